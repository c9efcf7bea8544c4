"""An asynchronous client of OpenAI chat completions for simulation LLMs (vLLM, sglang, ours).

Invariants: every sampling field is sent, so that no default of a server or of a model's
generation_config applies; every call ends within its deadline, pauses apart; jitter moves only when a retry
happens, never what is asked.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any
from weakref import WeakKeyDictionary

import aiohttp

from verl.workers.rollout.engine import InfrastructureError
from zerosearch.search.single_flight import SingleFlight
from zerosearch.simulation.pool import Lease, ServerPool

_FIRST_BACKOFF = 0.25
_LONGEST_BACKOFF = 8.0
_SHOWN_CHARACTERS = 500
_LOOK_AGAIN = 0.1
_PROBE_TIMEOUT = 30.0
_OVERLOADED = (429, 503)
_JITTER = random.Random()


class ServerUnavailableError(InfrastructureError):
    """No usable answer within the deadline."""


class RequestRejectedError(InfrastructureError):
    """The server understood and refused: sending the same again is pointless."""


class _RetryableError(Exception):
    """An attempt that may go better next time; ``retry_after`` in seconds where the server said so."""

    def __init__(self, message: str, retry_after: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class _OverloadedError(_RetryableError):
    """A server that lives and has too much to do."""


@dataclass(frozen=True, slots=True)
class ChatSampling:
    """How the simulation LLM samples."""

    temperature: float = 0.8
    top_p: float = 1.0
    max_tokens: int = 600


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """``model`` "" asks each server; ``request_timeout`` seconds per attempt, ``deadline`` seconds per
    call with all attempts and waits; ``max_concurrency`` requests at once."""

    model: str = ""
    api_key: str = ""
    request_timeout: float = 120.0
    deadline: float = 240.0
    max_concurrency: int = 256


@dataclass(frozen=True, slots=True)
class ChatReply:
    """``text`` may be empty. ``latency`` in seconds, waits included."""

    text: str
    attempts: int
    latency: float


@dataclass(slots=True)
class _Connections:
    """What belongs to one event loop."""

    session: aiohttp.ClientSession
    slots: asyncio.Semaphore


@dataclass(slots=True)
class _Call:
    """How far one call has come."""

    url: str
    patient: bool
    attempts: int = 0
    failure: str = "none, the first attempt was still waiting"
    begin: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.begin


class ChatClient:
    """Calls spread over the servers of a pool. One instance serves any number of event loops."""

    def __init__(self, pool: ServerPool, settings: ClientSettings) -> None:
        self._pool = pool
        self._settings = settings
        self._models: SingleFlight[str] = SingleFlight(len(pool.urls))
        self._connections: WeakKeyDictionary[asyncio.AbstractEventLoop, _Connections] = WeakKeyDictionary()

    @property
    def urls(self) -> tuple[str, ...]:
        return self._pool.urls

    @property
    def pause(self) -> str | None:
        """A sentence while every server is down."""
        return self._pool.pause

    def paused_seconds(self, since: float) -> float:
        """How much of the time from ``since`` (``time.monotonic``) to now every server was down."""
        return self._pool.paused_seconds(since)

    @property
    def model(self) -> str:
        """The configured model name; "" where each server is asked."""
        return self._settings.model

    async def complete(self, prompt: str, sampling: ChatSampling, seed: int, *, patient: bool = True) -> ChatReply:
        """The reply to one user message.

        Retries connection errors, timeouts, 429, 5xx and malformed replies with backoff. Raises
        ServerUnavailableError when the deadline leaves no further attempt, RequestRejectedError at once for
        every other status; both name the URL and what the server said.

        While every server is down the call waits, which does not count against its deadline unless it is not
        ``patient``. Raises ServerOutageError when they stay down.
        """
        call = _Call(self.urls[0], patient)
        try:
            text = await self._until_answered(call, _body(prompt, sampling, seed))
        except TimeoutError as error:
            waited = f"no answer within {self._settings.deadline:g} s (attempts: {call.attempts})"
            raise ServerUnavailableError(f"{call.url}: {waited}; last failure: {call.failure}") from error
        return ChatReply(text, call.attempts, call.seconds)

    async def _until_answered(self, call: _Call, body: Mapping[str, Any]) -> str:
        while True:
            await self._admission(call)
            pause = 0.0
            with self._pool.lease(avoid=call.url if call.attempts else None) as lease:
                call.url = lease.url
                call.attempts += 1
                try:
                    return await self._judged_attempt(call, lease, body)
                except _RetryableError as error:
                    call.failure, pause = str(error), _pause(call.attempts, error.retry_after)
            await self._rest(call, pause)

    async def _admission(self, call: _Call) -> None:
        """Returns when a request may begin. Raises TimeoutError when the call's time is over and
        ServerOutageError when the servers' is."""
        while True:
            self._pool.check()
            if self._left(call) <= 0:
                raise TimeoutError
            if self._pool.admits:
                return
            await asyncio.sleep(_LOOK_AGAIN)

    async def _rest(self, call: _Call, seconds: float) -> None:
        """The wait between two attempts; none while every server is down, where probes set the pace."""
        if self._pool.pause is None:
            if seconds > self._left(call):
                raise TimeoutError
            await asyncio.sleep(seconds)

    def _left(self, call: _Call) -> float:
        """Seconds of the call's deadline; a patient call does not count those in which every server was down."""
        paused = self._pool.paused_seconds(call.begin) if call.patient else 0.0
        return self._settings.deadline - call.seconds + paused

    async def _judged_attempt(self, call: _Call, lease: Lease, body: Mapping[str, Any]) -> str:
        """One attempt, whose outcome tells the pool whether the server is up."""
        try:
            text = await self._timed_attempt(call, lease, body)
        except RequestRejectedError:
            self._pool.succeeded(lease.url)
            raise
        except _OverloadedError:
            raise
        except _RetryableError as error:
            self._pool.failed(lease.url, str(error))
            raise
        self._pool.succeeded(lease.url)
        return text

    async def _timed_attempt(self, call: _Call, lease: Lease, body: Mapping[str, Any]) -> str:
        """Ends with the call's deadline, or the servers' where they are down."""
        seconds = min(math.inf if lease.probe and call.patient else self._left(call), self._pool.outage_left)
        begin = time.monotonic()
        try:
            async with asyncio.timeout(None if math.isinf(seconds) else seconds):
                if lease.probe:
                    await self._ask_models(lease.url, _PROBE_TIMEOUT)
                return await self._attempt(lease.url, body)
        except TimeoutError as error:
            silent = f"{lease.url}: no answer within {time.monotonic() - begin:.3g} s"
            raise _RetryableError(silent) from error

    async def served_models(self, url: str) -> tuple[str, ...]:
        """The model names that one server offers. Raises ServerUnavailableError or RequestRejectedError."""
        try:
            return await self._ask_models(url)
        except _RetryableError as error:
            raise ServerUnavailableError(f"{url}: {error}") from error

    async def close(self) -> None:
        """Closes the connections of the running event loop."""
        connections = self._connections.pop(asyncio.get_running_loop(), None)
        if connections is not None:
            await connections.session.close()

    async def _attempt(self, url: str, body: Mapping[str, Any]) -> str:
        async with self._here().slots:
            model = self._settings.model or (await self._models.get(url, lambda: self._first_model(url)))[0]
            reply = await self._request("POST", f"{url}/chat/completions", {"model": model, **body})
        return _content(url, reply)

    async def _first_model(self, url: str) -> str:
        return (await self._ask_models(url))[0]

    async def _ask_models(self, url: str, timeout: float = math.inf) -> tuple[str, ...]:
        reply = await self._request("GET", f"{url}/models", None, timeout)
        try:
            names = tuple(str(entry["id"]) for entry in reply["data"])
        except (KeyError, TypeError) as error:
            raise _RetryableError(f"{url}/models answered without model names: {_short(str(reply))}") from error
        if not names:
            raise _RetryableError(f"{url}/models lists no model")
        return names

    async def _request(self, method: str, url: str, body: Mapping[str, Any] | None, longest: float = math.inf) -> Any:
        seconds = min(self._settings.request_timeout, longest)
        timeout = aiohttp.ClientTimeout(total=seconds)
        try:
            async with self._here().session.request(method, url, json=body, timeout=timeout) as response:
                content = await response.read()
                return _decoded(url, response.status, response.headers, content)
        except TimeoutError as error:
            raise _RetryableError(f"{url}: no answer within {seconds:g} s") from error
        except aiohttp.ClientError as error:
            raise _RetryableError(f"{url}: {type(error).__name__}: {error}") from error

    def _here(self) -> _Connections:
        loop = asyncio.get_running_loop()
        if loop not in self._connections:
            key = self._settings.api_key
            session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0), headers={"Authorization": f"Bearer {key}"} if key else None
            )
            self._connections[loop] = _Connections(session, asyncio.Semaphore(self._settings.max_concurrency))
        return self._connections[loop]


