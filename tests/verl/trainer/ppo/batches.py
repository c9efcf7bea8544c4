"""Batches as environments with observations make them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

UNREAD = 1e6
"""Stands on tokens that nothing may read."""


@dataclass(frozen=True)
class DenseBatch:
    """``rewards`` and ``values`` (rows, width) float32, ``mask`` (rows, width) int64, ``groups`` (rows,)."""

    rewards: torch.Tensor
    values: torch.Tensor
    mask: torch.Tensor
    groups: np.ndarray


def dense_batch(seed: int = 0, rows: int = 9, width: int = 30, off_mask: float = UNREAD) -> DenseBatch:
    """Ragged rows with up to several observations, one row without any, rewards on every policy token."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, width + 1, (rows, 1), generator=generator)
    periods = torch.randint(1, 7, (rows, 1), generator=generator)
    place = torch.arange(width)
    mask = (place < lengths) & (place // periods % 2 == 0)
    mask[0] = place < lengths[0]
    rewards, values = torch.randn(2, rows, width, generator=generator)
    groups = np.array([f"q-{i}" for i in np.arange(rows) % 3], dtype=object)
    return DenseBatch(torch.where(mask, rewards, off_mask), torch.where(mask, values, off_mask), mask.long(), groups)


def outcome_rewards(mask: torch.Tensor, outcomes: torch.Tensor) -> torch.Tensor:
    """``outcomes`` (rows,) on the last policy token of each row of ``mask``."""
    last = (mask * torch.arange(1, mask.shape[1] + 1)).argmax(1)
    return torch.zeros(mask.shape).scatter(1, last[:, None], outcomes.float()[:, None])


def padded(rows: list[list[float]], mask: torch.Tensor) -> torch.Tensor:
    """One number per policy token, back in the shape of ``mask`` with 0 elsewhere; float32."""
    flat = torch.tensor([value for row in rows for value in row], dtype=torch.float32)
    return torch.zeros(mask.shape).masked_scatter(mask.bool(), flat)
