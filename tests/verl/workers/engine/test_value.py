"""The critic against a plain Hugging Face backbone, a linear head and a loop over tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers.dynamic_module_utils
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import AutoModel, PreTrainedModel, Qwen2ForCausalLM

from verl.models.registry import build_packed_model
from verl.trainer.ppo.critic_loss import CriticLoss
from verl.workers.config import CriticConfig, FSDPConfig, ModelConfig, OptimConfig
from verl.workers.engine.fsdp import TrainableFSDPEngine
from verl.workers.engine.loss import BatchTotals, ValueBatchLoss
from verl.workers.engine.packing import pack
from verl.workers.engine.rows import Row
from verl.workers.engine.value import TokenValues

CONFIG = CriticConfig(cliprange_value=0.4, optim=OptimConfig(lr=1e-2))
HEAD = torch.randn(1, 32, generator=torch.Generator().manual_seed(5)) / 8
BACKBONE = "backbone.hf_model."


def build(
    mesh: DeviceMesh, path: str, config: CriticConfig = CONFIG, head: torch.Tensor | None = None, dumps: str = ""
) -> TrainableFSDPEngine[ValueBatchLoss]:
    engine = TrainableFSDPEngine(ModelConfig(path=path), config, mesh, TokenValues, Path(dumps))
    if head is not None:
        weight = head_of(engine)
        weight.to_local().copy_(distribute_tensor(head, mesh, weight.placements).to_local())
    return engine


def head_of(engine: TrainableFSDPEngine[ValueBatchLoss]) -> DTensor:
    assert isinstance(engine.scorer, TokenValues)
    weight = engine.scorer.value_head.weight.detach()
    assert isinstance(weight, DTensor)
    return weight


def values(
    mesh: DeviceMesh, path: str, rows: list[Row], config: CriticConfig = CONFIG, head: torch.Tensor | None = None
) -> list[torch.Tensor]:
    return [scores[0] for scores in build(mesh, path, config, head).score(rows)]


def gradient(
    mesh: DeviceMesh, path: str, config: CriticConfig, head: torch.Tensor | None, rows: list[Row]
) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    engine = build(mesh, path, config, head)
    metrics = engine.backward(rows, CriticLoss.of(config))
    return metrics, {name: p.grad.full_tensor() for name, p in engine.scorer.named_parameters()}  # type: ignore[union-attr]


def plain_backbone(path: str) -> PreTrainedModel:
    return AutoModel.from_pretrained(path, dtype=torch.float32).eval()


def values_of_row(backbone: PreTrainedModel, head: torch.Tensor, row: Row) -> torch.Tensor:
    """The value of each response token is that of the position before it."""
    hidden = backbone(input_ids=row.input_ids[None]).last_hidden_state[0]
    positions = torch.arange(row.prompt_length, row.length) - 1
    return hidden[positions] @ head[0]


def plain_gradient(
    path: str, rows: Sequence[Row], head: torch.Tensor, config: CriticConfig
) -> tuple[float, dict[str, torch.Tensor]]:
    backbone, head = plain_backbone(path), head.clone().requires_grad_()
    rows = [row for row in rows if row.trained_tokens]
    tokens = sum(row.trained_tokens for row in rows)
    loss = torch.zeros(())
    for row in rows:
        predicted = values_of_row(backbone, head, row)
        share = {
            "token-mean": tokens,
            "seq-mean-token-sum": len(rows),
            "seq-mean-token-mean": len(rows) * row.trained_tokens,
        }
        for j in row.response_mask.nonzero()[:, 0].tolist():
            target, old = row.fields["returns"][j], row.fields["values"][j]
            near = torch.clamp(predicted[j], old - config.cliprange_value, old + config.cliprange_value)
            error = torch.maximum((predicted[j] - target) ** 2, (near - target) ** 2)
            loss = loss + 0.5 * error / share[config.loss_agg_mode]
    loss.backward()
    gradients = {BACKBONE + name: p.grad for name, p in backbone.named_parameters()} | {"value_head.weight": head.grad}
    return loss.item(), {name: grad for name, grad in gradients.items() if grad is not None}


def with_targets(rows: Sequence[Row], seed: int = 0) -> list[Row]:
    """Returns and values of the rollout at random; on tokens that are not trained they are not numbers."""
    generator = torch.Generator().manual_seed(seed)
    targets = []
    for row in rows:
        drawn = torch.randn(2, row.response_length, generator=generator)
        drawn[:, ~row.response_mask] = float("nan")
        targets.append(replace(row, fields={"returns": 2 * drawn[0], "values": drawn[1]}))
    return targets


def two_observations() -> Row:
    """Three turns with observations of two and three tokens between them."""
    mask = torch.tensor([1, 1, 0, 0, 1, 0, 0, 0, 1, 1]).bool()
    return Row(torch.randint(0, 61, (14,), generator=torch.Generator().manual_seed(9)), mask)


def assert_close(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Equal up to float32 rounding of the largest element of each tensor."""
    assert actual.keys() == expected.keys()
    for name in expected:
        assert (actual[name] - expected[name]).abs().max() <= 2e-5 * expected[name].abs().max(), name


