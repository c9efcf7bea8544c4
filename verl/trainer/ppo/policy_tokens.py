"""The policy's tokens of a batch side by side, as if no observation stood between them."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, eq=False)
class PolicyTokens:
    """Where the policy's tokens t_1..t_n of each trajectory stand.

    With B rows of at most N policy tokens: ``mask`` (B, response_length) bool, ``places`` (B, response_length)
    the k - 1 of each token t_k, ``lengths`` (B,) the n of each row.
    """

    mask: torch.Tensor
    places: torch.Tensor
    lengths: torch.Tensor

    @classmethod
    def of(cls, response_mask: torch.Tensor) -> PolicyTokens:
        """``response_mask`` (B, response_length) is not 0 on the policy's tokens."""
        mask = response_mask.bool()
        return cls(mask, mask.cumsum(1) - 1, mask.sum(1))

    @property
    def longest(self) -> int:
        return int(self.lengths.max()) if self.lengths.numel() else 0

    def compact(self, values: torch.Tensor) -> torch.Tensor:
        """(B, response_length) as (B, N) float64: column k - 1 holds what stands on t_k, 0 from a row's end on."""
        compact = torch.zeros(len(self.lengths), self.longest, dtype=torch.float64, device=values.device)
        rows, _ = self.mask.nonzero(as_tuple=True)
        compact[rows, self.places[self.mask]] = values[self.mask].double()
        return compact

    def expand(self, compact: torch.Tensor) -> torch.Tensor:
        """The inverse of :meth:`compact`: (B, N) as (B, response_length) float32, 0 outside the mask."""
        values = torch.zeros(self.mask.shape, dtype=torch.float32, device=compact.device)
        rows, _ = self.mask.nonzero(as_tuple=True)
        values[self.mask] = compact[rows, self.places[self.mask]].float()
        return values

    def whiten(self, compact: torch.Tensor) -> torch.Tensor:
        """(x - mean) / sqrt(variance + 1e-8) over all policy tokens of the batch, variance with count - 1.

        Equal values, one alone included, give exactly 0. ``compact`` is (B, N) float64, and so is the result.
        """
        present = torch.arange(self.longest, device=compact.device) < self.lengths[:, None]
        values = compact[present]
        if not values.numel() or values.max() == values.min():
            return torch.zeros_like(compact)
        return torch.where(present, (compact - values.mean()) * (values.var() + 1e-8).rsqrt(), 0)


def discounted_sums(compact: torch.Tensor, discount: float) -> torch.Tensor:
    """s_k = x_k + discount * s_(k+1) along each row of (B, N), with nothing after the last column."""
    sums = torch.empty_like(compact)
    running = torch.zeros_like(compact[:, 0]) if compact.shape[1] else compact.new_zeros(len(compact))
    for k in reversed(range(compact.shape[1])):
        running = compact[:, k] + discount * running
        sums[:, k] = running
    return sums
