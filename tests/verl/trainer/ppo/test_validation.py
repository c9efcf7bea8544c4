"""What a validation asks for, measures and says, on a validator whose trajectories are given."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from verl.agent_loop.base import RolloutTask, ScoredRow
from verl.agent_loop.trajectory import Segment, SegmentKind, Trajectory, TrajectoryStatus
from verl.trainer.config import ActorRolloutRefConfig, PPOTrainerConfig, TrainerConfig
from verl.trainer.ppo.parts import TrainerParts
from verl.trainer.ppo.validation import Validator, reward_interval
from verl.utils.dataset.rl_dataset import Row
from verl.workers.config import RolloutConfig, ValKwargsConfig
from verl.workers.rollout.engine import InfrastructureError, SamplingParams

REWARDS = {("calm", 0): (1.0, 0.0), ("calm", 1): (1.0, 1.0), ("calm", 2): (0.25, 0.25)} | {
    ("rough", row): (0.5, 0.5) for row in range(3)
}
"""Of the two samples of each row under each mode; rows 0 and 1 are of one data set, row 2 of another."""
ROWS = [Row("d.parquet", i, (1,) * (i + 1), {"data_source": "nq" if i < 2 else "hotpot/qa"}, "d") for i in range(3)]


@dataclass
class GivenStream:
    """Finishes tasks in reverse with the rewards above; loses the samples that are named (mode, row, sample)."""

    lost: frozenset[tuple[str, int, int]] = frozenset()
    tasks: list[RolloutTask] = field(default_factory=list)
    due: list[RolloutTask] = field(default_factory=list)

    def submit(self, tasks: Sequence[RolloutTask]) -> None:
        self.tasks += tasks
        self.due = list(tasks)

    def take(self) -> Iterator[Trajectory]:
        return map(self._finished, reversed(self.due))

    def _finished(self, task: RolloutTask) -> Trajectory:
        row, sample = len(task.prompt.prompt_ids) - 1, task.key.sample
        lost = (task.mode, row, sample) in self.lost
        status = TrajectoryStatus.INFRASTRUCTURE_FAILED if lost else TrajectoryStatus.ANSWERED
        return Trajectory(
            task.prompt.uid,
            sample,
            0,
            task.mode,
            task.prompt.prompt_ids,
            [] if lost else [Segment(SegmentKind.POLICY, (7, 7), (-1.0, -1.0), ((0, 2),))],
            status,
            REWARDS[task.mode, row][sample],
            {"f1": 0.5},
            task.prompt.data_source,
            failure="TimeoutError: late" if lost else None,
        )


class TwoModes:
    validation_modes = ("calm", "rough")

    def metrics(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        return {"own/seen": len(trajectories)}

    async def probe(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        assert {t.mode for t in trajectories} == {"calm"}
        return {"own/probed": len(trajectories)}


class Harness:
    def __init__(self, runner: asyncio.Runner, lost: frozenset[tuple[str, int, int]] = frozenset(), **trainer: Any):
        self.stream = GivenStream(lost)
        self.written: dict[str, list[Trajectory]] = {}
        val_kwargs = ValKwargsConfig(do_sample=False, temperature=0.7, top_p=0.9, n=2)
        rollout = RolloutConfig(val_kwargs=val_kwargs, max_failed_share=0.2)
        parts: dict[str, Any] = {
            "config": PPOTrainerConfig(
                actor_rollout_ref=ActorRolloutRefConfig(rollout=rollout), trainer=TrainerConfig(**trainer)
            ),
            "environment": TwoModes(),
            "val_set": SimpleNamespace(rows=ROWS),
            "runner": runner,
            "run": SimpleNamespace(write_trajectories=lambda name, rows, _: self.written.update({name: rows})),
        }
        absent = {name: None for name in TrainerParts.__dataclass_fields__ if name not in parts}
        stream: Any = self.stream
        self.validator = Validator(TrainerParts(**parts, **absent), stream)


@pytest.fixture
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


def scored(row: str, sample: int, reward: float) -> ScoredRow:
    return ScoredRow(row, sample, "d", {"reward": reward, "f1": 0.0})


def test_the_interval_is_over_rows_and_not_over_samples() -> None:
    """Of two rows with means 0.5 and 1, a resample has the mean 0.5, 0.75 or 1 with weights 1 : 2 : 1."""
    rows = [scored("a", 0, 1.0), scored("b", 0, 1.0), scored("a", 1, 0.0)]
    expected = {"reward/mean": 0.75, "reward/low95": 0.5, "reward/high95": 1.0, "n": 2.0}
    assert reward_interval(rows) == expected


def test_nothing_scored_has_no_mean() -> None:
    interval = reward_interval([])
    assert interval["n"] == 0.0
    assert all(math.isnan(interval[f"reward/{name}"]) for name in ("mean", "low95", "high95"))


def of_mode(mean: float, low: float, high: float, reward: tuple[float, float]) -> dict[str, float]:
    return {
        "status/answered": 1.0,
        "status/turns_exhausted": 0.0,
        "status/truncated": 0.0,
        "status/infrastructure_failed": 0.0,
        "rollout/trajectories": 6,
        "rollout/infrastructure_failed": 0,
        "reward/mean": mean,
        "reward/min": reward[0],
        "reward/max": reward[1],
        "reward/low95": low,
        "reward/high95": high,
        "n": 3.0,
        "prompt_length/mean": 2.0,
        "prompt_length/min": 1.0,
        "prompt_length/max": 3.0,
        "response_length/policy/mean": 2.0,
        "response_length/policy/min": 2.0,
        "response_length/policy/max": 2.0,
        "response_length/observation/mean": 0.0,
        "response_length/observation/min": 0.0,
        "response_length/observation/max": 0.0,
        "own/seen": 6,
    }


def of_source(name: str, mean: float, low: float, high: float, n: float) -> dict[str, float]:
    values = {"reward/mean": mean, "reward/low95": low, "reward/high95": high, "n": n}
    return {f"source/{name}/{key}": value for key, value in values.items()}


def test_every_metric_of_two_modes_and_two_data_sets(runner: asyncio.Runner) -> None:
    """Rows' means under the first mode are 0.5, 1 and 0.25: of their resamples' means each of all 0.25 and all 1 is
    1 of 27, more than 2.5 %, so that the interval reaches from the least mean to the greatest."""
    calm = of_mode(1.75 / 3, 0.25, 1.0, (0.0, 1.0))
    calm |= of_source("nq", 0.75, 0.5, 1.0, 2.0) | of_source("hotpot/qa", 0.25, 0.25, 0.25, 1.0)
    rough = of_mode(0.5, 0.5, 0.5, (0.5, 0.5))
    rough |= of_source("nq", 0.5, 0.5, 0.5, 2.0) | of_source("hotpot/qa", 0.5, 0.5, 0.5, 1.0)
    expected = {f"val/calm/{k}": v for k, v in calm.items()} | {f"val/rough/{k}": v for k, v in rough.items()}
    harness = Harness(runner)
    metrics = harness.validator.run(0, last=False)
    assert metrics == pytest.approx(expected | {"val/own/probed": 6})
    assert harness.validator.metrics == metrics
    assert harness.validator.probe == {"own/probed": 6}
    assert harness.validator.score == pytest.approx(1.75 / 3)


def test_tasks_and_what_is_written(runner: asyncio.Runner) -> None:
    harness = Harness(runner)
    harness.validator.run(0, last=False)
    harness.validator.run(4, last=True)
    before, after = harness.stream.tasks[:12], harness.stream.tasks[12:]
    assert after == before, "what differs between two validations is the policy"
    max_tokens = RolloutConfig().max_turn_length
    assert {task.sampling for task in before} == {SamplingParams(temperature=0.0, top_p=0.9, max_tokens=max_tokens)}
    assert [(task.mode, task.prompt.uid, task.key.sample) for task in before] == [
        (mode, f"d#{row}@0", sample) for mode in ("calm", "rough") for row in range(3) for sample in range(2)
    ]
    files = [f"validation_{step}_{mode}" for step in ("000000", "000004") for mode in ("calm", "rough")]
    assert list(harness.written) == files
    rewards = [t.reward for t in harness.written["validation_000004_calm"]]
    assert rewards == [1.0, 0.0, 1.0, 1.0, 0.25, 0.25], "in the order of the rows, whatever finished first"


def test_modes_in_between_and_the_first_and_last_validation(runner: asyncio.Runner) -> None:
    harness = Harness(runner, val_every_mode=False)
    validator = harness.validator
    assert validator.first == validator.last == {}
    validator.run(2, last=False)
    assert (validator.first, list(validator.last)) == ({}, ["calm"])
    validator.run(0, last=False)
    validator.run(4, last=True)
    assert list(validator.first) == list(validator.last) == ["calm", "rough"]
    assert validator.last["calm"][0] == ScoredRow("d#0@0", 0, "nq", {"reward": 1.0, "f1": 0.5})
    every = Harness(runner, val_every_mode=True).validator
    every.run(2, last=False)
    assert list(every.last) == ["calm", "rough"]


def test_lost_rows_lower_n_and_leave_no_score(runner: asyncio.Runner) -> None:
    harness = Harness(runner, lost=frozenset({("calm", 0, 1)}))
    metrics = harness.validator.run(1, last=True)
    assert metrics["val/calm/rollout/infrastructure_failed"] == 1
    assert metrics["val/calm/status/infrastructure_failed"] == pytest.approx(1 / 6)
    assert metrics["val/calm/reward/mean"] == pytest.approx((1.0 + 1.0 + 0.25) / 3), "of its row one sample is left"
    assert metrics["val/own/probed"] == len(harness.validator.last["calm"]) == 5
    assert math.isnan(harness.validator.score)
    assert harness.validator.failures == {"TimeoutError": 1}
    elsewhere = Harness(runner, lost=frozenset({("rough", 2, 0)}))
    elsewhere.validator.run(1, last=True)
    assert elsewhere.validator.score == pytest.approx(1.75 / 3)


def test_more_lost_rows_than_allowed_end_the_run_and_are_counted(runner: asyncio.Runner) -> None:
    harness = Harness(runner, lost=frozenset({("calm", 2, 0), ("calm", 2, 1)}))
    with pytest.raises(InfrastructureError, match=r"2 of 6 trajectories were lost .* the last: TimeoutError: late"):
        harness.validator.run(0, last=True)
    assert harness.validator.failures == {"TimeoutError": 2}


def test_the_line_names_modes_and_data_sets(runner: asyncio.Runner) -> None:
    harness = Harness(runner)
    line = harness.validator.line(4, harness.validator.run(4, last=True))
    assert line == (
        "held-out after step 4 (n = 3; hotpot/qa 1, nq 2) | "
        "calm: reward 0.583 [0.250, 1.000] | rough: reward 0.500 [0.500, 0.500]"
    )


def test_one_data_set_is_not_named_in_the_line(runner: asyncio.Runner) -> None:
    harness = Harness(runner)
    metrics = harness.validator.run(0, last=True)
    one = {name: value for name, value in metrics.items() if "/hotpot/qa/" not in name}
    assert harness.validator.line(0, one).startswith("held-out after step 0 (n = 3) | calm: reward 0.583")
