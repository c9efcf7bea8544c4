"""KL to the reference as a penalty in the reward."""

from __future__ import annotations

import torch


def compute_rewards(
    token_level_scores: torch.Tensor, old_log_prob: torch.Tensor, ref_log_prob: torch.Tensor, kl_ratio: float
) -> torch.Tensor:
    """Scores minus ``kl_ratio`` times k1, the log-ratio of policy and reference; all (batch, response_length).

    Every token is penalised: whoever has observation tokens calls :func:`apply_kl_penalty`.
    """
    return token_level_scores - kl_ratio * (old_log_prob - ref_log_prob)


@torch.no_grad()
def apply_kl_penalty(
    token_level_scores: torch.Tensor,
    old_log_prob: torch.Tensor,
    ref_log_prob: torch.Tensor,
    response_mask: torch.Tensor,
    kl_ratio: float,
) -> tuple[torch.Tensor, float]:
    """Token rewards with the penalty on the policy's tokens, and what the penalty measured.

    Summed over a trajectory, k1 is an unbiased estimate of the divergence of the two distributions of
    trajectories, and the returns of an estimator carry its whole gradient: a token answers for the
    divergence of all that follows, not only for its own.

    Args:
        token_level_scores: (batch, response_length) float.
        old_log_prob: (batch, response_length) of the policy that the batch is attributed to.
        ref_log_prob: the same of the reference.
        response_mask: (batch, response_length), not 0 on the policy's tokens; nothing is read elsewhere.
        kl_ratio: the coefficient.

    Returns (batch, response_length) float32 rewards and the mean KL of a trajectory in nats.
    """
    mask = response_mask.bool()
    old, reference = torch.where(mask, old_log_prob, 0), torch.where(mask, ref_log_prob, 0)
    per_trajectory = (old.double() - reference.double()).sum(-1)
    rewards = compute_rewards(token_level_scores.double(), old.double(), reference.double(), kl_ratio)
    return rewards.float(), per_trajectory.mean().item()
