"""Generalised advantage estimation over the policy's tokens."""

from __future__ import annotations

import torch

from verl.trainer.ppo.policy_tokens import PolicyTokens, discounted_sums
from verl.trainer.ppo.registry import AdvantageEstimator, register_adv_est


@register_adv_est(AdvantageEstimator.GAE)
@torch.no_grad()
def compute_gae_advantage_return(
    token_level_rewards: torch.Tensor,
    values: torch.Tensor,
    response_mask: torch.Tensor,
    gamma: float,
    lam: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages of PPO with a critic (arXiv 1506.02438, equation 16).

    Over the policy's tokens t_1..t_n of the whole trajectory: delta_k = r_k + gamma V_(k+1) - V_k with
    V_(n+1) = 0, and A_k = delta_k + gamma lam A_(k+1). The successor of the last token before an observation
    is the first one after it: an observation neither discounts nor decays, and what stands on it is not read.
    The returns, the critic's targets, are A_k + V_k; then the advantages are whitened over all policy tokens
    of the batch, as verl does. Computed in float64.

    Args:
        token_level_rewards: (batch, response_length) float.
        values: (batch, response_length), on each token the value of the state it was sampled in.
        response_mask: (batch, response_length), not 0 on the policy's tokens.
        gamma: discount of one token.
        lam: decay of one token.

    Returns advantages and returns, each (batch, response_length) float32, 0 outside the mask.
    """
    tokens = PolicyTokens.of(response_mask)
    rewards, current = tokens.compact(token_level_rewards), tokens.compact(values)
    following = torch.nn.functional.pad(current[:, 1:], (0, min(1, current.shape[1])))
    advantages = discounted_sums(rewards + gamma * following - current, gamma * lam)
    return tokens.expand(tokens.whiten(advantages)), tokens.expand(advantages + current)
