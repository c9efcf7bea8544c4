from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.verl.trainer.ppo import plain
from tests.verl.trainer.ppo.batches import dense_batch, outcome_rewards, padded
from verl.trainer.config import AlgorithmConfig
from verl.trainer.ppo.advantages import compute_rloo_outcome_advantage
from verl.trainer.ppo.reinforce import compute_reinforce_advantage, compute_reinforce_plus_plus_outcome_advantage

BASELINES = ["leave_one_out", "batch", "none"]


@pytest.mark.parametrize("baseline", BASELINES)
@pytest.mark.parametrize("gamma", [0.97, 1.0, 0.0])
@pytest.mark.parametrize("seed", range(3))
def test_equals_a_plain_loop_over_the_policy_tokens(baseline: str, gamma: float, seed: int) -> None:
    batch = dense_batch(seed)
    config = AlgorithmConfig(gamma=gamma, baseline=baseline)
    advantages, returns = compute_reinforce_advantage(batch.rewards, batch.mask, batch.groups, config)
    rewards = plain.policy_rows(batch.rewards, batch.mask)
    expected = plain.reinforce(rewards, batch.groups, gamma, baseline)
    assert advantages.dtype == returns.dtype == torch.float32
    torch.testing.assert_close(advantages, padded(expected, batch.mask), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(returns, padded(plain.returns_to_go(rewards, gamma), batch.mask), atol=1e-6, rtol=1e-6)


@given(
    st.lists(
        st.tuples(st.integers(1, 5), st.sampled_from([0.0, 0.25, 1.0]), st.integers(0, 2)), min_size=1, max_size=9
    ),
    st.sampled_from(BASELINES),
    st.sampled_from([1.0, 0.9]),
)
def test_outcome_rewards_with_ties_equal_the_plain_loop(
    rows: list[tuple[int, float, int]], baseline: str, gamma: float
) -> None:
    lengths, outcomes, groups = (list(column) for column in zip(*rows, strict=True))
    mask = (torch.arange(5) < torch.tensor(lengths)[:, None]).long()
    rewards = outcome_rewards(mask, torch.tensor(outcomes))
    advantages, _ = compute_reinforce_advantage(rewards, mask, np.array(groups), {"gamma": gamma, "baseline": baseline})
    expected = plain.reinforce(plain.policy_rows(rewards, mask), groups, gamma, baseline)
    torch.testing.assert_close(advantages, padded(expected, mask), atol=1e-6, rtol=1e-6)


def test_returns_do_not_reset_at_an_observation() -> None:
    mask = torch.tensor([[1, 1, 0, 0, 1, 0, 1]])
    rewards = torch.tensor([[0.0, 0.5, 9.0, 9.0, 0.0, 9.0, 1.0]])
    gamma = 0.9
    expected = [[0.9 * (0.5 + 0.81), 0.5 + 0.81, 0.0, 0.0, 0.9, 0.0, 1.0]]
    _, returns = compute_reinforce_advantage(rewards, mask, np.array(["a"]), {"gamma": gamma, "baseline": "none"})
    _, plus_plus = compute_reinforce_plus_plus_outcome_advantage(rewards, mask, {"gamma": gamma})
    assert returns.tolist() == plus_plus.tolist() == [pytest.approx(expected[0])]


@pytest.mark.parametrize("baseline", ["leave_one_out", "batch"])
@pytest.mark.parametrize("gamma", [1.0, 0.97])
@given(reward=st.fractions(-2, 2, max_denominator=60), size=st.integers(2, 9))
def test_equal_rational_rewards_give_exactly_zero(baseline: str, gamma: float, reward: Fraction, size: int) -> None:
    mask = (torch.arange(4) < torch.arange(1, size + 1)[:, None]).long()
    rewards = outcome_rewards(mask, torch.full((size,), float(reward)))
    advantages, _ = compute_reinforce_advantage(
        rewards, mask, np.array(["a"] * size), {"gamma": gamma, "baseline": baseline}
    )
    assert torch.equal(advantages, torch.zeros(mask.shape))


@pytest.mark.parametrize("baseline", ["leave_one_out", "batch"])
def test_equal_dense_rewards_give_exactly_zero(baseline: str) -> None:
    rewards = torch.full((3, 4), 0.1 * 3)
    advantages, _ = compute_reinforce_advantage(
        rewards, torch.ones(3, 4), np.array([1, 1, 1]), {"gamma": 0.97, "baseline": baseline}
    )
    assert torch.equal(advantages, torch.zeros(3, 4))


def test_a_group_of_one_gets_zero_and_so_does_a_row_without_tokens() -> None:
    rewards = torch.tensor([[0.0, 0.7], [0.0, 1.0], [0.0, 0.0], [0.0, 0.0]])
    mask = torch.tensor([[1, 1], [1, 1], [1, 1], [0, 0]])
    advantages, _ = compute_reinforce_advantage(rewards, mask, np.array(["alone", "b", "b", "b"]), None)
    # The row without a token takes no part in the mean of its group.
    assert advantages.tolist() == [[0.0, 0.0], [1.0, 1.0], [-1.0, -1.0], [0.0, 0.0]]


def test_without_a_discount_leave_one_out_on_outcomes_is_rloo() -> None:
    batch = dense_batch(4)
    rewards = outcome_rewards(batch.mask, torch.randn(9, generator=torch.Generator().manual_seed(1)))
    ours, _ = compute_reinforce_advantage(rewards, batch.mask, batch.groups, AlgorithmConfig())
    rloo, _ = compute_rloo_outcome_advantage(rewards, batch.mask, batch.groups)
    torch.testing.assert_close(ours, rloo, atol=1e-6, rtol=1e-6)


def test_no_baseline_leaves_the_reward_and_no_configuration_means_the_defaults() -> None:
    mask = torch.tensor([[1, 0, 1], [1, 1, 0]])
    rewards, groups = outcome_rewards(mask, torch.tensor([0.5, 0.25])), np.array([0, 0])
    raw, _ = compute_reinforce_advantage(rewards, mask, groups, AlgorithmConfig(baseline="none"))
    assert raw.tolist() == [[0.5, 0.0, 0.5], [0.25, 0.25, 0.0]]
    for config in (None, {}, AlgorithmConfig()):
        ours, _ = compute_reinforce_advantage(rewards, mask, groups, config)
        assert ours.tolist() == [[0.25, 0.0, 0.25], [-0.25, -0.25, 0.0]]


def test_an_unknown_baseline_is_named() -> None:
    with pytest.raises(ValueError, match=r"'loo'.*leave_one_out"):
        compute_reinforce_advantage(torch.zeros(1, 1), torch.ones(1, 1), np.array([0]), {"baseline": "loo"})


@pytest.mark.parametrize("gamma", [0.97, 1.0])
def test_plus_plus_equals_a_plain_loop(gamma: float) -> None:
    batch = dense_batch(7)
    advantages, returns = compute_reinforce_plus_plus_outcome_advantage(
        batch.rewards, batch.mask, AlgorithmConfig(gamma=gamma)
    )
    rewards = plain.policy_rows(batch.rewards, batch.mask)
    expected = padded(plain.reinforce_plus_plus(rewards, gamma), batch.mask)
    torch.testing.assert_close(advantages, expected, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(returns, padded(plain.returns_to_go(rewards, gamma), batch.mask), atol=1e-6, rtol=1e-6)


def test_plus_plus_with_equal_rational_rewards_gives_exactly_zero() -> None:
    mask = torch.tensor([[1, 0, 1], [1, 1, 0], [0, 1, 0]])
    rewards = outcome_rewards(mask, torch.full((3,), 0.1 * 3))
    advantages, _ = compute_reinforce_plus_plus_outcome_advantage(rewards, mask, AlgorithmConfig())
    assert torch.equal(advantages, torch.zeros(3, 3))
