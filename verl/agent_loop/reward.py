"""Rewards at the end of a trajectory's coroutine."""

from __future__ import annotations

import asyncio
import inspect
import math
import traceback
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from numbers import Real
from reprlib import repr as short_repr
from typing import Any

import numpy as np
import torch

from verl.agent_loop.base import RewardFn, RewardInput, RunEndingError
from verl.utils.dataset.ground_truth import ground_truth
from verl.utils.reward_score import default_compute_score, rule_for
from verl.workers.rollout.engine import InfrastructureError

_THREADS = 8


class RewardFunctionError(RunEndingError):
    """The user's reward function raised an error or returned no reward: the run ends, for its code is at fault."""


class UserReward:
    """A user's ``compute_score(data_source, solution_str, ground_truth, extra_info)`` as a RewardFn.

    It runs in a thread, eight calls at once; what it awaits, when it is asynchronous, is awaited here. It
    returns a finite number or a mapping with ``score``. Raises InfrastructureError when it takes longer than
    ``timeout`` seconds (or raises that error itself): the trajectory is never trained on with a made-up
    score. Raises RewardFunctionError, which ends the run, for every other error of the function and for
    what it returns instead of a reward.
    """

    def __init__(self, function: Callable[..., Any], timeout: float) -> None:
        self._function = function
        self._name = _name(function)
        self._timeout = timeout
        self._turns = asyncio.Semaphore(_THREADS)
        self._executor = _threads()

    async def __call__(self, given: RewardInput) -> dict[str, float]:
        truth = ground_truth(given.row)
        arguments = {
            "data_source": given.data_source,
            "solution_str": given.solution_str,
            "ground_truth": truth,
            "extra_info": given.row.get("extra_info"),
        }
        place = f"reward function {self._name!r}, data source {given.data_source!r}, ground truth {short_repr(truth)}"
        returned = await self._call(arguments, place)
        try:
            return _as_scores(returned)
        except ValueError as error:
            raise RewardFunctionError(f"{place}: {error}") from error

    async def _call(self, arguments: Mapping[str, Any], place: str) -> Any:
        async with self._turns:
            begin = asyncio.get_running_loop().time()
            executor = self._executor
            future = asyncio.wrap_future(executor.submit(_call_plainly, self._function, arguments))
            try:
                returned = await self._outcome(future, self._timeout, place)
            finally:
                if not future.done() or future.cancelled():
                    self._leave(executor)
        if not inspect.isawaitable(returned):
            return returned
        left = self._timeout - (asyncio.get_running_loop().time() - begin)
        return await self._outcome(asyncio.ensure_future(_awaited(returned)), left, place)

    def _leave(self, executor: ThreadPoolExecutor) -> None:
        """A thread that is not done may never be: later calls get others, and calls that run go on."""
        if executor is self._executor:
            self._executor = _threads()
            executor.shutdown(wait=False)

    async def _outcome(self, future: asyncio.Future[Any], seconds: float, place: str) -> Any:
        try:
            await asyncio.wait({future}, timeout=seconds)
            if not future.done():
                raise InfrastructureError(f"{place}: took longer than {self._timeout} s")
        finally:
            future.cancel()
        error = future.exception()
        if error is None:
            return future.result()
        if isinstance(error, InfrastructureError):
            raise error
        raise RewardFunctionError(f"{place}: {_in_words(error)}") from error


def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=_THREADS, thread_name_prefix="reward")


def _call_plainly(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    try:
        return function(**arguments)
    except StopIteration as error:  # asyncio's futures cannot carry it
        raise RuntimeError("StopIteration") from error


async def _awaited(pending: Awaitable[Any]) -> Any:
    return await pending


def _name(function: Callable[..., Any]) -> str:
    """Partial functions and callable objects have none of their own."""
    if isinstance(function, partial):
        return _name(function.func)
    named = inspect.isroutine(function) or inspect.isclass(function)
    return function.__name__ if named else type(function).__name__


def _in_words(error: BaseException) -> str:
    """The error in one line, with the place where it was raised; asyncio makes a TimeoutError anew, without one."""
    words = " ".join(f"raised {type(error).__name__}: {error}".split())
    frames = traceback.extract_tb(error.__traceback__)
    return f"{words} ({frames[-1].filename}, line {frames[-1].lineno})" if frames else words


class RuleReward:
    """The rule of the row's data source; ``answer_found`` is 0 where the response holds no answer at all."""

    async def __call__(self, given: RewardInput) -> dict[str, float]:
        found = rule_for(given.data_source).extract_solution(given.solution_str) is not None
        score = default_compute_score(
            given.data_source, given.solution_str, ground_truth(given.row), given.row.get("extra_info")
        )
        return {"score": score, "answer_found": float(found)}


def _as_scores(value: Any) -> dict[str, float]:
    if not isinstance(value, Mapping):
        return {"score": _finite(value)}
    if "score" not in value:
        raise ValueError(f"a reward mapping needs the key 'score', got {sorted(map(str, value))}")
    numbers = {name: float(score) for name, score in value.items() if isinstance(score, Real)}
    return numbers | {"score": _finite(value["score"])}


def _finite(score: Any) -> float:
    """Raises ValueError for what is no finite number."""
    plain = score.item() if isinstance(score, torch.Tensor | np.ndarray) and score.ndim == 0 else score
    if not isinstance(plain, Real | np.bool_) or not math.isfinite(float(plain)):
        raise ValueError(f"it returned {short_repr(plain)}, which is no finite number")
    return float(plain)


def with_user_reward(default: Callable[[], RewardFn], function: Callable[..., Any] | None, timeout: float) -> RewardFn:
    """The user's function where there is one; the environment's own reward is asked for only without it."""
    return default() if function is None else UserReward(function, timeout)
