from __future__ import annotations

import pytest

from verl.trainer.config import KLControlConfig
from verl.trainer.ppo.kl_controller import AdaptiveKLController, FixedKLController, get_kl_controller


def after(current_kl: float, n_steps: int = 100) -> float:
    controller = AdaptiveKLController(init_kl_coef=0.5, target_kl=2.0, horizon=1000)
    controller.update(current_kl, n_steps)
    return controller.value


def test_the_adaptive_coefficient_by_value() -> None:
    assert after(2.0) == 0.5
    assert after(2.2) == pytest.approx(0.5 * (1 + 0.1 * 0.1))
    assert after(1.8) == pytest.approx(0.5 * (1 - 0.1 * 0.1))
    assert after(2.2, n_steps=50) == pytest.approx(0.5 * (1 + 0.1 * 0.05))


def test_an_error_counts_as_a_fifth_at_most() -> None:
    assert after(200.0) == after(2.4 + 1e-9) == pytest.approx(0.5 * (1 + 0.2 * 0.1))
    assert after(-3.0) == after(1.6 - 1e-9) == pytest.approx(0.5 * (1 - 0.2 * 0.1))


def test_updates_multiply() -> None:
    controller = AdaptiveKLController(1.0, 1.0, 10)
    for _ in range(3):
        controller.update(5.0, 1)
    assert controller.value == pytest.approx(1.02**3)


def test_the_fixed_coefficient_stays() -> None:
    controller = FixedKLController(kl_coef=0.25)
    controller.update(current_kl=9.0, n_steps=1000)
    assert controller.value == 0.25


def test_chosen_by_configuration() -> None:
    adaptive = get_kl_controller(KLControlConfig(type="adaptive", kl_coef=0.1, target_kl=3.0, horizon=7))
    assert isinstance(adaptive, AdaptiveKLController)
    assert (adaptive.value, adaptive.target, adaptive.horizon) == (0.1, 3.0, 7)
    fixed = get_kl_controller(KLControlConfig(kl_coef=0.3))
    assert isinstance(fixed, FixedKLController)
    assert fixed.value == 0.3
    with pytest.raises(ValueError, match=r"'pid'.*fixed, adaptive"):
        get_kl_controller(KLControlConfig(type="pid"))  # type: ignore[arg-type]
