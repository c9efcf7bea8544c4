"""A single turn whose rollout worker stands still for ever once the driver has all of the first step."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from verl.agent_loop.base import RewardFn, RolloutTask
from verl.agent_loop.single_turn import SingleTurnLoop
from verl.agent_loop.trajectory import Trajectory
from verl.workers.rollout.engine import RolloutEngine


def stand_still_for_ever() -> None:
    threading.Event().wait()


class StuckEnvironment(SingleTurnLoop):
    """The driver, when it takes the metrics of a step, asks by one file and waits for the answer by another."""

    _listener: asyncio.Task[None] | None = None

    @property
    def _asked(self) -> Path:
        return self.context.run_dir / "stand_still"

    @property
    def _answered(self) -> Path:
        return self.context.run_dir / "stands_still"

    async def run(self, task: RolloutTask, engine: RolloutEngine, reward: RewardFn) -> Trajectory:
        self._listener = self._listener or asyncio.create_task(self._stand_still_when_asked())
        return await super().run(task, engine, reward)

    async def _stand_still_when_asked(self) -> None:
        while not self._asked.exists():
            await asyncio.sleep(0.05)
        self._answered.touch()
        stand_still_for_ever()

    def metrics(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        self._asked.touch()
        while not self._answered.exists():
            time.sleep(0.05)
        return super().metrics(trajectories)
