from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from tests.verl.agent_loop.flaky import FlakyConfig, FlakyLoop
from verl.agent_loop.base import RolloutLimits, RolloutTask
from verl.agent_loop.trajectory import Prompt, Trajectory, TrajectoryStatus
from verl.agent_loop.worker import Collected, RolloutSpec, RolloutWorker
from verl.utils.paths import resolve_path
from verl.workers.config import CustomRewardConfig, RolloutConfig
from verl.workers.rollout.engine import SampleKey, SamplingParams


@pytest.fixture
async def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RolloutWorker:
    return await make_worker(tmp_path, monkeypatch, RolloutConfig(max_num_seqs=4))


async def make_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rollout: RolloutConfig) -> RolloutWorker:
    monkeypatch.setattr(FlakyLoop, "attempts", Counter())
    monkeypatch.setattr(FlakyLoop, "away", None)
    monkeypatch.setattr(FlakyLoop, "service", asyncio.Event())
    spec = RolloutSpec(
        model_path=resolve_path("pkg://zerosearch.quickstart/assets/policy"),
        trust_remote_code=False,
        chat_template="auto",
        rollout=rollout,
        limits=RolloutLimits(16, 16, 8),
        max_prompt_length=16,
        environment="tests.verl.agent_loop.flaky.FlakyLoop",
        environment_config=FlakyConfig(),
        custom_reward=CustomRewardConfig(),
        seed=0,
        total_steps=1,
        test_freq=0,
        run_dir=str(tmp_path),
        device="cpu",
    )
    made = RolloutWorker(spec)
    await made.init_model()
    return made


def task(uid: str, **row: object) -> RolloutTask:
    return RolloutTask(Prompt(uid, (5, 6, 7), "d", row), SampleKey(0, 1, uid, 0), "train", SamplingParams(max_tokens=4))


async def run(worker: RolloutWorker, *tasks: RolloutTask) -> dict[str, Trajectory]:
    await worker.submit(tasks)
    done: list[Trajectory] = []
    while len(done) < len(tasks):
        done += (await worker.collect(10)).finished
    return {t.uid: t for t in done}


async def test_a_failed_sample_is_generated_once_more_and_then_given_up(worker: RolloutWorker) -> None:
    done = await run(worker, task("fine", failures=0), task("once", failures=1), task("twice", failures=2))
    assert FlakyLoop.attempts == {"fine": 1, "once": 2, "twice": 2}
    assert [done[u].status for u in ("fine", "once")] == [TrajectoryStatus.ANSWERED] * 2
    assert done["twice"].status is TrajectoryStatus.INFRASTRUCTURE_FAILED
    assert done["twice"].failure == "InfrastructureError: the server is gone"
    assert done["twice"].segments == []
    await worker.close()


async def test_every_trajectory_says_when_it_ran_and_with_which_weights(worker: RolloutWorker) -> None:
    done = (await run(worker, task("fine", failures=0)))["fine"]
    assert done.timings["end"] >= done.timings["begin"]
    assert done.segments[0].weights_versions == ((0, len(done.response_ids)),)
    await worker.close()


async def test_a_bug_in_an_environment_ends_the_run_with_its_own_error(worker: RolloutWorker) -> None:
    await worker.submit([task("bad", bug=True)])
    with pytest.raises(KeyError, match="a bug in the environment"):
        await worker.collect(60)


async def test_collecting_nothing_returns_after_the_timeout(worker: RolloutWorker) -> None:
    assert await worker.collect(0.01) == Collected([], None)


async def test_paused_time_is_not_in_a_trajectorys_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rollout = RolloutConfig(max_num_seqs=4, trajectory_timeout=0.05)
    worker = await make_worker(tmp_path, monkeypatch, rollout)
    FlakyLoop.away = "the server is away"
    await worker.submit([task("late", failures=0, waits=True)])
    assert await worker.collect(60) == Collected([], "the server is away"), "the pause is told at once"
    assert await worker.collect(0.5) == Collected([], "the server is away"), "ten deadlines later it still waits"
    FlakyLoop.service.set()
    (done,) = (await worker.collect(60)).finished
    assert done.status is TrajectoryStatus.ANSWERED
    assert FlakyLoop.attempts == {"late": 1}
    await worker.close()


async def test_the_same_wait_without_a_pause_is_over_at_the_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rollout = RolloutConfig(max_num_seqs=4, trajectory_timeout=0.05)
    worker = await make_worker(tmp_path, monkeypatch, rollout)
    done = (await run(worker, task("late", failures=0, waits=True)))["late"]
    assert done.status is TrajectoryStatus.INFRASTRUCTURE_FAILED
    assert done.failure == "TimeoutError: not finished within 0.05 s"
    assert FlakyLoop.attempts == {"late": 2}
    await worker.close()


async def test_the_end_of_a_pause_is_told_at_once(worker: RolloutWorker) -> None:
    FlakyLoop.away = "the server is away"
    await worker.submit([task("late", failures=0, waits=True)])
    assert (await worker.collect(60)).pause == "the server is away"
    FlakyLoop.away = None
    assert await worker.collect(60) == Collected([], None)
    await worker.close()
