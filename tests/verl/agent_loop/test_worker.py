from __future__ import annotations

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
async def worker(tmp_path: Path) -> RolloutWorker:
    FlakyLoop.attempts.clear()
    spec = RolloutSpec(
        model_path=resolve_path("pkg://zerosearch.quickstart/assets/policy"),
        trust_remote_code=False,
        chat_template="auto",
        rollout=RolloutConfig(max_num_seqs=4),
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
