"""Ends a run in which nothing happens any more, with the stacks of all its processes."""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from verl.trainer.config import PPOTrainerConfig
from verl.trainer.timing import PhaseTimer
from verl.utils.stack_dump import DumpTarget, request_dump

STALL_FACTOR = 2.5
"""``trajectory_timeout`` times this without a trajectory ends a rollout: each is tried twice, plus slack."""

_ANSWER_SECONDS = 10.0
_WRITE_SECONDS = 2.0


class WatchdogError(RuntimeError):
    """Nothing happened for ``trainer.watchdog_timeout`` seconds."""


def watchdog_problems(config: PPOTrainerConfig) -> list[str]:
    """The watchdog must leave a rollout the time to end by its own, better founded rule."""
    timeout = config.trainer.watchdog_timeout
    stall = STALL_FACTOR * config.actor_rollout_ref.rollout.trajectory_timeout
    if timeout == 0 or timeout > stall:
        return []
    return [
        f"trainer.watchdog_timeout is {timeout:g} s, but a rollout may be silent for {stall:g} s "
        f"({STALL_FACTOR:g} x rollout.trajectory_timeout): make it larger, or 0 for no watchdog"
    ]


class Watchdog:
    """A thread that looks at the timer's count of progress.

    ``timeout`` seconds without progress, 0 being never: it writes ``stacks-*.txt`` to ``directory`` and
    interrupts the main thread by ``interrupt``, which must make it raise KeyboardInterrupt; ``guard``
    turns that into the WatchdogError. It acts once.
    """

    def __init__(
        self,
        timeout: float,
        timer: PhaseTimer,
        directory: Path,
        clock: Callable[[], float] = time.monotonic,
        interrupt: Callable[[], None] | None = None,
    ) -> None:
        self._timeout = timeout
        self._timer = timer
        self._directory = directory
        self._clock = clock
        self._interrupt = interrupt or _interrupt_main_thread
        self._targets: dict[ray.ObjectRef, str] = {}
        self._seen = timer.progress
        self._since = clock()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self.error: WatchdogError | None = None

    def watch(self, name: str, targets: Sequence[ray.ObjectRef]) -> None:
        """Adds the workers of class ``name`` in rank order, as references to their DumpTarget, which may still be
        due."""
        self._targets.update({target: f"{name}-{rank}" for rank, target in enumerate(targets)})

    @property
    def targets(self) -> list[ray.ObjectRef]:
        """What ``watch`` was given; each is there as soon as its worker's process runs."""
        return list(self._targets)

    def __enter__(self) -> Watchdog:
        if self._timeout:
            self._seen, self._since = self._timer.progress, self._clock()
            self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Raises the WatchdogError in the place of the interrupt by which it came; any other passes."""
        try:
            yield
        except KeyboardInterrupt:
            if self.error is None:
                raise
            raise self.error from None

    def look(self) -> bool:
        """Whether the timeout has passed since the last progress seen."""
        if self._timer.progress != self._seen:
            self._seen, self._since = self._timer.progress, self._clock()
        return self._clock() - self._since >= self._timeout

    def act(self) -> None:
        """Dumps all stacks, then interrupts the main thread."""
        silent, phase = self._clock() - self._since, self._timer.current
        files = {"driver": self._dump_driver()} | self._dump_workers()
        without = ", ".join(name for name in self._targets.values() if name not in files)
        if self._ended.is_set():
            return
        self.error = WatchdogError(
            f"no progress for {silent:.0f} s {f'in phase {phase!r}' if phase else 'between two phases'} "
            f"(trainer.watchdog_timeout); stacks: {', '.join(files.values())}"
            f"{f'; none from {without}' if without else ''}"
        )
        self._interrupt()

    def _run(self) -> None:
        while not self._ended.wait(min(1.0, self._timeout / 10)):
            if self.look():
                self.act()
                return

    def _dump_driver(self) -> str:
        path = self._directory / "stacks-driver.txt"
        with path.open("w") as file:
            faulthandler.dump_traceback(file, all_threads=True)
        return str(path)

    def _dump_workers(self) -> dict[str, str]:
        """The files by worker, of those that wrote one."""
        if not self._targets:
            return {}
        known, _ = ray.wait(self.targets, num_returns=len(self._targets), timeout=_ANSWER_SECONDS)
        targets = {self._targets[ref]: target for ref in known if (target := _known_target(ref)) is not None}
        return _written({name: target.path for name, target in targets.items() if _ask(target)})


def _interrupt_main_thread() -> None:
    """By SIGTERM: Python's own SIGINT handler is missing in background jobs. Sent to that thread, so that a
    blocking system call returns."""
    ident = threading.main_thread().ident
    assert ident is not None
    signal.pthread_kill(ident, signal.SIGTERM)


def _known_target(ref: ray.ObjectRef) -> DumpTarget | None:
    """None where the worker died before it could say."""
    try:
        target: DumpTarget = ray.get(ref)
    except RayError:
        return None
    return target


def _ask(target: DumpTarget) -> bool:
    """Signals a worker from its own node: another one's through a task, which needs no CPU to be free."""
    if target.node_id == ray.get_runtime_context().get_node_id():
        return request_dump(target)
    strategy = NodeAffinitySchedulingStrategy(target.node_id, soft=False)
    task = ray.remote(request_dump).options(num_cpus=0, scheduling_strategy=strategy)
    try:
        asked: bool = ray.get(task.remote(target), timeout=_ANSWER_SECONDS)
    except RayError:
        return False
    return asked


def _written(paths: Mapping[str, str]) -> dict[str, str]:
    """Those that are not empty a moment later; another node's, not seen from here, are taken to be written."""
    until = time.monotonic() + _WRITE_SECONDS
    while any(map(_is_empty, paths.values())) and time.monotonic() < until:
        time.sleep(0.05)
    return {name: path for name, path in paths.items() if not _is_empty(path)}


def _is_empty(path: str) -> bool:
    return os.path.exists(path) and not os.path.getsize(path)
