"""Rewards at the end of a trajectory's coroutine."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from verl.agent_loop.base import RewardFn, RewardInput
from verl.workers.rollout.engine import InfrastructureError


class UserReward:
    """A user's ``compute_score(data_source, solution_str, ground_truth, extra_info)`` as a RewardFn.

    It runs in an executor with a deadline in seconds; a coroutine function is awaited instead. It
    returns a number or a mapping with ``score``. A late or failing reward function is a failure of
    the infrastructure: the trajectory is never trained on with a made-up score.
    """

    def __init__(self, function: Callable[..., Any], timeout: float) -> None:
        self._function = function
        self._timeout = timeout
        self._executor = ThreadPoolExecutor(max_workers=8, thread_name_prefix="reward")

    async def __call__(self, given: RewardInput) -> dict[str, float]:
        arguments = {
            "data_source": given.data_source,
            "solution_str": given.solution_str,
            "ground_truth": ground_truth(given.row),
            "extra_info": given.row.get("extra_info"),
        }
        try:
            async with asyncio.timeout(self._timeout):
                return _as_scores(await self._call(arguments))
        except TimeoutError as error:
            name = self._function.__name__
            raise InfrastructureError(f"reward function {name!r} took longer than {self._timeout} s") from error

    async def _call(self, arguments: Mapping[str, Any]) -> Any:
        if inspect.iscoroutinefunction(self._function):
            return await self._function(**arguments)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, lambda: self._function(**arguments))


def ground_truth(row: Mapping[str, Any]) -> Any:
    """``reward_model.ground_truth`` where a row has it, else ``golden_answers``."""
    reward_model = row.get("reward_model")
    return reward_model["ground_truth"] if reward_model else row.get("golden_answers")


def _as_scores(value: Any) -> dict[str, float]:
    if isinstance(value, Mapping):
        if "score" not in value:
            raise ValueError(f"a reward mapping needs the key 'score', got {sorted(value)}")
        return {name: float(score) for name, score in value.items() if isinstance(score, int | float)}
    return {"score": float(value)}


def with_user_reward(default: RewardFn, function: Callable[..., Any] | None, timeout: float) -> RewardFn:
    return default if function is None else UserReward(function, timeout)
