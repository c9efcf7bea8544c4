"""The algorithms under the import path verl's users know."""

from verl.trainer.ppo.advantages import compute_grpo_outcome_advantage
from verl.trainer.ppo.kl import kl_penalty
from verl.trainer.ppo.losses import agg_loss, compute_entropy_loss, compute_policy_loss_vanilla
from verl.trainer.ppo.registry import (
    AdvantageEstimator,
    get_adv_estimator_fn,
    get_policy_loss_fn,
    register_adv_est,
    register_policy_loss,
)

__all__ = [
    "AdvantageEstimator",
    "agg_loss",
    "compute_entropy_loss",
    "compute_grpo_outcome_advantage",
    "compute_policy_loss_vanilla",
    "get_adv_estimator_fn",
    "get_policy_loss_fn",
    "kl_penalty",
    "register_adv_est",
    "register_policy_loss",
]