def deal(rows: list[Row], sizes: Sequence[int]) -> list[list[Row]]:
    assert sum(sizes) == len(rows)
    return [rows[sum(sizes[:k]) : sum(sizes[: k + 1])] for k in range(len(sizes))]


@pytest.mark.parametrize("architecture", ["qwen2", "llama", "qwen3"])
@pytest.mark.parametrize("sizes", [(6,), (2, 4), (6, 0)])
def test_values_are_read_one_position_before_each_policy_token(
    ranks: Any, checkpoint: Any, make_rows: Any, architecture: str, sizes: tuple[int, ...]
) -> None:
    """Tied (qwen2, qwen3) and untied (llama) weights; the first token of a turn reads the last observation token."""
    rows, path = [two_observations(), *(replace(row, fields={}) for row in make_rows(5))], checkpoint(architecture)
    backbone = plain_backbone(path)
    config = replace(CONFIG, ppo_max_token_len_per_gpu=40)
    outcomes = ranks(values, [(path, part, config, HEAD) for part in deal(rows, sizes)])
    for row, actual in zip(rows, [value for part in outcomes for value in part], strict=True):
        expected = values_of_row(backbone, HEAD, row).detach() * row.response_mask
        assert actual.dtype == torch.float32
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


def test_a_new_critic_predicts_exactly_zero(ranks: Any, checkpoint: Any, make_rows: Any) -> None:
    rows = make_rows(5)
    for part in ranks(values, [(checkpoint("qwen2"), rows), (checkpoint("qwen2"), rows[:2])]):
        assert all(not value.any() for value in part)


@pytest.mark.parametrize("sizes", [(11,), (7, 4), (0, 11), (10, 1)])
@pytest.mark.parametrize("max_tokens", [25, 70, 10_000])
def test_value_loss_and_every_gradient_equal_the_plain_loop_for_any_ranks_and_micro_batches(
    ranks: Any, checkpoint: Any, make_rows: Any, sizes: tuple[int, ...], max_tokens: int
) -> None:
    rows, path = with_targets(make_rows(11)), checkpoint("qwen2")
    expected_loss, expected = plain_gradient(path, rows, HEAD, CONFIG)
    config = replace(CONFIG, ppo_max_token_len_per_gpu=max_tokens)
    for metrics, gradients in ranks(gradient, [(path, config, HEAD, part) for part in deal(rows, sizes)]):
        assert metrics["loss"] == metrics["critic/vf_loss"] == pytest.approx(expected_loss, rel=1e-5)
        assert 0 < metrics["critic/vf_clipfrac"] < 1
        assert metrics["tokens"] == sum(row.trained_tokens for row in rows)
        assert_close(gradients, expected)


@pytest.mark.parametrize("mode", ["seq-mean-token-sum", "seq-mean-token-mean"])
def test_every_aggregation_equals_the_plain_loop_on_untied_weights_kept_gathered(
    ranks: Any, checkpoint: Any, make_rows: Any, mode: str
) -> None:
    rows, path = with_targets(make_rows(9, seed=3)), checkpoint("llama")
    config = replace(CONFIG, loss_agg_mode=mode, ppo_max_token_len_per_gpu=60)
    _, expected = plain_gradient(path, rows, HEAD, config)
    config = replace(config, fsdp_config=FSDPConfig(reshard_after_forward=False))
    (_, gradients), _ = ranks(gradient, [(path, config, HEAD, part) for part in deal(rows, (3, 6))])
    assert_close(gradients, expected)


