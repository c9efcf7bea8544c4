"""The driver's view of a rollout: tasks in, finished and already rewarded trajectories out.

Synchronous training takes all of a step, asynchronous training the first k, dynamic sampling
submits more. Work in flight is bounded by each worker; all samples of a uid go to one worker, so
that a group shares its prompt's key/value cache.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import ray
from ray.actor import ActorHandle

from verl.agent_loop.base import RolloutTask, RunEndingError
from verl.agent_loop.pauses import PauseTeller
from verl.agent_loop.trajectory import Trajectory
from verl.agent_loop.worker import Collected
from verl.workers.rollout.engine import InfrastructureError

_POLL_SECONDS = 5.0


class TrajectoryStream:
    """Trajectories of several rollout workers as one stream.

    ``stall_seconds`` without any finished trajectory while some are due raises InfrastructureError:
    every trajectory has a deadline of its own, so such a silence means a worker is stuck. While an
    environment is paused no silence counts; the pause and its end are printed. ``on_progress`` is called
    whenever trajectories became ready, and again and again during a pause.
    """

    def __init__(
        self, workers: Sequence[ActorHandle], stall_seconds: float, on_progress: Callable[[], None] = lambda: None
    ) -> None:
        self._workers = list(workers)
        self._stall_seconds = stall_seconds
        self._on_progress = on_progress
        self._due = [0] * len(self._workers)
        self._pending: dict[ray.ObjectRef, int] = {}
        self._ready: list[Trajectory] = []
        self._next_worker = 0
        self._pauses = PauseTeller()

    @property
    def in_flight(self) -> int:
        """Trajectories submitted and not yet taken."""
        return sum(self._due) + len(self._ready)

    def submit(self, tasks: Sequence[RolloutTask]) -> None:
        """Groups are dealt to the workers in turn, in the order given."""
        batches: list[list[RolloutTask]] = [[] for _ in self._workers]
        home: dict[str, int] = {}
        for task in tasks:
            if task.prompt.uid not in home:
                home[task.prompt.uid] = self._next_worker
                self._next_worker = (self._next_worker + 1) % len(self._workers)
            batches[home[task.prompt.uid]].append(task)
        sent = [w.submit.remote(batch) for w, batch in zip(self._workers, batches, strict=True) if batch]
        ray.get(sent)
        for index, batch in enumerate(batches):
            self._due[index] += len(batch)

    def take(self, count: int | None = None) -> Iterator[Trajectory]:
        """Yields the next ``count`` trajectories to finish, in order of finishing; all in flight when None."""
        remaining = self.in_flight if count is None else count
        if remaining > self.in_flight:
            raise ValueError(f"asked for {remaining} trajectories, but only {self.in_flight} are in flight")
        last_progress = time.monotonic()
        while remaining:
            if self._ready:
                remaining -= 1
                yield self._ready.pop(0)
                last_progress = time.monotonic()
            elif self._poll() or self._pauses.paused:
                self._on_progress()
                last_progress = time.monotonic()
            elif time.monotonic() - last_progress > self._stall_seconds:
                waiting = {index: due for index, due in enumerate(self._due) if due}
                raise InfrastructureError(
                    f"no trajectory finished for {self._stall_seconds:.0f} s; due by rollout worker: {waiting}"
                )

    def _poll(self) -> bool:
        """Whether trajectories became ready, or a pause began or ended."""
        before = self._pauses.paused
        for index, due in enumerate(self._due):
            if due and index not in self._pending.values():
                self._pending[self._workers[index].collect.remote(_POLL_SECONDS)] = index
        done, _ = ray.wait(list(self._pending), timeout=_POLL_SECONDS)
        for ref in done:
            index = self._pending.pop(ref)
            collected = _collected(ref)
            self._due[index] -= len(collected.finished)
            self._ready.extend(collected.finished)
            self._pauses.note(index, collected.pause)
        return bool(self._ready) or self._pauses.paused != before


def _collected(ref: ray.ObjectRef) -> Collected:
    """Raises the worker's RunEndingError as it is: its words are for the user, the worker's stack is not."""
    try:
        collected: Collected = ray.get(ref)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, RunEndingError):
            raise error.cause from None
        raise
    return collected
