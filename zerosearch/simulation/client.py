"""An asynchronous client of OpenAI chat completions for simulation LLMs (vLLM, sglang, ours).

Invariants: every sampling field is sent, so that no default of a server or of a model's
generation_config applies; every call ends within its deadline, pauses apart; jitter moves only when a retry
happens, never what is asked.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from zerosearch.search.single_flight import SingleFlight
from zerosearch.simulation.pool import Lease, ServerPool
from zerosearch.transport import (
    OverloadedError,
    RequestRejectedError,
    RetryableError,
    ServerUnavailableError,
    Transport,
    backoff,
)

_LOOK_AGAIN = 0.1
_PROBE_TIMEOUT = 30.0


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
        self._transport = Transport(settings.max_concurrency, settings.api_key, bearer=True)

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
                except RetryableError as error:
                    call.failure, pause = str(error), backoff(call.attempts, error.retry_after)
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
        except OverloadedError:
            raise
        except RetryableError as error:
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
            raise RetryableError(silent) from error

    async def served_models(self, url: str) -> tuple[str, ...]:
        """The model names that one server offers. Raises ServerUnavailableError or RequestRejectedError."""
        try:
            return await self._ask_models(url)
        except RetryableError as error:
            raise ServerUnavailableError(f"{url}: {error}") from error

    async def close(self) -> None:
        """Closes the connections of the running event loop."""
        await self._transport.close()

    async def _attempt(self, url: str, body: Mapping[str, Any]) -> str:
        model = self._settings.model or (await self._models.get(url, lambda: self._first_model(url)))[0]
        target, seconds = f"{url}/chat/completions", self._settings.request_timeout
        reply = await self._transport.request("POST", target, seconds=seconds, body={"model": model, **body})
        return self._content(url, reply)

    async def _first_model(self, url: str) -> str:
        return (await self._ask_models(url))[0]

    async def _ask_models(self, url: str, timeout: float = math.inf) -> tuple[str, ...]:
        seconds = min(self._settings.request_timeout, timeout)
        reply = await self._transport.request("GET", f"{url}/models", seconds=seconds)
        try:
            names = tuple(str(entry["id"]) for entry in reply["data"])
        except (KeyError, TypeError) as error:
            raise RetryableError(
                f"{url}/models answered without model names: {self._transport.excerpt(reply)}"
            ) from error
        if not names:
            raise RetryableError(f"{url}/models lists no model")
        return names

    def _content(self, url: str, reply: Any) -> str:
        excerpt = self._transport.excerpt
        try:
            content = reply["choices"][0]["message"]["content"]
        except (KeyError, IndexError, TypeError) as error:
            raise RetryableError(f"{url}: a reply without choices: {excerpt(reply)}") from error
        if content is not None and not isinstance(content, str):
            raise RetryableError(f"{url}: a reply whose content is no text: {excerpt(content)}")
        return content or ""


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
