"""An environment that fails on command: the data row says how often."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass

from verl.agent_loop.base import AgentLoop, RewardFn, RewardInput, RolloutTask
from verl.agent_loop.trajectory import Segment, SegmentKind, Trajectory, TrajectoryStatus
from verl.workers.rollout.engine import GenerationRequest, InfrastructureError, RolloutEngine


@dataclass(frozen=True)
class FlakyConfig:
    pass


class FlakyLoop(AgentLoop[FlakyConfig]):
    """One generation of four tokens, after ``row["failures"]`` failed attempts; ``row["bug"]`` is a bug,
    ``row["waits"]`` for ``service`` comes first. While ``away`` is set the environment is paused."""

    Config = FlakyConfig
    attempts: Counter[str] = Counter()
    away: str | None = None
    service = asyncio.Event()

    @property
    def pause(self) -> str | None:
        return self.away

    def paused_seconds(self, since: float) -> float:
        return 0.0 if self.away is None else time.monotonic() - since

    async def run(self, task: RolloutTask, engine: RolloutEngine, reward: RewardFn) -> Trajectory:
        self.attempts[task.prompt.uid] += 1
        if task.prompt.row.get("bug"):
            raise KeyError("a bug in the environment")
        if task.prompt.row.get("waits"):
            await self.service.wait()
        if self.attempts[task.prompt.uid] <= task.prompt.row["failures"]:
            raise InfrastructureError("the server is gone")
        request = GenerationRequest(task.prompt.uid, task.prompt.prompt_ids, task.sampling, task.key.stream("policy"))
        part = await engine.generate(request)
        await engine.release(task.prompt.uid)
        scores = await reward(RewardInput("d", "", None, task.prompt.row))
        segment = Segment(SegmentKind.POLICY, part.token_ids, part.log_probs, part.weights_versions)
        names = (task.prompt.uid, task.key.sample, task.key.step, task.mode, task.prompt.prompt_ids)
        return Trajectory(*names, [segment], TrajectoryStatus.ANSWERED, scores["score"])

    def default_reward(self) -> RewardFn:
        async def one(_: RewardInput) -> dict[str, float]:
            return {"score": 1.0}

        return one
