"""Registries of advantage estimators and policy losses, under the names verl's users know."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any, Generic, Protocol, TypeVar

import torch

AdvantageFn = Callable[..., tuple[torch.Tensor, torch.Tensor]]
F = TypeVar("F", bound=AdvantageFn)


class AdvantageEstimator(StrEnum):
    """Names of the estimators that come with the library."""

    GAE = "gae"
    GRPO = "grpo"
    REINFORCE = "reinforce"
    REINFORCE_PLUS_PLUS = "reinforce_plus_plus"
    REINFORCE_PLUS_PLUS_BASELINE = "reinforce_plus_plus_baseline"
    RLOO = "rloo"


class PolicyLossFn(Protocol):
    """A policy loss over one micro-batch; the tensors are (n, r).

    ``config`` reads as a mapping and holds the actor's settings and ``global_batch_info``, the
    keyword arguments that make :func:`agg_loss` divide by the counts of the whole batch. Returns
    the loss and metrics, the latter means over the trained tokens of the micro-batch.
    """

    def __call__(
        self,
        old_log_prob: torch.Tensor,
        log_prob: torch.Tensor,
        advantages: torch.Tensor,
        response_mask: torch.Tensor,
        loss_agg_mode: str = ...,
        config: Any = ...,
        rollout_is_weights: torch.Tensor | None = ...,
    ) -> tuple[torch.Tensor, Mapping[str, float]]: ...


T = TypeVar("T")
P = TypeVar("P", bound=PolicyLossFn)


class _Registry(Generic[T]):
    """Functions by name."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._entries: dict[str, T] = {}

    def add(self, name: str, function: T) -> None:
        if self._entries.get(name, function) is not function:
            raise ValueError(f"the {self._kind} {name!r} is registered already")
        self._entries[name] = function

    def get(self, name: str) -> T:
        if name not in self._entries:
            raise ValueError(f"unknown {self._kind} {name!r}; known: {', '.join(sorted(self._entries))}")
        return self._entries[name]


_ADVANTAGE_ESTIMATORS: _Registry[AdvantageFn] = _Registry("advantage estimator")
_POLICY_LOSSES: _Registry[PolicyLossFn] = _Registry("policy loss")


def register_adv_est(name_or_enum: str | AdvantageEstimator) -> Callable[[F], F]:
    """Decorator: makes an estimator known. Raises ValueError if the name is taken by another function."""

    def decorate(function: F) -> F:
        _ADVANTAGE_ESTIMATORS.add(str(name_or_enum), function)
        return function

    return decorate


def get_adv_estimator_fn(name_or_enum: str | AdvantageEstimator) -> AdvantageFn:
    """Raises ValueError naming the known estimators."""
    return _ADVANTAGE_ESTIMATORS.get(str(name_or_enum))


def register_policy_loss(name: str) -> Callable[[P], P]:
    """Decorator: makes a policy loss known. Raises ValueError if the name is taken by another function."""

    def decorate(function: P) -> P:
        _POLICY_LOSSES.add(name, function)
        return function

    return decorate


def get_policy_loss_fn(name: str) -> PolicyLossFn:
    """Raises ValueError naming the known losses."""
    return _POLICY_LOSSES.get(name)
