"""What the engine shards and trains: a backbone and a head, read at the predictors of trained tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar, Generic, TypeVar

import torch
from torch import nn

from verl.models.hf.packed import PackedBackbone, PackedCausalLM
from verl.workers.engine.loss import BatchLoss, BatchTotals, LossOutput
from verl.workers.engine.packing import MicroBatch

LossT = TypeVar("LossT", bound=BatchLoss)


class TokenScorer(nn.Module, ABC, Generic[LossT]):
    """The root module of sharding. ``LossT`` is the kind of loss that its scores are trained with."""

    scores_per_token: ClassVar[int]
    backbone: PackedBackbone

    @abstractmethod
    def scores(self, batch: MicroBatch) -> tuple[torch.Tensor, ...]:
        """``scores_per_token`` tensors (n, r) float32 in the layout of ``batch.response_mask``, 0 where it is 0."""

    @abstractmethod
    def loss(self, loss: LossT, batch: MicroBatch, totals: BatchTotals) -> LossOutput:
        """``loss`` of this micro-batch, with a graph to every parameter."""

    def float32_modules(self) -> tuple[nn.Module, ...]:
        """Modules that compute in float32 whatever the backbone's type."""
        return ()


ScorerFactory = Callable[[PackedCausalLM], TokenScorer[LossT]]
"""Puts a head on a checkpoint's model, which may be on the ``meta`` device."""