def test_a_zero_head_learns_first(ranks: Any, checkpoint: Any, make_rows: Any) -> None:
    """Its own gradient does not vanish where that of the backbone does."""
    rows, path = with_targets(make_rows(4)), checkpoint("qwen2")
    _, expected = plain_gradient(path, rows, torch.zeros(1, 32), CONFIG)
    ((_, gradients),) = ranks(gradient, [(path, CONFIG, None, rows)])
    assert_close({"head": gradients.pop("value_head.weight")}, {"head": expected["value_head.weight"]})
    assert not any(tensor.any() for tensor in gradients.values())


def test_the_critic_mask_covers_exactly_the_policy_tokens(checkpoint: Any) -> None:
    """The n positions before policy tokens get gradient: not a position late, nor any before an observation token."""
    scorer = TokenValues(build_packed_model(checkpoint("qwen2"), torch.float32, torch.float32, "cpu", True))
    torch.nn.init.ones_(scorer.value_head.weight)
    (row,) = with_targets([two_observations()])
    row = replace(row, fields={**row.fields, "returns": torch.full((row.response_length,), 100.0)})
    hidden: list[torch.Tensor] = []
    scorer.backbone.register_forward_hook(lambda _, __, output: hidden.append(output) or output.retain_grad())
    batch = pack([row], torch.device("cpu"))
    loss = CriticLoss.of(replace(CONFIG, cliprange_value=1e6))
    scorer.loss(loss, batch, BatchTotals(row.trained_tokens, 1)).loss.backward()
    assert hidden[0].grad is not None
    first = row.prompt_length - 1
    touched = hidden[0].grad.abs().sum(1).nonzero()[:, 0].tolist()
    assert touched == [first + j for j in (0, 1, 4, 8, 9)]


def parameters_of(mesh: DeviceMesh, path: str, rows: list[Row]) -> tuple[list[str], int, int, int, list[str]]:
    """Names, elements over all ranks, tensors in the optimizer, those with state after an update, exported names."""
    engine = build(mesh, path)
    engine.train_batch(rows, CriticLoss.of(CONFIG), 1e-3)
    held = [p for group in engine.optimizer.param_groups for p in group["params"]]
    elements = sum(p.numel() for p in engine.scorer.parameters())
    names = [name for name, _ in engine.full_tensors()]
    state = len(engine.optimizer.state)
    return [name for name, _ in engine.scorer.named_parameters()], elements, len({id(p) for p in held}), state, names


@pytest.mark.parametrize("architecture", ["qwen2", "llama"])
def test_the_output_projection_is_neither_held_nor_trained_and_the_embedding_once(
    ranks: Any, checkpoint: Any, make_rows: Any, architecture: str
) -> None:
    path, rows = checkpoint(architecture), with_targets(make_rows(3))
    plain = plain_backbone(path)
    expected = [BACKBONE + name for name, _ in plain.named_parameters()] + ["value_head.weight"]
    for names, elements, optimized, updated, full in ranks(parameters_of, [(path, rows), (path, [])]):
        assert names == expected
        assert elements == sum(p.numel() for p in plain.parameters()) + 32
        assert optimized == updated == len(expected)
        assert full == [name for name, _ in plain.named_parameters()]


def learning_curve(mesh: DeviceMesh, path: str, rows: list[Row], steps: int) -> list[float]:
    """Mean squared errors before each update, values taken anew every time."""
    engine, loss, errors = build(mesh, path), CriticLoss.of(CONFIG), []
    for _ in range(steps):
        predicted = [scores[0] for scores in engine.score(rows)]
        batch = [
            replace(row, fields={**row.fields, "values": value}) for row, value in zip(rows, predicted, strict=True)
        ]
        errors.append(2 * engine.train_batch(batch, loss, 3e-3)["loss"])
    return errors


def test_the_critic_learns_a_simple_target_in_a_few_steps(ranks: Any, checkpoint: Any, make_rows: Any) -> None:
    """Whether the prompt begins with an odd token."""
    rows = [
        replace(row, fields={"returns": torch.full((row.response_length,), float(row.input_ids[0]) % 2)})
        for row in make_rows(8)
    ]
    first, second = ranks(learning_curve, [(checkpoint("qwen2"), part, 25) for part in deal(rows, (3, 5))])
    assert first == second
    assert first[0] > 0.2
    assert first[-1] < 0.1 * first[0]


