"""The estimators as their definitions read, in loops over lists: what the vectorised ones must equal.

``rewards[i][k]`` is the reward on the (k + 1)-th policy token of row i; observations do not occur here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

Rows = Sequence[Sequence[float]]


def policy_rows(values: torch.Tensor, mask: torch.Tensor) -> list[list[float]]:
    """What stands on each row's policy tokens."""
    return [
        [float(value) for value, chosen in zip(row, places, strict=True) if chosen]
        for row, places in zip(values.tolist(), mask.tolist(), strict=True)
    ]


def gae(rewards: Rows, values: Rows, gamma: float, lam: float) -> tuple[list[list[float]], list[list[float]]]:
    advantages, returns = [], []
    for r, v in zip(rewards, values, strict=True):
        n = len(r)
        delta = [r[k] + gamma * (v[k + 1] if k + 1 < n else 0.0) - v[k] for k in range(n)]
        row = [sum((gamma * lam) ** (j - k) * delta[j] for j in range(k, n)) for k in range(n)]
        advantages.append(row)
        returns.append([a + value for a, value in zip(row, v, strict=True)])
    return whitened(advantages), returns


def returns_to_go(rewards: Rows, gamma: float) -> list[list[float]]:
    return [[sum(gamma ** (j - k) * r[j] for j in range(k, len(r))) for k in range(len(r))] for r in rewards]


def reinforce(rewards: Rows, groups: Sequence[object], gamma: float, baseline: str) -> list[list[float]]:
    returns = returns_to_go(rewards, gamma)
    result = []
    for i, row in enumerate(returns):
        peers = [j for j in range(len(rewards)) if rewards[j] and (baseline == "batch" or groups[j] == groups[i])]
        others = [j for j in peers if j != i or baseline == "batch"]
        if baseline == "none":
            result.append(list(row))
        elif len(peers) < 2 or equal_outcomes([rewards[j] for j in peers]):
            result.append([0.0] * len(row))
        else:
            result.append(
                [g - mean([returns[j][min(k, len(returns[j]) - 1)] for j in others]) for k, g in enumerate(row)]
            )
    return result


def equal_outcomes(rewards: Rows) -> bool:
    return not any(any(r[:-1]) for r in rewards) and len({r[-1] for r in rewards}) == 1


def grpo(rewards: Rows, groups: Sequence[object], divide_by_std: bool) -> list[list[float]]:
    scores = []
    for i, centred in enumerate(group_centred(rewards, groups)):
        peers = [sum(r) for r, g in zip(rewards, groups, strict=True) if g == groups[i]]
        scores.append(centred / (deviation(peers) + 1e-6) if divide_by_std and len(peers) > 1 else centred)
    return on_every_token(scores, rewards)


def rloo(rewards: Rows, groups: Sequence[object]) -> list[list[float]]:
    scores = []
    for i, r in enumerate(rewards):
        others = [sum(rewards[j]) for j in range(len(rewards)) if groups[j] == groups[i] and j != i]
        scores.append(sum(r) - mean(others) if others else 0.0)
    return on_every_token(scores, rewards)


def reinforce_plus_plus(rewards: Rows, gamma: float) -> list[list[float]]:
    return whitened(returns_to_go(rewards, gamma))


def reinforce_plus_plus_baseline(rewards: Rows, groups: Sequence[object]) -> list[list[float]]:
    scores = group_centred(rewards, groups)
    rows = whitened(on_every_token(scores, rewards))
    for i, group in enumerate(groups):
        if len({sum(r) for r, g in zip(rewards, groups, strict=True) if g == group}) == 1:
            rows[i] = [0.0] * len(rewards[i])
    return rows


def group_centred(rewards: Rows, groups: Sequence[object]) -> list[float]:
    result = []
    for i, r in enumerate(rewards):
        peers = [sum(rewards[j]) for j in range(len(rewards)) if groups[j] == groups[i]]
        result.append(0.0 if max(peers) == min(peers) else sum(r) - mean(peers))
    return result


def on_every_token(scores: Sequence[float], rewards: Rows) -> list[list[float]]:
    return [[score] * len(r) for score, r in zip(scores, rewards, strict=True)]


def whitened(rows: Rows) -> list[list[float]]:
    values = [value for row in rows for value in row]
    if not values or max(values) == min(values):
        return [[0.0] * len(row) for row in rows]
    spread = math.sqrt(deviation(values) ** 2 + 1e-8)
    return [[(value - mean(values)) / spread for value in row] for row in rows]


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def deviation(values: Sequence[float]) -> float:
    """With n - 1."""
    centre = mean(values)
    return math.sqrt(math.fsum((value - centre) ** 2 for value in values) / (len(values) - 1))
