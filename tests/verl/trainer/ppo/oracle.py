"""Expected gradients over all batches of the toy: of the library's loss, and of plain loops.

Both are given as one coefficient per policy token of each path: the expected derivative of the loss by that
token's log-probability.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import torch

from tests.verl.trainer.ppo import plain, toy
from verl.trainer.config import AlgorithmConfig
from verl.trainer.ppo.actor_loss import ActorLoss
from verl.trainer.ppo.advantage_step import accepted
from verl.trainer.ppo.core_algos import apply_kl_penalty, get_adv_estimator_fn
from verl.workers.config import ActorConfig
from verl.workers.engine.loss import BatchTotals
from verl.workers.engine.packing import MicroBatch

LAMBDA = 0.9
KL_IN_REWARD = 0.3
GROUP = "the only question"


@dataclass(frozen=True)
class Estimator:
    """One configuration of an estimator; the fields are those of AlgorithmConfig."""

    name: str
    baseline: str = "none"
    norm_adv_by_std_in_grpo: bool = True

    def __str__(self) -> str:
        details = {"reinforce": f"-{self.baseline}", "grpo": "-std" if self.norm_adv_by_std_in_grpo else ""}
        return self.name + details.get(self.name, "")

    def advantages(self, rewards: torch.Tensor, rows: Sequence[int], gamma: float) -> torch.Tensor:
        """Of a batch of one group, called as the trainer does."""
        settings = {"baseline": self.baseline, "norm_adv_by_std_in_grpo": self.norm_adv_by_std_in_grpo}
        config = AlgorithmConfig(adv_estimator=self.name, gamma=gamma, lam=LAMBDA, **settings)
        function = get_adv_estimator_fn(self.name)
        given = {
            "token_level_rewards": rewards[rows],
            "values": toy.VALUES[rows],
            "response_mask": toy.MASK[rows].long(),
            "index": np.array([GROUP] * len(rows), dtype=object),
            "config": config,
            "gamma": gamma,
            "lam": LAMBDA,
            "norm_adv_by_std_in_grpo": self.norm_adv_by_std_in_grpo,
        }
        return function(**accepted(function, given))[0]

    def plain(self, rewards: plain.Rows, values: plain.Rows, gamma: float) -> list[list[float]]:
        groups = [GROUP] * len(rewards)
        match self.name:
            case "gae":
                return plain.gae(rewards, values, gamma, LAMBDA)[0]
            case "grpo":
                return plain.grpo(rewards, groups, self.norm_adv_by_std_in_grpo)
            case "reinforce":
                return plain.reinforce(rewards, groups, gamma, self.baseline)
            case "rloo":
                return plain.rloo(rewards, groups)
            case "reinforce_plus_plus":
                return plain.reinforce_plus_plus(rewards, gamma)
            case "reinforce_plus_plus_baseline":
                return plain.reinforce_plus_plus_baseline(rewards, groups)
        raise AssertionError(self.name)


ESTIMATORS = [
    Estimator("gae"),
    Estimator("grpo"),
    Estimator("grpo", norm_adv_by_std_in_grpo=False),
    Estimator("reinforce", "none"),
    Estimator("reinforce", "leave_one_out"),
    Estimator("reinforce", "batch"),
    Estimator("rloo"),
    Estimator("reinforce_plus_plus"),
    Estimator("reinforce_plus_plus_baseline"),
]


@dataclass(frozen=True, eq=False)
class Policies:
    """Log-probabilities (paths, WIDTH) float64 of the policies that a batch knows of.

    On policy ``sampler`` and ``old`` are the policy being trained and ``old`` is left out of the batch.
    """

    current: torch.Tensor
    reference: torch.Tensor
    sampler: torch.Tensor
    old: torch.Tensor
    on_policy: bool = field(default=False)

    @classmethod
    def on(cls, current: torch.Tensor, reference: torch.Tensor) -> Policies:
        return cls(current, reference, current, current, on_policy=True)


def rewards_of(policies: Policies, kl_ratio: float) -> torch.Tensor:
    """Token rewards (paths, WIDTH) float32 with the KL penalty of the old policy."""
    return apply_kl_penalty(toy.SCORES, policies.old, policies.reference, toy.MASK, kl_ratio)[0]


@dataclass(frozen=True, eq=False)
class Batch:
    """Paths of a batch, its probability, and its advantages (rows, WIDTH) or as rows of policy tokens."""

    rows: Sequence[int]
    weight: float
    advantages: torch.Tensor
    plain_advantages: Sequence[Sequence[float]]


@cache
def all_batches(
    estimator: Estimator | None, policies: Policies, kl_ratio: float, gamma: float, size: int
) -> list[Batch]:
    """For the library's loss; without an estimator all advantages are 0."""
    rewards = rewards_of(policies, kl_ratio)
    none = torch.zeros(size, toy.WIDTH)
    return [
        Batch(rows, weight, none if estimator is None else estimator.advantages(rewards, rows, gamma), [])
        for rows, weight in toy.batches(toy.path_probabilities(policies.sampler), size)
    ]


