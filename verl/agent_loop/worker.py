"""The Ray actor in which agent loops run beside their engine: no Ray hop per turn."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from verl.agent_loop.base import AgentLoop, AgentLoopContext, RewardFn, RolloutLimits, RolloutTask, RunEndingError
from verl.agent_loop.reward import with_user_reward
from verl.agent_loop.trajectory import Trajectory, TrajectoryStatus
from verl.single_controller.base import Worker
from verl.utils.import_path import load_by_path, load_from_file
from verl.utils.tokenizer import eos_token_ids, hf_tokenizer
from verl.workers.config import CustomRewardConfig, RolloutConfig
from verl.workers.rollout.engine import InfrastructureError, NamedTensor
from verl.workers.rollout.torch_engine import TorchEngine

BEGIN, END = "begin", "end"
"""In a trajectory's timings: when it started and ended, seconds since the epoch on the worker's clock."""


_LOOK_AGAIN = 0.1


@dataclass(frozen=True)
class Collected:
    """What has finished, and the environment's sentence while it is paused."""

    finished: list[Trajectory]
    pause: str | None


@dataclass(frozen=True)
class RolloutSpec:
    """Everything a rollout worker is made from. ``environment_config`` is an instance of the environment's Config."""

    model_path: str
    trust_remote_code: bool
    chat_template: str
    rollout: RolloutConfig
    limits: RolloutLimits
    max_prompt_length: int
    environment: str
    environment_config: Any
    custom_reward: CustomRewardConfig
    seed: int
    total_steps: int
    test_freq: int
    run_dir: str
    device: str


class RolloutWorker(Worker):
    """Runs trajectories: ``submit`` tasks, ``collect`` what has finished.

    At most ``rollout.max_in_flight`` run at once (default: one per decode row, so that no key/value
    cache of a running trajectory is ever evicted).
    """

    def __init__(self, spec: RolloutSpec) -> None:
        super().__init__()
        self._spec = spec
        self._running: set[asyncio.Task[None]] = set()
        self._told: str | None = None

    async def init_model(self) -> None:
        """Loads tokenizer, engine and environment. Raises ValueError for what cannot be used."""
        spec = self._spec
        if spec.rollout.num_threads:
            torch.set_num_threads(spec.rollout.num_threads)
        tokenizer = hf_tokenizer(spec.model_path, spec.trust_remote_code, spec.chat_template)
        eos = eos_token_ids(spec.model_path, tokenizer)
        self._engine = TorchEngine(
            spec.model_path,
            tokenizer,
            max_num_seqs=spec.rollout.max_num_seqs,
            max_model_len=spec.max_prompt_length + spec.limits.max_response_length,
            dtype=torch.float32 if spec.rollout.dtype == "float32" else torch.bfloat16,
            eos_token_ids=eos,
            device=spec.device,
        )
        context = AgentLoopContext(
            tokenizer, spec.limits, eos, spec.seed, spec.total_steps, Path(spec.run_dir), spec.test_freq
        )
        loop_class: type[AgentLoop[Any]] = load_by_path(spec.environment)
        self._loop = loop_class(spec.environment_config, context)
        self._reward = self._make_reward()
        self._finished: asyncio.Queue[Trajectory | BaseException] = asyncio.Queue()
        self._slots = asyncio.Semaphore(spec.rollout.max_in_flight or spec.rollout.max_num_seqs)

    def _make_reward(self) -> RewardFn:
        custom = self._spec.custom_reward
        function = load_from_file(custom.path, custom.name) if custom.path else None
        return with_user_reward(self._loop.default_reward, function, custom.timeout)

    async def submit(self, tasks: Sequence[RolloutTask]) -> None:
        for task in tasks:
            job = asyncio.create_task(self._run(task))
            self._running.add(job)
            job.add_done_callback(self._ended)

    def _ended(self, job: asyncio.Task[None]) -> None:
        self._running.discard(job)
        error = None if job.cancelled() else job.exception()
        if error is not None:
            self._finished.put_nowait(error)

    async def collect(self, timeout: float) -> Collected:
        """What has finished; waits up to ``timeout`` seconds for the first, or for a pause to begin or end. A
        fault in the code of an environment and a RunEndingError are raised here and end the run."""
        until = time.monotonic() + timeout
        while self._finished.empty() and self._loop.pause == self._told and time.monotonic() < until:
            await asyncio.sleep(min(_LOOK_AGAIN, timeout))
        finished: list[Trajectory] = []
        while not self._finished.empty():
            finished.append(_or_raise(self._finished.get_nowait()))
        self._told = self._loop.pause
        return Collected(finished, self._told)

    async def _run(self, task: RolloutTask) -> None:
        async with self._slots:
            begin = time.time()
            trajectory = await self._attempt(task) or await self._attempt(task, last=True)
        assert trajectory is not None
        trajectory.timings |= {BEGIN: begin, END: time.time()}
        await self._finished.put(trajectory)

    async def _attempt(self, task: RolloutTask, last: bool = False) -> Trajectory | None:
        """None after a failure that is not the policy's; on the last attempt a record of it."""
        try:
            return await self._within_timeout(task)
        except RunEndingError:
            raise
        except (InfrastructureError, TimeoutError) as error:
            return _failed(task, error) if last else None

    async def _within_timeout(self, task: RolloutTask) -> Trajectory:
        """Raises TimeoutError after ``trajectory_timeout`` seconds in which the environment was not paused."""
        begin, limit = time.monotonic(), self._spec.rollout.trajectory_timeout
        job = asyncio.ensure_future(self._loop.run(task, self._engine, self._reward))
        try:
            while not job.done():
                left = limit - (time.monotonic() - begin) + self._loop.paused_seconds(begin)
                if left <= 0:
                    raise TimeoutError(f"not finished within {limit:g} s")
                await asyncio.wait({job}, timeout=max(left, _LOOK_AGAIN))
            return job.result()
        finally:
            job.cancel()
            await asyncio.wait({job})

    async def begin_weights(self, version: int) -> None:
        await self._engine.begin_weights(version)

    async def load_weights(self, bucket: Iterable[NamedTensor]) -> None:
        await self._engine.load_weights(bucket)

    async def end_weights(self, version: int) -> None:
        await self._engine.end_weights(version)

    async def close(self) -> None:
        for job in list(self._running):
            job.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        await self._loop.close()


def _or_raise(outcome: Trajectory | BaseException) -> Trajectory:
    if isinstance(outcome, Trajectory):
        return outcome
    raise outcome


def _failed(task: RolloutTask, error: InfrastructureError | TimeoutError) -> Trajectory:
    return task.trajectory(
        status=TrajectoryStatus.INFRASTRUCTURE_FAILED,
        environment=error.environment if isinstance(error, InfrastructureError) else None,
        failure=f"{type(error).__name__}: {error}",
    )
