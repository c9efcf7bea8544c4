"""The engine against a plain single-process loop over padded rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoModelForCausalLM

from verl.trainer.ppo.actor_loss import ActorLoss
from verl.workers.config import ActorConfig, FSDPConfig, ModelConfig, OptimConfig
from verl.workers.engine.fsdp import FSDPEngine, TrainableFSDPEngine
from verl.workers.engine.guard import NonFiniteTrainingError
from verl.workers.engine.logprob import TokenLogProbs
from verl.workers.engine.loss import PolicyBatchLoss
from verl.workers.engine.rows import Row

TEMPERATURE = 0.7
LOG_PROBS = partial(TokenLogProbs, temperature=TEMPERATURE)
CONFIG = ActorConfig(
    kl_loss_coef=0.3,
    entropy_coeff=0.05,
    clip_ratio_low=0.1,
    clip_ratio_high=0.3,
    clip_ratio_c=1.5,
    rollout_is_threshold=1.2,
    optim=OptimConfig(lr=1e-2),
)


def build(mesh: DeviceMesh, path: str, config: ActorConfig, dumps: str = "") -> TrainableFSDPEngine[PolicyBatchLoss]:
    model = ModelConfig(path=path, enable_gradient_checkpointing=config.entropy_coeff == 0)
    return TrainableFSDPEngine(model, config, mesh, LOG_PROBS, Path(dumps))


def gradient(
    mesh: DeviceMesh, path: str, config: ActorConfig, rows: list[Row]
) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    engine = build(mesh, path, config)
    metrics = engine.backward(rows, ActorLoss.of(config))
    named = engine.scorer.backbone.hf_model.named_parameters()
    return metrics, {name: parameter.grad.full_tensor() for name, parameter in named}


def weights_after(
    mesh: DeviceMesh, path: str, config: ActorConfig, updates: Sequence[list[Row]], dumps: str = ""
) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    engine = build(mesh, path, config, dumps)
    metrics = [engine.train_batch(rows, ActorLoss.of(config), 1e-2) for rows in updates]
    return metrics, {name: tensor.clone() for name, tensor in engine.full_tensors()}


def assert_close(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Equal up to float32 rounding of the largest element of each tensor."""
    assert actual.keys() == expected.keys()
    for name in expected:
        difference = (actual[name] - expected[name]).abs().max()
        assert difference <= 1e-5 * expected[name].abs().max(), name


def deal(rows: list[Row], *sizes: int) -> list[list[Row]]:
    parts = []
    for size in sizes:
        parts.append(rows[:size])
        rows = rows[size:]
    assert not rows
    return parts


SPLITS = {"one rank": (11,), "uneven ranks": (7, 4), "a rank without rows": (0, 11), "one row there": (10, 1)}


@pytest.mark.parametrize("sizes", SPLITS.values(), ids=SPLITS.keys())
@pytest.mark.parametrize("max_tokens", [25, 70, 10_000])
def test_loss_and_every_gradient_equal_the_plain_loop_for_any_ranks_and_micro_batches(
    ranks: Any, checkpoint: Any, make_rows: Any, plain_gradient: Any, sizes: tuple[int, ...], max_tokens: int
) -> None:
    rows, path = make_rows(11), checkpoint("qwen2")
    expected_loss, expected = plain_gradient(path, rows, CONFIG, TEMPERATURE)
    config = replace(CONFIG, ppo_max_token_len_per_gpu=max_tokens)
    outcomes = ranks(gradient, [(path, config, part) for part in deal(rows, *sizes)])
    for metrics, gradients in outcomes:
        assert metrics["loss"] == pytest.approx(expected_loss, abs=1e-5)
        assert metrics["tokens"] == sum(row.trained_tokens for row in rows)
        assert_close(gradients, expected)


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"])
def test_every_architecture_and_aggregation_equals_the_plain_loop(
    ranks: Any, checkpoint: Any, make_rows: Any, plain_gradient: Any, architecture: str, mode: str
) -> None:
    rows, path = make_rows(9, seed=3), checkpoint(architecture)
    config = replace(CONFIG, loss_agg_mode=mode, ppo_max_token_len_per_gpu=60)
    _, expected = plain_gradient(path, rows, config, TEMPERATURE)
    (_, gradients), _ = ranks(gradient, [(path, config, part) for part in deal(rows, 3, 6)])
    assert_close(gradients, expected)


