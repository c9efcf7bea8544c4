"""The noise curriculum: how often a simulated search returns noisy documents.

ZeroSearch (arXiv 2505.04588), section 3.4, equation 3.
"""

from __future__ import annotations


def noise_probability(step: int, total_steps: int, start: float, end: float, base: float = 4.0) -> float:
    """p = start + (b^x - 1)/(b - 1) * (end - start) with x = (step - 1)/(total_steps - 1).

    Steps count updates from 1, so ``start`` holds exactly at the first step and ``end`` exactly at
    the last (a run of one step: ``start``). Later steps keep ``end``. Base 1 is the limit, a line.
    """
    assert step >= 1 and total_steps >= 1 and base >= 1, (step, total_steps, base)
    x = min((step - 1) / (total_steps - 1), 1.0) if total_steps > 1 else 0.0
    weight = (base**x - 1) / (base - 1) if base > 1 else x
    return (1 - weight) * start + weight * end