def updates_around_a_bad_one(
    mesh: DeviceMesh, path: str, rows: list[Row], dumps: str
) -> tuple[list[dict[str, float]], torch.Tensor, torch.Tensor]:
    """Metrics of a poisoned and a good update, and the head after each."""
    engine, loss = build(mesh, path, dumps=dumps), CriticLoss.of(CONFIG)
    poisoned = [replace(row, fields={**row.fields, "returns": row.fields["returns"] * float("inf")}) for row in rows]
    metrics, heads = [], []
    for batch in (poisoned, rows):
        metrics.append(engine.train_batch(batch, loss, 1e-3))
        heads.append(head_of(engine).full_tensor().clone())
    return metrics, heads[0], heads[1]


def test_a_nonfinite_critic_update_is_skipped_on_every_rank(
    ranks: Any, checkpoint: Any, make_rows: Any, run_dir: Path
) -> None:
    path, rows = checkpoint("qwen2"), with_targets(make_rows(3))
    for metrics, after_bad, after_good in ranks(
        updates_around_a_bad_one, [(path, rows, str(run_dir)), (path, [], str(run_dir))]
    ):
        assert [m["nonfinite_updates"] for m in metrics] == [1, 1]
        assert not after_bad.any()
        assert after_good.all()
    assert [file.name for file in run_dir.iterdir()] == ["nonfinite_0001_rank0.safetensors"]


def test_in_bfloat16_the_head_still_computes_in_float32(ranks: Any, checkpoint: Any, make_rows: Any) -> None:
    rows, path = make_rows(6), checkpoint("qwen2")
    half = replace(CONFIG, fsdp_config=FSDPConfig(param_dtype="bfloat16"))
    (coarse, _), (exact, _) = (
        ranks(values, [(path, rows, config, HEAD), (path, rows[:1], config, HEAD)]) for config in (half, CONFIG)
    )
    coarse, exact = torch.cat(coarse), torch.cat(exact)
    assert 1e-4 < (coarse - exact).abs().max() < 0.1
    assert (coarse != coarse.bfloat16().float()).any()


REMOTE_CODE = """
from transformers import Qwen2Config, Qwen2ForCausalLM as Base

class TinyConfig(Qwen2Config):
    model_type = "tiny_remote"

class Qwen2ForCausalLM(Base):
    config_class = TinyConfig
"""


def save_remote(path: Path, source: str) -> str:
    """The weights of ``source`` as a checkpoint that brings its own code."""
    model = Qwen2ForCausalLM.from_pretrained(source)
    model.save_pretrained(path)
    config = json.loads((path / "config.json").read_text())
    config["model_type"] = "tiny_remote"
    config["auto_map"] = {"AutoConfig": "tiny.TinyConfig", "AutoModelForCausalLM": "tiny.Qwen2ForCausalLM"}
    (path / "config.json").write_text(json.dumps(config))
    (path / "tiny.py").write_text(REMOTE_CODE)
    return str(path)


def remote_values(mesh: DeviceMesh, model: ModelConfig, cache: str, rows: list[Row]) -> list[torch.Tensor]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", cache)
        engine = TrainableFSDPEngine(model, CONFIG, mesh, TokenValues, Path())
    weight = head_of(engine)
    weight.to_local().copy_(distribute_tensor(HEAD, mesh, weight.placements).to_local())
    return [scores[0] for scores in engine.score(rows)]


def test_the_critic_obeys_trust_remote_code(ranks: Any, checkpoint: Any, make_rows: Any, tmp_path: Path) -> None:
    rows, path = make_rows(3), save_remote(tmp_path / "remote", checkpoint("qwen2"))
    trusted = ModelConfig(path=path, trust_remote_code=True)
    (actual,) = ranks(remote_values, [(trusted, str(tmp_path / "modules"), rows)])
    (expected,) = ranks(values, [(checkpoint("qwen2"), rows, CONFIG, HEAD)])
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    with pytest.raises(ValueError, match="trust_remote_code"):
        ranks(remote_values, [(replace(trusted, trust_remote_code=False), str(tmp_path / "modules"), rows)])