@pytest.mark.parametrize("kl_loss_type", ["k2", "low_var_kl", "k1+"])
def test_gradient_checkpointing_and_gathered_parameters_change_nothing(
    ranks: Any, checkpoint: Any, make_rows: Any, plain_gradient: Any, kl_loss_type: str
) -> None:
    rows, path = make_rows(9, seed=4), checkpoint("qwen2")
    config = replace(
        CONFIG,
        entropy_coeff=0.0,  # switches gradient checkpointing on, see build
        kl_loss_type=kl_loss_type,
        ppo_max_token_len_per_gpu=50,
        fsdp_config=FSDPConfig(reshard_after_forward=False),
    )
    _, expected = plain_gradient(path, rows, config, TEMPERATURE)
    (_, gradients), _ = ranks(gradient, [(path, config, part) for part in deal(rows, 6, 3)])
    assert_close(gradients, expected)


def test_without_old_log_probs_the_old_policy_is_the_policy_itself(
    ranks: Any, checkpoint: Any, make_rows: Any, plain_gradient: Any
) -> None:
    rows, path = [without(row, "old_log_probs") for row in make_rows(6)], checkpoint("qwen2")
    _, expected = plain_gradient(path, rows, CONFIG, TEMPERATURE)
    ((metrics, gradients),) = ranks(gradient, [(path, CONFIG, rows)])
    assert_close(gradients, expected)
    assert metrics["actor/ppo_kl"] == metrics["actor/pg_clipfrac"] == 0


def test_rows_without_trained_tokens_change_nothing(ranks: Any, checkpoint: Any, make_rows: Any) -> None:
    rows, path = make_rows(5), checkpoint("qwen2")
    silent = replace(rows[0], response_mask=torch.zeros_like(rows[0].response_mask))
    ((_, expected),) = ranks(gradient, [(path, CONFIG, rows)])
    ((_, actual),) = ranks(gradient, [(path, CONFIG, [*rows, silent])])
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


def test_a_batch_without_any_trained_token_is_refused(ranks: Any, checkpoint: Any) -> None:
    with pytest.raises(ValueError, match="no trained token"):
        ranks(gradient, [(checkpoint("qwen2"), CONFIG, []), (checkpoint("qwen2"), CONFIG, [])])


def test_the_update_is_the_same_bit_for_bit_in_any_order_of_rows(ranks: Any, checkpoint: Any, make_rows: Any) -> None:
    rows, path = make_rows(10), checkpoint("qwen2")
    config = replace(CONFIG, ppo_max_token_len_per_gpu=60)
    outcomes = [ranks(weights_after, [(path, config, [order, rows[:3]])]) for order in (rows, rows[::-1])]
    ((metrics, weights),), ((other_metrics, other_weights),) = outcomes
    assert metrics == other_metrics
    assert all(torch.equal(weights[name], other_weights[name]) for name in weights)


def test_an_update_is_one_step_of_adamw_on_the_clipped_gradient(
    ranks: Any, checkpoint: Any, make_rows: Any, plain_gradient: Any
) -> None:
    rows, path = make_rows(6), checkpoint("llama")
    config = replace(CONFIG, grad_clip=0.01)
    _, gradients = plain_gradient(path, rows, config, TEMPERATURE)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        parameter.grad = gradients[name]
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.999), weight_decay=0.01).step()
    ((metrics,), weights), _ = ranks(weights_after, [(path, config, [part]) for part in deal(rows, 2, 4)])
    assert metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-5)
    assert metrics["lr"] == 1e-2
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(weights[name], parameter.detach(), atol=2e-5, rtol=1e-4)


