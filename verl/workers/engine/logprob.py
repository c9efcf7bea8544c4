"""Log-probabilities of trained tokens without ever holding all logits."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from verl.models.hf.packed import PackedCausalLM
from verl.utils.torch_functional import entropy_from_log_probs
from verl.workers.engine.loss import BatchTotals, LossOutput, PolicyBatchLoss
from verl.workers.engine.packing import MicroBatch
from verl.workers.engine.scorer import TokenScorer

LOGITS_PER_CHUNK = 1 << 25
"""Logits held at once (128 MB as float32)."""


class TokenLogProbs(TokenScorer[PolicyBatchLoss]):
    """Log-probability and entropy of given tokens; the head is part of the model and may be its embedding."""

    scores_per_token: ClassVar[int] = 2

    def __init__(self, model: PackedCausalLM, temperature: float) -> None:
        super().__init__()
        self.backbone: PackedCausalLM = model
        self.temperature = temperature

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        cu_seqlens: torch.Tensor,
        max_seqlen: int,
        predictors: torch.Tensor,
        targets: torch.Tensor,
        entropy_needs_grad: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probability and entropy of each target at the sampling temperature, both (m,) float32, in nats.

        The first four arguments are those of :class:`PackedBackbone`; ``predictors`` and ``targets``
        are those of :class:`MicroBatch`.
        """
        hidden = self.backbone(input_ids, position_ids, cu_seqlens, max_seqlen)[predictors]
        weight = self.backbone.head_weight
        size = max(1, LOGITS_PER_CHUNK // weight.shape[0])
        chunks = [
            checkpoint(
                self._score_chunk, *chunk, weight, entropy_needs_grad, use_reentrant=False, preserve_rng_state=False
            )
            for chunk in zip(hidden.split(size), targets.split(size), strict=True)
        ]
        return torch.cat([chunk[0] for chunk in chunks]), torch.cat([chunk[1] for chunk in chunks])

    def scores(self, batch: MicroBatch, entropy_needs_grad: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        log_probs, entropy = self(
            batch.input_ids,
            batch.position_ids,
            batch.cu_seqlens,
            batch.max_seqlen,
            batch.predictors,
            batch.targets,
            entropy_needs_grad,
        )
        return batch.unpack(log_probs), batch.unpack(entropy)

    def loss(self, loss: PolicyBatchLoss, batch: MicroBatch, totals: BatchTotals) -> LossOutput:
        log_probs, entropy = self.scores(batch, loss.entropy_needs_grad)
        return loss(log_probs, entropy, batch, totals)

    def _score_chunk(
        self, hidden: torch.Tensor, targets: torch.Tensor, weight: torch.Tensor, entropy_needs_grad: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        log_probs = (nn.functional.linear(hidden, weight).float() / self.temperature).log_softmax(-1)
        entropy = entropy_from_log_probs(log_probs if entropy_needs_grad else log_probs.detach())
        return log_probs.gather(1, targets[:, None])[:, 0], entropy
