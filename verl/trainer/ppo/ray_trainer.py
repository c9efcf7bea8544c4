"""The driver: the algorithm, a phase a line."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from verl.agent_loop.base import TRAIN
from verl.agent_loop.stream import TrajectoryStream
from verl.agent_loop.trajectory import Trajectory
from verl.agent_loop.worker import BEGIN, END
from verl.protocol import DataProto
from verl.trainer.alarms import Alarms, trainer_rules
from verl.trainer.config import ActorConfig, CriticConfig
from verl.trainer.ppo.advantage_step import AdvantageStep
from verl.trainer.ppo.metric_utils import (
    compute_data_metrics,
    compute_group_metrics,
    compute_timing_metrics,
    compute_trajectory_metrics,
    reduce_metrics,
)
from verl.trainer.ppo.mini_batches import mini_batches, updates_per_batch
from verl.trainer.ppo.parts import TrainerParts
from verl.trainer.ppo.rollout import check_failed_share, failures_by_type, make_tasks, run_tasks, without_lost
from verl.trainer.ppo.rollout_batch import deal_by_length, to_data_proto
from verl.trainer.ppo.validation import Validator
from verl.trainer.ppo.weight_keeper import WeightKeeper
from verl.trainer.timing import covered_seconds
from verl.trainer.watchdog import STALL_FACTOR
from verl.utils.dataset.rl_dataset import StatefulLoader
from verl.workers.rollout.engine import SamplingParams

_COMPUTING_PHASES = ("rollout", "old_log_prob", "reference", "values", "update_critic", "update_actor")
_COMPUTING = tuple(f"perf/{name}_seconds" for name in _COMPUTING_PHASES)
"""Seconds in which something generated, searched, scored or trained; the rest of a step is overhead."""


class RayPPOTrainer:
    """T steps, each a rollout followed by its update(s); validation before, in between and after."""

    def __init__(self, parts: TrainerParts) -> None:
        """Raises ValueError for an unknown estimator."""
        config = parts.config
        rollout = config.actor_rollout_ref.rollout
        self._parts = parts
        self._config = config
        self._timer = parts.timer
        self._advantages = AdvantageStep(config.algorithm)
        self._stream = TrajectoryStream(
            parts.rollout_group.workers, STALL_FACTOR * rollout.trajectory_timeout, self._timer.mark
        )
        self._loader = StatefulLoader(
            len(parts.train_set), config.data.train_batch_size, config.trainer.seed, config.data.shuffle
        )
        self._sampling = SamplingParams(temperature=rollout.temperature, max_tokens=rollout.max_turn_length)
        self.validator = Validator(parts, self._stream)
        self.weights = WeightKeeper(
            config.trainer, parts.actor_group, parts.run.path / "checkpoints", parts.environment.stop_strings
        )
        alarms = config.trainer.alarms
        self.alarms = Alarms([*trainer_rules(alarms), *parts.environment.alarm_rules()], alarms.steps)
        self.failures: Counter[str] = Counter()
        self.steps_done = 0
        self._step_began = time.perf_counter()

    def fit(self) -> None:
        """Trains to ``total_training_steps``; failures by type are in ``failures`` whatever ends it."""
        trainer = self._config.trainer
        self._step_began = time.perf_counter()
        if trainer.val_before_train or trainer.val_only:
            self._validate(0)
        if trainer.val_only:
            return
        for step in range(1, trainer.total_training_steps + 1):
            self._train_step(step)
            if step == trainer.total_training_steps or (trainer.test_freq and step % trainer.test_freq == 0):
                self._validate(step)
            with self._timer.phase("save"):
                self.weights.after_step(step)

    def _train_step(self, step: int) -> None:
        with self._timer.phase("rollout"):
            trajectories = self._rollout(step)
        with self._timer.phase("collate"):
            kept = self._without_failures(trajectories)
            valid = [kept[row] for row in deal_by_length([len(t.context_ids) for t in kept], self._ranks)]
            batch = to_data_proto(valid, self._parts.tokenizer.pad_token_id, self._sampling.temperature)
            batch.meta_info["global_steps"] = step
        batch, metrics = self._add_scores(batch)
        with self._timer.phase("advantage"):
            metrics |= self._advantages.run(batch, valid)
        metrics |= compute_data_metrics(batch, use_critic=self._config.algorithm.needs_critic)
        metrics |= self._update(batch, step)
        self.steps_done = step
        with self._timer.phase("log"):
            metrics |= self._rollout_metrics(trajectories, valid)
            self._dump(step, trajectories)
        self._log(step, metrics)

    def _rollout(self, step: int) -> list[Trajectory]:
        """All trajectories of the step, in the order of the batch's rows and samples, whatever finished first."""
        prompts = [self._parts.train_set[index].prompt(step) for index in self._loader.next_batch()]
        seed, n = self._config.trainer.seed, self._config.actor_rollout_ref.rollout.n
        return run_tasks(self._stream, make_tasks(prompts, n, seed, step, TRAIN, self._sampling), f"step {step}")

    def _without_failures(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        """Rows lost to the infrastructure leave before the estimator. Raises InfrastructureError above the
        configured share."""
        self.failures += failures_by_type(trajectories)
        check_failed_share(trajectories, self._config.actor_rollout_ref.rollout.max_failed_share)
        return without_lost(trajectories)

    def _add_scores(self, batch: DataProto) -> tuple[DataProto, dict[str, float]]:
        """What the estimator and the losses compare with: old log-probabilities, the reference's, values."""
        group, metrics = self._parts.actor_group, dict[str, float]()
        if self._needs_old_log_probs:
            with self._timer.phase("old_log_prob"):
                batch, metrics = _merged(batch, group.compute_log_prob(batch), metrics)
        if self._config.needs_reference:
            with self._timer.phase("reference"):
                batch, metrics = _merged(batch, group.compute_ref_log_prob(batch), metrics)
        if self._config.algorithm.needs_critic:
            with self._timer.phase("values"):
                batch, metrics = _merged(batch, group.compute_values(batch), metrics)
        return batch, metrics

    @property
    def _ranks(self) -> int:
        return self._config.trainer.ranks_per_node * self._config.trainer.nnodes

    @property
    def _needs_old_log_probs(self) -> bool:
        """Not with exactly one update per batch, unless the reward reads them: the policy is its own old policy."""
        actor = self._config.actor_rollout_ref.actor
        updates = updates_per_batch(self._config.data.train_batch_size, actor.ppo_mini_batch_size, actor.ppo_epochs)
        return updates > 1 or self._config.algorithm.use_kl_in_reward

    def _update(self, batch: DataProto, step: int) -> dict[str, float]:
        """Critic, then, after its warm-up, the actor, whose new weights go to the rollout engines."""
        metrics: dict[str, float] = {}
        group, config = self._parts.actor_group, self._config
        if config.algorithm.needs_critic:
            with self._timer.phase("update_critic"):
                metrics |= self._updates(group.update_critic, batch, config.critic, step)
        if not config.algorithm.needs_critic or step > config.trainer.critic_warmup:
            with self._timer.phase("update_actor"):
                metrics |= self._updates(group.update_actor, batch, config.actor_rollout_ref.actor, step)
            with self._timer.phase("sync_weights"):
                group.send_weights(self._parts.rollout_group.workers, step)
        return metrics

    def _updates(
        self, update: Callable[[DataProto], DataProto], batch: DataProto, config: ActorConfig | CriticConfig, step: int
    ) -> dict[str, float]:
        """All updates of one model on the batch; metrics are means over them, counts since the start the last."""
        metrics: dict[str, list[float]] = {}
        seed = (self._config.trainer.seed, step)
        sizes = (config.ppo_mini_batch_size, config.ppo_epochs, self._ranks)
        for part in mini_batches(batch, *sizes, config.shuffle, seed):
            for name, value in update(part).meta_info["metrics"].items():
                metrics.setdefault(name, []).append(value)
        counts = {name: values[-1] for name, values in metrics.items() if name.endswith("nonfinite_updates")}
        return reduce_metrics(metrics) | counts

    def _rollout_metrics(self, trajectories: Sequence[Trajectory], valid: Sequence[Trajectory]) -> dict[str, float]:
        own = compute_trajectory_metrics(trajectories) | compute_group_metrics(valid)
        own["perf/rollout_seconds"] = covered_seconds((t.timings[BEGIN], t.timings[END]) for t in trajectories)
        return own | self._parts.environment.metrics(trajectories)

    def _dump(self, step: int, trajectories: Sequence[Trajectory]) -> None:
        frequency = self._config.trainer.rollout_dump_freq
        if frequency and step % frequency == 0:
            self._parts.run.write_trajectories(f"step_{step:06d}", trajectories, self._parts.tokenizer)

    def _log(self, step: int, metrics: dict[str, float]) -> None:
        """The step's seconds reach from the end of the one before, so that logging counts too."""
        now = time.perf_counter()
        seconds, self._step_began = now - self._step_began, now
        line = self._line(step, metrics, seconds)
        timing = compute_timing_metrics({**self._timer.take_step(), "step": seconds})
        overhead = {"perf/overhead_share": 1 - sum(metrics[name] for name in _COMPUTING if name in metrics) / seconds}
        with self._timer.phase("log"):
            report = self.alarms.observe(step, metrics)
            self._parts.tracking.log(metrics | timing | overhead | report.metrics, step, line)
            for sentence in report.lines:
                print(sentence, flush=True)

    def _line(self, step: int, metrics: Mapping[str, float], seconds: float) -> str:
        """What a person reads of a step; what was not measured is left out."""
        shown = {
            "kl": metrics.get("actor/kl_loss", metrics.get("actor/reward_kl_penalty")),
            "entropy": metrics.get("actor/entropy"),
        }
        parts = [
            f"step {step:>3}/{self._config.trainer.total_training_steps}",
            f"reward {metrics['reward/mean']:.3f}",
            self._parts.environment.headline(metrics),
            *(f"{name} {value:.4f}" for name, value in shown.items() if value is not None),
            f"{seconds:.1f} s",
        ]
        return " | ".join(part for part in parts if part)

    def _validate(self, step: int) -> None:
        if self._parts.val_set is None:
            return
        with self._timer.phase("validate"):
            metrics = self.validator.run(step, last=step == self._config.trainer.total_training_steps)
        with self._timer.phase("save"):
            self.weights.after_validation(step, self.validator.score)
        self._parts.tracking.log(metrics, step, self.validator.line(step, metrics))
        self._timer.take_step()
        self._step_began = time.perf_counter()


def _merged(batch: DataProto, scores: DataProto, metrics: dict[str, float]) -> tuple[DataProto, dict[str, float]]:
    """The batch with what workers computed on it, and with their metrics, each gathered from all ranks."""
    measured = reduce_metrics(scores.meta_info.pop("metrics"))
    return batch.union(scores), metrics | measured
