"""JSON over HTTP for real search engines: one pooled asynchronous client with retries and a deadline.

Invariants: every search ends within its deadline; no secret stands in a message, whatever a library
or a server says; redirects are not followed, so that a secret goes to no other host.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import quote, quote_plus
from weakref import WeakKeyDictionary

import aiohttp

from zerosearch.simulation.client import RequestRejectedError, ServerUnavailableError, error_message
from zerosearch.simulation.pool import ServerPool

V = TypeVar("V")

_FIRST_BACKOFF = 0.25
_LONGEST_BACKOFF = 8.0
_SHOWN_CHARACTERS = 300
_JITTER = random.Random()
_QUERY_SAFE = "?/:@-._~!$'()*,"


class RetryableError(Exception):
    """An attempt that may go better next time; ``retry_after`` in seconds where the server said so."""

    def __init__(self, message: str, retry_after: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


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


@dataclass(slots=True)
class _Connections:
    """What belongs to one event loop."""

    session: aiohttp.ClientSession
    slots: asyncio.Semaphore


class JsonClient:
    """Requests spread over the servers of a pool. One instance serves any number of event loops."""

    def __init__(self, pool: ServerPool, settings: HttpSettings) -> None:
        self._pool = pool
        self._settings = settings
        self._connections: WeakKeyDictionary[asyncio.AbstractEventLoop, _Connections] = WeakKeyDictionary()

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
                    call.failure, pause = str(error), _pause(tries, error.retry_after)
            if call.seconds + pause > self._settings.deadline:
                raise TimeoutError
            await asyncio.sleep(pause)

    async def request(
        self, method: str, url: str, *, params: Mapping[str, str | int] | None = None, body: Any = None
    ) -> Any:
        """One request's decoded JSON.

        Raises RetryableError for connection errors, timeouts, 408, 429, 5xx and malformed JSON,
        RequestRejectedError for every other status. Messages name the URL without ``params``.
        """
        timeout = aiohttp.ClientTimeout(total=self._settings.request_timeout)
        options: dict[str, Any] = {"params": params, "json": body, "timeout": timeout, "allow_redirects": False}
        here = self._here()
        # "from None": what aiohttp raises can hold the whole URL, and so the secret.
        try:
            async with here.slots, here.session.request(method, url, **options) as response:
                content = await response.read()
                return self._decoded(url, response.status, response.headers, content)
        except TimeoutError:
            raise RetryableError(f"{url}: no answer within {self._settings.request_timeout:g} s") from None
        except aiohttp.ClientResponseError as error:
            raise RetryableError(self.without_secret(f"{url}: broken HTTP: {error.message}")) from None
        except aiohttp.ClientError as error:
            raise RetryableError(self.without_secret(f"{url}: {type(error).__name__}: {error}")) from None

    def _decoded(self, url: str, status: int, headers: Mapping[str, str], content: bytes) -> Any:
        said = self.without_secret(f"{url}: HTTP {status}: {error_message(content)}")
        if status in (408, 429) or status >= 500:
            raise RetryableError(said, _retry_after(headers))
        if status >= 300:
            raise RequestRejectedError(said)
        try:
            return json.loads(content)
        except ValueError:
            raise RetryableError(f"{url}: malformed JSON: {self.excerpt(content.decode(errors='replace'))}") from None

    def excerpt(self, reply: Any) -> str:
        """The beginning of a reply, as it may stand in a message."""
        text = reply if isinstance(reply, str) else json.dumps(reply)
        return self.without_secret(text)[:_SHOWN_CHARACTERS]

    def without_secret(self, text: str) -> str:
        secret = self._settings.secret
        encoded = {encode(secret, safe=safe) for encode in (quote, quote_plus) for safe in ("", "/", _QUERY_SAFE)}
        for form in {secret, *encoded} - {""}:
            text = text.replace(form, "***")
        return text

    async def close(self) -> None:
        """Closes the connections of the running event loop."""
        connections = self._connections.pop(asyncio.get_running_loop(), None)
        if connections is not None:
            await connections.session.close()

    def _here(self) -> _Connections:
        loop = asyncio.get_running_loop()
        if loop not in self._connections:
            session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
            self._connections[loop] = _Connections(session, asyncio.Semaphore(self._settings.max_concurrency))
        return self._connections[loop]


def _pause(tries: int, retry_after: float) -> float:
    """Seconds before the next attempt: doubling, with jitter, never less than the server asked for."""
    backoff = min(_FIRST_BACKOFF * 2 ** (tries - 1), _LONGEST_BACKOFF)
    return max(retry_after, backoff * _JITTER.uniform(0.5, 1.0))


def _retry_after(headers: Mapping[str, str]) -> float:
    """Seconds; 0 where absent or given as a date."""
    value = headers.get("Retry-After", "").strip()
    return float(value) if value.isascii() and value.isdigit() else 0.0
