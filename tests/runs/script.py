"""The training script as a user starts it: a process of its own, nothing replaced."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
MARK = "ZEROSEARCH_TEST_MARK"
SHORT = (
    "TOTAL_STEPS",
    "5",
    "trainer.test_freq=0",
    "data.val_max_samples=120",
    "retriever.end_threshold=0.2",
)
"""The quickstart in about a minute: five steps, 120 held-out questions."""


@dataclass(frozen=True)
class Finished:
    """A run that ended: its exit status, what it printed, its directory, the mark its processes carried."""

    code: int
    output: str
    directory: Path | None
    mark: str

    @property
    def summary(self) -> dict[str, Any]:
        assert self.directory is not None, self.output
        return json.loads((self.directory / "summary.json").read_text())

    @property
    def metrics(self) -> list[dict[str, Any]]:
        assert self.directory is not None, self.output
        return [json.loads(line) for line in (self.directory / "metrics.jsonl").read_text().splitlines()]

    @property
    def processes_left(self) -> list[str]:
        """Command lines of living processes that this run started, found by the environment they inherited."""
        return list(_marked_commands(self.mark).values())


def _marked_commands(mark: str) -> dict[int, str]:
    needle = f"{MARK}={mark}".encode()
    return {pid: line for pid in _pids() if (line := _command_if_marked(pid, needle))}


def _pids() -> list[int]:
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]


def _command_if_marked(pid: int, needle: bytes) -> str | None:
    try:
        if needle not in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            return None
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None


class RunningScript:
    """``bash train_{algorithm}.sh`` with its output in a file."""

    def __init__(self, root: Path, arguments: Sequence[str], algorithm: str = "grpo") -> None:
        self.mark = uuid.uuid4().hex
        self.root = root
        self.log = root / f"output-{self.mark[:6]}.txt"
        environment = {**os.environ, MARK: self.mark, "WANDB_MODE": "offline"}
        command = ["bash", str(ROOT / f"train_{algorithm}.sh"), *arguments, f"trainer.default_local_dir={root}"]
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, env=environment, preexec_fn=_interruptible
            )

    def wait_for(self, text: str, seconds: float = 300) -> None:
        deadline = time.monotonic() + seconds
        while text not in self.log.read_text():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, f"{text!r} did not appear:\n{self.log.read_text()}"
            time.sleep(0.2)

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def pids_of(self, part: str) -> list[int]:
        """Processes of this run with ``part`` in their command line."""
        return [pid for pid, line in _marked_commands(self.mark).items() if part in line]

    def finish(self, seconds: float = 600) -> Finished:
        code = self.process.wait(seconds)
        output = self.log.read_text()
        prefix = "run directory: "
        lines = [line.removeprefix(prefix) for line in output.splitlines() if line.startswith(prefix)]
        return Finished(code, output, Path(lines[0]) if lines else None, self.mark)


def _interruptible() -> None:
    """A shell's background jobs ignore Ctrl-C, and so would what they start: the tests may be such a job."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


Start = Callable[..., RunningScript]
