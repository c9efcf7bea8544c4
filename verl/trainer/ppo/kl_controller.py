"""The coefficient of the KL penalty in the reward: fixed, or steered towards a target."""

from __future__ import annotations

from verl.trainer.config import KLControlConfig

_MAX_ERROR = 0.2
"""Largest relative distance from the target that counts in one update."""


class AdaptiveKLController:
    """Proportional control in log space (Ziegler et al., arXiv 1909.08593, section 2.2)."""

    def __init__(self, init_kl_coef: float, target_kl: float, horizon: int) -> None:
        """``target_kl`` in the unit of the KL it is given, ``horizon`` in that of ``n_steps``."""
        self.value = init_kl_coef
        self.target = target_kl
        self.horizon = horizon

    def update(self, current_kl: float, n_steps: int) -> None:
        """Raises the coefficient above the target, lowers it below, the more so the more steps went by."""
        error = max(-_MAX_ERROR, min(_MAX_ERROR, current_kl / self.target - 1))
        self.value *= 1 + error * n_steps / self.horizon


class FixedKLController:
    """A coefficient that stays."""

    def __init__(self, kl_coef: float) -> None:
        self.value = kl_coef

    def update(self, current_kl: float, n_steps: int) -> None:
        """Changes nothing."""


KLController = AdaptiveKLController | FixedKLController


def get_kl_controller(kl_ctrl: KLControlConfig) -> KLController:
    """The controller of ``algorithm.kl_ctrl``. Raises ValueError for an unknown type."""
    match kl_ctrl.type:
        case "fixed":
            return FixedKLController(kl_ctrl.kl_coef)
        case "adaptive":
            return AdaptiveKLController(kl_ctrl.kl_coef, kl_ctrl.target_kl, kl_ctrl.horizon)
    raise ValueError(f"unknown algorithm.kl_ctrl.type {kl_ctrl.type!r}; known: fixed, adaptive")
