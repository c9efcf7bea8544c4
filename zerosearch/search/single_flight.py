"""Equal calls are made once: those in flight are joined, finished ones remembered."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

V = TypeVar("V")


class SingleFlight(Generic[V]):
    """Keeps the last ``capacity`` results, the least recently used going first. Failures reach everyone
    who waits and are not kept; a caller that is cancelled does not disturb the others."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._running: dict[Hashable, asyncio.Task[V]] = {}
        self._done: OrderedDict[Hashable, V] = OrderedDict()

    async def get(self, key: Hashable, compute: Callable[[], Awaitable[V]]) -> tuple[V, bool]:
        """The value of ``key``, and whether it was already there or on its way."""
        if key in self._done:
            self._done.move_to_end(key)
            return self._done[key], True
        shared = key in self._running
        if not shared:
            self._start(key, compute)
        return await asyncio.shield(self._running[key]), shared

    def _start(self, key: Hashable, compute: Callable[[], Awaitable[V]]) -> None:
        task = self._running[key] = asyncio.create_task(self._compute(key, compute))
        task.add_done_callback(lambda _: self._running.pop(key))
        task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())

    async def _compute(self, key: Hashable, compute: Callable[[], Awaitable[V]]) -> V:
        value = self._done[key] = await compute()
        if len(self._done) > self._capacity:
            self._done.popitem(last=False)
        return value

    async def close(self) -> None:
        """Cancels what is still running."""
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
