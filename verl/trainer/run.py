"""One run from its configuration to its summary; whatever was started is stopped, however it ends."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from types import FrameType, TracebackType
from typing import Any

import ray

from verl.agent_loop.base import AgentLoop
from verl.agent_loop.worker import RolloutSpec, RolloutWorker
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.trainer.compose import Composed
from verl.trainer.config import PPOTrainerConfig
from verl.trainer.ppo.actor_loss import ActorLoss
from verl.trainer.ppo.critic_loss import CriticLoss
from verl.trainer.ppo.parts import TrainerParts
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.trainer.ppo.weight_keeper import BEST, LAST
from verl.trainer.preflight import preflight, refuse
from verl.trainer.report import RunClock, make_summary, print_report
from verl.trainer.resources import cluster_problem
from verl.trainer.run_dir import RunDirectory
from verl.trainer.setup import Inputs, device_name, make_environment, rollout_limits
from verl.trainer.timing import PhaseTimer
from verl.trainer.watchdog import Watchdog
from verl.utils.paths import resolve_path
from verl.utils.tracking import Tracking
from verl.workers.training_worker import TrainingWorker, TrainingWorkerConfig

STARTED_VARIABLE = "ZEROSEARCH_STARTED"
"""Seconds since the epoch at which the launching script had finished its set-up."""
SETUP_VARIABLE = "ZEROSEARCH_SETUP_SECONDS"


def run_training(composed: Composed) -> int:
    """Trains, reports, and returns the exit status: 0 complete, 1 failed, 130 interrupted."""
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        with TrainingRun(composed, preflight(composed.config)) as run:
            run.execute()
    except KeyboardInterrupt:
        return 130
    except (RuntimeError, OSError, ray.exceptions.RayError):
        traceback.print_exc()
        return 1
    return 0


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    """A termination request ends a run as Ctrl-C does: everything started is stopped, the summary is written."""
    raise KeyboardInterrupt


def _reason(error: BaseException | None) -> str:
    if error is None:
        return "completed"
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[-1] if lines else ''}"


class TrainingRun:
    """What is started for a run, in the order it must be stopped."""

    def __init__(self, composed: Composed, inputs: Inputs) -> None:
        trainer = composed.config.trainer
        self._started = float(os.environ.get(STARTED_VARIABLE, time.time()))
        self._composed = composed
        self._inputs = inputs
        self._config: PPOTrainerConfig = composed.config
        self._timer = PhaseTimer()
        self._clock = RunClock(setup=float(os.environ.get(SETUP_VARIABLE, 0)))
        self._stack = ExitStack()
        self._watching = ExitStack()
        self._directory = RunDirectory(trainer.default_local_dir, trainer.experiment_name)
        self._directory.write_config(composed.plain, composed.overrides)
        self._watchdog = Watchdog(trainer.watchdog_timeout, self._timer, self._directory.path / "logs")
        self._environment: AgentLoop[Any] | None = None
        self._trainer: RayPPOTrainer | None = None
        self._exit_code = 1

    def execute(self) -> None:
        with self._watchdog.guard(), self._watching:
            self._execute()

    def _execute(self) -> None:
        print("overrides: " + (" ".join(self._composed.overrides) or "none"))
        print(f"run directory: {self._directory.path}", flush=True)
        with self._timer.phase("startup"):
            self._trainer = RayPPOTrainer(self._assemble())
        self._timer.take_step()
        self._clock.startup = time.time() - self._started
        print(f"started in {self._clock.startup:.1f} s", flush=True)
        begin = time.perf_counter()
        try:
            self._trainer.fit()
        finally:
            self._clock.training = time.perf_counter() - begin
        self._exit_code = 0

    def __enter__(self) -> TrainingRun:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Keeps the weights of a run that failed, stops everything and writes the summary.

        The summary is written before as well: what ended the run may have ended Ray too, and then this process
        does not outlive the attempt to stop it.
        """
        exit_reason = _reason(error)
        self._write_summary(exit_reason)
        if error is not None and self._trainer is not None and self._watchdog.error is None:
            self._stack.callback(self._trainer.weights.after_failure, self._trainer.steps_done)
        try:
            with self._timer.phase("shutdown"):
                self._stack.close()
        finally:
            summary = self._write_summary(exit_reason)
        if self._trainer is not None and self._environment is not None:
            print_report(self._trainer, self._environment, summary, self._places())
        print(f"{exit_reason}; everything of this run lies in {self._directory.path}", flush=True)

    def _write_summary(self, exit_reason: str) -> dict[str, Any]:
        self._clock.phases = self._timer.totals
        self._clock.total = time.time() - self._started + self._clock.setup
        summary = make_summary(self._trainer, self._environment, self._clock, exit_reason)
        self._directory.write_summary(summary)
        return summary

    def _places(self) -> dict[str, str]:
        path = self._directory.path
        places = {"run directory": str(path), "metrics": "metrics.jsonl", "trajectories": "trajectories/"}
        for name in (LAST, BEST):
            if (path / "checkpoints" / name).is_dir():
                places[f"{name} weights"] = f"checkpoints/{name} (Hugging Face format)"
        return places

    def _assemble(self) -> TrainerParts:
        """Services, Ray and workers come up side by side: each spends most of its time importing."""
        config, inputs = self._config, self._inputs
        self._environment = environment = make_environment(config, inputs, self._directory.path)
        threads = self._stack.enter_context(ThreadPoolExecutor(1))
        services = threads.submit(self._stack.enter_context, environment.services())
        tracking = self._tracking()
        self._start_ray()
        self._watching.enter_context(self._watchdog)  # after Ray, which puts a handler of its own on its signal
        pool = self._resource_pool()
        actor_group = self._actor_group(pool)
        initialising = actor_group.execute_all_async("init_model")
        environment.config = services.result()
        self._timer.mark()
        runner = self._stack.enter_context(asyncio.Runner())
        self._stack.callback(lambda: runner.run(environment.close()))
        if environment.starts_services:  # otherwise it was asked before anything started
            refuse(runner.run(environment.preflight()))
            self._timer.mark()
        rollout_group = self._rollout_group(pool, environment)
        self._await([*self._watchdog.targets, *initialising, *rollout_group.execute_all_async("init_model")])
        parts = (config, environment, inputs.tokenizer, inputs.train_set, inputs.val_set, actor_group, rollout_group)
        return TrainerParts(*parts, runner, self._directory, tracking, self._timer, self._watchdog)

    def _await(self, pending: list[ray.ObjectRef]) -> None:
        """Each worker that has come up, or has loaded its model, is progress. Raises the first error."""
        while pending:
            done, pending = ray.wait(pending)
            ray.get(done)
            self._timer.mark()

    def _tracking(self) -> Tracking:
        trainer = self._config.trainer
        names = (trainer.project_name, trainer.experiment_name)
        tracking = Tracking(*names, trainer.logger, self._composed.plain, self._directory.path)
        self._stack.callback(lambda: tracking.finish(self._exit_code))
        return tracking

    def _start_ray(self) -> None:
        """Joins the cluster of RAY_ADDRESS, or starts a private Ray on this machine.

        Raises ValueError when the cluster has less than the run asks for.
        """
        trainer = self._config.trainer
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        if os.environ.get("RAY_ADDRESS"):
            ray.init(log_to_driver=False, logging_level=logging.ERROR)
        else:
            store = trainer.object_store_megabytes
            ray.init(
                address="local",
                num_cpus=max(os.cpu_count() or 1, trainer.ranks_per_node * trainer.nnodes),
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                object_store_memory=store << 20 if store else None,
            )
        signal.signal(signal.SIGTERM, _interrupt)  # Ray has put a handler of its own there
        self._stack.callback(ray.shutdown)
        problem = cluster_problem(trainer, ray.cluster_resources())
        refuse([problem] if problem else [])

    def _resource_pool(self) -> RayResourcePool:
        trainer = self._config.trainer
        return RayResourcePool(
            [trainer.ranks_per_node] * trainer.nnodes,
            use_gpu=trainer.n_gpus_per_node > 0,
            max_colocate_count=2,
            name_prefix="pool",
        )

    def _actor_group(self, pool: RayResourcePool) -> RayWorkerGroup:
        config = self._config
        worker_config = TrainingWorkerConfig(
            model_path=resolve_path(config.actor_rollout_ref.model.path),
            model=config.actor_rollout_ref.model,
            actor=config.actor_rollout_ref.actor,
            ref=config.actor_rollout_ref.ref,
            rollout=config.actor_rollout_ref.rollout,
            loss=ActorLoss.of(config.actor_rollout_ref.actor),
            total_training_steps=config.trainer.total_training_steps,
            num_threads=config.trainer.num_threads,
            device=device_name(config),
            run_dir=str(self._directory.path),
            needs_reference=config.needs_reference,
            critic=config.critic if config.algorithm.needs_critic else None,
            critic_loss=CriticLoss.of(config.critic) if config.algorithm.needs_critic else None,
            critic_warmup=config.trainer.critic_warmup if config.algorithm.needs_critic else 0,
        )
        group = RayWorkerGroup(pool, RayClassWithInitArgs(ray.remote(TrainingWorker), worker_config))
        self._stack.callback(group.shutdown)
        self._watch(group)
        return group

    def _rollout_group(self, pool: RayResourcePool, environment: AgentLoop[Any]) -> RayWorkerGroup:
        group = RayWorkerGroup(pool, RayClassWithInitArgs(ray.remote(RolloutWorker), self._spec(environment)))
        self._stack.callback(group.shutdown)
        self._watch(group)
        return group

    def _watch(self, group: RayWorkerGroup) -> None:
        name = group.ray_cls_with_init.user_cls.__name__
        logs = str(self._directory.path / "logs")
        self._watchdog.watch(name, group.execute_all_async("dump_stacks_on_signal", logs))

    def _spec(self, environment: AgentLoop[Any]) -> RolloutSpec:
        config = self._config
        return RolloutSpec(
            model_path=resolve_path(config.actor_rollout_ref.model.path),
            trust_remote_code=config.actor_rollout_ref.model.trust_remote_code,
            chat_template=config.data.chat_template,
            rollout=config.actor_rollout_ref.rollout,
            limits=rollout_limits(config),
            max_prompt_length=config.data.max_prompt_length,
            environment=config.environment.path,
            environment_config=environment.config,
            custom_reward=config.custom_reward_function,
            seed=config.trainer.seed,
            total_steps=config.trainer.total_training_steps,
            test_freq=environment.context.test_freq,
            run_dir=str(self._directory.path),
            device=device_name(config),
        )
