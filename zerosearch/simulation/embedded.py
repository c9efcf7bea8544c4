"""The embedded server as a child process that never outlives its parent."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO

from verl.workers.rollout.engine import InfrastructureError

_TAIL_BYTES = 4000


class EmbeddedServer:
    """Runs ``python -m zerosearch.simulation.server`` while the ``with`` block runs.

    The child ends when this process does, however that happens: it watches its stdin.
    """

    def __init__(
        self,
        model: str | Path,
        log_file: str | Path,
        *,
        options: Sequence[str] = (),
        threads: int = 1,
        start_timeout: float = 120.0,
        grace: float = 5.0,
    ) -> None:
        """``options`` are further command-line options of the server; ``start_timeout`` and ``grace`` seconds
        to become ready and to end after SIGTERM. The server's stderr goes to ``log_file``."""
        self._command = [sys.executable, "-m", "zerosearch.simulation.server", "--model", str(model), *options]
        self._log_file = Path(log_file)
        self._threads, self._start_timeout, self._grace = threads, start_timeout, grace
        self._process: subprocess.Popen[str] | None = None
        self.url = ""
        self.model = ""

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def __enter__(self) -> EmbeddedServer:
        """Raises InfrastructureError with the end of the log when the server dies or is not ready in time."""
        self._log_file.parent.mkdir(parents=True, exist_ok=True)
        threads = {"OMP_NUM_THREADS": str(self._threads), "TOKENIZERS_PARALLELISM": "false"}
        with self._log_file.open("ab") as log:
            self._process = subprocess.Popen(
                [*self._command, "--exit-with-stdin"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                # Ctrl-C in a terminal reaches this process only, which then ends the server in its turn.
                start_new_session=True,
                env=os.environ | _importable() | threads,
            )
        try:
            self.url, self.model = self._ready()
        except InfrastructureError:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the server: asks first, kills after the grace period."""
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(self._grace)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()

    def _ready(self) -> tuple[str, str]:
        assert self._process is not None and self._process.stdout is not None
        lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=_read_line, args=(self._process.stdout, lines), daemon=True).start()
        try:
            line = lines.get(timeout=self._start_timeout)
        except queue.Empty as error:
            raise InfrastructureError(self._failure(f"was not ready after {self._start_timeout:g} s")) from error
        if not line:
            raise InfrastructureError(self._failure(f"ended with status {self._process.wait()} before it was ready"))
        ready = json.loads(line)
        return ready["url"], ready["model"]

    def _failure(self, what: str) -> str:
        tail = self._log_file.read_bytes()[-_TAIL_BYTES:].decode(errors="replace").strip()
        return f"the embedded server {what}: {' '.join(self._command)}\n{self._log_file}:\n{tail}"


def _read_line(stream: IO[str], lines: queue.Queue[str]) -> None:
    lines.put(stream.readline())


def _importable() -> dict[str, str]:
    """Lets the child import what this process imports, also when neither is installed."""
    root = str(Path(__file__).resolve().parents[2])
    return {"PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))}
