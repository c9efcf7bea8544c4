"""The one record of a rollout.

Invariants: tokens in, tokens out. Text is only ever derived from ids, the loss mask is the
segment kind and nothing else, and the ids that are trained are the ids that were sampled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

TokenIds = tuple[int, ...]


class SegmentKind(StrEnum):
    POLICY = "policy"
    OBSERVATION = "observation"


class TrajectoryStatus(StrEnum):
    """How a trajectory ended."""

    ANSWERED = "answered"
    TURNS_EXHAUSTED = "turns_exhausted"
    TRUNCATED = "truncated"
    INFRASTRUCTURE_FAILED = "infrastructure_failed"


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of tokens with one author.

    POLICY segments carry one sampler log-probability per token (natural log, at the sampling
    temperature) and runs of (weights version, number of tokens) that add up to the segment.
    OBSERVATION segments carry an ``info`` that only the environment reads.
    """

    kind: SegmentKind
    token_ids: TokenIds
    log_probs: tuple[float, ...] = ()
    weights_versions: tuple[tuple[int, int], ...] = ()
    info: Any = None

    def __post_init__(self) -> None:
        if self.kind is SegmentKind.POLICY:
            assert len(self.log_probs) == len(self.token_ids), "one log-probability per policy token"
            assert sum(n for _, n in self.weights_versions) == len(self.token_ids)
        else:
            assert not self.log_probs and not self.weights_versions


@dataclass(slots=True)
class Trajectory:
    """One rollout of one prompt: everything training, metrics and the run directory need.

    ``reward_extra`` holds further scores of the same trajectory (each a float), ``environment``
    what only the environment's ``metrics`` reads, ``timings`` seconds by name.
    """

    uid: str
    sample: int
    step: int
    mode: str
    prompt_ids: TokenIds
    segments: list[Segment] = field(default_factory=list)
    status: TrajectoryStatus = TrajectoryStatus.TRUNCATED
    reward: float = 0.0
    reward_extra: dict[str, float] = field(default_factory=dict)
    data_source: str = ""
    environment: Any = None
    timings: dict[str, float] = field(default_factory=dict)
    failure: str | None = None

    @property
    def lost(self) -> bool:
        """Lost to the infrastructure: without tokens, reward or any say about the policy."""
        return self.status is TrajectoryStatus.INFRASTRUCTURE_FAILED

    @property
    def response_ids(self) -> TokenIds:
        return tuple(token for segment in self.segments for token in segment.token_ids)

    @property
    def context_ids(self) -> TokenIds:
        return self.prompt_ids + self.response_ids

    @property
    def response_mask(self) -> tuple[int, ...]:
        """1 on policy tokens, 0 on observation tokens; as long as ``response_ids``."""
        return tuple(int(segment.kind is SegmentKind.POLICY) for segment in self.segments for _ in segment.token_ids)

    @property
    def response_log_probs(self) -> tuple[float, ...]:
        """Sampler log-probabilities; 0.0 on observation tokens."""
        return tuple(
            value for segment in self.segments for value in (segment.log_probs or (0.0,) * len(segment.token_ids))
        )

    @property
    def policy_tokens(self) -> int:
        return sum(len(s.token_ids) for s in self.segments if s.kind is SegmentKind.POLICY)

    @property
    def observation_tokens(self) -> int:
        return sum(len(s.token_ids) for s in self.segments if s.kind is SegmentKind.OBSERVATION)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A data row made ready for rollouts.

    ``uid`` names the group: a function of data file, row and step, set by the driver before
    repetition. ``row`` is the row of the data set as plain Python values.
    """

    uid: str
    prompt_ids: TokenIds
    data_source: str
    row: Mapping[str, Any]
