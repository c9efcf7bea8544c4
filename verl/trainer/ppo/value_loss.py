"""The critic's regression: a squared error that may not move far from the values of the rollout."""

from __future__ import annotations

import torch

from verl.trainer.ppo.losses import agg_loss
from verl.utils.torch_functional import masked_mean


def compute_value_loss(
    vpreds: torch.Tensor,
    returns: torch.Tensor,
    values: torch.Tensor,
    response_mask: torch.Tensor,
    cliprange_value: float,
    loss_agg_mode: str = "token-mean",
    dp_size: int = 1,
    batch_num_tokens: int | None = None,
    global_batch_size: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """PPO's clipped value loss (arXiv 2005.12729, section 3): half of the larger of two squared errors.

    One error is that of the prediction, the other that of the prediction cut to within ``cliprange_value``
    of the value at rollout.

    Args:
        vpreds: (n, r) predictions being trained.
        returns: (n, r) what they should be.
        values: (n, r) predictions when the batch was collected; no gradient.
        response_mask: (n, r), not 0 on the tokens that count; nothing is read elsewhere.
        cliprange_value: in units of the reward.
        loss_agg_mode: see :func:`agg_loss`, which takes the last three arguments too.

    Returns the loss and, without gradient, the share of tokens whose error is that of the cut prediction.
    """
    clipped = torch.clamp(vpreds, values - cliprange_value, values + cliprange_value)
    free_error, clipped_error = (vpreds - returns).square(), (clipped - returns).square()
    loss = agg_loss(
        torch.maximum(free_error, clipped_error) / 2,
        response_mask,
        loss_agg_mode,
        dp_size=dp_size,
        batch_num_tokens=batch_num_tokens,
        global_batch_size=global_batch_size,
    )
    return loss, masked_mean((clipped_error > free_error).float(), response_mask)
