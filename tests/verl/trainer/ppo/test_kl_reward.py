from __future__ import annotations

import pytest
import torch

from verl.trainer.ppo.kl_reward import apply_kl_penalty, compute_rewards

SCORES = torch.tensor([[0.0, 0.0, 0.0, 1.0], [0.5, 0.0, 0.0, 0.0]])
OLD = torch.tensor([[-1.0, -9.0, -9.0, -2.0], [-0.5, -9.0, -9.0, -9.0]])
REFERENCE = torch.tensor([[-2.0, 3.0, 7.0, -1.5], [-0.75, 3.0, 7.0, 3.0]])
MASK = torch.tensor([[1, 0, 0, 1], [1, 0, 0, 0]])


def test_the_penalty_is_the_log_ratio_of_policy_and_reference() -> None:
    rewards = compute_rewards(SCORES, OLD, REFERENCE, kl_ratio=0.1)
    assert rewards[0, 0].item() == pytest.approx(-0.1)
    assert rewards[0, 3].item() == pytest.approx(1 + 0.05)


def test_observation_tokens_get_no_penalty() -> None:
    rewards, kl = apply_kl_penalty(SCORES, OLD, REFERENCE, MASK, kl_ratio=0.1)
    assert rewards.dtype == torch.float32
    expected = torch.tensor([[-0.1, 0.0, 0.0, 1.05], [0.475, 0.0, 0.0, 0.0]])
    torch.testing.assert_close(rewards, expected)
    assert kl == pytest.approx(((1.0 - 0.5) + 0.25) / 2)


def test_the_scores_are_not_changed_and_unread_places_may_hold_anything() -> None:
    before = SCORES.clone()
    spoiled = torch.where(MASK.bool(), OLD, float("nan"))
    clean, kl = apply_kl_penalty(SCORES, OLD, REFERENCE, MASK, 0.3)
    rewards, same = apply_kl_penalty(SCORES, spoiled, REFERENCE, MASK, 0.3)
    assert torch.equal(SCORES, before)
    assert torch.equal(rewards, clean)
    assert kl == same


def test_the_reference_itself_costs_exactly_nothing() -> None:
    rewards, kl = apply_kl_penalty(SCORES, OLD, OLD, MASK, kl_ratio=5.0)
    assert torch.equal(rewards, SCORES)
    assert kl == 0
