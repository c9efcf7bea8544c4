"""Per-token estimators of the KL divergence KL(policy || reference).

Schulman, "Approximating KL Divergence" (2020), http://joschu.net/blog/kl-approx.html. With tokens
drawn from the policy and d = log_prob - ref_log_prob: k1 = d and k3 = exp(-d) - 1 + d are unbiased,
k2 = d^2 / 2 is not.

As a loss what counts is the expected gradient, taken in the states that were visited. That of k2, and of
k1+ which borrows it, is the gradient of KL(policy || reference). That of k3 is the gradient of
KL(reference || policy), which agrees to first order where the two are close. That of k1 is 0.
"""

from __future__ import annotations

import torch


def kl_penalty(logprob: torch.Tensor, ref_logprob: torch.Tensor, kl_penalty: str) -> torch.Tensor:
    """The estimate for each token, in nats, of the shape of ``logprob``.

    Args:
        logprob: log-probabilities of the sampled tokens under the policy.
        ref_logprob: the same under the reference.
        kl_penalty: ``kl`` = ``k1``, ``abs``, ``mse`` = ``k2``, ``low_var_kl`` = ``k3`` (not clamped: clamping
            removes the gradient where the policy is furthest away). A trailing ``+`` keeps the value and
            takes the gradient of k2.

    Raises ValueError for another name.
    """
    difference = logprob - ref_logprob
    value = _estimate(difference, kl_penalty.removesuffix("+"))
    if not kl_penalty.endswith("+"):
        return value
    surrogate = difference.square() / 2
    return surrogate - surrogate.detach() + value.detach()


def _estimate(difference: torch.Tensor, name: str) -> torch.Tensor:
    match name:
        case "kl" | "k1":
            return difference
        case "abs":
            return difference.abs()
        case "mse" | "k2":
            return difference.square() / 2
        case "low_var_kl" | "k3":
            return torch.expm1(-difference) + difference
    raise ValueError(f"unknown KL estimator {name!r}; known: kl, k1, abs, mse, k2, low_var_kl, k3, each also with '+'")
