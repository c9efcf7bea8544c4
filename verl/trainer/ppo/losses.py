"""Policy losses and how token losses become one number.

Tensors are (batch, response_length); ``response_mask`` is not 0 on the tokens that count.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

import torch

from verl.trainer.ppo.registry import register_policy_loss
from verl.utils.torch_functional import entropy_from_log_probs, masked_mean, masked_sum
from verl.workers.config import ActorConfig

MAX_LOG_RATIO = 20.0
"""Log-ratios beyond are cut, so that their exponential stays finite."""


@dataclass(frozen=True)
class PolicyLossConfig(ActorConfig):
    """What a policy loss is given: the actor's settings and keyword arguments for :func:`agg_loss`."""

    global_batch_info: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, config: ActorConfig, **global_batch_info: int) -> PolicyLossConfig:
        values = {entry.name: config[entry.name] for entry in fields(ActorConfig)}
        return cls(**values, global_batch_info=global_batch_info)


def agg_loss(
    loss_mat: torch.Tensor,
    loss_mask: torch.Tensor,
    loss_agg_mode: str,
    dp_size: int = 1,
    batch_num_tokens: int | None = None,
    global_batch_size: int | None = None,
    loss_scale_factor: int | None = None,
) -> torch.Tensor:
    """Token losses (n, r) as a scalar.

    Args:
        loss_mat: loss of each token.
        loss_mask: which tokens count.
        loss_agg_mode: ``token-mean``; ``seq-mean-token-sum``, the mean over sequences of their sums;
            ``seq-mean-token-mean``, of their means; ``seq-mean-token-sum-norm``, of their sums divided by
            ``loss_scale_factor`` (default: the width r), as in Dr. GRPO (arXiv 2503.20783).
        dp_size: factor for engines that average gradients over ranks.
        batch_num_tokens: tokens to divide by when ``loss_mat`` is a part of a batch; default: those here.
        global_batch_size: the same for sequences; sequences without a token do not count.
        loss_scale_factor: see above.

    An empty mask gives 0. Raises ValueError for another mode.
    """
    if loss_agg_mode == "token-mean":
        tokens = int(loss_mask.bool().sum()) if batch_num_tokens is None else batch_num_tokens
        return masked_sum(loss_mat, loss_mask) / max(int(tokens), 1) * dp_size
    lengths = loss_mask.bool().sum(-1)
    sums = torch.where(loss_mask.bool(), loss_mat, 0).sum(-1)
    match loss_agg_mode:
        case "seq-mean-token-sum":
            per_sequence = sums
        case "seq-mean-token-mean":
            per_sequence = sums / lengths.clamp(min=1)
        case "seq-mean-token-sum-norm":
            per_sequence = sums / (loss_scale_factor or loss_mask.shape[-1])
        case _:
            raise ValueError(f"unknown loss_agg_mode {loss_agg_mode!r}")
    sequences = int((lengths > 0).sum()) if global_batch_size is None else global_batch_size
    return per_sequence.sum() / max(int(sequences), 1) * dp_size


@register_policy_loss("vanilla")
def compute_policy_loss_vanilla(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "token-mean",
    config: ActorConfig | None = None,
    rollout_is_weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, float]]:
    """PPO's clipped surrogate (arXiv 1707.06347, equation 7) with a dual clip (arXiv 1912.09729, equation 5).

    Args:
        old_log_prob: of the policy the batch is attributed to; no gradient.
        log_prob: of the policy being trained.
        advantages: one per token.
        response_mask: which tokens count.
        loss_agg_mode: see :func:`agg_loss`.
        config: ``clip_ratio`` with ``clip_ratio_low`` and ``clip_ratio_high``, ``clip_ratio_c``.
        rollout_is_weights: constant factor of each token's loss.

    Returns the loss and ``actor/pg_clipfrac`` (share of tokens whose ratio is clipped),
    ``actor/pg_clipfrac_lower`` (share stopped by the dual clip) and ``actor/ppo_kl`` (mean of
    old_log_prob - log_prob).
    """
    config = config or ActorConfig()
    losses, metrics = _clipped_surrogate(
        old_log_prob, log_prob, advantages, response_mask, config.clip_range, config.clip_ratio_c
    )
    if rollout_is_weights is not None:
        losses = losses * rollout_is_weights
    loss = agg_loss(losses, response_mask, loss_agg_mode, **_global_batch_info(config))
    return loss, {name: value.item() for name, value in metrics.items()}


def compute_policy_loss(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    cliprange: float | None = None,
    cliprange_low: float | None = None,
    cliprange_high: float | None = None,
    clip_ratio_c: float = 3.0,
    loss_agg_mode: str = "token-mean",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """:func:`compute_policy_loss_vanilla` with the clipping as plain arguments.

    ``cliprange`` stands in for whichever of ``cliprange_low`` and ``cliprange_high`` is None; ValueError if it
    is None too. Returns the loss and the scalars pg_clipfrac, ppo_kl, pg_clipfrac_lower, in this order.
    """
    low = cliprange if cliprange_low is None else cliprange_low
    high = cliprange if cliprange_high is None else cliprange_high
    if low is None or high is None:
        raise ValueError("compute_policy_loss needs cliprange, or both cliprange_low and cliprange_high")
    losses, metrics = _clipped_surrogate(old_log_prob, log_prob, advantages, response_mask, (low, high), clip_ratio_c)
    loss = agg_loss(losses, response_mask, loss_agg_mode)
    return loss, metrics["actor/pg_clipfrac"], metrics["actor/ppo_kl"], metrics["actor/pg_clipfrac_lower"]


def _clipped_surrogate(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    clip_range: tuple[float, float],
    clip_ratio_c: float,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss of each token, and scalar metrics."""
    low, high = clip_range
    log_ratio = (log_prob - old_log_prob).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    unclipped, clipped = -advantages * ratio, -advantages * ratio.clamp(1 - low, 1 + high)
    surrogate = torch.maximum(unclipped, clipped)
    bound = -advantages * clip_ratio_c
    losses = torch.where(advantages < 0, torch.minimum(surrogate, bound), surrogate)
    return losses, {
        "actor/pg_clipfrac": _share(clipped > unclipped, response_mask),
        "actor/pg_clipfrac_lower": _share((surrogate > bound) & (advantages < 0), response_mask),
        "actor/ppo_kl": masked_mean(-log_ratio.detach(), response_mask),
    }


def _share(condition: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return masked_mean(condition.float(), mask)


def _global_batch_info(config: ActorConfig) -> Mapping[str, int]:
    return config.global_batch_info if isinstance(config, PolicyLossConfig) else {}


def compute_entropy_loss(
    logits: torch.Tensor, response_mask: torch.Tensor, loss_agg_mode: str = "token-mean"
) -> torch.Tensor:
    """Aggregated entropy of softmax(logits): (n, r, vocabulary) and (n, r) to a scalar, in nats."""
    return agg_loss(entropy_from_log_probs(logits.log_softmax(-1)), response_mask, loss_agg_mode)


def truncated_importance_weights(
    old_log_prob: torch.Tensor, rollout_log_prob: torch.Tensor, threshold: float
) -> torch.Tensor:
    """min(pi_old / pi_sampler, threshold) for each token, without gradient.

    Corrects for a sampler whose probabilities differ from the trainer's (truncated importance
    sampling, Ionides 2008). ``threshold`` is at least 1.
    """
    log_ratio = (old_log_prob - rollout_log_prob).detach()
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().clamp(max=threshold)
