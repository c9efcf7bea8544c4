from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.verl.trainer.ppo import plain as loops
from tests.verl.trainer.ppo.batches import dense_batch, outcome_rewards, padded
from verl.trainer.ppo.advantages import (
    compute_grpo_outcome_advantage,
    compute_reinforce_plus_plus_baseline_outcome_advantage,
    compute_rloo_outcome_advantage,
)

OUTCOME_ESTIMATORS = [
    compute_grpo_outcome_advantage,
    compute_rloo_outcome_advantage,
    compute_reinforce_plus_plus_baseline_outcome_advantage,
]


def outcome(rewards: list[float], groups: list[object], **settings: bool) -> list[float]:
    """Advantage of each row; responses of two tokens, the reward on the last."""
    token_rewards = torch.tensor([[0.0, reward] for reward in rewards])
    mask = torch.ones(len(rewards), 2)
    advantages, returns = compute_grpo_outcome_advantage(
        token_rewards, mask, np.array(groups, dtype=object), **settings
    )
    assert torch.equal(advantages, returns)
    assert torch.equal(advantages[:, 0], advantages[:, 1])
    return advantages[:, 0].tolist()


def plain(rewards: list[float], groups: list[object]) -> list[float]:
    result = []
    for reward, group in zip(rewards, groups, strict=True):
        peers = [r for r, g in zip(rewards, groups, strict=True) if g == group]
        mean = sum(peers) / len(peers)
        if len(peers) < 2 or max(peers) == min(peers):
            result.append(0.0)
        else:
            std = math.sqrt(sum((r - mean) ** 2 for r in peers) / (len(peers) - 1))
            result.append((reward - mean) / (std + 1e-6))
    return result


def test_by_value() -> None:
    # mean 1, std with n - 1 is 1
    assert outcome([0.0, 1.0, 2.0], ["a"] * 3) == pytest.approx([-1, 0, 1], abs=2e-6)
    assert outcome([0.0, 1.0, 2.0], ["a"] * 3, norm_adv_by_std_in_grpo=False) == [-1, 0, 1]


@given(st.lists(st.tuples(st.floats(-4, 4, width=32), st.integers(0, 3)), min_size=1, max_size=24))
def test_equals_a_plain_loop(rows: list[tuple[float, int]]) -> None:
    rewards, groups = [float(np.float32(r)) for r, _ in rows], [g for _, g in rows]
    assert outcome(rewards, list(groups)) == pytest.approx(plain(rewards, list(groups)), rel=1e-5, abs=1e-6)


@given(st.fractions(-2, 2, max_denominator=60), st.integers(2, 9))
def test_equal_rational_rewards_give_exactly_zero(reward: Fraction, size: int) -> None:
    assert outcome([float(reward)] * size, ["a"] * size) == [0.0] * size


def test_thirds_spread_over_tokens_give_exactly_zero() -> None:
    rewards = torch.full((7, 3), 1 / 3) / 3
    advantages, _ = compute_grpo_outcome_advantage(rewards, torch.ones(7, 3), np.array(["a"] * 7))
    assert torch.equal(advantages, torch.zeros(7, 3))


def test_a_group_of_one_gets_zero_not_its_reward() -> None:
    assert outcome([0.7, 0.0, 1.0], ["alone", "b", "b"])[0] == 0.0


def test_groups_may_interleave_and_the_same_question_twice_is_two_groups() -> None:
    mixed = outcome([0.0, 5.0, 1.0, 7.0], ["q-0", "q-1", "q-0", "q-1"])
    assert mixed == pytest.approx([-math.sqrt(0.5), -math.sqrt(0.5), math.sqrt(0.5), math.sqrt(0.5)], abs=1e-5)


def test_observation_tokens_get_no_advantage() -> None:
    rewards = torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, 0.0]])
    mask = torch.tensor([[1, 0, 1], [1, 1, 0]])
    advantages, _ = compute_grpo_outcome_advantage(rewards, mask, np.array([3, 3]))
    assert advantages.dtype == torch.float32
    assert (advantages != 0).tolist() == mask.bool().tolist()


@pytest.mark.parametrize("seed", range(3))
def test_outcome_estimators_equal_plain_loops(seed: int) -> None:
    batch = dense_batch(seed, off_mask=0.0)
    rewards = loops.policy_rows(batch.rewards, batch.mask)
    expected = [
        loops.grpo(rewards, batch.groups, divide_by_std=True),
        loops.rloo(rewards, batch.groups),
        loops.reinforce_plus_plus_baseline(rewards, batch.groups),
    ]
    for estimator, rows in zip(OUTCOME_ESTIMATORS, expected, strict=True):
        advantages, returns = estimator(batch.rewards, batch.mask, batch.groups)
        assert advantages.dtype == torch.float32
        assert torch.equal(advantages, returns)
        torch.testing.assert_close(advantages, padded(rows, batch.mask), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("estimator", OUTCOME_ESTIMATORS)
@given(reward=st.fractions(-2, 2, max_denominator=60), size=st.integers(2, 9))
def test_a_group_of_equal_rational_rewards_gets_exactly_zero_beside_another(
    estimator: Callable[..., tuple[torch.Tensor, torch.Tensor]], reward: Fraction, size: int
) -> None:
    mask = (torch.arange(4) < torch.arange(1, size + 3)[:, None]).long()
    rewards = outcome_rewards(mask, torch.tensor([float(reward)] * size + [0.0, 1.0]))
    advantages, _ = estimator(rewards, mask, np.array(["a"] * size + ["b", "b"]))
    assert torch.equal(advantages[:size], torch.zeros(size, 4))
    assert (advantages[-2:, 0] != 0).all()


@pytest.mark.parametrize("estimator", OUTCOME_ESTIMATORS)
def test_a_lone_row_gets_zero_from_every_estimator(
    estimator: Callable[..., tuple[torch.Tensor, torch.Tensor]],
) -> None:
    rewards = torch.tensor([[0.0, 0.7], [0.0, 0.2], [0.0, 1.0]])
    advantages, _ = estimator(rewards, torch.ones(3, 2), np.array(["alone", "b", "b"]))
    assert advantages[0].tolist() == [0.0, 0.0]
    assert advantages[1, 0] < 0 < advantages[2, 0]


def test_rloo_by_value() -> None:
    rewards = torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.5, 0.0], [0.0, 0.0, 0.0], [0.5, 0.0, 0.25]])
    mask = torch.tensor([[1, 0, 1], [1, 1, 0], [0, 0, 1], [1, 1, 1]])
    advantages, _ = compute_rloo_outcome_advantage(rewards, mask, np.array([7, 7, 7, 8]))
    assert advantages.tolist() == [[0.75, 0, 0.75], [0, 0, 0], [0, 0, -0.75], [0, 0, 0]]
