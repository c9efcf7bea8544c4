"""Real search engines as backends: no noise, no gold answers, equal queries asked once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from verl.workers.rollout.engine import InfrastructureError
from zerosearch.search.backend import Label, SearchRequest, SearchResult
from zerosearch.search.http import Call
from zerosearch.search.simulation import cut_query
from zerosearch.search.single_flight import SingleFlight

_REMEMBERED = 1 << 17


@dataclass(frozen=True, slots=True)
class Found:
    """``documents`` in the engine's order, however many came; none is a valid answer."""

    documents: Sequence[str]
    call: Call


class SearchEngine(Protocol):
    @property
    def urls(self) -> tuple[str, ...]:
        """Base URLs, without any key."""
        ...

    @property
    def fix(self) -> str:
        """What to look at when it does not answer."""
        ...

    async def find(self, query: str, topk: int) -> Found:
        """Raises ServerUnavailableError or RequestRejectedError."""
        ...

    async def close(self) -> None: ...


class EngineBackend:
    """Asks a real engine what the policy typed, of a query beyond 512 characters its beginning.

    Results are remembered by (query, topk) as long as this process runs, so a query that one rollout
    worker repeats, in whatever trajectory or step, costs one call.
    """

    def __init__(self, name: str, engine: SearchEngine) -> None:
        self._name = name
        self._engine = engine
        self._answers: SingleFlight[SearchResult] = SingleFlight(_REMEMBERED)

    @property
    def urls(self) -> tuple[str, ...]:
        return self._engine.urls

    async def search(self, request: SearchRequest) -> SearchResult:
        """Raises InfrastructureError; a remembered result has 0 attempts, engine calls and latency."""
        query = cut_query(" ".join(request.query.split()))
        result, shared = await self._answers.get((query, request.topk), lambda: self._ask(query, request.topk))
        return replace(result, attempts=0, latency=0.0, engine_calls=0) if shared else result

    async def _ask(self, query: str, topk: int) -> SearchResult:
        found = await self._engine.find(query, topk)
        call = found.call
        documents = tuple(found.documents[:topk])
        cut = len(found.documents) - len(documents)
        return SearchResult(documents, Label.NONE, self._name, call.retries + 1, call.seconds, cut, call.requests)

    async def preflight(self) -> list[str]:
        try:
            await self._engine.find("capital of France", 1)
        except InfrastructureError as error:
            return [f"a trial search ({self._name}) failed ({error}): {self._engine.fix}"]
        return []

    async def close(self) -> None:
        await self._answers.close()
        await self._engine.close()
