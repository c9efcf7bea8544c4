from __future__ import annotations

import math

import pytest
import torch

from verl.trainer.ppo.kl import kl_penalty

ESTIMATES = {
    "kl": lambda d: d,
    "k1": lambda d: d,
    "abs": abs,
    "mse": lambda d: d * d / 2,
    "k2": lambda d: d * d / 2,
    "low_var_kl": lambda d: math.exp(-d) - 1 + d,
    "k3": lambda d: math.exp(-d) - 1 + d,
}


@pytest.mark.parametrize("name", ESTIMATES)
@pytest.mark.parametrize("suffix", ["", "+"])
@pytest.mark.parametrize(("policy", "reference"), [(-1.0, -3.0), (-3.0, -1.0), (-2.0, -2.0)])
def test_values(name: str, suffix: str, policy: float, reference: float) -> None:
    estimate = kl_penalty(torch.tensor([policy]), torch.tensor([reference]), name + suffix)
    assert estimate.item() == pytest.approx(ESTIMATES[name](policy - reference), rel=1e-6, abs=1e-7)


def slope(name: str, policy: float, reference: float) -> float:
    log_prob = torch.tensor(policy, requires_grad=True)
    kl_penalty(log_prob, torch.tensor(reference), name).backward()
    assert log_prob.grad is not None
    return log_prob.grad.item()


@pytest.mark.parametrize("name", ["k2", "k3", "low_var_kl", "k1+", "k3+", "abs"])
def test_descending_the_estimate_moves_towards_the_reference(name: str) -> None:
    assert slope(name, -1.0, -2.0) > 0 > slope(name, -2.0, -1.0)


def test_k3_keeps_its_gradient_where_the_policy_is_far_away() -> None:
    assert slope("k3", -20.0, -1.0) == pytest.approx(1 - math.exp(19), rel=1e-5)


def test_a_plus_takes_the_gradient_of_k2() -> None:
    assert slope("k1+", -1.0, -3.5) == slope("k3+", -1.0, -3.5) == slope("k2", -1.0, -3.5) == 2.5


def test_the_expectation_of_k1_and_k3_is_the_divergence() -> None:
    """Against the exact divergence of two categorical distributions."""
    policy = torch.tensor([0.2, -0.4, 1.0], dtype=torch.float64).log_softmax(0)
    reference = torch.tensor([0.9, 0.1, -0.3], dtype=torch.float64).log_softmax(0)
    exact = (policy.exp() * (policy - reference)).sum()
    for name in ("k1", "k3"):
        assert (policy.exp() * kl_penalty(policy, reference, name)).sum().item() == pytest.approx(exact.item())


def test_an_unknown_estimator_is_named() -> None:
    with pytest.raises(ValueError, match="'k4'"):
        kl_penalty(torch.zeros(1), torch.zeros(1), "k4")
