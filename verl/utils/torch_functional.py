"""Small tensor functions shared by losses, advantages and the engine."""

from __future__ import annotations

import torch


def entropy_from_log_probs(log_probs: torch.Tensor) -> torch.Tensor:
    """Entropy of normalised log-probabilities in nats: (..., vocabulary) → (...)."""
    return -(log_probs.exp() * log_probs).sum(-1)


def masked_sum(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Sum where ``mask`` is not 0. What stands elsewhere does not matter, even if it is not finite."""
    return torch.where(mask.bool(), values, 0).sum()


def masked_mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Mean where ``mask`` is not 0; 0 for an empty mask."""
    return masked_sum(values, mask) / mask.bool().sum().clamp(min=1)
