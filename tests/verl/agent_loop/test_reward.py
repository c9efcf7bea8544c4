from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from verl.agent_loop.base import RewardFn, RewardInput
from verl.agent_loop.reward import UserReward, with_user_reward
from verl.workers.rollout.engine import InfrastructureError

GIVEN = RewardInput("nq", "text", "a", {"reward_model": {"ground_truth": ["x"]}, "extra_info": {"index": 3}})


async def test_user_function_gets_verls_arguments() -> None:
    seen: dict[str, Any] = {}

    def compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any) -> float:
        seen.update(data_source=data_source, solution=solution_str, truth=ground_truth, extra=extra_info)
        return 0.5

    assert await UserReward(compute_score, 5)(GIVEN) == {"score": 0.5}
    assert seen == {"data_source": "nq", "solution": "text", "truth": ["x"], "extra": {"index": 3}}


async def test_mapping_keeps_its_numbers_and_needs_a_score() -> None:
    reward = UserReward(lambda **_: {"score": 1, "length": 2.0, "note": "text"}, 5)
    assert await reward(GIVEN) == {"score": 1.0, "length": 2.0}
    with pytest.raises(ValueError, match="score"):
        await UserReward(lambda **_: {"value": 1}, 5)(GIVEN)


async def test_coroutine_functions_are_awaited() -> None:
    async def compute_score(**_: Any) -> float:
        await asyncio.sleep(0)
        return 0.25

    assert await UserReward(compute_score, 5)(GIVEN) == {"score": 0.25}


async def test_a_late_reward_is_a_failure_of_the_infrastructure() -> None:
    with pytest.raises(InfrastructureError, match="longer than"):
        await UserReward(lambda **_: time.sleep(0.3), 0.01)(GIVEN)


async def test_a_reward_that_is_not_finite_is_refused() -> None:
    with pytest.raises(ValueError, match="nan"):
        await UserReward(lambda **_: float("nan"), 5)(GIVEN)


def test_an_environment_without_a_reward_of_its_own_takes_the_users() -> None:
    def none() -> RewardFn:
        raise ValueError("set custom_reward_function.path")

    assert isinstance(with_user_reward(none, lambda **_: 1.0, 5), UserReward)
    with pytest.raises(ValueError, match="custom_reward_function"):
        with_user_reward(none, None, 5)
