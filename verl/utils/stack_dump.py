"""Stack dumps of a process on a signal, written by faulthandler's C handler: also of one stuck in C code."""

from __future__ import annotations

import faulthandler
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

DUMP_SIGNAL = signal.SIGUSR1

_files: list[TextIO] = []
"""faulthandler keeps only the descriptor: the files must stay open as long as the process."""


@dataclass(frozen=True)
class DumpTarget:
    """A process that writes its stacks to ``path``, on its own node, on DUMP_SIGNAL. ``started`` (clock ticks
    since boot) tells it from a later process of the same number, which the signal would kill."""

    node_id: str
    pid: int
    started: int
    path: str


def dump_on_signal(path: Path, node_id: str) -> DumpTarget:
    """From now on this process appends the stacks of all its threads to ``path`` on DUMP_SIGNAL."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("w")
    _files.append(file)
    faulthandler.register(DUMP_SIGNAL, file=file, all_threads=True)
    pid = os.getpid()
    return DumpTarget(node_id, pid, process_started(pid), str(path))


def process_started(pid: int) -> int:
    """Clock ticks since boot (proc_pid_stat(5), field 22). Raises FileNotFoundError or ProcessLookupError where
    there is no such process."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def request_dump(target: DumpTarget) -> bool:
    """Signals a process of this node; False where it has ended."""
    try:
        if process_started(target.pid) != target.started:
            return False
        os.kill(target.pid, DUMP_SIGNAL)
    except (FileNotFoundError, ProcessLookupError):
        return False
    return True
