"""Advantage estimators on per-token returns: REINFORCE with a choice of baselines, REINFORCE++.

The return of the k-th policy token is G_k = r_k + gamma G_(k+1), over the policy's tokens of the whole
trajectory: an observation neither discounts nor ends it, and what stands on it is not read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from verl.trainer.ppo.advantages import group_rows
from verl.trainer.ppo.policy_tokens import PolicyTokens, discounted_sums
from verl.trainer.ppo.registry import AdvantageEstimator, register_adv_est


@register_adv_est(AdvantageEstimator.REINFORCE)
@torch.no_grad()
def compute_reinforce_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: np.ndarray,
    config: Mapping[str, Any] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns minus a baseline (Williams 1992), which does not look at what the token led to.

    The baseline of a row's k-th token is a mean of other rows' returns from their own k-th token on, of a row
    that ended earlier from its last. With gamma 1 and the reward at the end that is the mean outcome, and
    ``leave_one_out`` equals :func:`compute_rloo_outcome_advantage`. With a discount or rewards on many tokens
    (a KL penalty) the baseline has the same scale as the return it is taken from, and because it reads only
    other rows and k, it leaves the expected gradient as it is.

    Baselines, by ``config["baseline"]``:

    - ``leave_one_out`` (default; arXiv 2402.14740): over the other rows of the group. Unbiased.
    - ``batch``: over all rows of the batch, the row itself included, which shrinks the expected gradient by
      1 - 1 / batch.
    - ``none``: 0.

    With a baseline, a group (or batch) whose only rewards are equal ones at the end gets exactly 0, whatever
    the discount and the lengths: nothing was better than anything else. Under a discount this departs from the
    formula, which would reward the shorter rows. A group of one row gets 0.

    Args:
        token_level_rewards: (batch, response_length) float.
        response_mask: (batch, response_length), not 0 on the policy's tokens.
        index: (batch,) group ids of any type.
        config: ``gamma`` (default 1) and ``baseline``.

    Returns advantages and returns, each (batch, response_length) float32, 0 outside the mask. Computed in
    float64. Raises ValueError for another baseline.
    """
    settings = {} if config is None else config
    tokens = PolicyTokens.of(response_mask)
    rewards = tokens.compact(token_level_rewards)
    returns = discounted_sums(rewards, settings.get("gamma", 1.0))
    advantages = returns.clone()
    for rows in _baseline_groups(settings.get("baseline", "leave_one_out"), tokens, index):
        advantages[rows] = _above_others(rewards[rows], returns[rows], tokens.lengths[rows])
    if settings.get("baseline", "leave_one_out") == "batch":
        count = max(int((tokens.lengths > 0).sum()), 1)
        # x - mean of all = (x - mean of the others) * (n - 1) / n.
        advantages *= (count - 1) / count
    return tokens.expand(advantages), tokens.expand(returns)


def _baseline_groups(baseline: str, tokens: PolicyTokens, index: Sequence[Any] | np.ndarray) -> list[list[int]]:
    """Which rows are compared. Rows without a policy token have no return and take no part."""
    present = tokens.lengths.bool().tolist()
    match baseline:
        case "none":
            return []
        case "batch":
            groups = [list(range(len(present)))]
        case "leave_one_out":
            groups = group_rows(index)
        case _:
            raise ValueError(f"unknown algorithm.baseline {baseline!r}; known: leave_one_out, batch, none")
    return [rows for group in groups if (rows := [row for row in group if present[row]])]


def _above_others(rewards: torch.Tensor, returns: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Returns (n, N) of one group minus the mean of the other rows' at the same place; 0 for a group of one."""
    last = lengths - 1
    final = rewards.gather(1, last[:, None])
    if final.max() == final.min() and rewards.count_nonzero() == final.count_nonzero():
        return torch.zeros_like(returns)
    place = torch.arange(returns.shape[1], device=returns.device).expand_as(returns)
    held = returns.gather(1, torch.minimum(place, last[:, None]))
    others = (held.sum(0) - held) / max(len(lengths) - 1, 1)
    return torch.where(held.max(0).values > held.min(0).values, returns - others, 0)


@register_adv_est(AdvantageEstimator.REINFORCE_PLUS_PLUS)
@torch.no_grad()
def compute_reinforce_plus_plus_outcome_advantage(
    token_level_rewards: torch.Tensor, response_mask: torch.Tensor, config: Mapping[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """REINFORCE++ (arXiv 2501.03262, section 3.2): returns whitened over all policy tokens of the batch.

    Args:
        token_level_rewards: (batch, response_length) float.
        response_mask: (batch, response_length), not 0 on the policy's tokens.
        config: ``gamma``.

    Returns advantages and returns, each (batch, response_length) float32, 0 outside the mask. Computed in
    float64. Equal returns give exactly 0.
    """
    tokens = PolicyTokens.of(response_mask)
    returns = discounted_sums(tokens.compact(token_level_rewards), config["gamma"])
    return tokens.expand(tokens.whiten(returns)), tokens.expand(returns)
