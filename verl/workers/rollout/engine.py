"""The interface between agent loops and whatever generates tokens.

An engine is stateless to its caller: every request states its whole context. ``session`` only
lets the engine keep the key/value cache of a trajectory between its turns; an engine that lost
it computes the same result again, slower.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

import torch

from verl.agent_loop.trajectory import TokenIds

NamedTensor = tuple[str, torch.Tensor]


class InfrastructureError(RuntimeError):
    """A server, engine or worker failed: never the policy's fault, never trained on.

    ``environment`` is what an agent loop knew of the trajectory when it failed, for the
    trajectory's own ``environment``.
    """

    environment: Any = None


@dataclass(frozen=True, slots=True)
class SampleKey:
    """Names one trajectory and thereby its random streams."""

    seed: int
    step: int
    uid: str
    sample: int

    def stream(self, *parts: str | int) -> int:
        """A 64-bit key of the stream named by ``parts``: equal on every machine and in any order of calls."""
        text = "\x1f".join(map(str, (self.seed, self.step, self.uid, self.sample, *parts)))
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample. ``temperature`` 0 is greedy. ``stop`` strings end a generation in decoded text."""

    temperature: float = 1.0
    top_p: float = 1.0
    max_tokens: int = 512
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.temperature < 0 or not 0 < self.top_p <= 1 or self.max_tokens < 1:
            raise ValueError(f"need temperature >= 0, 0 < top_p <= 1 and max_tokens >= 1, got {self}")


class StopReason(StrEnum):
    STOP_STRING = "stop_string"
    END_OF_SEQUENCE = "end_of_sequence"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """Continue ``token_ids`` (the whole context).

    The token at absolute position p of the context is drawn with the number (stream, p), so a
    trajectory's tokens do not depend on what else is being generated.
    """

    session: str
    token_ids: TokenIds
    sampling: SamplingParams
    stream: int


@dataclass(frozen=True, slots=True)
class Generation:
    """What was sampled.

    ``log_probs`` are those of the sampled tokens at the sampling temperature (temperature 0: at
    temperature 1). The end-of-sequence id or the token completing the stop string is the last id.
    ``weights_versions`` are runs of (version, number of tokens).
    """

    token_ids: TokenIds
    log_probs: tuple[float, ...]
    stop_reason: StopReason
    stop_string: str | None
    weights_versions: tuple[tuple[int, int], ...]


class RolloutEngine(Protocol):
    """What an agent loop may ask of an engine."""

    async def generate(self, request: GenerationRequest) -> Generation:
        """Raises ValueError for a context that cannot fit and InfrastructureError when the engine is out of order."""
        ...

    async def release(self, session: str) -> None:
        """Frees what the engine keeps for a trajectory. Unknown sessions are ignored."""
        ...


class WeightReceiver(Protocol):
    """The engine's end of the weight stream.

    Between ``begin_weights`` and a successful ``end_weights`` the engine serves nothing; a sync
    that broke half-way leaves it so until a complete one has gone through.
    """

    async def begin_weights(self, version: int) -> None:
        """Waits for requests in flight, drops every cached key and value, opens version ``version``."""
        ...

    async def load_weights(self, bucket: Iterable[NamedTensor]) -> None:
        """One bucket of (Hugging Face name, full tensor)."""
        ...

    async def end_weights(self, version: int) -> None:
        """Raises InfrastructureError unless every tensor of the model arrived exactly once."""
        ...
