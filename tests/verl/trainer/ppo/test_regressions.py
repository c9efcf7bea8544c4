"""What a training step asks of its rollouts and says of their rewards."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from verl.agent_loop.base import RolloutTask
from verl.agent_loop.trajectory import Trajectory
from verl.trainer.config import DataConfig, PPOTrainerConfig
from verl.trainer.ppo import metric_utils, ray_trainer
from verl.trainer.ppo.parts import TrainerParts
from verl.trainer.timing import PhaseTimer
from verl.utils.dataset.rl_dataset import Row
from verl.workers.rollout.engine import SamplingParams


def trainer_on(rows: Sequence[Row], directory: Path) -> ray_trainer.RayPPOTrainer:
    """A trainer without workers: enough for what the driver decides alone."""
    parts: dict[str, Any] = {
        "config": PPOTrainerConfig(data=DataConfig(train_batch_size=len(rows))),
        "environment": SimpleNamespace(stop_strings=(), validation_modes=("validation",), alarm_rules=tuple),
        "rollout_group": SimpleNamespace(workers=[]),
        "run": SimpleNamespace(path=directory),
        "train_set": rows,
        "timer": PhaseTimer(),
    }
    absent = {name: None for name in TrainerParts.__dataclass_fields__ if name not in parts}
    return ray_trainer.RayPPOTrainer(TrainerParts(**parts, **absent))


def test_a_step_draws_n_samples_of_each_prompt_from_the_whole_distribution(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses are taken on the probabilities of the whole distribution, and a question that occurs twice is two
    groups."""
    rows = [Row("a.parquet", index, (1, 2), {"question": "who"}, "a.parquet") for index in range(2)]
    trainer, tasks = trainer_on(rows, tmp_path), list[RolloutTask]()
    monkeypatch.setattr(ray_trainer, "run_tasks", lambda _, submitted, __: tasks.extend(submitted))
    trainer._rollout(3)
    rollout = PPOTrainerConfig().actor_rollout_ref.rollout
    assert {task.sampling for task in tasks} == {
        SamplingParams(temperature=rollout.temperature, top_p=1.0, max_tokens=rollout.max_turn_length)
    }
    drawn = {
        uid: [task.key.sample for task in tasks if task.prompt.uid == uid] for uid in ("a.parquet#0@3", "a.parquet#1@3")
    }
    assert list(drawn.values()) == [list(range(rollout.n))] * 2
    assert len(tasks) == 2 * rollout.n


def test_the_share_of_groups_without_variance_is_told() -> None:
    rewards = {"a": [1.0, 1.0], "b": [1.0, 0.0], "c": [0.0, 0.0], "d": [0.5]}
    trajectories = [
        Trajectory(uid, sample, 1, "train", (1,), reward=reward)
        for uid, group in rewards.items()
        for sample, reward in enumerate(group)
    ]
    assert metric_utils.compute_group_metrics(trajectories) == {"group/count": 4, "group/zero_variance": 0.75}
