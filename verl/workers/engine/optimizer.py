"""AdamW, its learning-rate schedule and the gradient norm of sharded parameters."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from verl.workers.config import OptimConfig


def learning_rate(config: OptimConfig, step: int, total_steps: int) -> float:
    """The rate of training step ``step`` of ``total_steps``, both counted from 1.

    Warm-up is linear and reaches ``lr`` at step ``lr_warmup_steps``. After it the rate is constant,
    or falls along half a cosine that would reach ``min_lr_ratio * lr`` one step after the last, so
    that no step is spent at a rate of 0. Raises ValueError for a step outside 1..total_steps.
    """
    if not 1 <= step <= total_steps:
        raise ValueError(f"step {step} is not one of 1..{total_steps}")
    if step <= config.lr_warmup_steps:
        return config.lr * step / config.lr_warmup_steps
    if config.warmup_style == "constant":
        return config.lr
    peak = max(config.lr_warmup_steps, 1)
    progress = (step - peak) / (total_steps + 1 - peak)
    floor = config.min_lr_ratio
    return config.lr * (floor + (1 - floor) * (1 + math.cos(math.pi * progress)) / 2)


def build_optimizer(parameters: Iterable[torch.nn.Parameter], config: OptimConfig) -> torch.optim.AdamW:
    """AdamW on float32 masters. The rate is set before every step."""
    return torch.optim.AdamW(parameters, lr=config.lr, betas=config.betas, weight_decay=config.weight_decay, fused=True)


def clip_grad_norm(parameters: Iterable[torch.nn.Parameter], max_norm: float, group: dist.ProcessGroup) -> float:
    """Scales the gradients, sharded over ``group``, to a global 2-norm of at most ``max_norm``.

    Returns the norm before scaling. One that is not finite leaves the gradients as they are.
    """
    shards = [_local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    squares = torch.stack(torch._foreach_norm(shards)).double().square().sum()
    dist.all_reduce(squares, group=group)
    norm = math.sqrt(squares.item()) if torch.isfinite(squares) else math.inf
    if max_norm < norm < math.inf:
        torch._foreach_mul_(shards, max_norm / norm)
    return norm


def _local(gradient: torch.Tensor) -> torch.Tensor:
    assert isinstance(gradient, DTensor)
    return gradient.to_local()