def _body(prompt: str, sampling: ChatSampling, seed: int) -> dict[str, Any]:
    """The standard's fields, then those by which vLLM and sglang extend it, at their neutral values."""
    return {
        "messages": [{"role": "user", "content": prompt}],
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "max_tokens": sampling.max_tokens,
        "seed": seed,
        "n": 1,
        "stream": False,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "top_k": -1,
        "min_p": 0.0,
    }


def _pause(attempts: int, retry_after: float) -> float:
    """Seconds before the next attempt: doubling, with jitter, never less than the server asked for."""
    backoff = min(_FIRST_BACKOFF * 2 ** (attempts - 1), _LONGEST_BACKOFF)
    return max(retry_after, backoff * _JITTER.uniform(0.5, 1.0))


def _decoded(url: str, status: int, headers: Mapping[str, str], content: bytes) -> Any:
    if status in (408, 429) or status >= 500:
        kind = _OverloadedError if status in _OVERLOADED else _RetryableError
        raise kind(f"{url}: HTTP {status}: {error_message(content)}", _retry_after(headers))
    if status >= 300:
        raise RequestRejectedError(f"{url}: HTTP {status}: {error_message(content)}")
    try:
        return json.loads(content)
    except ValueError as error:
        raise _RetryableError(f"{url}: malformed JSON: {_short(content.decode(errors='replace'))}") from error


def _content(url: str, reply: Any) -> str:
    try:
        content = reply["choices"][0]["message"]["content"]
    except (KeyError, IndexError, TypeError) as error:
        raise _RetryableError(f"{url}: a reply without choices: {_short(json.dumps(reply))}") from error
    if content is not None and not isinstance(content, str):
        raise _RetryableError(f"{url}: a reply whose content is no text: {_short(json.dumps(content))}")
    return content or ""


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
