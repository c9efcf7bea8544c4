"""Rewards at the end of a trajectory's coroutine."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from numbers import Real
from typing import Any

from verl.agent_loop.base import RewardFn, RewardInput
from verl.utils.reward_score import default_compute_score, rule_for
from verl.workers.rollout.engine import InfrastructureError


class UserReward:
    """A user's ``compute_score(data_source, solution_str, ground_truth, extra_info)`` as a RewardFn.

    It runs in an executor with a deadline in seconds; a coroutine function is awaited instead. It
    returns a finite number or a mapping with ``score``. A late or failing reward function is a failure of
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


class RuleReward:
    """The rule of the row's data source; ``answer_found`` is 0 where the response holds no answer at all."""

    async def __call__(self, given: RewardInput) -> dict[str, float]:
        found = rule_for(given.data_source).extract_solution(given.solution_str) is not None
        score = default_compute_score(
            given.data_source, given.solution_str, ground_truth(given.row), given.row.get("extra_info")
        )
        return {"score": score, "answer_found": float(found)}


def ground_truth(row: Mapping[str, Any]) -> Any:
    """``reward_model.ground_truth`` where a row has it, else ``golden_answers``; None without either."""
    reward_model = row.get("reward_model") or {}
    return reward_model.get("ground_truth", row.get("golden_answers"))


def _as_scores(value: Any) -> dict[str, float]:
    if not isinstance(value, Mapping):
        return {"score": _finite(value)}
    if "score" not in value:
        raise ValueError(f"a reward mapping needs the key 'score', got {sorted(value)}")
    numbers = {name: float(score) for name, score in value.items() if isinstance(score, Real)}
    return numbers | {"score": _finite(value["score"])}


def _finite(score: Any) -> float:
    number = float(score)
    if not math.isfinite(number):
        raise ValueError(f"the reward function returned {number}, which is no reward")
    return number


def with_user_reward(default: Callable[[], RewardFn], function: Callable[..., Any] | None, timeout: float) -> RewardFn:
    """The user's function where there is one; the environment's own reward is asked for only without it."""
    return default() if function is None else UserReward(function, timeout)
