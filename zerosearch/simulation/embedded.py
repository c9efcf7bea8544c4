"""The embedded server as a child process that is restarted when it dies and never outlives its parent."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO
from urllib.parse import urlsplit

from verl.workers.rollout.engine import InfrastructureError

_TAIL_BYTES = 4000
_RESTARTS = 3


class _ServerProcess:
    """One ``python -m zerosearch.simulation.server``. It ends when this process does: it watches its stdin."""

    def __init__(self, command: Sequence[str], log_file: Path, threads: int) -> None:
        self._command, self._log_file = command, log_file
        variables = {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
        with log_file.open("ab") as log:
            self._process = subprocess.Popen(
                [*command, "--exit-with-stdin"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                # Ctrl-C in a terminal reaches this process only, which then ends the server in its turn.
                start_new_session=True,
                env=os.environ | _importable() | variables,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def ready(self, timeout: float) -> tuple[str, str]:
        """URL and model once it listens. Raises InfrastructureError with the end of the log."""
        assert self._process.stdout is not None
        lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=_read_line, args=(self._process.stdout, lines), daemon=True).start()
        try:
            line = lines.get(timeout=timeout)
        except queue.Empty as error:
            raise InfrastructureError(self.failure(f"was not ready after {timeout:g} s")) from error
        if not line:
            raise InfrastructureError(self.failure(f"{self.wait()} before it was ready"))
        ready = json.loads(line)
        return ready["url"], ready["model"]

    def wait(self) -> str:
        """How it ended, once it has."""
        code = self._process.wait()
        return f"ended with status {code}" if code >= 0 else f"was ended by {signal.Signals(-code).name}"

    def failure(self, what: str) -> str:
        tail = self._log_file.read_bytes()[-_TAIL_BYTES:].decode(errors="replace").strip()
        return f"the embedded server {what}: {' '.join(self._command)}\n{self._log_file}:\n{tail or '(empty)'}"

    def stop(self, grace: float) -> None:
        """Asks first, kills after ``grace`` seconds."""
        self._process.terminate()
        try:
            self._process.wait(grace)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()


class EmbeddedServer:
    """Runs ``python -m zerosearch.simulation.server`` while the ``with`` block runs.

    A server that dies is started anew on the same port, a few times in all, and each time said on the
    console with the end of its log; its clients see an outage. ``close`` never restarts it.
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
        self._process: _ServerProcess | None = None
        self._watcher = threading.Thread(target=self._watch, name="embedded-server", daemon=True)
        # Held while the process is replaced, so that ``close`` ends the last one and none comes after it.
        self._lock = threading.Lock()
        self._closing = False
        self.url = ""
        self.model = ""

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def __enter__(self) -> EmbeddedServer:
        """Raises InfrastructureError with the end of the log when the server dies or is not ready in time."""
        self._log_file.parent.mkdir(parents=True, exist_ok=True)
        self._process = _ServerProcess(self._command, self._log_file, self._threads)
        try:
            self.url, self.model = self._process.ready(self._start_timeout)
        except InfrastructureError:
            self.close()
            raise
        self._watcher.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the server: asks first, kills after the grace period."""
        with self._lock:
            self._closing = True
            process, self._process = self._process, None
        if process is not None:
            process.stop(self._grace)
        if self._watcher.ident is not None:
            self._watcher.join()

    def _watch(self) -> None:
        """Waits for the server's death and starts it anew, until it has died once too often."""
        for restart in range(1, _RESTARTS + 1):
            if not self._replace(f"restarting it on {self.url} ({restart} of at most {_RESTARTS})"):
                return
        self._replace(None)

    def _replace(self, plan: str | None) -> bool:
        """Once the server has died: starts the next one where there is a ``plan``; False when closing."""
        with self._lock:
            process = self._process
        if process is None:
            return False
        ended = process.wait()
        with self._lock:
            if self._closing:
                return False
            _tell(f"{process.failure(ended)}\n{plan or f'it was restarted {_RESTARTS} times and stays down'}")
            process.stop(self._grace)
            if plan is None:
                return True
            command = [*self._command, "--port", str(urlsplit(self.url).port)]
            self._process = successor = _ServerProcess(command, self._log_file, self._threads)
        self._await_ready(successor)
        return True

    def _await_ready(self, process: _ServerProcess) -> None:
        try:
            process.ready(self._start_timeout)
        except InfrastructureError:
            process.stop(self._grace)
            return
        _tell(f"the embedded server is back on {self.url}")


def _tell(text: str) -> None:
    print(text, flush=True)


def _read_line(stream: IO[str], lines: queue.Queue[str]) -> None:
    lines.put(stream.readline())


def _importable() -> dict[str, str]:
    """Lets the child import what this process imports, also when neither is installed."""
    root = str(Path(__file__).resolve().parents[2])
    return {"PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))}
