"""Held-out evaluation under each of the environment's validation modes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from verl.agent_loop.base import RolloutTask, ScoredRow, scores_by_row
from verl.agent_loop.stream import TrajectoryStream
from verl.agent_loop.trajectory import Trajectory
from verl.trainer.config import PPOTrainerConfig
from verl.trainer.ppo.metric_utils import compute_trajectory_metrics
from verl.trainer.ppo.parts import TrainerParts
from verl.trainer.ppo.rollout import check_failed_share, failures_by_type, make_tasks, run_tasks, without_lost
from verl.utils.dataset.rl_dataset import RLHFDataset
from verl.utils.intervals import bootstrap_mean
from verl.workers.rollout.engine import SamplingParams

VALIDATION_STEP = 0
"""Validation draws with the keys of step 0 at every step: what differs between two validations is the policy."""


class Validator:
    """Scores every row of the development split ``val_kwargs.n`` times per mode.

    ``first`` is the validation before training, empty without one; ``last`` the most recent one.
    ``score`` is the mean reward of the last validation in the environment's first mode, by which the best
    weights are chosen; NaN where rows were lost to the infrastructure, for what is left may be the easier part.
    """

    def __init__(self, parts: TrainerParts, stream: TrajectoryStream) -> None:
        self._parts = parts
        self._stream = stream
        self.first: dict[str, list[ScoredRow]] = {}
        self.last: dict[str, list[ScoredRow]] = {}
        self.probe: dict[str, float] = {}
        self.metrics: dict[str, float] = {}
        self.score = float("nan")
        self.failures: Counter[str] = Counter()

    def run(self, step: int, last: bool) -> dict[str, float]:
        """Metrics under ``val/{mode}/…``; with ``val_every_mode`` false only the first mode is run in between."""
        modes = self._parts.environment.validation_modes
        modes = modes if step == 0 or last or self._parts.config.trainer.val_every_mode else modes[:1]
        results = {mode: self._run_mode(step, mode) for mode in modes}
        metrics = {f"val/{m}/{k}": v for m, rows in results.items() for k, v in self._mode_metrics(rows).items()}
        self.probe = self._parts.runner.run(self._parts.environment.probe(without_lost(results[modes[0]])))
        scored = {mode: [_scored(t) for t in without_lost(rows)] for mode, rows in results.items()}
        self.first = scored if step == 0 else self.first
        self.last = scored
        complete = not any(t.lost for t in results[modes[0]])
        self.score = metrics[f"val/{modes[0]}/reward/mean"] if complete else float("nan")
        self.metrics = metrics | {f"val/{k}": v for k, v in self.probe.items()}
        return self.metrics

    def _run_mode(self, step: int, mode: str) -> list[Trajectory]:
        assert self._parts.val_set is not None
        tasks = validation_tasks(self._parts.config, self._parts.val_set, mode)
        trajectories = run_tasks(self._stream, tasks, f"validation {mode}")
        self._parts.run.write_trajectories(f"validation_{step:06d}_{mode}", trajectories, self._parts.tokenizer)
        self.failures += failures_by_type(trajectories)
        check_failed_share(trajectories, self._parts.config.actor_rollout_ref.rollout.max_failed_share)
        return trajectories

    def _mode_metrics(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """Of all rows, and of each data set under ``source/{data_source}/…``."""
        scored = [_scored(t) for t in without_lost(trajectories)]
        metrics = compute_trajectory_metrics(trajectories) | self._parts.environment.metrics(trajectories)
        metrics |= reward_interval(scored)
        for source in sorted({row.data_source for row in scored}):
            own = reward_interval([row for row in scored if row.data_source == source])
            metrics |= {f"source/{source}/{name}": value for name, value in own.items()}
        return metrics

    def line(self, step: int, metrics: Mapping[str, float]) -> str:
        """One line for a person: each mode's reward with its interval, n of each data set where there are several."""
        modes = dict.fromkeys(name.split("/")[1] for name in metrics if name.endswith("/reward/low95"))
        first = f"val/{next(iter(modes))}/"
        sources = {
            name.removeprefix(first + "source/").removesuffix("/n"): value
            for name, value in metrics.items()
            if name.startswith(first + "source/") and name.endswith("/n")
        }
        by_source = "; " + ", ".join(f"{s} {n:.0f}" for s, n in sources.items()) if len(sources) > 1 else ""
        scores = " | ".join(
            f"{mode}: reward {metrics[f'val/{mode}/reward/mean']:.3f} "
            f"[{metrics[f'val/{mode}/reward/low95']:.3f}, {metrics[f'val/{mode}/reward/high95']:.3f}]"
            for mode in modes
        )
        return f"held-out after step {step} (n = {metrics[first + 'n']:.0f}{by_source}) | {scores}"


def reward_interval(rows: Sequence[ScoredRow]) -> dict[str, float]:
    """Mean reward with its 95 % bootstrap interval over data rows, and their number ``n``. Rows lost to the
    infrastructure have no score and lower ``n``."""
    interval = bootstrap_mean(list(scores_by_row(rows, "reward").values()))
    bounds = {"reward/low95": interval.low, "reward/high95": interval.high, "n": float(interval.n)}
    return {"reward/mean": interval.mean, **bounds}


def validation_tasks(config: PPOTrainerConfig, rows: RLHFDataset, mode: str) -> list[RolloutTask]:
    """One task per row and sample, drawn with the same keys at every validation."""
    kwargs = config.actor_rollout_ref.rollout.val_kwargs
    sampling = SamplingParams(
        temperature=kwargs.temperature if kwargs.do_sample else 0.0,
        top_p=kwargs.top_p,
        max_tokens=config.actor_rollout_ref.rollout.max_turn_length,
    )
    prompts = [row.prompt(VALIDATION_STEP) for row in rows.rows]
    return make_tasks(prompts, kwargs.n, config.trainer.seed, VALIDATION_STEP, mode, sampling)


def _scored(trajectory: Trajectory) -> ScoredRow:
    scores = {"reward": trajectory.reward, **trajectory.reward_extra}
    return ScoredRow(trajectory.uid, trajectory.sample, trajectory.data_source, scores)