@cache
def plain_batches(
    estimator: Estimator | None, policies: Policies, kl_ratio: float, gamma: float, size: int
) -> list[Batch]:
    """The same by plain loops, over batches in every order."""
    scores, old, reference = (
        plain.policy_rows(values, toy.MASK) for values in (toy.SCORES, policies.old, policies.reference)
    )
    values = plain.policy_rows(toy.VALUES, toy.MASK)
    rewards = [
        [s - kl_ratio * (o - r) for s, o, r in zip(*row, strict=True)]
        for row in zip(scores, old, reference, strict=True)
    ]
    result = []
    for rows, weight in toy.ordered_batches(toy.path_probabilities(policies.sampler), size):
        if estimator is None:
            advantages = [[0.0] * len(rewards[row]) for row in rows]
        else:
            advantages = estimator.plain([rewards[row] for row in rows], [values[row] for row in rows], gamma)
        result.append(Batch(rows, weight, torch.zeros(0), advantages))
    return result


def micro_batch(rows: Sequence[int], advantages: torch.Tensor, policies: Policies) -> MicroBatch:
    empty, mask = torch.zeros(0, dtype=torch.int64), toy.MASK[rows]
    fields = {
        "advantages": advantages,
        "rollout_log_probs": policies.sampler[rows],
        "ref_log_prob": policies.reference[rows],
    }
    if not policies.on_policy:
        fields["old_log_probs"] = policies.old[rows]
    return MicroBatch(empty, empty, empty, 0, empty, toy.TOKENS[rows][mask], mask, fields)


def expected_loss_coefficients(batches: Sequence[Batch], policies: Policies, config: ActorConfig) -> torch.Tensor:
    """Of :class:`ActorLoss`, by autograd."""
    leaf = policies.current.clone().requires_grad_()
    loss, entropy = ActorLoss.of(config), torch.zeros_like(leaf)
    total = torch.zeros((), dtype=torch.float64)
    for batch in batches:
        part = micro_batch(batch.rows, batch.advantages, policies)
        totals = BatchTotals(part.targets.numel(), len(batch.rows))
        total = total + batch.weight * loss(leaf[batch.rows], entropy[batch.rows], part, totals).loss
    (gradient,) = torch.autograd.grad(total, leaf)
    return gradient


def plain_coefficients(batches: Sequence[Batch], policies: Policies, config: ActorConfig) -> torch.Tensor:
    """Of the loss as its definition reads, token by token."""
    names = (policies.current, policies.reference, policies.sampler, policies.old)
    tables = [plain.policy_rows(table, toy.MASK) for table in names]
    coefficients = [[0.0] * len(row) for row in tables[0]]
    for batch in batches:
        lengths = [len(coefficients[row]) for row in batch.rows]
        for row, length, advantages in zip(batch.rows, lengths, batch.plain_advantages, strict=True):
            share = batch.weight / denominator(config.loss_agg_mode, length, lengths)
            for k, advantage in enumerate(advantages):
                slope = token_slope(advantage, *(table[row][k] for table in tables), config)
                coefficients[row][k] += share * slope
    flat = torch.tensor([value for row in coefficients for value in row], dtype=torch.float64)
    return torch.zeros(toy.MASK.shape, dtype=torch.float64).masked_scatter(toy.MASK, flat)


def denominator(mode: str, length: int, lengths: Sequence[int]) -> float:
    return {
        "token-mean": sum(lengths),
        "seq-mean-token-sum": len(lengths),
        "seq-mean-token-mean": len(lengths) * length,
    }[mode]


KL_SLOPES: dict[str, Callable[[float], float]] = {
    "k1": lambda _: 1.0,
    "k2": lambda d: d,
    "k1+": lambda d: d,
    "k3": lambda d: 1 - math.exp(-d),
    "low_var_kl": lambda d: 1 - math.exp(-d),
}
"""Derivative of each estimator by the policy's log-probability; d is its difference from the reference's."""


def token_slope(
    advantage: float, current: float, reference: float, sampler: float, old: float, config: ActorConfig
) -> float:
    """Derivative of one token's loss by its log-probability."""
    low, high = config.clip_range
    ratio = math.exp(current - old)
    too_high = advantage > 0 and ratio > 1 + high
    too_low = advantage < 0 and (ratio < 1 - low or ratio > config.clip_ratio_c)
    weight = min(math.exp(old - sampler), config.rollout_is_threshold or math.inf)
    if config.rollout_is_threshold is None:
        weight = 1.0
    policy = 0.0 if too_high or too_low else -advantage * ratio * weight
    if not config.use_kl_loss:
        return policy
    return policy + config.kl_loss_coef * ratio * KL_SLOPES[config.kl_loss_type](current - reference)
