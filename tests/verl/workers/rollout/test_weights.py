"""The engine's end of the weight stream."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from verl.workers.rollout.engine import GenerationRequest, InfrastructureError, NamedTensor, SamplingParams
from verl.workers.rollout.torch_engine import TorchEngine

MakeEngine = Callable[..., TorchEngine]
PROMPT = tuple(random.Random(0).randrange(256) for _ in range(150))


def request(session: str = "s", max_tokens: int = 12, stream: int = 3) -> GenerationRequest:
    return GenerationRequest(session, PROMPT, SamplingParams(max_tokens=max_tokens), stream)


def changed(model: PreTrainedModel, seed: int = 1) -> PreTrainedModel:
    torch.manual_seed(seed)
    other = type(model)(model.config).eval()
    other.load_state_dict({k: v + 0.05 * torch.randn_like(v) for k, v in model.state_dict().items()})
    other.tie_weights()
    return other


def stream(model: PreTrainedModel, *, without: str = "") -> Iterator[NamedTensor]:
    """Parameters without duplicates, as a trainer sends them."""
    return ((name, tensor.detach()) for name, tensor in model.named_parameters() if name != without)


async def sync(engine: TorchEngine, version: int, tensors: Iterator[NamedTensor]) -> None:
    await engine.begin_weights(version)
    for tensor in tensors:
        await engine.load_weights([tensor])
    await engine.end_weights(version)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
async def test_new_weights_replace_everything_computed_from_old_ones(
    name: str, request_: pytest.FixtureRequest, make_engine: MakeEngine
) -> None:
    """Stale keys and values of the same session and of the same prompt would show in the output."""
    model = request_.getfixturevalue(name)
    engine, other = make_engine(model), changed(model)
    before = await engine.generate(request())
    await sync(engine, 7, stream(other))
    after = await engine.generate(request())
    fresh = await make_engine(other).generate(request())
    assert after.token_ids == fresh.token_ids
    assert after.log_probs == fresh.log_probs
    assert after.log_probs != before.log_probs
    assert before.weights_versions == ((0, 12),)
    assert after.weights_versions == ((7, 12),)
    assert engine.weights_version == 7


@pytest.fixture
def request_(request: pytest.FixtureRequest) -> pytest.FixtureRequest:
    return request


async def test_a_tied_head_may_come_or_not(qwen2: PreTrainedModel, make_engine: MakeEngine) -> None:
    engine = make_engine(qwen2)
    await sync(engine, 1, iter(qwen2.state_dict().items()))
    await sync(engine, 2, stream(qwen2))
    assert (await engine.generate(request())).weights_versions == ((2, 12),)


async def test_bfloat16_engine_takes_float32_masters(qwen2: PreTrainedModel, make_engine: MakeEngine) -> None:
    engine, other = make_engine(qwen2, dtype=torch.bfloat16), changed(qwen2)
    await sync(engine, 1, stream(other))
    fresh = make_engine(other, dtype=torch.bfloat16)
    assert (await engine.generate(request())).log_probs == (await fresh.generate(request())).log_probs


@pytest.mark.parametrize("fault", ["missing", "twice", "unknown", "shape"])
async def test_an_incomplete_sync_is_refused_and_named(
    qwen2: PreTrainedModel, make_engine: MakeEngine, fault: str
) -> None:
    engine = make_engine(qwen2)
    odd = "model.layers.1.self_attn.k_proj.weight"
    tensor = qwen2.state_dict()[odd]
    tensors = list(stream(qwen2, without=odd))
    tensors += {
        "missing": [],
        "twice": [(odd, tensor), (odd, tensor)],
        "unknown": [(odd, tensor), ("model.layers.1.extra", tensor)],
        "shape": [(odd, tensor[:-1])],
    }[fault]
    said = {"missing": "is missing", "twice": "came twice", "unknown": "not a tensor", "shape": "shape"}[fault]
    with pytest.raises(InfrastructureError, match=said):
        await sync(engine, 1, iter(tensors))
    with pytest.raises(InfrastructureError, match="out of order"):
        await engine.generate(request())
    await sync(engine, 2, stream(qwen2))
    assert (await engine.generate(request())).weights_versions == ((2, 12),)


async def test_weights_wait_for_requests_in_flight_and_new_requests_for_weights(
    qwen2: PreTrainedModel, make_engine: MakeEngine
) -> None:
    engine = make_engine(qwen2, max_num_seqs=1)
    early = [asyncio.create_task(engine.generate(request(f"e{i}", 40, i))) for i in range(3)]
    await asyncio.sleep(0)
    begin = asyncio.create_task(engine.begin_weights(1))
    await asyncio.sleep(0)
    late = asyncio.create_task(engine.generate(request("late")))
    await begin
    assert all(task.done() for task in early)
    assert not late.done()
    await engine.load_weights(stream(changed(qwen2)))
    await asyncio.sleep(0.01)
    assert not late.done()
    await engine.end_weights(1)
    assert (await late).weights_versions == ((1, 12),)
    assert {(await task).weights_versions for task in early} == {((0, 40),)}


async def test_a_broken_sync_fails_those_who_waited_for_it(qwen2: PreTrainedModel, make_engine: MakeEngine) -> None:
    """By its end failing, or by another one beginning instead."""
    engine = make_engine(qwen2)
    for version, ending in ((1, "fails"), (2, "restarts")):
        await engine.begin_weights(version)
        waiting = asyncio.create_task(engine.generate(request()))
        await asyncio.sleep(0)
        if ending == "fails":
            with pytest.raises(InfrastructureError, match="missing"):
                await engine.end_weights(version)
        else:
            await engine.begin_weights(version + 1)
        with pytest.raises(InfrastructureError, match="out of order"):
            await waiting
    await engine.load_weights(stream(qwen2))
    await engine.end_weights(3)
    assert (await engine.generate(request())).weights_versions == ((3, 12),)


async def test_calls_out_of_turn_are_errors(qwen2: PreTrainedModel, make_engine: MakeEngine) -> None:
    engine = make_engine(qwen2)
    with pytest.raises(InfrastructureError, match="before begin_weights"):
        await engine.load_weights(stream(qwen2))
    await engine.begin_weights(1)
    await engine.load_weights(stream(qwen2))
    with pytest.raises(InfrastructureError, match="version 2"):
        await engine.end_weights(2)


async def test_a_checkpoint_directory_is_version_0(
    llama: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, make_engine: MakeEngine, tmp_path: Path
) -> None:
    llama.save_pretrained(tmp_path)
    engine = TorchEngine(tmp_path, tokenizer, max_num_seqs=2, max_model_len=300)
    assert engine.weights_version == 0
    assert await engine.generate(request()) == await make_engine(llama).generate(request())
