"""The expected gradient over every batch of an enumerable environment, through the engine on one rank and on two.

The engine computes in float32, batches are summed in float64. The sums equal float64 autograd through the
enumeration to 1e-6 of the largest element of each parameter's gradient, or to 1e-6 where that is under 1.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoModelForCausalLM, Qwen2Config

from tests.verl.trainer.ppo import toy
from tests.verl.trainer.ppo.oracle import (
    ESTIMATORS,
    KL_IN_REWARD,
    Estimator,
    Policies,
    all_batches,
    plain_batches,
    plain_coefficients,
)
from verl.trainer.ppo.actor_loss import ActorLoss
from verl.workers.config import ActorConfig, ModelConfig
from verl.workers.engine.fsdp import TrainableFSDPEngine
from verl.workers.engine.logprob import TokenLogProbs
from verl.workers.engine.loss import BatchTotals, LossOutput
from verl.workers.engine.packing import MicroBatch
from verl.workers.engine.rows import Row

TINY = Qwen2Config(
    vocab_size=toy.VOCABULARY,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    initializer_range=0.2,
    tie_word_embeddings=True,
)
SIZE = 2
WORLDS = {"one rank": (2,), "two ranks": (1, 1), "a rank without rows": (0, 2)}
Gradients = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Weighted:
    """A loss times the probability of its batch."""

    loss: ActorLoss
    weight: float

    @property
    def fields(self) -> tuple[str, ...]:
        return self.loss.fields

    @property
    def entropy_needs_grad(self) -> bool:
        return self.loss.entropy_needs_grad

    def __call__(
        self, log_probs: torch.Tensor, entropy: torch.Tensor, batch: MicroBatch, totals: BatchTotals
    ) -> LossOutput:
        output = self.loss(log_probs, entropy, batch, totals)
        return LossOutput(output.loss * self.weight, output.metrics)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Policy and reference."""
    paths = [str(tmp_path_factory.mktemp("toy") / str(seed)) for seed in range(2)]
    for seed, path in enumerate(paths):
        torch.manual_seed(seed)
        AutoModelForCausalLM.from_config(TINY).save_pretrained(path)
    return paths


def exact_log_probs(model: torch.nn.Module) -> torch.Tensor:
    """Of every policy token of every path, (paths, WIDTH) float64; one Hugging Face call per path."""
    rows = []
    for path in toy.PATHS:
        logits = model(input_ids=torch.tensor([[*toy.PROMPT, *path.tokens]])).logits[0, len(toy.PROMPT) - 1 : -1]
        own = logits.log_softmax(-1)[torch.arange(len(path.tokens)), torch.tensor(path.tokens)]
        rows.append(torch.nn.functional.pad(own, (0, toy.WIDTH - len(path.tokens))))
    return torch.where(toy.MASK, torch.stack(rows), 0)


def load_exact(path: str) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)


def row_of(path: int, advantages: torch.Tensor, policies: Policies) -> Row:
    length = len(toy.PATHS[path].tokens)
    fields = {
        "advantages": advantages,
        "rollout_log_probs": policies.sampler[path],
        "ref_log_prob": policies.reference[path],
    }
    return Row(
        input_ids=torch.tensor([*toy.PROMPT, *toy.PATHS[path].tokens]),
        response_mask=toy.MASK[path, :length],
        fields={name: value[:length].float() for name, value in fields.items()},
    )


def engine_gradient(
    mesh: DeviceMesh, path: str, config: ActorConfig, batches: Sequence[tuple[list[Row], float]]
) -> Gradients:
    """Summed over ``batches`` of this rank's rows and the weight of each."""
    engine = TrainableFSDPEngine(ModelConfig(path=path), config, mesh, partial(TokenLogProbs, temperature=1.0), Path())
    named = dict(engine.scorer.backbone.hf_model.named_parameters())
    totals = {name: torch.zeros_like(parameter, dtype=torch.float64) for name, parameter in named.items()}
    for rows, weight in batches:
        engine.backward(rows, Weighted(ActorLoss.of(config), weight))
        for name, parameter in named.items():
            totals[name] += parameter.grad
        engine.optimizer.zero_grad()
    return {name: total.full_tensor() for name, total in totals.items()}


