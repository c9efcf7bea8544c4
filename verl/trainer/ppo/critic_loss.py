"""The critic's loss over one micro-batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from verl.trainer.ppo.value_loss import compute_value_loss
from verl.utils.torch_functional import masked_mean
from verl.workers.config import CriticConfig
from verl.workers.engine.loss import BatchTotals, LossOutput, Metric, MetricKind
from verl.workers.engine.packing import MicroBatch


@dataclass(frozen=True)
class CriticLoss:
    """Clipped regression of the predicted values on ``returns``; ``values`` are those of the rollout."""

    config: CriticConfig

    @classmethod
    def of(cls, config: CriticConfig) -> CriticLoss:
        return cls(config)

    @property
    def fields(self) -> tuple[str, ...]:
        return ("returns", "values")

    def __call__(self, values: torch.Tensor, batch: MicroBatch, totals: BatchTotals) -> LossOutput:
        """``values`` are the predictions being trained, (n, r) float32, read where ``batch.response_mask`` is 1."""
        loss, clipped_share = compute_value_loss(
            vpreds=values,
            returns=batch.fields["returns"],
            values=batch.fields["values"],
            response_mask=batch.response_mask,
            cliprange_value=self.config.cliprange_value,
            loss_agg_mode=self.config.loss_agg_mode,
            batch_num_tokens=totals.tokens,
            global_batch_size=totals.sequences,
        )
        tokens = float(batch.targets.numel())
        mean_value = masked_mean(values.detach(), batch.response_mask)
        return LossOutput(
            loss,
            {
                "critic/vf_loss": Metric(MetricKind.SUM, loss.detach()),
                "critic/vf_clipfrac": Metric(MetricKind.MEAN, clipped_share, tokens),
                "critic/vpred_mean": Metric(MetricKind.MEAN, mean_value, tokens),
            },
        )
