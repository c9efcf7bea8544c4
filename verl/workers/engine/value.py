"""Values of trained tokens: the critic."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import nn

from verl.models.hf.packed import PackedCausalLM
from verl.workers.engine.loss import BatchTotals, LossOutput, ValueBatchLoss
from verl.workers.engine.packing import MicroBatch
from verl.workers.engine.scorer import TokenScorer


class TokenValues(TokenScorer[ValueBatchLoss]):
    """A language model's backbone with a linear value head; the model's output projection is left behind.

    The value of a trained token is read where the token is predicted from, so it is that of the state
    in which the policy chose. The head starts at exactly 0. It has no bias: one would move with the
    learning rate alone, while the weights move the value by that times the sum of the hidden state.
    """

    scores_per_token: ClassVar[int] = 1

    def __init__(self, model: PackedCausalLM) -> None:
        super().__init__()
        self.backbone = model.backbone()
        weight = model.head_weight
        self.value_head = nn.Linear(self.backbone.hidden_size, 1, bias=False, device=weight.device)
        nn.init.zeros_(self.value_head.weight)

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        cu_seqlens: torch.Tensor,
        max_seqlen: int,
        predictors: torch.Tensor,
    ) -> torch.Tensor:
        """Value at each of the ``predictors``, (m, 1) float32, in units of the reward.

        The first four arguments are those of :class:`PackedBackbone`, the last that of :class:`MicroBatch`.
        """
        hidden = self.backbone(input_ids, position_ids, cu_seqlens, max_seqlen)[predictors]
        values: torch.Tensor = self.value_head(hidden.float())
        return values  # not a view of it: FSDP hangs its backward hook on what a root module returns

    def scores(self, batch: MicroBatch) -> tuple[torch.Tensor]:
        values = self(batch.input_ids, batch.position_ids, batch.cu_seqlens, batch.max_seqlen, batch.predictors)
        return (batch.unpack(values[:, 0]),)

    def loss(self, loss: ValueBatchLoss, batch: MicroBatch, totals: BatchTotals) -> LossOutput:
        (values,) = self.scores(batch)
        return loss(values, batch, totals)

    def float32_modules(self) -> tuple[nn.Module, ...]:
        return (self.value_head,)
