"""Simulation servers beside a run: killed, hung and slowed down at moments that are found, not guessed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from verl.utils.paths import resolve_path
from zerosearch.config import EmbeddedConfig

MODEL = "pkg://zerosearch.quickstart/assets/simulator"


class ExternalServer:
    """``python -m zerosearch.simulation.server`` as a user starts it, on one port however often it is started."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._port = 0
        self._process: subprocess.Popen[str] | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Returns when it listens."""
        options = [*EmbeddedConfig().server_options(), "--port", str(self._port)]
        command = [sys.executable, "-m", "zerosearch.simulation.server", "--model", resolve_path(MODEL), *options]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=log, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
            )
        assert self._process.stdout is not None
        ready = json.loads(self._process.stdout.readline())
        self._port = int(re.findall(r":(\d+)/", ready["url"])[0])

    def kill(self) -> None:
        """Ends it without a word, whatever state it is in."""
        assert self._process is not None and self._process.stdout is not None
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()


def stop_with_requests_inside(pid: int, seconds: float = 120) -> None:
    """Stops a server (SIGSTOP) and returns when requests lie unread in its sockets: a rollout is under way."""
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + seconds
    while not _unread(pid):
        assert time.monotonic() < deadline, "no request came"
        time.sleep(0.02)


def _unread(pid: int) -> bool:
    """Whether a socket of the process holds bytes that it has not read, or connections that it has not taken."""
    sockets = {os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()}
    rows = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    return any(f"socket:[{row[9]}]" in sockets and int(row[4].partition(":")[2], 16) for row in rows)
