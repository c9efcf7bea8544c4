from __future__ import annotations

import pytest
import torch

from tests.verl.trainer.ppo import plain
from tests.verl.trainer.ppo.batches import dense_batch, padded
from verl.trainer.ppo.gae import compute_gae_advantage_return


@pytest.mark.parametrize(("gamma", "lam"), [(0.97, 0.9), (1.0, 1.0), (0.9, 0.0), (0.0, 0.5)])
@pytest.mark.parametrize("seed", range(3))
def test_equals_a_plain_loop_over_the_policy_tokens(gamma: float, lam: float, seed: int) -> None:
    batch = dense_batch(seed)
    advantages, returns = compute_gae_advantage_return(batch.rewards, batch.values, batch.mask, gamma, lam)
    rewards, values = plain.policy_rows(batch.rewards, batch.mask), plain.policy_rows(batch.values, batch.mask)
    expected = plain.gae(rewards, values, gamma, lam)
    assert advantages.dtype == returns.dtype == torch.float32
    torch.testing.assert_close(advantages, padded(expected[0], batch.mask), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(returns, padded(expected[1], batch.mask), atol=1e-6, rtol=1e-6)


def test_credit_crosses_an_observation_without_discount_and_decay() -> None:
    """Two tokens and a reward of 1 behind the second: the same whether an observation stands between or not."""
    adjacent = compute_gae_advantage_return(
        torch.tensor([[0.0, 1.0]]), torch.tensor([[0.5, 0.25]]), torch.ones(1, 2), 0.9, 0.8
    )
    apart = compute_gae_advantage_return(
        torch.tensor([[0.0, 7.0, 7.0, 7.0, 1.0, 7.0]]),
        torch.tensor([[0.5, 8.0, -8.0, 8.0, 0.25, 8.0]]),
        torch.tensor([[1, 0, 0, 0, 1, 0]]),
        0.9,
        0.8,
    )
    # delta_2 = 1 - 0.25, delta_1 = 0.9 * 0.25 - 0.5, A_1 = delta_1 + 0.72 * delta_2.
    assert adjacent[1].tolist() == [pytest.approx([0.5 - 0.275 + 0.72 * 0.75, 1.0])]
    for near, far in zip(adjacent, apart, strict=True):
        assert far[:, [0, 4]].tolist() == near.tolist()
        assert not far[:, [1, 2, 3, 5]].any()


def test_the_last_token_does_not_bootstrap() -> None:
    _, returns = compute_gae_advantage_return(
        torch.tensor([[0.0, 0.3]]), torch.tensor([[0.0, 0.9]]), torch.ones(1, 2), 1.0, 0.0
    )
    assert returns[0, 1].item() == pytest.approx(0.3)


def test_whitening_covers_policy_tokens_only() -> None:
    batch = dense_batch(5)
    advantages, _ = compute_gae_advantage_return(batch.rewards, batch.values, batch.mask, 0.97, 0.9)
    chosen = advantages[batch.mask.bool()].double()
    assert chosen.mean().item() == pytest.approx(0, abs=1e-7)
    assert chosen.std().item() == pytest.approx(1, abs=1e-6)
    assert not advantages[~batch.mask.bool()].any()


def test_equal_rational_rewards_with_equal_values_give_exactly_zero() -> None:
    mask = torch.tensor([[1, 0, 1], [1, 1, 0], [0, 1, 0]])
    rewards = torch.tensor([[0, 0, 0.1 * 3], [0, 0.1 * 3, 0], [0, 0.1 * 3, 0]])
    advantages, returns = compute_gae_advantage_return(rewards, torch.full((3, 3), 0.1), mask, 1.0, 1.0)
    assert torch.equal(advantages, torch.zeros(3, 3))
    torch.testing.assert_close(returns, 0.3 * mask.float())


def test_one_token_and_no_token_at_all_are_no_error() -> None:
    for mask in (torch.tensor([[0, 1], [0, 0]]), torch.zeros(2, 2), torch.zeros(0, 2)):
        zeros = torch.zeros(mask.shape)
        advantages, returns = compute_gae_advantage_return(zeros + 1, zeros, mask, 0.97, 0.9)
        assert torch.equal(advantages, zeros)
        assert torch.equal(returns, mask.float())
