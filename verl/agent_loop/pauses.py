"""What a person reads when an environment's services stop answering, and when they are back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

from verl.agent_loop.base import AgentLoop

T = TypeVar("T")

_LOOK_AGAIN = 0.1


class PauseTeller:
    """Prints when the first of several places pauses and when the last goes on."""

    def __init__(self) -> None:
        self._pauses: set[int] = set()
        self._since = 0.0

    @property
    def paused(self) -> frozenset[int]:
        """The places that are paused."""
        return frozenset(self._pauses)

    def note(self, place: int, pause: str | None) -> None:
        """The present ``pause`` of one place, None while it goes on."""
        if pause is not None and not self._pauses:
            self._since = time.monotonic()
            print(f"paused: {pause}", flush=True)
        if pause is not None:
            self._pauses.add(place)
        elif place in self._pauses:
            self._pauses.remove(place)
            if not self._pauses:
                print(f"resumed after {time.monotonic() - self._since:.0f} s", flush=True)


async def telling_pauses(environment: AgentLoop[Any], work: Coroutine[Any, Any, T]) -> T:
    """The outcome of ``work``; meanwhile the environment's pauses are printed."""
    teller = PauseTeller()
    job = asyncio.ensure_future(work)
    try:
        while not job.done():
            await asyncio.wait({job}, timeout=_LOOK_AGAIN)
            teller.note(0, environment.pause)
        return job.result()
    finally:
        job.cancel()
        await asyncio.wait({job})