def test_a_nonfinite_update_is_skipped_on_every_rank_counted_and_kept(
    ranks: Any, checkpoint: Any, make_rows: Any, run_dir: Path
) -> None:
    path, good = checkpoint("qwen2"), make_rows(4)
    bad = poisoned(good[0])
    rank0, rank1 = [[bad, *good[1:2]], good[:2]], [good[2:], good[2:]]
    outcomes = ranks(weights_after, [(path, CONFIG, rank0, str(run_dir)), (path, CONFIG, rank1, str(run_dir))])
    ((first, second), weights), ((_, _), other_weights) = outcomes
    assert first["nonfinite_updates"] == second["nonfinite_updates"] == 1
    ((_, unpoisoned), _) = ranks(weights_after, [(path, CONFIG, [good[:2]]), (path, CONFIG, [good[2:]])])
    for name, expected in unpoisoned.items():
        assert torch.equal(weights[name], expected)
        assert torch.equal(other_weights[name], expected)
    dump = load_file(run_dir / "nonfinite_0001_rank0.safetensors")
    assert torch.equal(dump["input_ids"], torch.cat([bad.input_ids, good[1].input_ids]))
    assert torch.equal(dump["advantages"][: bad.response_length].isinf(), torch.ones(bad.response_length).bool())


def test_too_many_nonfinite_updates_in_a_row_stop_the_run(
    ranks: Any, checkpoint: Any, make_rows: Any, run_dir: Path
) -> None:
    bad, good, path = [poisoned(make_rows(1)[0])], make_rows(2), checkpoint("qwen2")
    config = replace(CONFIG, max_nonfinite_updates=2)
    ((metrics, _),) = ranks(weights_after, [(path, config, [bad, good, bad, good], str(run_dir))])
    assert [m["nonfinite_updates"] for m in metrics] == [1, 1, 2, 2]
    with pytest.raises(NonFiniteTrainingError, match="2 updates in a row"):
        ranks(weights_after, [(path, config, [bad, bad], str(run_dir)), (path, config, [good, good], str(run_dir))])


