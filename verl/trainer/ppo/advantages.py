"""Advantage estimators: pure functions of rewards, masks and group ids."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from verl.trainer.ppo.registry import AdvantageEstimator, register_adv_est


@register_adv_est(AdvantageEstimator.GRPO)
def compute_grpo_outcome_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: np.ndarray,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    config: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Group-relative advantages (DeepSeekMath, arXiv 2402.03300, section 4.1.2).

    A row's outcome is the sum of its token rewards; its advantage (r - mean) / (std + epsilon) within
    its group, std with n - 1, stands on every trained token. Statistics are float64. A group of equal
    rewards gets exactly 0, and so does a group of one row, which has nothing to be compared with.

    Args:
        token_level_rewards: (batch, response_length) float.
        response_mask: (batch, response_length), not 0 on trained tokens.
        index: (batch,) group ids of any type.
        epsilon: added to the standard deviation.
        norm_adv_by_std_in_grpo: False leaves out the division (Dr. GRPO, arXiv 2503.20783).
        config: not read.

    Returns advantages and returns, the same tensor here, (batch, response_length) float32.
    """
    outcomes = token_level_rewards.double().sum(-1)
    scores = torch.zeros_like(outcomes)
    for rows in group_rows(index):
        rewards = outcomes[rows]
        if len(rows) > 1 and rewards.max() > rewards.min():
            centred = rewards - rewards.mean()
            scores[rows] = centred / (rewards.std() + epsilon) if norm_adv_by_std_in_grpo else centred
    advantages = scores.float()[:, None] * response_mask.bool().float()
    return advantages, advantages


def group_rows(index: Iterable[Any]) -> list[list[int]]:
    """Row numbers of each group, groups in order of appearance."""
    groups: dict[Any, list[int]] = {}
    for row, key in enumerate(index):
        groups.setdefault(key, []).append(row)
    return list(groups.values())
