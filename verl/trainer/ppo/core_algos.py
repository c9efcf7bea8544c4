"""The algorithms under the import path verl's users know."""

from verl.trainer.ppo.advantages import (
    compute_grpo_outcome_advantage,
    compute_reinforce_plus_plus_baseline_outcome_advantage,
    compute_rloo_outcome_advantage,
)
from verl.trainer.ppo.gae import compute_gae_advantage_return
from verl.trainer.ppo.kl import kl_penalty
from verl.trainer.ppo.kl_controller import AdaptiveKLController, FixedKLController, get_kl_controller
from verl.trainer.ppo.kl_reward import apply_kl_penalty, compute_rewards
from verl.trainer.ppo.losses import agg_loss, compute_entropy_loss, compute_policy_loss, compute_policy_loss_vanilla
from verl.trainer.ppo.registry import (
    AdvantageEstimator,
    get_adv_estimator_fn,
    get_policy_loss_fn,
    register_adv_est,
    register_policy_loss,
)
from verl.trainer.ppo.reinforce import compute_reinforce_advantage, compute_reinforce_plus_plus_outcome_advantage
from verl.trainer.ppo.value_loss import compute_value_loss

__all__ = [
    "AdaptiveKLController",
    "AdvantageEstimator",
    "FixedKLController",
    "agg_loss",
    "apply_kl_penalty",
    "compute_entropy_loss",
    "compute_gae_advantage_return",
    "compute_grpo_outcome_advantage",
    "compute_policy_loss",
    "compute_policy_loss_vanilla",
    "compute_reinforce_advantage",
    "compute_reinforce_plus_plus_baseline_outcome_advantage",
    "compute_reinforce_plus_plus_outcome_advantage",
    "compute_rewards",
    "compute_rloo_outcome_advantage",
    "compute_value_loss",
    "get_adv_estimator_fn",
    "get_kl_controller",
    "get_policy_loss_fn",
    "kl_penalty",
    "register_adv_est",
    "register_policy_loss",
]
