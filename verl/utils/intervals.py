"""Means with intervals that say how far to trust them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

RESAMPLES = 4000


@dataclass(frozen=True)
class Interval:
    """A mean over ``n`` rows with its two-sided 95 % bootstrap interval; n = 0 gives NaN."""

    mean: float
    low: float
    high: float
    n: int


def bootstrap_mean(values: ArrayLike, seed: int = 0) -> Interval:
    """Percentile bootstrap of the mean (Efron 1979), the same for the same values and seed."""
    rows = np.asarray(values, dtype=np.float64)
    if rows.size == 0:
        return Interval(float("nan"), float("nan"), float("nan"), 0)
    rng = np.random.default_rng(seed)
    counts = rng.multinomial(rows.size, np.full(rows.size, 1 / rows.size), size=RESAMPLES)
    low, high = np.quantile(counts @ rows / rows.size, [0.025, 0.975])
    return Interval(float(rows.mean()), float(low), float(high), int(rows.size))
