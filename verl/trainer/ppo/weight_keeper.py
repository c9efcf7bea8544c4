"""Which weights of the policy stay on disk: the last and those of the best validation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import ray
from ray.exceptions import RayError

from verl.single_controller.ray import RayWorkerGroup
from verl.trainer.config import TrainerConfig

LAST, BEST = "last", "best"

_SECONDS_AFTER_A_FAILURE = 300.0
"""A worker that hangs must not keep a failed run alive."""


class WeightKeeper:
    """Writes Hugging Face checkpoints below ``directory``, each complete or not at all.

    ``best_step`` is the step of the best validation so far, step 0 being the policy before training, which
    is not written again; None before any validation.
    """

    def __init__(
        self, config: TrainerConfig, actor_group: RayWorkerGroup, directory: Path, stop_strings: Sequence[str]
    ) -> None:
        self._config = config
        self._actor_group = actor_group
        self._directory = directory
        self._stop_strings = tuple(stop_strings)
        self._last_saved = 0
        self.best_step: int | None = None
        self.best_score = -math.inf

    def after_validation(self, step: int, score: float) -> None:
        """Keeps the weights of ``step`` if no earlier validation scored as high."""
        if not score > self.best_score:
            return
        self.best_step, self.best_score = step, score
        if step and self._config.save_best:
            self._write(BEST)

    def after_step(self, step: int) -> None:
        last = step == self._config.total_training_steps
        due = self._config.save_freq and step % self._config.save_freq == 0
        if (last and self._config.save_last) or due:
            self._write(LAST)
            self._last_saved = step

    def after_failure(self, steps_done: int) -> None:
        """Keeps what was learned in a run that ends early; says so where the workers cannot give it any more."""
        if not self._config.save_last or steps_done == self._last_saved:
            return
        try:
            self._write(LAST, _SECONDS_AFTER_A_FAILURE)
        except (RayError, OSError) as error:
            print(f"the weights after step {steps_done} could not be written: {type(error).__name__}", flush=True)
        else:
            print(f"the weights after step {steps_done} are in {self._directory / LAST}", flush=True)

    def _write(self, name: str, timeout: float | None = None) -> None:
        target = str(self._directory / name)
        ray.get(self._actor_group.execute_all_async("save_hf", target, self._stop_strings), timeout=timeout)
