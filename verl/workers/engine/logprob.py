"""Log-probabilities of trained tokens without ever holding all logits."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from verl.models.hf.packed import PackedCausalLM
from verl.utils.torch_functional import entropy_from_log_probs

LOGITS_PER_CHUNK = 1 << 25
"""Logits held at once (128 MB as float32)."""


class TokenLogProbs(nn.Module):
    """Scores given tokens: the root module of sharding, so that the head is gathered with it."""

    def __init__(self, model: PackedCausalLM, temperature: float) -> None:
        super().__init__()
        self.model = model
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

        The first four arguments are those of :class:`PackedCausalLM`; ``predictors`` and ``targets``
        are those of :class:`MicroBatch`.
        """
        hidden = self.model(input_ids, position_ids, cu_seqlens, max_seqlen)[predictors]
        weight = self.model.head_weight
        size = max(1, LOGITS_PER_CHUNK // weight.shape[0])
        chunks = [
            checkpoint(self._score, *chunk, weight, entropy_needs_grad, use_reentrant=False, preserve_rng_state=False)
            for chunk in zip(hidden.split(size), targets.split(size), strict=True)
        ]
        return torch.cat([chunk[0] for chunk in chunks]), torch.cat([chunk[1] for chunk in chunks])

    def _score(
        self, hidden: torch.Tensor, targets: torch.Tensor, weight: torch.Tensor, entropy_needs_grad: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        log_probs = (nn.functional.linear(hidden, weight).float() / self.temperature).log_softmax(-1)
        entropy = entropy_from_log_probs(log_probs if entropy_needs_grad else log_probs.detach())
        return log_probs.gather(1, targets[:, None])[:, 0], entropy
