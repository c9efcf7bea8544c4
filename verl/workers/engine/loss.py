"""What the engine asks of a loss, and how its metrics add up.

Invariant: a loss divides by the totals of the whole optimizer step, so the parts that micro-batches
and ranks compute add up to the loss of the batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import torch

from verl.workers.engine.packing import MicroBatch

Scalar = torch.Tensor | float


class MetricKind(StrEnum):
    SUM = "sum"
    MEAN = "mean"
    MAX = "max"


@dataclass(frozen=True, slots=True)
class Metric:
    """One micro-batch's part of a metric. A MEAN weighs with ``weight``, usually trained tokens."""

    kind: MetricKind
    value: Scalar
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class BatchTotals:
    """Trained tokens, and rows that have any, over all ranks and micro-batches of one optimizer step."""

    tokens: int
    sequences: int


@dataclass(frozen=True, slots=True)
class LossOutput:
    """``loss`` is a scalar, this micro-batch's part of the batch's loss."""

    loss: torch.Tensor
    metrics: Mapping[str, Metric]


class BatchLoss(Protocol):
    """What every loss over one micro-batch has. It is handed to workers by value, so it can be pickled."""

    @property
    def fields(self) -> tuple[str, ...]:
        """Keys of the batch it reads."""
        ...


class PolicyBatchLoss(BatchLoss, Protocol):
    """A loss over what a policy says of its trained tokens."""

    @property
    def entropy_needs_grad(self) -> bool: ...

    def __call__(
        self, log_probs: torch.Tensor, entropy: torch.Tensor, batch: MicroBatch, totals: BatchTotals
    ) -> LossOutput:
        """``log_probs`` and ``entropy`` are (n, r) float32, 0 where ``batch.response_mask`` is 0."""
        ...


class ValueBatchLoss(BatchLoss, Protocol):
    """A loss over the values that a critic predicts for the trained tokens."""

    def __call__(self, values: torch.Tensor, batch: MicroBatch, totals: BatchTotals) -> LossOutput:
        """``values`` are (n, r) float32, 0 where ``batch.response_mask`` is 0."""
        ...


def combine_metrics(parts: Iterable[Mapping[str, Metric]]) -> dict[str, float]:
    """The metrics of all micro-batches of all ranks as plain numbers, summed in the order given."""
    values: dict[str, float] = {}
    weights: dict[str, float] = {}
    for name, metric in (item for part in parts for item in part.items()):
        value = float(metric.value)
        if metric.kind is MetricKind.MAX:
            values[name] = max(values.get(name, value), value)
        else:
            weight = metric.weight if metric.kind is MetricKind.MEAN else 1.0
            values[name] = values.get(name, 0.0) + value * weight
            weights[name] = weights.get(name, 0.0) + (weight if metric.kind is MetricKind.MEAN else 0.0)
    return {name: value / weights[name] if weights.get(name) else value for name, value in values.items()}
