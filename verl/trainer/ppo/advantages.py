"""Advantage estimators that compare the outcomes of a group: pure functions of rewards, masks and group ids.

A row's outcome is the sum of its token rewards. A group is the rows of one id; whoever calls has taken out
the rows that do not count. Statistics are float64, and equal outcomes give exactly 0: a mean rounded in the
last bit would otherwise leave a residue that the division by a spread near 0 blows up.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from verl.trainer.ppo.policy_tokens import PolicyTokens
from verl.trainer.ppo.registry import AdvantageEstimator, register_adv_est


@register_adv_est(AdvantageEstimator.GRPO)
@torch.no_grad()
def compute_grpo_outcome_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: np.ndarray,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    config: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Group-relative advantages (DeepSeekMath, arXiv 2402.03300, section 4.1.2).

    A row's advantage is (r - mean) / (std + epsilon) within its group, std with n - 1, and stands on every
    trained token. A group of equal rewards gets exactly 0, and so does a group of one row, which has nothing
    to be compared with.

    Args:
        token_level_rewards: (batch, response_length) float.
        response_mask: (batch, response_length), not 0 on trained tokens.
        index: (batch,) group ids of any type.
        epsilon: added to the standard deviation.
        norm_adv_by_std_in_grpo: False leaves out the division (Dr. GRPO, arXiv 2503.20783).
        config: not read.

    Returns advantages and returns, the same tensor here, (batch, response_length) float32.
    """
    scores = group_centred(token_level_rewards, index)
    if norm_adv_by_std_in_grpo:
        for rows in group_rows(index):
            if scores[rows].any():
                scores[rows] /= scores[rows].std() + epsilon
    return _on_every_token(scores, response_mask)


@register_adv_est(AdvantageEstimator.RLOO)
@torch.no_grad()
def compute_rloo_outcome_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: np.ndarray,
    epsilon: float = 1e-6,
    config: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """REINFORCE with the leave-one-out baseline on outcomes (arXiv 2402.14740, section 3.2).

    A row's advantage is its outcome minus the mean outcome of the group's other rows, on every token. A group
    of equal rewards, one row included, gets exactly 0.

    Args: those of :func:`compute_grpo_outcome_advantage`; ``epsilon`` and ``config`` are not read.

    Returns advantages and returns, the same tensor here, (batch, response_length) float32.
    """
    scores = group_centred(token_level_rewards, index)
    for rows in group_rows(index):
        # r - mean of the others = (r - mean of all) * n / (n - 1).
        scores[rows] *= len(rows) / max(len(rows) - 1, 1)
    return _on_every_token(scores, response_mask)


@register_adv_est(AdvantageEstimator.REINFORCE_PLUS_PLUS_BASELINE)
@torch.no_grad()
def compute_reinforce_plus_plus_baseline_outcome_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: np.ndarray,
    epsilon: float = 1e-6,
    config: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """REINFORCE++ with the group's mean as baseline (arXiv 2501.03262, section 3.3).

    A row's outcome minus its group's mean stands on every token and is whitened over all policy tokens of the
    batch, so a long row weighs more in the statistics. A group of equal rewards, one row included, counts in
    them but gets exactly 0.

    Args: those of :func:`compute_grpo_outcome_advantage`; ``epsilon`` and ``config`` are not read.

    Returns advantages and returns, the same tensor here, (batch, response_length) float32.
    """
    tokens = PolicyTokens.of(response_mask)
    scores = group_centred(token_level_rewards, index)
    advantages = tokens.expand(tokens.whiten(scores[:, None].expand(-1, tokens.longest)))
    for rows in group_rows(index):
        if not scores[rows].any():
            advantages[rows] = 0
    return advantages, advantages


def group_centred(token_level_rewards: torch.Tensor, index: Iterable[Any]) -> torch.Tensor:
    """Each row's outcome minus its group's mean, (batch,) float64; exactly 0 in a group of equal outcomes."""
    outcomes = token_level_rewards.double().sum(-1)
    centred = torch.zeros_like(outcomes)
    for rows in group_rows(index):
        rewards = outcomes[rows]
        if rewards.max() > rewards.min():
            centred[rows] = rewards - rewards.mean()
    return centred


def group_rows(index: Iterable[Any]) -> list[list[int]]:
    """Row numbers of each group, groups in order of appearance."""
    groups: dict[Any, list[int]] = {}
    for row, key in enumerate(index):
        groups.setdefault(key, []).append(row)
    return list(groups.values())


def _on_every_token(scores: torch.Tensor, response_mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    advantages = scores.float()[:, None] * response_mask.bool().float()
    return advantages, advantages