def library_gradients(
    ranks: Any, path: str, policies: Policies, config: ActorConfig, estimator: Estimator, sizes: Sequence[int]
) -> list[Gradients]:
    """One of each rank; ``sizes`` says how many rows of every batch it gets."""
    shares: list[list[tuple[list[Row], float]]] = [[] for _ in sizes]
    for batch in all_batches(estimator, policies, KL_IN_REWARD, 1.0, SIZE):
        rows = [row_of(p, a, policies) for p, a in zip(batch.rows, batch.advantages, strict=True)]
        for share, size in zip(shares, sizes, strict=True):
            share.append((rows[:size], batch.weight))
            rows = rows[size:]
    return ranks(engine_gradient, [(path, config, share) for share in shares])


def parameter_gradients(model: torch.nn.Module, loss: torch.Tensor) -> Gradients:
    names, parameters = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))


def assert_equal(actual: Gradients, expected: Gradients) -> None:
    assert actual.keys() == expected.keys()
    for name, exact in expected.items():
        bound = 1e-6 * max(1.0, exact.abs().max().item())
        torch.testing.assert_close(actual[name].double(), exact, atol=bound, rtol=0, msg=name)
    assert max(exact.abs().max() for exact in expected.values()) > 1e-2


@pytest.mark.parametrize("sizes", WORLDS.values(), ids=WORLDS.keys())
def test_an_unbiased_estimator_with_kl_in_the_reward_follows_the_true_objective(
    ranks: Any, checkpoints: list[str], sizes: Sequence[int]
) -> None:
    model = load_exact(checkpoints[0])
    current, reference = exact_log_probs(model), exact_log_probs(load_exact(checkpoints[1])).detach()
    config = ActorConfig(use_kl_loss=False, loss_agg_mode="seq-mean-token-sum")
    in_log, score = current.sum(-1), toy.SCORES.double().sum(-1)
    assert in_log.exp().sum().item() == pytest.approx(1, abs=1e-12)
    true_loss = (in_log.exp() * (KL_IN_REWARD * (in_log - reference.sum(-1)) - score)).sum()
    expected = parameter_gradients(model, true_loss)
    policies = Policies.on(current.detach(), reference)
    estimator = Estimator("reinforce", "leave_one_out")
    for actual in library_gradients(ranks, checkpoints[0], policies, config, estimator, sizes):
        assert_equal(actual, expected)


MODES = itertools.cycle(["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"])
FORMS = itertools.cycle(["k3", "k2", "k1+", "low_var_kl"])
CASES = list(zip(ESTIMATORS, MODES, FORMS, strict=False))
"""Every estimator; aggregations and KL forms take turns."""


@pytest.mark.parametrize(("estimator", "mode", "form"), CASES, ids=str)
def test_on_two_ranks_every_estimator_with_kl_in_reward_and_loss_equals_plain_loops(
    ranks: Any, checkpoints: list[str], estimator: Estimator, mode: Any, form: Any
) -> None:
    model = load_exact(checkpoints[0])
    current, reference = exact_log_probs(model), exact_log_probs(load_exact(checkpoints[1])).detach()
    policies = Policies.on(current.detach(), reference)
    config = ActorConfig(kl_loss_coef=0.4, kl_loss_type=form, loss_agg_mode=mode)
    batches = plain_batches(estimator, policies, KL_IN_REWARD, 1.0, SIZE)
    expected = parameter_gradients(model, (current * plain_coefficients(batches, policies, config)).sum())
    for actual in library_gradients(ranks, checkpoints[0], policies, config, estimator, WORLDS["two ranks"]):
        assert_equal(actual, expected)
