"""Real search engines over HTTP: one pooled asynchronous client with retries and a deadline.

Invariant: every search ends within its deadline.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from zerosearch.simulation.pool import ServerPool
from zerosearch.transport import RetryableError, ServerUnavailableError, Transport, backoff

V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class HttpSettings:
    """``request_timeout`` seconds per attempt, ``deadline`` seconds per search with all its requests and
    waits; ``max_concurrency`` requests at once. ``secret`` is blotted out of every message."""

    request_timeout: float = 120.0
    deadline: float = 240.0
    max_concurrency: int = 256
    secret: str = field(default="", repr=False)


@dataclass(slots=True)
class Call:
    """How far one search has come: ``requests`` sent, of which ``retries`` repeated another."""

    url: str
    requests: int = 0
    retries: int = 0
    failure: str = "none, the first attempt was still waiting"
    begin: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.begin


class JsonClient:
    """Requests spread over the servers of a pool. One instance serves any number of event loops."""

    def __init__(self, pool: ServerPool, settings: HttpSettings) -> None:
        self._pool = pool
        self._settings = settings
        self._transport = Transport(settings.max_concurrency, settings.secret)

    @property
    def urls(self) -> tuple[str, ...]:
        return self._pool.urls

    async def within_deadline(self, job: Callable[[Call], Awaitable[V]]) -> tuple[V, Call]:
        """What ``job`` returns, and what it took. Raises ServerUnavailableError when the deadline leaves no
        further attempt; it names the URL and what was said last."""
        call = Call(self.urls[0])
        try:
            async with asyncio.timeout(self._settings.deadline):
                return await job(call), call
        except TimeoutError:
            waited = f"no answer within {self._settings.deadline:g} s (requests: {call.requests})"
            raise ServerUnavailableError(f"{call.url}: {waited}; last failure: {call.failure}") from None

    async def until_answered(self, call: Call, attempt: Callable[[str], Awaitable[V]]) -> V:
        """Tries ``attempt`` on one base URL after another while it raises RetryableError."""
        tries = 0
        while True:
            tries += 1
            call.requests += 1
            call.retries += tries > 1
            with self._pool.lease(avoid=call.url if tries > 1 else None) as lease:
                call.url = lease.url
                try:
                    return await attempt(call.url)
                except RetryableError as error:
                    call.failure, pause = str(error), backoff(tries, error.retry_after)
            if call.seconds + pause > self._settings.deadline:
                raise TimeoutError
            await asyncio.sleep(pause)

    async def request(
        self, method: str, url: str, *, params: Mapping[str, str | int] | None = None, body: Any = None
    ) -> Any:
        """See :meth:`Transport.request`; waits ``request_timeout`` seconds."""
        seconds = self._settings.request_timeout
        return await self._transport.request(method, url, seconds=seconds, params=params, body=body)

    def excerpt(self, reply: Any) -> str:
        """The beginning of a reply, as it may stand in a message."""
        return self._transport.excerpt(reply)

    async def close(self) -> None:
        """Closes the connections of the running event loop."""
        await self._transport.close()
