"""The expected gradient of the loss against the exact one, over every batch that can happen.

"Exact" is the gradient of the true objective, by autograd through the enumeration, where an estimator is
unbiased, and otherwise what plain loops over all batches in every order give. Losses run in float64;
advantages and token rewards are float32, which leaves errors near 1e-7.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.verl.trainer.ppo import toy
from tests.verl.trainer.ppo.oracle import (
    ESTIMATORS,
    KL_IN_REWARD,
    Estimator,
    Policies,
    all_batches,
    expected_loss_coefficients,
    plain_batches,
    plain_coefficients,
)
from verl.workers.config import ActorConfig

CURRENT, REFERENCE, OLD, SAMPLER = (toy.table_policy(seed) for seed in range(4))
ON_POLICY = Policies.on(toy.log_probs(CURRENT), toy.log_probs(REFERENCE))
OFF_POLICY = Policies(*(toy.log_probs(logits) for logits in (CURRENT, REFERENCE, SAMPLER, OLD)))
SECOND_EPOCH = Policies(*(toy.log_probs(logits) for logits in (CURRENT, REFERENCE, OLD, OLD)))
MODES = ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"]
KL_FORMS = ["k2", "k3", "low_var_kl", "k1+"]
GAMMA = 0.97
SIZE = 3
"""Trajectories of a batch, which is one group; two where there are no advantages to compare."""


def by_logits(coefficients: torch.Tensor) -> torch.Tensor:
    """Gradient by the current policy's logits of a loss with these derivatives by its log-probabilities."""
    leaf = CURRENT.clone().requires_grad_()
    return torch.autograd.grad((toy.log_probs(leaf) * coefficients).sum(), leaf)[0]


def library_gradient(
    policies: Policies, config: ActorConfig, estimator: Estimator | None, kl_ratio: float = 0.0, gamma: float = GAMMA
) -> torch.Tensor:
    batches = all_batches(estimator, policies, kl_ratio, gamma, SIZE if estimator else 2)
    return by_logits(expected_loss_coefficients(batches, policies, config))


def plain_gradient(
    policies: Policies, config: ActorConfig, estimator: Estimator | None, kl_ratio: float = 0.0, gamma: float = GAMMA
) -> torch.Tensor:
    batches = plain_batches(estimator, policies, kl_ratio, gamma, SIZE if estimator else 2)
    return by_logits(plain_coefficients(batches, policies, config))


def gradient_of_true_loss(kl_ratio: float) -> torch.Tensor:
    """Of -(expected score) + kl_ratio * KL(distribution of trajectories || the reference's)."""
    leaf = CURRENT.clone().requires_grad_()
    in_log, reference = toy.log_probs(leaf).sum(-1), toy.log_probs(REFERENCE).sum(-1)
    score = toy.SCORES.double().sum(-1)
    return torch.autograd.grad((in_log.exp() * (kl_ratio * (in_log - reference) - score)).sum(), leaf)[0]


def gradient_at_visited_states(sampler: torch.Tensor, reverse: bool) -> torch.Tensor:
    """Of the divergence from the reference in each state, summed over the states the sampler visits.

    KL(policy || reference), or with ``reverse`` KL(reference || policy). How often a state is visited is a
    constant here.
    """
    leaf = CURRENT.clone().requires_grad_()
    ours, theirs = leaf.log_softmax(-1), REFERENCE.log_softmax(-1)
    divergence = (theirs.exp() * (theirs - ours) if reverse else ours.exp() * (ours - theirs)).sum(-1)
    chance = toy.path_probabilities(toy.log_probs(sampler))
    visits = torch.where(toy.MASK, divergence[toy.STATE_OF], 0).sum(-1)
    return torch.autograd.grad((chance * visits).sum(), leaf)[0]


def assert_equal(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=1e-6, rtol=0)
    assert expected.abs().max() > 1e-3, "a gradient of 0 proves nothing"


@pytest.mark.parametrize("logits", [CURRENT, REFERENCE, OLD, SAMPLER])
def test_the_enumeration_is_complete(logits: torch.Tensor) -> None:
    chances = toy.path_probabilities(toy.log_probs(logits))
    assert chances.sum().item() == pytest.approx(1, abs=1e-12)
    assert sum(weight for _, weight in toy.batches(chances, SIZE)) == pytest.approx(1, abs=1e-12)
    assert sorted(toy.MASK.sum(1).tolist()) == [1] + [2] * 4 + [3] * 6


@pytest.mark.parametrize("kl_ratio", [0.0, KL_IN_REWARD])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("estimator", ESTIMATORS, ids=str)
def test_every_estimator_and_aggregation_equals_plain_loops(estimator: Estimator, mode: str, kl_ratio: float) -> None:
    config = ActorConfig(use_kl_loss=False, loss_agg_mode=mode)
    arguments = (ON_POLICY, config, estimator, kl_ratio)
    assert_equal(library_gradient(*arguments), plain_gradient(*arguments))


