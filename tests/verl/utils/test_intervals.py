from __future__ import annotations

import math

import numpy as np

from verl.utils.intervals import bootstrap_mean


def test_interval_is_near_the_normal_approximation_and_repeatable() -> None:
    rows = np.random.default_rng(1).random(400)
    interval = bootstrap_mean(rows)
    half = 1.96 * rows.std(ddof=1) / 20
    assert interval.mean == rows.mean()
    assert abs(interval.low - (rows.mean() - half)) < 0.1 * half
    assert abs(interval.high - (rows.mean() + half)) < 0.1 * half
    assert bootstrap_mean(rows) == interval


def test_equal_rows_have_no_spread_and_no_rows_no_mean() -> None:
    interval = bootstrap_mean([0.25] * 7)
    assert (interval.mean, interval.low, interval.high, interval.n) == (0.25, 0.25, 0.25, 7)
    assert math.isnan(bootstrap_mean([]).mean)
