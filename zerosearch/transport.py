"""JSON over HTTP for every server that answers searches: connections, failures by kind, backoff.

Invariants: no secret stands in a message, whatever a library or a server says; redirects are not
followed, so that a secret goes to no other host.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import quote, quote_plus
from weakref import WeakKeyDictionary

import aiohttp

from verl.workers.rollout.engine import InfrastructureError

_FIRST_BACKOFF = 0.25
_LONGEST_BACKOFF = 8.0
_SHOWN_CHARACTERS = 500
_OVERLOADED = (429, 503)
_QUERY_SAFE = "?/:@-._~!$'()*,"
_JITTER = random.Random()


class ServerUnavailableError(InfrastructureError):
    """No usable answer within the deadline."""


class RequestRejectedError(InfrastructureError):
    """The server understood and refused: sending the same again is pointless."""


class RetryableError(Exception):
    """An attempt that may go better next time; ``retry_after`` in seconds where the server said so."""

    def __init__(self, message: str, retry_after: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class OverloadedError(RetryableError):
    """A server that lives and has too much to do."""


@dataclass(slots=True)
class _Connections:
    """What belongs to one event loop."""

    session: aiohttp.ClientSession
    slots: asyncio.Semaphore


class Transport:
    """Pooled connections, ``max_concurrency`` requests at once. One instance serves any number of event loops.

    ``secret`` is blotted out of every message; ``bearer`` sends it as the authorisation of each request.
    """

    def __init__(self, max_concurrency: int, secret: str = "", *, bearer: bool = False) -> None:
        self._max_concurrency = max_concurrency
        self._secret = secret
        self._headers = {"Authorization": f"Bearer {secret}"} if secret and bearer else None
        self._connections: WeakKeyDictionary[asyncio.AbstractEventLoop, _Connections] = WeakKeyDictionary()

    async def request(
        self,
        method: str,
        url: str,
        *,
        seconds: float,
        params: Mapping[str, str | int] | None = None,
        body: Any = None,
    ) -> Any:
        """One request's decoded JSON, waited for ``seconds`` at most.

        Raises RetryableError for connection errors, timeouts, 408, 5xx and malformed JSON, its subclass
        OverloadedError for 429 and 503, RequestRejectedError for every other status. Messages name the URL
        without ``params``.
        """
        timeout = aiohttp.ClientTimeout(total=seconds)
        options: dict[str, Any] = {"params": params, "json": body, "timeout": timeout, "allow_redirects": False}
        here = self._here()
        # "from None": what aiohttp raises can hold the whole URL, and so the secret.
        try:
            async with here.slots, here.session.request(method, url, **options) as response:
                content = await response.read()
                return self._decoded(url, response.status, response.headers, content)
        except TimeoutError:
            raise RetryableError(f"{url}: no answer within {seconds:g} s") from None
        except aiohttp.ClientResponseError as error:
            raise RetryableError(self.without_secret(f"{url}: broken HTTP: {error.message}")) from None
        except aiohttp.ClientError as error:
            raise RetryableError(self.without_secret(f"{url}: {type(error).__name__}: {error}")) from None

    def _decoded(self, url: str, status: int, headers: Mapping[str, str], content: bytes) -> Any:
        said = self.without_secret(f"{url}: HTTP {status}: {error_message(content)}")
        if status in (408, 429) or status >= 500:
            kind = OverloadedError if status in _OVERLOADED else RetryableError
            raise kind(said, _retry_after(headers))
        if status >= 300:
            raise RequestRejectedError(said)
        try:
            return json.loads(content)
        except ValueError:
            raise RetryableError(f"{url}: malformed JSON: {self.excerpt(content.decode(errors='replace'))}") from None

    def excerpt(self, reply: Any) -> str:
        """The beginning of a reply, as it may stand in a message."""
        return _short(self.without_secret(reply if isinstance(reply, str) else json.dumps(reply)))

    def without_secret(self, text: str) -> str:
        secret = self._secret
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
            session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), headers=self._headers)
            self._connections[loop] = _Connections(session, asyncio.Semaphore(self._max_concurrency))
        return self._connections[loop]


def backoff(tries: int, retry_after: float) -> float:
    """Seconds before the next attempt: doubling, with jitter, never less than the server asked for."""
    seconds = min(_FIRST_BACKOFF * 2 ** (tries - 1), _LONGEST_BACKOFF)
    return max(retry_after, seconds * _JITTER.uniform(0.5, 1.0))


def error_message(content: bytes) -> str:
    """What a server says in an error body: ``error.message``, ``error``, ``message`` or ``detail``."""
    text = content.decode(errors="replace").strip()
    try:
        body = json.loads(text)
    except ValueError:
        return _short(text) or "(empty body)"
    if not isinstance(body, dict):
        return _short(text)
    error = body.get("error")
    said = error.get("message") if isinstance(error, dict) else error
    said = said or body.get("message") or body.get("detail")
    return _short(said if isinstance(said, str) else json.dumps(said)) if said else _short(text)


def _retry_after(headers: Mapping[str, str]) -> float:
    """Seconds, from a number or a date; 0 where absent or unreadable."""
    value = headers.get("Retry-After", "").strip()
    if value.isascii() and value.isdigit():
        return float(value)
    try:
        moment = parsedate_to_datetime(value)
    except ValueError:
        return 0.0
    return max(0.0, (moment.astimezone(UTC) - datetime.now(UTC)).total_seconds())


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"