UNBIASED = {
    Estimator("reinforce", "none"): 1.0,
    Estimator("reinforce", "leave_one_out"): 1.0,
    Estimator("rloo"): 1.0,
    # A mean with the row itself in it takes away its share of the reward.
    Estimator("reinforce", "batch"): 1 - 1 / SIZE,
    Estimator("grpo", norm_adv_by_std_in_grpo=False): 1 - 1 / SIZE,
}


@pytest.mark.parametrize("kl_ratio", [0.0, KL_IN_REWARD])
@pytest.mark.parametrize(("estimator", "scale"), UNBIASED.items(), ids=map(str, UNBIASED))
def test_unbiased_estimators_follow_the_true_objective(estimator: Estimator, scale: float, kl_ratio: float) -> None:
    """Expected return minus, with KL in the reward, the divergence of whole trajectories."""
    config = ActorConfig(use_kl_loss=False, loss_agg_mode="seq-mean-token-sum")
    actual = library_gradient(ON_POLICY, config, estimator, kl_ratio, gamma=1.0)
    assert_equal(actual, scale * gradient_of_true_loss(kl_ratio))


def test_under_a_discount_too_leave_one_out_expects_what_no_baseline_does() -> None:
    """Rewards on several tokens, so that the rule for groups of equal outcomes stays out of it."""
    config = ActorConfig(use_kl_loss=False, loss_agg_mode="seq-mean-token-sum")
    gradients = [
        library_gradient(ON_POLICY, config, Estimator("reinforce", baseline), KL_IN_REWARD, gamma=0.9)
        for baseline in ("leave_one_out", "none")
    ]
    assert_equal(*gradients)


@pytest.mark.parametrize("policies", [ON_POLICY, SECOND_EPOCH, OFF_POLICY], ids=["on", "second epoch", "off"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("form", KL_FORMS)
def test_every_kl_loss_and_aggregation_equals_plain_loops(form: str, mode: str, policies: Policies) -> None:
    config = ActorConfig(kl_loss_coef=0.7, kl_loss_type=form, loss_agg_mode=mode)
    assert_equal(library_gradient(policies, config, None), plain_gradient(policies, config, None))


@pytest.mark.parametrize(("policies", "visits"), [(ON_POLICY, CURRENT), (SECOND_EPOCH, OLD)], ids=["on", "off"])
@pytest.mark.parametrize("form", KL_FORMS)
def test_what_divergence_a_kl_loss_descends(form: str, policies: Policies, visits: torch.Tensor) -> None:
    """k2 and k1+ have the gradient of KL(policy || reference) in the visited states, k3 that of KL(reference ||
    policy): 1 - pi_ref / pi is the slope of k3, and under the policy it averages to -(pi_ref's log-likelihood)'.
    The importance ratio makes both hold for tokens that an older policy drew."""
    config = ActorConfig(kl_loss_coef=1.0, kl_loss_type=form, loss_agg_mode="seq-mean-token-sum")
    expected = gradient_at_visited_states(visits, reverse=form in ("k3", "low_var_kl"))
    assert_equal(library_gradient(policies, config, None), expected)


def test_a_kl_loss_leaves_out_where_a_token_leads_and_a_kl_reward_does_not() -> None:
    config = ActorConfig(kl_loss_coef=1.0, kl_loss_type="k2", loss_agg_mode="seq-mean-token-sum")
    in_loss = library_gradient(ON_POLICY, config, None)
    of_trajectories = gradient_of_true_loss(1.0) - gradient_of_true_loss(0.0)
    assert (in_loss - of_trajectories).abs().max() > 1e-2
    # In the last state of a trajectory nothing follows, so there the two agree.
    last_turn = [number for number, context in enumerate(toy.STATES) if len(context) > 1]
    assert_equal(in_loss[last_turn], of_trajectories[last_turn])


def test_k1_as_a_loss_would_have_no_gradient() -> None:
    """Why it is refused: the expected slope of a log-probability is 0."""
    config = ActorConfig(kl_loss_coef=1.0, kl_loss_type="k1", loss_agg_mode="seq-mean-token-sum")  # type: ignore[arg-type]
    torch.testing.assert_close(library_gradient(ON_POLICY, config, None), torch.zeros_like(CURRENT), atol=1e-12, rtol=0)


OFF_POLICY_CASES = list(
    itertools.product(
        [Estimator("gae"), Estimator("grpo"), Estimator("reinforce", "leave_one_out")],
        ["token-mean", "seq-mean-token-sum"],
    )
)


@pytest.mark.parametrize(("estimator", "mode"), OFF_POLICY_CASES, ids=lambda value: str(value))
def test_off_policy_with_clipping_truncation_and_both_kl_terms(estimator: Estimator, mode: str) -> None:
    """Sampler, old and current policy all differ: ratio, clip, dual clip and truncated weight, token by token."""
    config = ActorConfig(
        kl_loss_coef=0.2,
        kl_loss_type="k3",
        clip_ratio_low=0.2,
        clip_ratio_high=0.3,
        clip_ratio_c=1.6,
        rollout_is_threshold=1.4,
        loss_agg_mode=mode,
    )
    arguments = (OFF_POLICY, config, estimator, KL_IN_REWARD)
    assert_equal(library_gradient(*arguments), plain_gradient(*arguments))
