from __future__ import annotations

import asyncio
import time
from functools import partial
from threading import Event
from typing import Any

import numpy as np
import pytest
import torch

from verl.agent_loop.base import RewardFn, RewardInput, RunEndingError
from verl.agent_loop.reward import RewardFunctionError, UserReward, with_user_reward
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
    with pytest.raises(RewardFunctionError, match="score"):
        await UserReward(lambda **_: {"value": 1}, 5)(GIVEN)


async def test_coroutine_functions_are_awaited() -> None:
    async def compute_score(**_: Any) -> float:
        await asyncio.sleep(0)
        return 0.25

    assert await UserReward(compute_score, 5)(GIVEN) == {"score": 0.25}


async def test_a_late_reward_is_a_failure_of_the_infrastructure() -> None:
    with pytest.raises(InfrastructureError, match="longer than"):
        await UserReward(lambda **_: time.sleep(0.3), 0.01)(GIVEN)


async def test_threads_lost_to_late_calls_do_not_block_later_rewards() -> None:
    release = Event()

    def compute_score(solution_str: str, **_: Any) -> float:
        if solution_str == "hang":
            release.wait(60)
        return 1.0

    reward = UserReward(compute_score, 0.05)
    hanging = RewardInput("nq", "hang", None, {})
    try:
        outcomes = await asyncio.gather(*(reward(hanging) for _ in range(20)), return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [InfrastructureError] * 20
        late = UserReward(compute_score, 30)
        late._executor = reward._executor
        assert await late(GIVEN) == {"score": 1.0}
    finally:
        release.set()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None, "0.5", [1.0], {"score": None}, {"score": "1"}])
async def test_what_is_no_finite_number_ends_the_run(value: Any) -> None:
    with pytest.raises(RewardFunctionError, match="no finite number") as caught:
        await UserReward(lambda **_: value, 5)(GIVEN)
    assert isinstance(caught.value, RunEndingError)


@pytest.mark.parametrize("value", [1, True, np.float32(1), np.bool_(True), np.array(1.0), torch.tensor(1.0)])
async def test_numbers_of_every_kind_are_rewards(value: Any) -> None:
    assert await UserReward(lambda **_: value, 5)(GIVEN) == {"score": 1.0}


@pytest.mark.parametrize(
    "error", [KeyError("x"), StopIteration(), TimeoutError("remote"), ZeroDivisionError("by zero")]
)
async def test_an_error_of_the_users_function_ends_the_run_in_one_error_that_says_where(error: Exception) -> None:
    def compute_score(**_: Any) -> float:
        raise error

    async def later(**_: Any) -> float:
        raise error

    for function in (compute_score, later):
        with pytest.raises(RewardFunctionError) as caught:
            await UserReward(function, 5)(GIVEN)
        message = str(caught.value)
        assert f"reward function {function.__name__!r}, data source 'nq', ground truth ['x']: raised" in message
        assert type(error).__name__ in message
        assert "\n" not in message


async def test_an_infrastructure_error_of_the_users_function_stays_one() -> None:
    def compute_score(**_: Any) -> float:
        raise InfrastructureError("the reward model is down")

    with pytest.raises(InfrastructureError, match="reward model is down") as caught:
        await UserReward(compute_score, 5)(GIVEN)
    assert not isinstance(caught.value, RunEndingError)


async def test_partial_functions_and_callable_objects_are_named_when_late() -> None:
    class Slow:
        async def __call__(self, **_: Any) -> float:
            await asyncio.sleep(60)
            return 0.0

    async def compute_score(seconds: float, **_: Any) -> float:
        await asyncio.sleep(seconds)
        return 0.0

    for function, name in ((Slow(), "'Slow'"), (partial(compute_score, 60), "'compute_score'")):
        with pytest.raises(InfrastructureError, match=f"{name}.*took longer than 0.01 s"):
            await UserReward(function, 0.01)(GIVEN)


def test_an_environment_without_a_reward_of_its_own_takes_the_users() -> None:
    def none() -> RewardFn:
        raise ValueError("set custom_reward_function.path")

    assert isinstance(with_user_reward(none, lambda **_: 1.0, 5), UserReward)
    with pytest.raises(ValueError, match="custom_reward_function"):
        with_user_reward(none, None, 5)
