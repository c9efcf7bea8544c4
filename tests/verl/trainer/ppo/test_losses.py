from __future__ import annotations

import math

import pytest
import torch

from verl.trainer.ppo.actor_loss import ActorLoss
from verl.trainer.ppo.losses import (
    PolicyLossConfig,
    agg_loss,
    compute_entropy_loss,
    compute_policy_loss,
    compute_policy_loss_vanilla,
    truncated_importance_weights,
)
from verl.utils.config import build_config
from verl.workers.config import ActorConfig
from verl.workers.engine.loss import BatchTotals
from verl.workers.engine.packing import MicroBatch

LOSSES = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [7.0, 8.0, 9.0]])
MASK = torch.tensor([[1, 1, 0], [0, 1, 0], [0, 0, 0]])
MODES = {
    "token-mean": (1 + 2 + 5) / 3,
    "seq-mean-token-sum": (1 + 2 + 5) / 2,
    "seq-mean-token-mean": (1.5 + 5) / 2,
    "seq-mean-token-sum-norm": (1 + 2 + 5) / 3 / 2,
}


@pytest.mark.parametrize(("mode", "expected"), MODES.items())
def test_aggregation_by_value(mode: str, expected: float) -> None:
    assert agg_loss(LOSSES, MASK, mode).item() == pytest.approx(expected)
    assert agg_loss(LOSSES, MASK, mode, dp_size=4).item() == pytest.approx(4 * expected)


@pytest.mark.parametrize(("mode", "expected"), MODES.items())
def test_ragged_parts_add_up_to_the_whole_with_global_counts(mode: str, expected: float) -> None:
    parts = [
        agg_loss(LOSSES[rows], MASK[rows], mode, batch_num_tokens=3, global_batch_size=2)
        for rows in (slice(0, 1), slice(1, 3))
    ]
    assert sum(parts).item() == pytest.approx(expected)


@pytest.mark.parametrize("mode", MODES)
def test_an_empty_mask_gives_zero_even_over_values_that_are_not_finite(mode: str) -> None:
    values = torch.full((2, 2), float("nan"), requires_grad=True)
    loss = agg_loss(values, torch.zeros(2, 2), mode)
    loss.backward()
    assert loss.item() == 0
    assert values.grad is not None
    assert not values.grad.any()


def test_an_unknown_mode_is_named() -> None:
    with pytest.raises(ValueError, match="'mean'"):
        agg_loss(LOSSES, MASK, "mean")


