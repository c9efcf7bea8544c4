from __future__ import annotations

import asyncio

import pytest
import ray

from verl.agent_loop.base import RolloutTask
from verl.agent_loop.stream import TrajectoryStream
from verl.agent_loop.trajectory import Prompt, Trajectory
from verl.agent_loop.worker import Collected
from verl.workers.rollout.engine import InfrastructureError, SampleKey, SamplingParams


@ray.remote(num_cpus=0)
class EchoWorker:
    """Finishes what it was given, last first; holds back tasks of uids that start with "stuck"."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.finished: asyncio.Queue[Trajectory] = asyncio.Queue()

    async def submit(self, tasks: list[RolloutTask]) -> None:
        for task in reversed(tasks):
            if not task.prompt.uid.startswith("stuck"):
                uid, sample = task.prompt.uid, task.key.sample
                await self.finished.put(Trajectory(uid, sample, 1, task.mode, (1,), data_source=self.name))

    async def collect(self, timeout: float) -> Collected:
        try:
            async with asyncio.timeout(min(timeout, 0.2)):
                return Collected([await self.finished.get()], None)
        except TimeoutError:
            return Collected([], None)


@ray.remote(num_cpus=0)
class PausedWorker:
    """Paused for ``pauses`` collects of 0.2 s, then for ``silences`` silent, then finishes what it was given."""

    def __init__(self, pauses: int, silences: int) -> None:
        self.answers = ["the server is away"] * pauses + [None] * silences
        self.tasks: list[RolloutTask] = []

    async def submit(self, tasks: list[RolloutTask]) -> None:
        self.tasks += tasks

    async def collect(self, timeout: float) -> Collected:
        await asyncio.sleep(0.2)
        if self.answers:
            return Collected([], self.answers.pop(0))
        done = [Trajectory(t.prompt.uid, t.key.sample, 1, t.mode, (1,)) for t in self.tasks]
        self.tasks.clear()
        return Collected(done, None)


def tasks(*uids: str, n: int = 2) -> list[RolloutTask]:
    prompts = [Prompt(uid, (1,), "d", {}) for uid in uids]
    return [RolloutTask(p, SampleKey(0, 1, p.uid, s), "train", SamplingParams()) for p in prompts for s in range(n)]


@pytest.fixture
def workers(ray_session: None) -> list[ray.actor.ActorHandle]:
    return [EchoWorker.remote("a"), EchoWorker.remote("b")]


def test_every_trajectory_arrives_once_and_groups_stay_together(workers: list[ray.actor.ActorHandle]) -> None:
    stream = TrajectoryStream(workers, stall_seconds=30)
    stream.submit(tasks("p", "q", "r"))
    assert stream.in_flight == 6
    done = list(stream.take())
    assert sorted((t.uid, t.sample) for t in done) == [(u, s) for u in "pqr" for s in (0, 1)]
    homes = {t.uid: {x.data_source for x in done if x.uid == t.uid} for t in done}
    assert homes == {"p": {"a"}, "q": {"b"}, "r": {"a"}}
    assert stream.in_flight == 0


def test_taking_some_leaves_the_rest_and_more_can_be_submitted(workers: list[ray.actor.ActorHandle]) -> None:
    stream = TrajectoryStream(workers, stall_seconds=30)
    stream.submit(tasks("p", "q"))
    first = list(stream.take(3))
    stream.submit(tasks("r"))
    rest = list(stream.take())
    assert (len(first), len(rest)) == (3, 3)
    assert len({(t.uid, t.sample) for t in first + rest}) == 6
    with pytest.raises(ValueError, match="only 0 are in flight"):
        list(stream.take(1))


def test_a_stuck_worker_is_a_typed_error_and_not_a_hang(workers: list[ray.actor.ActorHandle]) -> None:
    stream = TrajectoryStream(workers, stall_seconds=0.5)
    stream.submit(tasks("stuck", "q", n=1))
    with pytest.raises(InfrastructureError, match=r"due by rollout worker: \{0: 1\}"):
        list(stream.take())


def test_a_pause_is_no_stall_and_its_two_messages_come_once(
    ray_session: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both workers pause for longer than the stall limit, the second longer than the first."""
    stream = TrajectoryStream([PausedWorker.remote(6, 0), PausedWorker.remote(8, 0)], stall_seconds=0.5)
    stream.submit(tasks("p", "q"))
    assert len(list(stream.take())) == 4
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("paused", "resumed"))]
    assert told[0] == "paused: the server is away"
    assert told[1].startswith("resumed after ")
    assert len(told) == 2


def test_silence_after_a_pause_is_a_stall(ray_session: None) -> None:
    stream = TrajectoryStream([PausedWorker.remote(3, 10**6)], stall_seconds=0.5)
    stream.submit(tasks("p"))
    with pytest.raises(InfrastructureError, match="no trajectory finished"):
        list(stream.take())
