"""The records between an environment and whatever answers its searches."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from verl.workers.rollout.engine import SampleKey


class Label(StrEnum):
    """What kind of documents a simulated search was asked for; real engines have none."""

    USEFUL = "useful"
    NOISY = "noisy"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class SearchRequest:
    """One search of one trajectory. ``key`` with the normalised query decides the useful/noisy draw;
    ``turn`` enters it only under ``draw=call``."""

    query: str
    question: str
    golden_answers: tuple[str, ...]
    noise_probability: float
    key: SampleKey
    turn: int
    topk: int


@dataclass(frozen=True, slots=True)
class SearchResult:
    """``documents`` without their ``Doc i: `` prefix, at most topk; ``cut`` counts those beyond.
    ``latency`` in seconds, all attempts together. ``engine_calls``: requests sent to a real engine, further
    pages and retries included; 0 for simulated searches and remembered answers."""

    documents: tuple[str, ...]
    label: Label
    backend: str
    attempts: int
    latency: float
    cut: int = 0
    engine_calls: int = 0


class SearchBackend(Protocol):
    async def search(self, request: SearchRequest) -> SearchResult:
        """Raises InfrastructureError when no answer came within the deadline."""
        ...

    async def preflight(self) -> list[str]:
        """Problems, each with its fix; one real request is made."""
        ...

    async def close(self) -> None: ...
