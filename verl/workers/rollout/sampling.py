"""Sampling by inverse cumulative probability with one counter-based uniform number per token.

The number of a token is a hash of its sequence's stream and its position, so nothing about a
sample depends on what else is being sampled.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def _mix(x: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014), on uint64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def uniforms(streams: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """``streams`` uint64 (rows,) and ``positions`` int64 (rows,) → float64 (rows,) in [0, 1), 53 random bits each."""
    state = _mix(streams + np.uint64(_GOLDEN)) ^ ((positions.astype(np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN))
    return (_mix(_mix(state)) >> np.uint64(11)) * 2.0**-53


@dataclass(frozen=True, slots=True)
class RowSampling:
    """How each row is sampled: uint64, int64, float32 and float32 arrays of shape (rows,)."""

    streams: np.ndarray
    positions: np.ndarray
    temperatures: np.ndarray
    top_ps: np.ndarray


def sample(logits: torch.Tensor, rows: RowSampling) -> tuple[np.ndarray, np.ndarray]:
    """Float32 ``logits`` (rows, vocab) → token ids int64 (rows,) and their log-probabilities float32 (rows,).

    Log-probabilities are those of the whole distribution at the row's temperature (temperature 0:
    at temperature 1), also where ``top_p`` restricts what may be drawn. A token of probability 0 is
    never drawn. Non-finite logits give a non-finite log-probability in their row only.
    """
    greedy = rows.temperatures == 0
    divisors = np.where(greedy, np.float32(1), rows.temperatures)
    if (divisors != 1).any():
        logits = logits / torch.from_numpy(divisors).to(logits.device)[:, None]
    log_probs = logits.log_softmax(dim=-1)
    if greedy.all():
        tokens = log_probs.argmax(dim=-1)
    else:
        draws = torch.from_numpy(uniforms(rows.streams, rows.positions)).to(logits.device)
        tokens = _draw(_truncate(log_probs.exp(), rows.top_ps), draws)
        if greedy.any():
            tokens = torch.where(torch.from_numpy(greedy).to(logits.device), log_probs.argmax(dim=-1), tokens)
    chosen = log_probs.gather(1, tokens[:, None])[:, 0]
    return tokens.cpu().numpy(), chosen.cpu().numpy()


def _truncate(probabilities: torch.Tensor, top_ps: np.ndarray) -> torch.Tensor:
    """Zeroes what lies outside the smallest set of most probable tokens that reaches top_p (rows with top_p < 1)."""
    restricted = torch.from_numpy(np.flatnonzero(top_ps < 1)).to(probabilities.device)
    if len(restricted) == 0:
        return probabilities
    ordered, order = probabilities[restricted].sort(dim=-1, descending=True, stable=True)
    limits = torch.from_numpy(top_ps[top_ps < 1]).to(ordered.device, torch.float64)[:, None]
    before = ordered.double().cumsum(dim=-1) - ordered
    kept = torch.zeros_like(ordered).scatter_(1, order, ordered.masked_fill(before >= limits, 0.0))
    return probabilities.index_copy(0, restricted, kept)


def _draw(weights: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """The first index whose cumulative weight exceeds draw * total; weights (rows, vocab), not all zero."""
    cumulative = weights.double().cumsum_(dim=-1)
    total = cumulative[:, -1:]
    # Strictly below the total, so that an index of positive weight always follows.
    targets = torch.minimum(draws[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    found = torch.searchsorted(cumulative, targets, right=True)[:, 0]
    return found.clamp_(max=weights.shape[1] - 1)
