"""Every metric of the trainer's own, by value."""

from __future__ import annotations

import pytest
import torch

from verl.agent_loop.trajectory import Segment, SegmentKind, Trajectory, TrajectoryStatus
from verl.protocol import DataProto
from verl.trainer.ppo.metric_utils import (
    compute_data_metrics,
    compute_group_metrics,
    compute_timing_metrics,
    compute_trajectory_metrics,
    reduce_metrics,
)

ANSWERED, EXHAUSTED, TRUNCATED, FAILED = TrajectoryStatus
OFF = 1e6
"""Stands where nothing may be read."""


def trajectory(
    status: TrajectoryStatus, reward: float, prompt: int, *lengths: int, uid: str = "a", sample: int = 0
) -> Trajectory:
    """``lengths`` are the tokens of the segments, the policy's and observations in turn."""
    segments = [_policy(n) if i % 2 == 0 else _observation(n) for i, n in enumerate(lengths)]
    return Trajectory(uid, sample, 1, "train", (1,) * prompt, segments, status, reward)


def _policy(count: int) -> Segment:
    return Segment(SegmentKind.POLICY, (5,) * count, (-0.5,) * count, ((0, count),))


def _observation(count: int) -> Segment:
    return Segment(SegmentKind.OBSERVATION, (6,) * count)


def test_statuses_rewards_and_lengths_of_a_step() -> None:
    step = [
        trajectory(ANSWERED, 1.0, 2, 3, 4, 1),
        trajectory(ANSWERED, 0.25, 3, 1),
        trajectory(EXHAUSTED, -0.5, 7, 5, 2, 2),
        trajectory(TRUNCATED, 0.0, 4, 9),
        trajectory(FAILED, 9.0, 100, 50, 50),
    ]
    assert compute_trajectory_metrics(step) == {
        "status/answered": 2 / 5,
        "status/turns_exhausted": 1 / 5,
        "status/truncated": 1 / 5,
        "status/infrastructure_failed": 1 / 5,
        "rollout/trajectories": 5,
        "rollout/infrastructure_failed": 1,
        "reward/mean": 0.75 / 4,
        "reward/min": -0.5,
        "reward/max": 1.0,
        "prompt_length/mean": 16 / 4,
        "prompt_length/min": 2,
        "prompt_length/max": 7,
        "response_length/policy/mean": (4 + 1 + 7 + 9) / 4,
        "response_length/policy/min": 1,
        "response_length/policy/max": 9,
        "response_length/observation/mean": 6 / 4,
        "response_length/observation/min": 0,
        "response_length/observation/max": 4,
    }


def test_where_all_are_lost_only_that_is_told() -> None:
    assert compute_trajectory_metrics([trajectory(FAILED, 0.0, 3)] * 2) == {
        "status/answered": 0.0,
        "status/turns_exhausted": 0.0,
        "status/truncated": 0.0,
        "status/infrastructure_failed": 1.0,
        "rollout/trajectories": 2,
        "rollout/infrastructure_failed": 2,
    }


def batch() -> DataProto:
    """Two rows with 2 and 1 policy tokens."""
    return DataProto.from_dict(
        {
            "response_mask": torch.tensor([[1, 0, 1], [1, 0, 0]]),
            "token_level_scores": torch.tensor([[0.0, 0.0, 1.0], [0.25, 0.0, 0.0]]),
            "token_level_rewards": torch.tensor([[-0.5, 0.0, 1.0], [0.125, 0.0, 0.0]]),
            "advantages": torch.tensor([[1.0, OFF, -2.0], [0.25, -OFF, OFF]]),
            "returns": torch.tensor([[4.0, OFF, 2.0], [0.0, -OFF, OFF]]),
            "values": torch.tensor([[0.5, OFF, 0.25], [-3.0, -OFF, OFF]]),
        }
    )


CRITIC = {
    "critic/score/mean": 1.25 / 2,
    "critic/score/min": 0.25,
    "critic/score/max": 1.0,
    "critic/rewards/mean": 0.625 / 2,
    "critic/rewards/min": 0.125,
    "critic/rewards/max": 0.5,
    "critic/advantages/mean": -0.75 / 3,
    "critic/advantages/min": -2.0,
    "critic/advantages/max": 1.0,
    "critic/returns/mean": 6 / 3,
    "critic/returns/min": 0.0,
    "critic/returns/max": 4.0,
}
VALUES = {"critic/values/mean": -2.25 / 3, "critic/values/min": -3.0, "critic/values/max": 0.5}


def test_scores_are_sums_and_advantages_are_those_of_policy_tokens() -> None:
    assert compute_data_metrics(batch()) == CRITIC
    assert compute_data_metrics(batch(), use_critic=True) == CRITIC | VALUES


def test_groups_of_equal_rewards_are_those_without_variance() -> None:
    rewards = {"a": (1.0, 1.0), "b": (0.0, 0.5), "c": (0.25,)}
    step = [
        trajectory(ANSWERED, r, 1, 1, uid=uid, sample=i) for uid, group in rewards.items() for i, r in enumerate(group)
    ]
    assert compute_group_metrics(step) == {"group/count": 3, "group/zero_variance": 2 / 3}
    assert compute_group_metrics([]) == {"group/count": 0, "group/zero_variance": 0.0}


def test_seconds_by_phase_keep_their_values() -> None:
    assert compute_timing_metrics({"rollout": 1.5, "step": 2.0}) == {"timing_s/rollout": 1.5, "timing_s/step": 2.0}


def test_lists_become_maxima_minima_and_means_by_name() -> None:
    values = [1.0, 4.0, 2.5]
    reduced = reduce_metrics({"training/diff_max": values, "x/min": values, "actor/pg_loss": values})
    assert reduced == pytest.approx({"training/diff_max": 4.0, "x/min": 1.0, "actor/pg_loss": 2.5})
