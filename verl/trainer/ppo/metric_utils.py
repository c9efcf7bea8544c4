"""The trainer's own metrics; docs/metrics.md defines each by name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from verl.agent_loop.trajectory import Trajectory, TrajectoryStatus
from verl.protocol import DataProto


def compute_trajectory_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Statuses, rewards and token counts of a step's trajectories, failed ones only counted."""
    counts = Counter(t.status for t in trajectories)
    valid = [t for t in trajectories if not t.lost]
    metrics = {f"status/{status.value}": counts[status] / len(trajectories) for status in TrajectoryStatus}
    metrics["rollout/trajectories"] = len(trajectories)
    metrics["rollout/infrastructure_failed"] = counts[TrajectoryStatus.INFRASTRUCTURE_FAILED]
    metrics |= _spread("reward", [t.reward for t in valid])
    metrics |= _spread("prompt_length", [len(t.prompt_ids) for t in valid])
    metrics |= _spread("response_length/policy", [t.policy_tokens for t in valid])
    return metrics | _spread("response_length/observation", [t.observation_tokens for t in valid])


def _spread(name: str, values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    array = np.asarray(values, dtype=np.float64)
    return {f"{name}/mean": float(array.mean()), f"{name}/min": float(array.min()), f"{name}/max": float(array.max())}


def compute_data_metrics(batch: DataProto, use_critic: bool = False) -> dict[str, float]:
    """verl's names for scores, rewards, advantages and returns; the latter two over policy tokens only."""
    tensors = batch.batch
    assert tensors is not None
    mask = tensors["response_mask"].bool()
    scores = tensors["token_level_scores"].sum(-1)
    rewards = tensors["token_level_rewards"].sum(-1)
    metrics = _tensor_spread("critic/score", scores) | _tensor_spread("critic/rewards", rewards)
    metrics |= _tensor_spread("critic/advantages", tensors["advantages"][mask])
    metrics |= _tensor_spread("critic/returns", tensors["returns"][mask])
    if use_critic:
        metrics |= _tensor_spread("critic/values", tensors["values"][mask])
    return metrics


def _tensor_spread(name: str, values: torch.Tensor) -> dict[str, float]:
    return _spread(name, values.double().tolist())


def compute_group_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Share of groups whose rewards are all equal, and which therefore teach nothing."""
    groups: dict[str, list[float]] = {}
    for trajectory in trajectories:
        groups.setdefault(trajectory.uid, []).append(trajectory.reward)
    equal = sum(max(rewards) == min(rewards) for rewards in groups.values())
    return {"group/count": len(groups), "group/zero_variance": equal / len(groups) if groups else 0.0}


def compute_timing_metrics(seconds: Mapping[str, float]) -> dict[str, float]:
    return {f"timing_s/{name}": value for name, value in seconds.items()}


def reduce_metrics(metrics: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Lists as one number each: the maximum where the name has "max", the minimum for "min", else the mean."""
    return {name: _reduce(name, np.asarray(values, dtype=np.float64)) for name, values in metrics.items()}


def _reduce(name: str, values: np.ndarray) -> float:
    return float(values.max() if "max" in name else values.min() if "min" in name else values.mean())
