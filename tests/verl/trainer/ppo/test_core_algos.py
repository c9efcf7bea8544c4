from __future__ import annotations

import inspect

import pytest
import torch

from verl.trainer.ppo import core_algos
from verl.trainer.ppo.core_algos import (
    AdvantageEstimator,
    compute_grpo_outcome_advantage,
    compute_policy_loss_vanilla,
    get_adv_estimator_fn,
    get_policy_loss_fn,
    register_adv_est,
    register_policy_loss,
)


def arguments(name: str) -> list[str]:
    return list(inspect.signature(vars(core_algos)[name]).parameters)


def test_argument_names_and_order_are_verls() -> None:
    rewards, mask = "token_level_rewards", "response_mask"
    assert arguments("compute_grpo_outcome_advantage") == [
        rewards, mask, "index", "epsilon", "norm_adv_by_std_in_grpo", "config",
    ]  # fmt: skip
    for name in ("compute_rloo_outcome_advantage", "compute_reinforce_plus_plus_baseline_outcome_advantage"):
        assert arguments(name) == [rewards, mask, "index", "epsilon", "config"]
    assert arguments("compute_reinforce_plus_plus_outcome_advantage") == [rewards, mask, "config"]
    assert arguments("compute_gae_advantage_return") == [rewards, "values", mask, "gamma", "lam"]
    assert arguments("compute_rewards") == ["token_level_scores", "old_log_prob", "ref_log_prob", "kl_ratio"]
    assert arguments("AdaptiveKLController") == ["init_kl_coef", "target_kl", "horizon"]
    assert arguments("FixedKLController") == ["kl_coef"]
    assert arguments("get_kl_controller") == ["kl_ctrl"]
    assert arguments("compute_policy_loss") == [
        "old_log_prob", "log_prob", "advantages", mask, "cliprange", "cliprange_low", "cliprange_high",
        "clip_ratio_c", "loss_agg_mode",
    ]  # fmt: skip
    assert arguments("compute_value_loss")[:6] == [
        "vpreds", "returns", "values", mask, "cliprange_value", "loss_agg_mode",
    ]  # fmt: skip
    assert arguments("agg_loss") == [
        "loss_mat", "loss_mask", "loss_agg_mode", "dp_size", "batch_num_tokens", "global_batch_size",
        "loss_scale_factor",
    ]  # fmt: skip
    assert arguments("compute_policy_loss_vanilla") == [
        "old_log_prob", "log_prob", "advantages", mask, "loss_agg_mode", "config", "rollout_is_weights",
    ]  # fmt: skip
    assert arguments("compute_entropy_loss") == ["logits", mask, "loss_agg_mode"]
    assert arguments("kl_penalty") == ["logprob", "ref_logprob", "kl_penalty"]


def test_estimators_and_losses_are_found_by_name_and_by_enum() -> None:
    assert get_adv_estimator_fn("grpo") is get_adv_estimator_fn(AdvantageEstimator.GRPO)
    assert get_adv_estimator_fn("grpo") is compute_grpo_outcome_advantage
    found = {str(name): get_adv_estimator_fn(name).__name__ for name in AdvantageEstimator}
    assert found == {
        "gae": "compute_gae_advantage_return",
        "grpo": "compute_grpo_outcome_advantage",
        "reinforce": "compute_reinforce_advantage",
        "reinforce_plus_plus": "compute_reinforce_plus_plus_outcome_advantage",
        "reinforce_plus_plus_baseline": "compute_reinforce_plus_plus_baseline_outcome_advantage",
        "rloo": "compute_rloo_outcome_advantage",
    }
    assert get_policy_loss_fn("vanilla") is compute_policy_loss_vanilla


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'grpoo'.*grpo"):
        get_adv_estimator_fn("grpoo")
    with pytest.raises(ValueError, match=r"'ppo'.*vanilla"):
        get_policy_loss_fn("ppo")


def test_a_name_is_taken_once() -> None:
    register_adv_est("grpo")(compute_grpo_outcome_advantage)
    with pytest.raises(ValueError, match="registered already"):
        register_adv_est("grpo")(lambda **_: (torch.zeros(1), torch.zeros(1)))


def test_a_users_own_loss_is_found() -> None:
    @register_policy_loss("test_only")
    def own(
        old_log_prob,
        log_prob,
        advantages,
        response_mask,
        loss_agg_mode="token-mean",
        config=None,
        rollout_is_weights=None,
    ):
        return log_prob.sum(), {}

    assert get_policy_loss_fn("test_only") is own
