"""The driver: the algorithm, a phase a line."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

from verl.agent_loop.base import TRAIN
from verl.agent_loop.stream import TrajectoryStream
from verl.agent_loop.trajectory import Trajectory
from verl.agent_loop.worker import BEGIN, END
from verl.protocol import DataProto
from verl.trainer.ppo.core_algos import get_adv_estimator_fn
from verl.trainer.ppo.metric_utils import (
    compute_data_metrics,
    compute_group_metrics,
    compute_timing_metrics,
    compute_trajectory_metrics,
    reduce_metrics,
)
from verl.trainer.ppo.parts import TrainerParts
from verl.trainer.ppo.rollout import failures_by_type, make_tasks, run_tasks, without_lost
from verl.trainer.ppo.rollout_batch import deal_by_length, to_data_proto
from verl.trainer.ppo.validation import Validator
from verl.trainer.timing import covered_seconds
from verl.utils.dataset.rl_dataset import StatefulLoader
from verl.workers.rollout.engine import InfrastructureError, SamplingParams

_COMPUTING = tuple(f"perf/{name}_seconds" for name in ("rollout", "old_log_prob", "reference", "update_actor"))
"""Seconds in which something generated, searched, scored or trained; the rest of a step is overhead."""


class RayPPOTrainer:
    """T steps, each a rollout followed by its update; validation before, in between and after."""

    def __init__(self, parts: TrainerParts) -> None:
        config = parts.config
        rollout = config.actor_rollout_ref.rollout
        self._parts = parts
        self._config = config
        self._timer = parts.timer
        self._estimator = get_adv_estimator_fn(config.algorithm.adv_estimator)
        self._stream = TrajectoryStream(parts.rollout_group.workers, stall_seconds=2.5 * rollout.trajectory_timeout)
        self._loader = StatefulLoader(
            len(parts.train_set), config.data.train_batch_size, config.trainer.seed, config.data.shuffle
        )
        self._sampling = SamplingParams(temperature=rollout.temperature, max_tokens=rollout.max_turn_length)
        self.validator = Validator(parts, self._stream)
        self.failures: Counter[str] = Counter()
        self.steps_done = 0
        self._step_began = time.perf_counter()

    def fit(self) -> None:
        """Trains to ``total_training_steps``; failures by type are in ``failures`` whatever ends it."""
        trainer = self._config.trainer
        self._step_began = time.perf_counter()
        if trainer.val_before_train:
            self._validate(0)
        for step in range(1, trainer.total_training_steps + 1):
            self._train_step(step)
            if step == trainer.total_training_steps or (trainer.test_freq and step % trainer.test_freq == 0):
                self._validate(step)
        if trainer.save_last:
            with self._timer.phase("save"):
                target = str(self._parts.run.path / "checkpoints" / "last")
                self._parts.actor_group.save_hf(target, self._parts.environment.stop_strings)

    def _train_step(self, step: int) -> None:
        with self._timer.phase("rollout"):
            trajectories = self._rollout(step)
        with self._timer.phase("collate"):
            ranks = self._config.trainer.ranks_per_node * self._config.trainer.nnodes
            valid = deal_by_length(self._without_failures(trajectories), ranks)
            batch = to_data_proto(valid, self._parts.tokenizer.pad_token_id, self._sampling.temperature)
            batch.meta_info["global_steps"] = step
        batch, old_seconds = self._add_old_log_probs(batch)
        batch, reference_seconds = self._add_reference(batch)
        with self._timer.phase("advantage"):
            batch = self._add_advantages(batch, valid)
        with self._timer.phase("update_actor"):
            actor_metrics = self._update_actor(batch)
        with self._timer.phase("sync_weights"):
            self._parts.actor_group.send_weights(self._parts.rollout_group.workers, step)
        self.steps_done = step
        with self._timer.phase("log"):
            metrics = compute_data_metrics(batch) | actor_metrics | self._rollout_metrics(trajectories, valid)
            self._dump(step, trajectories)
        self._log(step, metrics | old_seconds | reference_seconds)

    def _rollout(self, step: int) -> list[Trajectory]:
        """All trajectories of the step, in the order of the batch's rows and samples, whatever finished first."""
        prompts = [self._parts.train_set[index].prompt(step) for index in self._loader.next_batch()]
        seed, n = self._config.trainer.seed, self._config.actor_rollout_ref.rollout.n
        return run_tasks(self._stream, make_tasks(prompts, n, seed, step, TRAIN, self._sampling), f"step {step}")

    def _without_failures(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        """Rows lost to the infrastructure leave before the estimator. Raises InfrastructureError above the
        configured share."""
        failed = [t for t in trajectories if t.lost]
        self.failures += failures_by_type(failed)
        limit = self._config.actor_rollout_ref.rollout.max_failed_share
        if len(failed) > limit * len(trajectories) or len(failed) == len(trajectories):
            raise InfrastructureError(
                f"{len(failed)} of {len(trajectories)} trajectories were lost to the infrastructure "
                f"(rollout.max_failed_share is {limit}); the last: {failed[-1].failure}"
            )
        return without_lost(trajectories)

    def _add_old_log_probs(self, batch: DataProto) -> tuple[DataProto, dict[str, float]]:
        """Skipped with exactly one update per batch: then the policy is its own old policy."""
        if self._updates_per_batch == 1:
            return batch, {}
        with self._timer.phase("old_log_prob"):
            return _merged(batch, self._parts.actor_group.compute_log_prob(batch))

    def _add_reference(self, batch: DataProto) -> tuple[DataProto, dict[str, float]]:
        if not self._config.actor_rollout_ref.actor.use_kl_loss:
            return batch, {}
        with self._timer.phase("reference"):
            return _merged(batch, self._parts.actor_group.compute_ref_log_prob(batch))

    def _add_advantages(self, batch: DataProto, trajectories: Sequence[Trajectory]) -> DataProto:
        tensors = batch.batch
        assert tensors is not None
        tensors["token_level_rewards"] = tensors["token_level_scores"]
        policy = self._config.algorithm.status_policy
        advantages, returns = self._estimator(
            token_level_rewards=tensors["token_level_rewards"],
            response_mask=tensors["response_mask"],
            index=batch.non_tensor_batch["uid"],
            config=self._config.algorithm,
        )
        tensors["advantages"], tensors["returns"] = advantages, returns
        for row, trajectory in enumerate(trajectories):
            if policy[trajectory.status.value] == "mask":
                tensors["response_mask"][row] = 0
        return batch

    @property
    def _updates_per_batch(self) -> int:
        actor = self._config.actor_rollout_ref.actor
        return actor.ppo_epochs * -(-self._config.data.train_batch_size // self._mini_batch_prompts)

    @property
    def _mini_batch_prompts(self) -> int:
        return self._config.actor_rollout_ref.actor.ppo_mini_batch_size or self._config.data.train_batch_size

    def _update_actor(self, batch: DataProto) -> dict[str, float]:
        """``ppo_epochs`` passes over mini-batches of whole groups; metrics are means over the updates."""
        metrics: dict[str, list[float]] = {}
        uids = list(dict.fromkeys(batch.non_tensor_batch["uid"].tolist()))
        for _ in range(self._config.actor_rollout_ref.actor.ppo_epochs):
            for start in range(0, len(uids), self._mini_batch_prompts):
                chosen = set(uids[start : start + self._mini_batch_prompts])
                rows = [i for i, uid in enumerate(batch.non_tensor_batch["uid"]) if uid in chosen]
                mini_batch = batch if len(chosen) == len(uids) else batch.select_idxs(rows)
                for name, value in self._parts.actor_group.update_actor(mini_batch).meta_info["metrics"].items():
                    metrics.setdefault(name, []).append(value)
        return reduce_metrics(metrics)

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
        line = (
            f"step {step:>3}/{self._config.trainer.total_training_steps} | reward {metrics['reward/mean']:.3f} | "
            f"{self._parts.environment.headline(metrics)} | kl {metrics.get('actor/kl_loss', 0.0):.4f} | "
            f"entropy {metrics.get('actor/entropy', 0.0):.3f} | {seconds:.1f} s"
        )
        timing = compute_timing_metrics({**self._timer.take_step(), "step": seconds})
        overhead = {"perf/overhead_share": 1 - sum(metrics[name] for name in _COMPUTING if name in metrics) / seconds}
        with self._timer.phase("log"):
            self._parts.tracking.log(metrics | timing | overhead, step, line)

    def _validate(self, step: int) -> None:
        if self._parts.val_set is None:
            return
        with self._timer.phase("validate"):
            metrics = self.validator.run(step, last=step == self._config.trainer.total_training_steps)
        self._parts.tracking.log(metrics, step, self.validator.line(step, metrics))
        self._timer.take_step()
        self._step_began = time.perf_counter()


def _merged(batch: DataProto, scores: DataProto) -> tuple[DataProto, dict[str, float]]:
    """The batch with what workers computed on it, and their metrics, each gathered from all ranks."""
    metrics = reduce_metrics(scores.meta_info.pop("metrics"))
    return batch.union(scores), metrics
