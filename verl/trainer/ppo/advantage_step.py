"""From scores to advantages: the part of a step that the driver computes itself."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from verl.agent_loop.trajectory import Trajectory
from verl.protocol import DataProto
from verl.trainer.config import AlgorithmConfig
from verl.trainer.ppo.core_algos import get_adv_estimator_fn, get_kl_controller
from verl.trainer.ppo.kl_reward import apply_kl_penalty
from verl.trainer.ppo.registry import AdvantageFn


class AdvantageStep:
    """KL penalty in the reward, then the estimator, then the statuses that are not trained.

    Reads ``token_level_scores``, ``response_mask`` and ``uid``, with a critic ``values``, with KL in the reward
    ``old_log_probs`` and ``ref_log_prob``. Writes ``token_level_rewards``, ``advantages`` and ``returns``.
    """

    def __init__(self, config: AlgorithmConfig) -> None:
        """Raises ValueError for an unknown estimator."""
        self._config = config
        self._estimator = get_adv_estimator_fn(config.adv_estimator)
        self._kl_controller = get_kl_controller(config.kl_ctrl)

    def run(self, batch: DataProto, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """Adds to ``batch``, whose rows are ``trajectories``; returns metrics of the KL penalty."""
        tensors = batch.batch
        assert tensors is not None
        metrics = self._add_rewards(tensors)
        given = {key: tensors[key] for key in ("token_level_rewards", "response_mask", "values") if key in tensors}
        given |= {"index": batch.non_tensor_batch["uid"], "config": self._config}
        given |= {"gamma": self._config.gamma, "lam": self._config.lam}
        given["norm_adv_by_std_in_grpo"] = self._config.norm_adv_by_std_in_grpo
        tensors["advantages"], tensors["returns"] = self._estimator(**accepted(self._estimator, given))
        for row, trajectory in enumerate(trajectories):
            if self._config.status_policy[trajectory.status.value] == "mask":
                tensors["response_mask"][row] = 0
        return metrics

    def _add_rewards(self, tensors: Any) -> dict[str, float]:
        scores = tensors["token_level_scores"]
        if not self._config.use_kl_in_reward:
            tensors["token_level_rewards"] = scores
            return {}
        coefficient = self._kl_controller.value
        old, reference, mask = (tensors[key] for key in ("old_log_probs", "ref_log_prob", "response_mask"))
        tensors["token_level_rewards"], kl = apply_kl_penalty(scores, old, reference, mask, coefficient)
        self._kl_controller.update(kl, len(scores))
        return {"actor/reward_kl_penalty": kl, "actor/reward_kl_penalty_coeff": coefficient}


def accepted(function: AdvantageFn, given: Mapping[str, Any]) -> dict[str, Any]:
    """Those of ``given`` that ``function`` takes: estimators differ in what they read."""
    parameters = inspect.signature(function).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return dict(given)
    return {name: value for name, value in given.items() if name in parameters}