def test_log_probs_and_entropies_equal_hugging_face_row_by_row(
    ranks: Any, checkpoint: Any, make_rows: Any, plain_scores: Callable[..., Any]
) -> None:
    rows, path = make_rows(9), checkpoint("qwen2")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    for sizes in ((9,), (2, 7), (9, 0)):
        outcomes = ranks(frozen_scores, [(path, part) for part in deal(rows, *sizes)])
        for row, (log_probs, entropys) in zip(rows, [score for part in outcomes for score in part], strict=True):
            expected = plain_scores(model, row, TEMPERATURE)
            torch.testing.assert_close(log_probs, expected[0].detach() * row.response_mask, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(entropys, expected[1].detach() * row.response_mask, atol=1e-5, rtol=1e-5)


def test_bfloat16_computes_in_bfloat16_on_float32_masters(ranks: Any, checkpoint: Any, make_rows: Any) -> None:
    rows, path = make_rows(9), checkpoint("qwen2")
    half = FSDPConfig(param_dtype="bfloat16")
    ((exact, coarse, dtype),) = ranks(scores_in_two_types, [(path, rows, half)])
    difference = torch.cat([a - b for a, b in zip(exact, coarse, strict=True)]).abs()
    assert dtype == torch.float32
    assert 1e-4 < difference.max() < 0.2


def test_in_bfloat16_too_the_kl_starts_at_exactly_zero(ranks: Any, checkpoint: Any, make_rows: Any) -> None:
    """A frozen model holds the compute type, a trained one float32 masters: both must compute the same."""
    config = replace(CONFIG, fsdp_config=FSDPConfig(param_dtype="bfloat16"), ppo_max_token_len_per_gpu=60)
    outcomes = ranks(first_kl, [(checkpoint("qwen3"), config, part) for part in deal(make_rows(9), 4, 5)])
    assert outcomes == [0.0, 0.0]


def test_metrics_do_not_depend_on_ranks_and_micro_batches(ranks: Any, checkpoint: Any, make_rows: Any) -> None:
    rows, path = make_rows(11), checkpoint("qwen2")
    ((expected, _),) = ranks(gradient, [(path, CONFIG, rows)])
    config = replace(CONFIG, ppo_max_token_len_per_gpu=30)
    for metrics, _ in ranks(gradient, [(path, config, part) for part in deal(rows, 3, 8)]):
        assert metrics == pytest.approx(expected, rel=1e-4, abs=1e-5)
        assert 0 < metrics["actor/pg_clipfrac"] < 1


def test_only_the_kl_term_moves_the_policy_towards_the_reference(ranks: Any, checkpoint: Any, make_rows: Any) -> None:
    config = replace(CONFIG, kl_loss_coef=1.0, entropy_coeff=0.0)
    rows = [with_advantage(without(row, "old_log_probs"), 0.0) for row in make_rows(12)]
    arguments = (checkpoint("qwen2"), checkpoint("qwen2", 1), config, rows)
    (distances,) = ranks(distances_from_reference, [arguments])
    assert distances[0] > distances[1] > distances[2]


def test_a_positive_advantage_makes_its_tokens_likelier_and_a_negative_one_less_likely(
    ranks: Any, checkpoint: Any, make_rows: Any
) -> None:
    config = replace(CONFIG, use_kl_loss=False, entropy_coeff=0.0, rollout_is_threshold=None)
    row = without(make_rows(1)[0], "old_log_probs")
    for advantage in (1.0, -1.0):
        ((before, after),) = ranks(
            log_prob_around_update, [(checkpoint("qwen2"), config, with_advantage(row, advantage))]
        )
        assert (after - before) * advantage > 0


def without(row: Row, key: str) -> Row:
    return replace(row, fields={name: value for name, value in row.fields.items() if name != key})


def with_advantage(row: Row, advantage: float) -> Row:
    return replace(row, fields={**row.fields, "advantages": torch.full((row.response_length,), advantage)})


def poisoned(row: Row) -> Row:
    return with_advantage(row, float("inf"))


def frozen_scores(mesh: DeviceMesh, path: str, rows: list[Row]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    engine = FSDPEngine(ModelConfig(path=path), FSDPConfig(), mesh, LOG_PROBS, max_tokens=40)
    return [(score[0], score[1]) for score in engine.score(rows)]


def scores_in_two_types(mesh: DeviceMesh, path: str, rows: list[Row], fsdp: FSDPConfig) -> tuple[Any, Any, torch.dtype]:
    exact = build(mesh, path, CONFIG)
    coarse = build(mesh, path, replace(CONFIG, fsdp_config=fsdp))
    coarse.train_batch(rows, ActorLoss.of(CONFIG), 0.0)
    masters = {tensor.dtype for _, tensor in coarse.full_tensors()}
    scores = [[s[0] for s in engine.score(rows)] for engine in (exact, coarse)]
    assert len(masters) == 1
    return scores[0], scores[1], masters.pop()


def first_kl(mesh: DeviceMesh, path: str, config: ActorConfig, rows: list[Row]) -> float:
    reference = FSDPEngine(
        ModelConfig(path=path), config.fsdp_config, mesh, LOG_PROBS, config.ppo_max_token_len_per_gpu
    )
    scores = zip(rows, reference.score(rows), strict=True)
    scored = [replace(row, fields={**row.fields, "ref_log_prob": score[0]}) for row, score in scores]
    return build(mesh, path, config).train_batch(scored, ActorLoss.of(config), 0.0)["actor/kl_loss"]


def distances_from_reference(
    mesh: DeviceMesh, path: str, reference_path: str, config: ActorConfig, rows: list[Row]
) -> list[float]:
    """Mean squared difference of log-probabilities before, between and after two updates."""
    reference = FSDPEngine(ModelConfig(path=reference_path), FSDPConfig(), mesh, LOG_PROBS, 1000)
    scored = [
        replace(row, fields={**row.fields, "ref_log_prob": score[0]})
        for row, score in zip(rows, reference.score(rows), strict=True)
    ]
    engine = build(mesh, path, config)
    distances = []
    for _ in range(3):
        scores = zip(scored, engine.score(scored), strict=True)
        distances.append(float(torch.cat([row.fields["ref_log_prob"] - s[0] for row, s in scores]).square().mean()))
        engine.train_batch(scored, ActorLoss.of(config), 1e-3)
    return distances


def log_prob_around_update(mesh: DeviceMesh, path: str, config: ActorConfig, row: Row) -> tuple[float, float]:
    engine = build(mesh, path, config)
    before = engine.score([row])[0][0].sum()
    engine.train_batch([row], ActorLoss.of(config), 1e-4)
    return float(before), float(engine.score([row])[0][0].sum())
