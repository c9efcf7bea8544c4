"""Faults on the way from a batch to an update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.mutations.estimators import through_observations
from tests.mutations.mutation import Mutation, everywhere
from verl.agent_loop.trajectory import Trajectory
from verl.protocol import DataProto
from verl.trainer.ppo import kl_reward, losses, rollout_batch, value_loss
from verl.trainer.ppo.actor_loss import ActorLoss
from verl.utils import torch_functional
from verl.workers.config import OptimConfig
from verl.workers.engine import fsdp, optimizer, packing, rows
from verl.workers.engine.fsdp import FSDPEngine
from verl.workers.engine.packing import MicroBatch
from verl.workers.engine.rows import Row
from verl.workers.engine.value import TokenValues

FOLDER = "tests/verl/trainer/ppo/"
ENGINE = "tests/verl/workers/engine/"
PAD = 0


def kl_loss_is_subtracted(patch: pytest.MonkeyPatch) -> None:
    kl_term = ActorLoss._kl_term
    patch.setattr(ActorLoss, "_kl_term", lambda self, *given: -kl_term(self, *given))


def kl_raises_the_reward(patch: pytest.MonkeyPatch) -> None:
    rewards = kl_reward.compute_rewards
    everywhere(patch, rewards, lambda scores, old, reference, kl_ratio: rewards(scores, old, reference, -kl_ratio))


def documents_are_trained(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Trajectory, "response_mask", property(lambda self: (1,) * len(self.response_ids)))


def batch_masks_come_from_pad_ids(patch: pytest.MonkeyPatch) -> None:
    to_data_proto = rollout_batch.to_data_proto

    def by_pad(trajectories: Sequence[Trajectory], pad_token_id: int, temperature: float) -> DataProto:
        batch = to_data_proto(trajectories, pad_token_id, temperature)
        assert batch.batch is not None
        batch.batch["attention_mask"] = (batch.batch["input_ids"] != pad_token_id).long()
        batch.batch["response_mask"] *= batch.batch["responses"] != pad_token_id
        return batch

    everywhere(patch, to_data_proto, by_pad)


def row_lengths_come_from_pad_ids(patch: pytest.MonkeyPatch) -> None:
    rows_from_batch = rows.rows_from_batch

    def by_pad(batch: Mapping[str, torch.Tensor], fields: Sequence[str] = ()) -> list[Row]:
        ids = torch.cat([batch["prompts"], batch["responses"]], 1)
        return rows_from_batch({**batch, "attention_mask": (ids != PAD).long()}, fields)

    everywhere(patch, rows_from_batch, by_pad)


def reward_stands_on_the_last_token(patch: pytest.MonkeyPatch) -> None:
    everywhere(patch, rollout_batch.last_policy_token, lambda trajectory: len(trajectory.response_ids) - 1)


def micro_batches_are_averaged_each(patch: pytest.MonkeyPatch) -> None:
    agg_loss = losses.agg_loss

    def of_this_part(loss_mat: torch.Tensor, loss_mask: torch.Tensor, loss_agg_mode: str, **_: Any) -> torch.Tensor:
        return agg_loss(loss_mat, loss_mask, loss_agg_mode)

    everywhere(patch, agg_loss, of_this_part)


def values_are_trained_one_token_late_and_on_documents(patch: pytest.MonkeyPatch) -> None:
    compute = value_loss.compute_value_loss

    def shifted(
        vpreds: torch.Tensor,
        returns: torch.Tensor,
        values: torch.Tensor,
        response_mask: torch.Tensor,
        *rest: Any,
        **how: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return compute(vpreds, returns, values, through_observations(response_mask).roll(1, 1), *rest, **how)

    everywhere(patch, compute, shifted)


def states_are_read_one_token_late(patch: pytest.MonkeyPatch) -> None:
    pack = packing.pack

    def pack_late(chosen: Sequence[Row], device: torch.device) -> MicroBatch:
        batch = pack(chosen, device)
        return replace(batch, predictors=batch.predictors + 1)

    everywhere(patch, pack, pack_late)


def values_are_read_one_token_late(patch: pytest.MonkeyPatch) -> None:
    scores = TokenValues.scores
    patch.setattr(
        TokenValues, "scores", lambda self, batch: scores(self, replace(batch, predictors=batch.predictors + 1))
    )


def sampler_mismatch_is_ignored(patch: pytest.MonkeyPatch) -> None:
    everywhere(patch, losses.truncated_importance_weights, lambda old, *_: torch.ones_like(old).detach())


def first_step_has_rate_zero(patch: pytest.MonkeyPatch) -> None:
    def scheduled_from_zero(config: OptimConfig, step: int, total_steps: int) -> float:
        return config.lr * min(1.0, (step - 1) / max(1, config.lr_warmup_steps))

    everywhere(patch, optimizer.learning_rate, scheduled_from_zero)


def empty_mask_gives_nan(patch: pytest.MonkeyPatch) -> None:
    def masked_mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return (values * mask).sum() / mask.sum()

    everywhere(patch, torch_functional.masked_mean, masked_mean)


def nothing_checks_for_finite_gradients(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(fsdp, "math", SimpleNamespace(isfinite=lambda _: True))


def micro_batch_counts_are_not_agreed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FSDPEngine, "_agree_on_maximum", lambda _, count: count)


MUTATIONS = (
    Mutation(
        "kl_loss_is_subtracted",
        "the KL loss was subtracted, which drove the policy away from the reference",
        kl_loss_is_subtracted,
        (FOLDER + "test_losses.py::test_kl_loss_is_added",),
    ),
    Mutation(
        "kl_raises_the_reward",
        "the KL penalty in the reward had the wrong sign",
        kl_raises_the_reward,
        (FOLDER + "test_kl_reward.py",),
    ),
    Mutation(
        "documents_are_trained",
        "the tokens of documents were trained as if the policy had sampled them",
        documents_are_trained,
        (FOLDER + "test_rollout_batch.py::test_layout_masks_and_score_position",),
    ),
    Mutation(
        "batch_masks_come_from_pad_ids",
        "the masks of a batch came from pad ids, though end of sequence is often the same id",
        batch_masks_come_from_pad_ids,
        (FOLDER + "test_rollout_batch.py::test_layout_masks_and_score_position",),
    ),
    Mutation(
        "row_lengths_come_from_pad_ids",
        "the lengths of rows came from pad ids, though end of sequence is often the same id",
        row_lengths_come_from_pad_ids,
        (ENGINE + "test_packing.py::test_lengths_come_from_the_mask_where_pad_equals_end_of_sequence",),
    ),
    Mutation(
        "reward_stands_on_the_last_token",
        "the reward stood on an observation's token where a row ended in an observation",
        reward_stands_on_the_last_token,
        (FOLDER + "test_rollout_batch.py",),
    ),
    Mutation(
        "micro_batches_are_averaged_each",
        "each micro-batch was averaged by itself, so ragged ones weighed too much or too little",
        micro_batches_are_averaged_each,
        (ENGINE + "test_one_process.py::test_gradient_is_that_of_the_whole_batch_for_any_micro_batches",),
    ),
    Mutation(
        "value_micro_batches_are_averaged_each",
        "each micro-batch of the critic was averaged by itself",
        micro_batches_are_averaged_each,
        (FOLDER + "test_critic_loss.py",),
    ),
    Mutation(
        "values_are_trained_one_token_late_and_on_documents",
        "the critic's mask was off by one and covered observations",
        values_are_trained_one_token_late_and_on_documents,
        (FOLDER + "test_value_loss.py", FOLDER + "test_critic_loss.py"),
    ),
    Mutation(
        "states_are_read_one_token_late",
        "a token was scored from the state that already contained it",
        states_are_read_one_token_late,
        (ENGINE + "test_packing.py::test_pack_by_value",),
    ),
    Mutation(
        "values_are_read_one_token_late",
        "the value of a token was that of the state that already contained it",
        values_are_read_one_token_late,
        (ENGINE + "test_one_process.py::test_a_value_is_that_of_the_state_in_which_the_policy_chose",),
    ),
    Mutation(
        "sampler_mismatch_is_ignored",
        "nothing corrected for the sampler's probabilities being other than the trainer's",
        sampler_mismatch_is_ignored,
        (FOLDER + "test_losses.py",),
    ),
    Mutation(
        "first_step_has_rate_zero",
        "the learning rate of the first step was 0, and warm-up ended a step late",
        first_step_has_rate_zero,
        (ENGINE + "test_optimizer.py",),
    ),
    Mutation(
        "empty_mask_gives_nan",
        "the mean over an empty mask was not a number",
        empty_mask_gives_nan,
        (FOLDER + "test_value_loss.py::test_an_empty_mask_gives_zero",),
    ),
    Mutation(
        "nothing_checks_for_finite_gradients",
        "a loss or gradient that is not finite went into the weights",
        nothing_checks_for_finite_gradients,
        (ENGINE + "test_one_process.py::test_an_update_that_is_not_finite_changes_nothing_and_is_counted",),
    ),
    Mutation(
        "micro_batch_counts_are_not_agreed",
        "a rank with fewer micro-batches than another left the others waiting in a collective",
        micro_batch_counts_are_not_agreed,
        (ENGINE + "test_one_process.py::test_a_rank_enters_as_many_collectives_as_the_one_with_most_micro_batches",),
    ),
)
