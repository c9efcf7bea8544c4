"""What of a rollout counts as progress for whoever watches the run."""

from __future__ import annotations

import pytest
import ray

from verl.agent_loop.base import RolloutTask
from verl.agent_loop.stream import TrajectoryStream
from verl.agent_loop.trajectory import Prompt, Trajectory
from verl.agent_loop.worker import Collected
from verl.workers.rollout.engine import SampleKey, SamplingParams

AWAY = "the server is away"


@ray.remote(num_cpus=0)
class ScriptedWorker:
    """Answers each collect with the next of ``script``: a number of finished trajectories, or a pause."""

    def __init__(self, script: list[int | str]) -> None:
        self.script = script
        self.tasks: list[RolloutTask] = []

    def submit(self, tasks: list[RolloutTask]) -> None:
        self.tasks += tasks

    def collect(self, timeout: float) -> Collected:
        answer = self.script.pop(0)
        if isinstance(answer, str):
            return Collected([], answer)
        done = [self.tasks.pop(0) for _ in range(answer)]
        return Collected([Trajectory(t.prompt.uid, t.key.sample, 1, t.mode, (1,)) for t in done], None)


def progress_seen(script: list[int | str], trajectories: int) -> list[int]:
    """How many trajectories had been taken at each call of ``on_progress``."""
    taken: list[Trajectory] = []
    calls: list[int] = []
    stream = TrajectoryStream([ScriptedWorker.remote(script)], 60, lambda: calls.append(len(taken)))
    keys = [SampleKey(0, 1, "p", sample) for sample in range(trajectories)]
    stream.submit([RolloutTask(Prompt("p", (1,), "d", {}), key, "train", SamplingParams()) for key in keys])
    for trajectory in stream.take():
        taken.append(trajectory)
    return calls


def test_trajectories_that_arrive_are_progress_and_silence_is_not(ray_session: None) -> None:
    assert progress_seen([0, 0, 2, 0, 1], 3) == [0, 2]


def test_every_look_at_a_pause_is_progress(ray_session: None, capsys: pytest.CaptureFixture[str]) -> None:
    """A slow machine looks more often than the worker answers, never less."""
    calls = progress_seen([1, AWAY, AWAY, AWAY, 1], 2)
    assert calls[0] == 0
    assert len(calls) >= 1 + 3 + 1
    assert set(calls[1:]) == {1}
