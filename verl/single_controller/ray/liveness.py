"""Looking after workers that nobody is calling."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from verl._protocol.waiting import WATCHES


class Watch:
    """Asks each worker every ``every_n_seconds`` whether it lives, in a thread.

    A question to a busy worker waits behind its work, so that it is never asked twice, and fails
    with the worker. The first failure is kept for :meth:`raise_failure`; nothing is asked after it.
    The thread ends with :meth:`stop`, and when nobody holds the watch.
    """

    def __init__(self, workers: Sequence[ActorHandle], every_n_seconds: float, who: Callable[[int], str]) -> None:
        if every_n_seconds <= 0:
            raise ValueError(f"every_n_seconds must be positive, got {every_n_seconds}")
        self.every_n_seconds = every_n_seconds
        self._workers = list(workers)
        self._who = who
        self._asked: dict[int, ray.ObjectRef] = {}
        self._failure: RayError | None = None
        self._stopped = threading.Event()
        WATCHES.add(self)
        threading.Thread(target=_run, args=(weakref.ref(self),), name="worker liveness", daemon=True).start()

    def raise_failure(self) -> None:
        """Raises what a worker died of, where one has."""
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        """Asks no more and forgets what was found."""
        WATCHES.discard(self)
        self._stopped.set()
        self._failure = None

    def look(self) -> bool:
        """One round; whether there shall be another."""
        for rank, worker in enumerate(self._workers):
            if rank not in self._asked:
                self._asked[rank] = worker.__ray_ready__.remote()
        refs = list(self._asked.values())
        answered, _ = ray.wait(refs, num_returns=len(refs), timeout=self.every_n_seconds, fetch_local=False)
        for rank, ref in list(self._asked.items()):
            if ref in answered:
                self._note_answer(rank, ref)
        return self._failure is None and not self._stopped.wait(self.every_n_seconds)

    def _note_answer(self, rank: int, ref: ray.ObjectRef) -> None:
        del self._asked[rank]
        try:
            ray.get(ref)
        except RayError as error:
            if self._failure is None and not self._stopped.is_set():
                error.add_note(f"found by the liveness check of {self._who(rank)}")
                self._failure = error


def _run(watch_of: weakref.ref[Watch]) -> None:
    while (watch := watch_of()) is not None and ray.is_initialized() and watch.look():
        del watch
