"""Faults of advantage estimators."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.mutations.mutation import Mutation, everywhere
from verl.trainer.ppo import advantages, gae, metric_utils, reinforce
from verl.trainer.ppo.policy_tokens import PolicyTokens
from verl.trainer.ppo.reinforce import compute_reinforce_plus_plus_outcome_advantage

FOLDER = "tests/verl/trainer/ppo/"


def through_observations(mask: torch.Tensor) -> torch.Tensor:
    """1 up to each row's last policy token."""
    return (mask.bool().flip(1).cumsum(1).flip(1) > 0).long()


def gae_runs_through_observations(patch: pytest.MonkeyPatch) -> None:
    every_token = SimpleNamespace(of=lambda mask: PolicyTokens.of(through_observations(mask)))
    patch.setattr(gae, "PolicyTokens", every_token)


def whitening_counts_observations(patch: pytest.MonkeyPatch) -> None:
    def whiten(self: PolicyTokens, compact: torch.Tensor) -> torch.Tensor:
        present = torch.arange(self.longest) < self.lengths[:, None]
        seen = int(through_observations(self.mask).sum() - self.mask.sum())
        values = torch.cat([compact[present], compact.new_zeros(seen)])
        return torch.where(present, (compact - values.mean()) * (values.var() + 1e-8).rsqrt(), 0)

    patch.setattr(PolicyTokens, "whiten", whiten)


def returns_reset_at_observations(patch: pytest.MonkeyPatch) -> None:
    def compute(
        token_level_rewards: torch.Tensor, response_mask: torch.Tensor, config: Mapping[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        returns, running = torch.zeros_like(token_level_rewards), torch.zeros(len(response_mask))
        for place in reversed(range(response_mask.shape[1])):
            running = token_level_rewards[:, place] + config["gamma"] * running
            returns[:, place] = running * response_mask[:, place]
            running = running * response_mask[:, place]
        tokens = PolicyTokens.of(response_mask)
        return tokens.expand(tokens.whiten(tokens.compact(returns))), returns

    everywhere(patch, compute_reinforce_plus_plus_outcome_advantage, compute)


def no_baseline(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(reinforce, "_baseline_groups", lambda *_: [])


def equal_rewards_are_centred_in_float32(patch: pytest.MonkeyPatch) -> None:
    def group_centred(token_level_rewards: torch.Tensor, index: Iterable[Any]) -> torch.Tensor:
        scores = token_level_rewards.float().sum(-1)
        for rows in advantages.group_rows(index):
            scores[rows] -= scores[rows].mean()
        return scores.double()

    everywhere(patch, advantages.group_centred, group_centred)


def group_of_one_keeps_its_reward(patch: pytest.MonkeyPatch) -> None:
    centre = advantages.group_centred

    def group_centred(token_level_rewards: torch.Tensor, index: Iterable[Any]) -> torch.Tensor:
        scores = centre(token_level_rewards, index)
        for rows in advantages.group_rows(index):
            if len(rows) == 1:
                scores[rows] = token_level_rewards[rows].double().sum(-1)
        return scores

    everywhere(patch, centre, group_centred)


def groups_that_teach_nothing_are_not_counted(patch: pytest.MonkeyPatch) -> None:
    count = metric_utils.compute_group_metrics
    everywhere(patch, count, lambda rows: {name: v for name, v in count(rows).items() if name == "group/count"})


MUTATIONS = (
    Mutation(
        "gae_runs_through_observations",
        "generalised advantage estimation discounted and decayed over the tokens of documents",
        gae_runs_through_observations,
        (FOLDER + "test_gae.py",),
    ),
    Mutation(
        "whitening_counts_observations",
        "the tokens of documents counted in the statistics of whitening",
        whitening_counts_observations,
        (FOLDER + "test_gae.py",),
    ),
    Mutation(
        "returns_reset_at_observations",
        "REINFORCE++ lost the credit of all that came before an observation",
        returns_reset_at_observations,
        (FOLDER + "test_reinforce.py::test_returns_do_not_reset_at_an_observation",),
    ),
    Mutation(
        "no_baseline",
        "REINFORCE had no baseline, though rewards are never negative",
        no_baseline,
        (FOLDER + "test_advantage_step.py",),
    ),
    Mutation(
        "equal_rewards_are_centred_in_float32",
        "groups of equal rewards got advantages that came from rounding alone",
        equal_rewards_are_centred_in_float32,
        (
            FOLDER + "test_advantages.py::test_equal_rational_rewards_give_exactly_zero",
            FOLDER + "test_advantages.py::test_thirds_spread_over_tokens_give_exactly_zero",
        ),
    ),
    Mutation(
        "group_of_one_keeps_its_reward",
        "a trajectory left alone in its group was trained on its raw reward",
        group_of_one_keeps_its_reward,
        (FOLDER + "test_advantages.py::test_a_group_of_one_gets_zero_not_its_reward",),
    ),
    Mutation(
        "groups_that_teach_nothing_are_not_counted",
        "nobody was told how many groups had equal rewards and so taught nothing",
        groups_that_teach_nothing_are_not_counted,
        (FOLDER + "test_regressions.py::test_the_share_of_groups_without_variance_is_told",),
    ),
)
