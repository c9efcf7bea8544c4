"""A single turn whose rollout worker stands still for ever as soon as a step's trajectories are away."""

from __future__ import annotations

import asyncio
import threading

from verl.agent_loop.base import RewardFn, RolloutTask
from verl.agent_loop.single_turn import SingleTurnLoop
from verl.agent_loop.trajectory import Trajectory
from verl.workers.rollout.engine import RolloutEngine

TRAJECTORIES = 4


def stand_still_for_ever() -> None:
    threading.Event().wait()


class StuckEnvironment(SingleTurnLoop):
    _count = 0

    async def run(self, task: RolloutTask, engine: RolloutEngine, reward: RewardFn) -> Trajectory:
        trajectory = await super().run(task, engine, reward)
        self._count += 1
        if self._count == TRAJECTORIES:
            asyncio.get_running_loop().call_later(1.0, stand_still_for_ever)
        return trajectory
