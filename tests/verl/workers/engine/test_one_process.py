"""The engine on a mesh of one rank, in the process of the test."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import AutoModel

from verl.trainer.ppo.actor_loss import ActorLoss
from verl.workers.config import ActorConfig, CriticConfig, ModelConfig
from verl.workers.engine.fsdp import TrainableFSDPEngine
from verl.workers.engine.logprob import TokenLogProbs
from verl.workers.engine.rows import Row
from verl.workers.engine.value import TokenValues

TEMPERATURE = 0.7
CONFIG = ActorConfig(kl_loss_coef=0.3, entropy_coeff=0.05, rollout_is_threshold=1.2)


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("cpu:gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("fsdp",))
    dist.destroy_process_group()


def build(mesh: DeviceMesh, path: str, max_tokens: int, dumps: Path = Path()) -> TrainableFSDPEngine[Any]:
    config = replace(CONFIG, ppo_max_token_len_per_gpu=max_tokens)
    scorer = partial(TokenLogProbs, temperature=TEMPERATURE)
    return TrainableFSDPEngine(ModelConfig(path=path), config, mesh, scorer, dumps)


def gradient_of(engine: TrainableFSDPEngine[Any], rows: Sequence[Row]) -> dict[str, torch.Tensor]:
    engine.backward(rows, ActorLoss.of(CONFIG))
    named = engine.scorer.backbone.hf_model.named_parameters()
    return {name: parameter.grad.full_tensor() for name, parameter in named}


@pytest.mark.parametrize("max_tokens", [25, 70, 10_000])
def test_gradient_is_that_of_the_whole_batch_for_any_micro_batches(
    mesh: DeviceMesh, checkpoint: Any, make_rows: Any, plain_gradient: Any, max_tokens: int
) -> None:
    rows, path = make_rows(9), checkpoint("qwen2")
    _, expected = plain_gradient(path, rows, CONFIG, TEMPERATURE)
    actual = gradient_of(build(mesh, path, max_tokens), rows)
    assert actual.keys() == expected.keys()
    for name in expected:
        assert (actual[name] - expected[name]).abs().max() <= 1e-5 * expected[name].abs().max(), name


def test_a_rank_enters_as_many_collectives_as_the_one_with_most_micro_batches(
    mesh: DeviceMesh, checkpoint: Any, make_rows: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if another rank had five micro-batches more. A forward pass gathers parameters, which needs every rank."""
    rows, path = make_rows(6), checkpoint("qwen2")
    expected = gradient_of(build(mesh, path, 60), rows)
    engine, passes = build(mesh, path, 60), list[int]()
    engine.scorer.register_forward_hook(lambda *_: passes.append(1))
    alone = [score.clone() for score in engine.score(rows)]
    own = len(passes)
    assert own > 1

    def all_reduce(counts: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None) -> None:
        if op == dist.ReduceOp.MAX:
            counts += 5

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    passes.clear()
    assert all(map(torch.equal, engine.score(rows), alone))
    assert len(passes) == own + 5
    passes.clear()
    actual = gradient_of(engine, rows)
    assert len(passes) == own + 5
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


def test_an_update_that_is_not_finite_changes_nothing_and_is_counted(
    mesh: DeviceMesh, checkpoint: Any, make_rows: Any, run_dir: Path
) -> None:
    rows = make_rows(3)
    bad = replace(rows[0], fields={**rows[0].fields, "advantages": torch.full((rows[0].response_length,), torch.inf)})
    engine = build(mesh, checkpoint("qwen2"), 1000, run_dir)
    before = {name: tensor.clone() for name, tensor in engine.full_tensors()}
    metrics = engine.train_batch([bad, *rows[1:]], ActorLoss.of(CONFIG), 1e-2)
    assert all(torch.equal(tensor, before[name]) for name, tensor in engine.full_tensors())
    assert metrics["nonfinite_updates"] == 1
    assert list(run_dir.glob("nonfinite_0001_rank0*"))
    assert engine.train_batch(rows, ActorLoss.of(CONFIG), 1e-2)["nonfinite_updates"] == 1
    assert not any(torch.equal(tensor, before[name]) for name, tensor in engine.full_tensors())


def test_a_value_is_that_of_the_state_in_which_the_policy_chose(
    mesh: DeviceMesh, checkpoint: Any, make_rows: Any
) -> None:
    """For the first token after an observation that is the observation's last token."""
    rows, path = make_rows(4), checkpoint("qwen2")
    engine = TrainableFSDPEngine(ModelConfig(path=path), CriticConfig(), mesh, TokenValues, Path())
    assert isinstance(engine.scorer, TokenValues)
    head = torch.randn(1, 32, generator=torch.Generator().manual_seed(5))
    engine.scorer.value_head.weight.detach().to_local().copy_(head)  # type: ignore[operator]
    model = AutoModel.from_pretrained(path, dtype=torch.float32).eval()
    for row, (values,) in zip(rows, engine.score(rows), strict=True):
        hidden = model(input_ids=row.input_ids[None]).last_hidden_state[0].detach()
        expected = hidden[row.prompt_length - 1 : row.length - 1] @ head[0]
        torch.testing.assert_close(values, expected * row.response_mask, atol=1e-5, rtol=1e-5)