def vanilla(ratio: float, advantage: float, **settings: float) -> tuple[float, float, dict[str, float]]:
    """Loss, its derivative by the log-probability, and metrics, of one token."""
    log_prob = torch.tensor([[math.log(ratio)]], requires_grad=True)
    loss, metrics = compute_policy_loss_vanilla(
        torch.zeros(1, 1), log_prob, torch.tensor([[advantage]]), torch.ones(1, 1), config=ActorConfig(**settings)
    )
    loss.backward()
    assert log_prob.grad is not None
    return loss.item(), log_prob.grad.item(), dict(metrics)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope", "clipped", "clipped_lower"),
    [
        (1.0, 2.0, -2.0, -2.0, 0, 0),
        (1.1, 2.0, -2.2, -2.2, 0, 0),
        (1.5, 2.0, -2.56, 0.0, 1, 0),  # above 1 + clip_ratio_high
        (0.5, 2.0, -1.0, -1.0, 0, 0),
        (0.5, -2.0, 1.8, 0.0, 1, 0),  # below 1 - clip_ratio_low
        (1.5, -2.0, 3.0, 3.0, 0, 0),
        (9.0, -2.0, 6.0, 0.0, 0, 1),  # the dual clip
    ],
)
def test_clipping_by_value(
    ratio: float, advantage: float, loss: float, slope: float, clipped: float, clipped_lower: float
) -> None:
    value, gradient, metrics = vanilla(ratio, advantage, clip_ratio_low=0.1, clip_ratio_high=0.28, clip_ratio_c=3.0)
    assert value == pytest.approx(loss, rel=1e-5)
    assert gradient == pytest.approx(slope, abs=1e-5)
    assert metrics["actor/pg_clipfrac"] == clipped
    assert metrics["actor/pg_clipfrac_lower"] == clipped_lower
    assert metrics["actor/ppo_kl"] == pytest.approx(-math.log(ratio), abs=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_the_older_policy_loss_is_the_same_function(mode: str) -> None:
    generator = torch.Generator().manual_seed(0)
    old, new, advantages = torch.randn(3, *MASK.shape, generator=generator)
    config = ActorConfig(clip_ratio_low=0.1, clip_ratio_high=0.3, clip_ratio_c=1.5)
    expected, metrics = compute_policy_loss_vanilla(old, new, advantages, MASK, mode, config)
    loss, clipped, kl, lower = compute_policy_loss(old, new, advantages, MASK, None, 0.1, 0.3, 1.5, mode)
    assert loss.item() == expected.item()
    assert (clipped.item(), kl.item(), lower.item()) == (
        metrics["actor/pg_clipfrac"],
        metrics["actor/ppo_kl"],
        metrics["actor/pg_clipfrac_lower"],
    )
    both, *_ = compute_policy_loss(old, new, advantages, MASK, cliprange=0.2)
    assert both.item() == compute_policy_loss_vanilla(old, new, advantages, MASK)[0].item()


def test_the_older_policy_loss_needs_a_range() -> None:
    one = torch.ones(1, 1)
    with pytest.raises(ValueError, match="cliprange"):
        compute_policy_loss(one, one, one, one, cliprange_low=0.2)


def test_an_extreme_ratio_stays_finite() -> None:
    assert all(map(math.isfinite, vanilla(1e30, 1.0)[:2]))
    assert math.isfinite(vanilla(1e-30, 1.0)[0])


def test_importance_weights_are_truncated_and_carry_no_gradient() -> None:
    old = torch.tensor([-1.0, -1.0, -3.0, -1.0], requires_grad=True)
    weights = truncated_importance_weights(old, torch.tensor([-1.0, -1.5, -1.0, -90.0]), 2.0)
    assert weights.tolist() == pytest.approx([1.0, math.exp(0.5), math.exp(-2), 2.0])
    assert not weights.requires_grad


def test_entropy_of_a_uniform_distribution() -> None:
    loss = compute_entropy_loss(torch.zeros(2, 3, 7), MASK[:2])
    assert loss.item() == pytest.approx(math.log(7))


def micro_batch(mask: torch.Tensor, **fields: torch.Tensor) -> MicroBatch:
    empty = torch.zeros(0, dtype=torch.int64)
    targets = torch.zeros(int(mask.sum()), dtype=torch.int64)
    return MicroBatch(empty, empty, empty, 0, empty, targets, mask.bool(), fields)


def actor_loss(config: ActorConfig, log_probs: torch.Tensor, **fields: torch.Tensor) -> tuple[float, torch.Tensor]:
    mask = torch.ones_like(log_probs)
    leaf = log_probs.clone().requires_grad_()
    output = ActorLoss.of(config)(
        leaf, torch.zeros_like(leaf), micro_batch(mask, **fields), BatchTotals(mask.numel(), len(mask))
    )
    output.loss.backward()
    assert leaf.grad is not None
    return output.loss.item(), leaf.grad


def test_kl_loss_is_added() -> None:
    config = ActorConfig(kl_loss_coef=0.5, kl_loss_type="k2")
    log_probs, reference, zero = torch.tensor([[-1.0]]), torch.tensor([[-3.0]]), torch.zeros(1, 1)
    loss, gradient = actor_loss(config, log_probs, advantages=zero, rollout_log_probs=log_probs, ref_log_prob=reference)
    assert loss == pytest.approx(0.5 * 2.0)
    assert gradient.item() == pytest.approx(0.5 * 2.0)


def test_off_policy_the_kl_is_weighted_with_the_importance_ratio() -> None:
    config = ActorConfig(kl_loss_coef=1.0, kl_loss_type="k2", rollout_is_threshold=None)
    log_probs, reference = torch.tensor([[-1.0]]), torch.tensor([[-3.0]])
    old = torch.tensor([[-1.5]])
    loss, gradient = actor_loss(
        config,
        log_probs,
        advantages=torch.zeros(1, 1),
        rollout_log_probs=old,
        old_log_probs=old,
        ref_log_prob=reference,
    )
    assert loss == pytest.approx(math.exp(0.5) * 2.0)
    assert gradient.item() == pytest.approx(math.exp(0.5) * 2.0)


def test_rows_of_advantage_zero_stay_in_the_denominator_and_keep_their_kl() -> None:
    config = ActorConfig(kl_loss_coef=1.0, kl_loss_type="k2")
    log_probs = torch.full((2, 2), -1.0)
    advantages = torch.tensor([[1.0, 1.0], [0.0, 0.0]])
    _, gradient = actor_loss(
        config, log_probs, advantages=advantages, rollout_log_probs=log_probs, ref_log_prob=torch.full((2, 2), -2.0)
    )
    assert gradient.tolist() == [[0.0, 0.0], [0.25, 0.25]]


def test_k1_without_a_gradient_of_its_own_is_refused_as_a_loss() -> None:
    for name in ("k1", "kl", "abs"):
        with pytest.raises(ValueError, match="kl_loss_type"):
            build_config(ActorConfig, {"kl_loss_type": name})
    for name in ("k2", "k3", "low_var_kl", "k1+"):
        assert build_config(ActorConfig, {"kl_loss_type": name}).kl_loss_type == name


def test_the_sampler_mismatch_is_measured_on_trained_tokens_only() -> None:
    mask = torch.tensor([[1, 0, 1]])
    log_probs, sampler = torch.tensor([[-1.0, -9.0, -2.0]]), torch.tensor([[-1.5, 0.0, -2.0]])
    batch = micro_batch(mask, advantages=torch.zeros(1, 3), rollout_log_probs=sampler)
    output = ActorLoss.of(ActorConfig(use_kl_loss=False))(log_probs, torch.zeros(1, 3), batch, BatchTotals(2, 1))
    assert float(output.metrics["training/rollout_log_prob_diff_mean"].value) == pytest.approx(0.25)
    assert float(output.metrics["training/rollout_log_prob_diff_max"].value) == pytest.approx(0.5)
    difference = math.exp(-1) - math.exp(-1.5)
    assert float(output.metrics["training/rollout_probs_diff_max"].value) == pytest.approx(difference)


def test_the_config_of_a_policy_loss_reads_like_verls() -> None:
    config = PolicyLossConfig.of(ActorConfig(clip_ratio=0.25), dp_size=1, batch_num_tokens=7, global_batch_size=2)
    assert config.clip_ratio == config["clip_ratio"] == config.get("clip_ratio") == 0.25
    assert config.get("unknown", 5) == 5
    assert agg_loss(
        torch.ones(1, 1), torch.ones(1, 1), "token-mean", **config.global_batch_info
    ).item() == pytest.approx(1 / 7)
