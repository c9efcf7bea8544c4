"""An environment that asks nothing of a machine; it says what it was told of the run."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from verl.agent_loop.base import AgentLoop, RewardFn, RolloutTask, RunPlan
from verl.agent_loop.trajectory import Trajectory
from verl.utils.paths import resolve_path
from verl.workers.rollout.engine import RolloutEngine


@dataclass(frozen=True)
class PlainConfig:
    """Takes every key of the section that the default configuration holds."""

    values: dict[str, Any] = field(default_factory=dict)
    __pydantic_config__ = {"extra": "allow"}


class PlainEnvironment(AgentLoop[PlainConfig]):
    Config: ClassVar[type] = PlainConfig

    @classmethod
    def check(cls, config: PlainConfig, plan: RunPlan) -> list[str]:
        return ["the plan has seven steps: take another number"] if plan.total_steps == 7 else []

    @classmethod
    def announce(cls, config: PlainConfig, plan: RunPlan) -> list[str]:
        return [f"{plan.validations} validations of {plan.validation_rows} rows"]

    @classmethod
    def prompt_template(cls, name: str) -> str:
        return "{question}" if name == "search" else Path(resolve_path(name)).read_text()

    @property
    def starts_services(self) -> bool:
        return self.context.total_steps == 9

    async def preflight(self) -> list[str]:
        return ["no server answers: start one"] if self.context.total_steps in (8, 9) else []

    async def run(self, task: RolloutTask, engine: RolloutEngine, reward: RewardFn) -> Trajectory:
        raise NotImplementedError
