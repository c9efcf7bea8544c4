"""The actor's loss: policy gradient, KL to the reference, entropy bonus."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from verl.trainer.ppo.kl import kl_penalty
from verl.trainer.ppo.losses import MAX_LOG_RATIO, PolicyLossConfig, agg_loss, truncated_importance_weights
from verl.trainer.ppo.registry import PolicyLossFn, get_policy_loss_fn
from verl.utils.torch_functional import masked_mean
from verl.workers.config import ActorConfig
from verl.workers.engine.loss import BatchTotals, LossOutput, Metric, MetricKind
from verl.workers.engine.packing import MicroBatch


@dataclass(frozen=True)
class ActorLoss:
    """loss = policy loss + kl_loss_coef * KL - entropy_coeff * entropy.

    Reads ``advantages``, ``rollout_log_probs``, with a KL term ``ref_log_prob``, and ``old_log_probs``
    where the batch has them. Where it has none the step has a single update and the old policy is the
    one being trained, so its log-probabilities are those just computed, without gradient.

    The policy term of each token is weighted with min(pi_old / pi_sampler, rollout_is_threshold). The
    KL estimate of each token is weighted with pi / pi_old, without gradient, because its expectation is
    over the policy being trained.
    """

    config: ActorConfig
    policy_loss: PolicyLossFn

    @classmethod
    def of(cls, config: ActorConfig) -> ActorLoss:
        """Raises ValueError for an unknown ``policy_loss``."""
        return cls(config, get_policy_loss_fn(config.policy_loss))

    @property
    def fields(self) -> tuple[str, ...]:
        reference = ("ref_log_prob",) if self.config.use_kl_loss else ()
        return ("advantages", "rollout_log_probs", *reference)

    @property
    def entropy_needs_grad(self) -> bool:
        return self.config.entropy_coeff != 0

    def __call__(
        self, log_probs: torch.Tensor, entropy: torch.Tensor, batch: MicroBatch, totals: BatchTotals
    ) -> LossOutput:
        config = PolicyLossConfig.of(
            self.config, dp_size=1, batch_num_tokens=totals.tokens, global_batch_size=totals.sequences
        )
        old = batch.fields.get("old_log_probs", log_probs.detach())
        loss, metrics = self._policy_term(log_probs, old, batch, config)
        if config.use_kl_loss:
            kl = self._kl_term(log_probs, old, batch, config)
            loss = loss + config.kl_loss_coef * kl
            metrics["actor/kl_loss"] = Metric(MetricKind.SUM, kl.detach())
        mean_entropy = agg_loss(entropy, batch.response_mask, config.loss_agg_mode, **config.global_batch_info)
        metrics["actor/entropy"] = Metric(MetricKind.SUM, mean_entropy.detach())
        if config.entropy_coeff:
            loss = loss - config.entropy_coeff * mean_entropy
        return LossOutput(loss, metrics | mismatch_metrics(old, batch))

    def _policy_term(
        self, log_probs: torch.Tensor, old: torch.Tensor, batch: MicroBatch, config: PolicyLossConfig
    ) -> tuple[torch.Tensor, dict[str, Metric]]:
        weights = None
        if config.rollout_is_threshold is not None:
            weights = truncated_importance_weights(old, batch.fields["rollout_log_probs"], config.rollout_is_threshold)
        loss, means = self.policy_loss(
            old_log_prob=old,
            log_prob=log_probs,
            advantages=batch.fields["advantages"],
            response_mask=batch.response_mask,
            loss_agg_mode=config.loss_agg_mode,
            config=config,
            rollout_is_weights=weights,
        )
        metrics = {name: _token_mean(value, batch) for name, value in means.items()}
        metrics["actor/pg_loss"] = Metric(MetricKind.SUM, loss.detach())
        if weights is not None:
            metrics["training/rollout_is_mean"] = _token_mean(masked_mean(weights, batch.response_mask), batch)
        return loss, metrics

    def _kl_term(
        self, log_probs: torch.Tensor, old: torch.Tensor, batch: MicroBatch, config: PolicyLossConfig
    ) -> torch.Tensor:
        estimate = kl_penalty(log_probs, batch.fields["ref_log_prob"], config.kl_loss_type)
        ratio = (log_probs - old).detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        return agg_loss(ratio * estimate, batch.response_mask, config.loss_agg_mode, **config.global_batch_info)


def mismatch_metrics(old_log_probs: torch.Tensor, batch: MicroBatch) -> dict[str, Metric]:
    """How far the sampler's probabilities are from the trainer's, over trained tokens."""
    sampler, mask = batch.fields["rollout_log_probs"], batch.response_mask
    in_log = torch.where(mask, (old_log_probs - sampler).abs(), 0)
    in_probability = torch.where(mask, (old_log_probs.exp() - sampler.exp()).abs(), 0)
    return {
        "training/rollout_probs_diff_mean": _token_mean(masked_mean(in_probability, mask), batch),
        "training/rollout_probs_diff_max": Metric(MetricKind.MAX, in_probability.max()),
        "training/rollout_log_prob_diff_mean": _token_mean(masked_mean(in_log, mask), batch),
        "training/rollout_log_prob_diff_max": Metric(MetricKind.MAX, in_log.max()),
    }


def _token_mean(value: torch.Tensor | float, batch: MicroBatch) -> Metric:
    return Metric(MetricKind.MEAN, value, weight=float(batch.targets.numel()))
