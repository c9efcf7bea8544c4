"""The forward pass against Hugging Face's, and its independence of the batch."""

from __future__ import annotations

import random

import pytest
import torch
from torch.nn import functional
from transformers import LlamaConfig, MistralConfig, PreTrainedModel, PreTrainedTokenizerFast, Qwen2Config

from verl.workers.rollout.attention import BatchAttention, Span
from verl.workers.rollout.kv_cache import KVCache, pool_capacities
from verl.workers.rollout.torch_engine import TorchEngine
from verl.workers.rollout.torch_model import DecoderModel, ModelSpec, RowTiling
from verl.workers.rollout.weight_loader import WeightLoader

CPU = torch.device("cpu")


def built(source: PreTrainedModel, dtype: torch.dtype = torch.float32) -> DecoderModel:
    model = DecoderModel(source.config, 512, dtype, CPU)
    loader = WeightLoader(model, 0)
    loader.load(source.state_dict().items())
    loader.finish()
    return model


def hidden_states(model: DecoderModel, ids: list[int], cuts: list[int]) -> torch.Tensor:
    """Last-layer states (tokens, hidden) of a sequence computed in pieces that end at ``cuts``."""
    cache = KVCache(model.spec, 512, CPU)
    row = cache.new_row(len(ids))
    states = []
    for end in cuts:
        positions = list(range(row.length, end))
        rest = len(positions) - 1
        spans = [Span(row, row.length + 1, rest, start=1)] if rest else []
        attention = BatchAttention(cache, model.spec, spans)
        padding = [0] * (model.tiling.padded(len(positions)) - len(positions))
        tokens = torch.tensor([ids[p] for p in positions] + padding)
        states.append(model.forward(tokens, torch.tensor(positions + padding), attention)[: len(positions)])
        row.length = end
    return torch.cat(states)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
@torch.inference_mode()
def test_logits_equal_hugging_faces(name: str, request: pytest.FixtureRequest) -> None:
    source = request.getfixturevalue(name)
    model = built(source)
    ids = [random.Random(0).randrange(300) for _ in range(300)]
    logits = model.logits(hidden_states(model, ids, [300]))
    reference = source(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(logits.log_softmax(-1), reference.log_softmax(-1), rtol=0, atol=5e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
@torch.inference_mode()
def test_prefill_in_any_cut_is_the_same_bits(name: str, dtype: torch.dtype, request: pytest.FixtureRequest) -> None:
    model = built(request.getfixturevalue(name), dtype)
    rng = random.Random(1)
    ids = [rng.randrange(300) for _ in range(330)]
    whole = hidden_states(model, ids, [330])
    one_by_one = hidden_states(model, ids, [64, *range(65, 331)])
    assert torch.equal(whole, one_by_one)
    for _ in range(3):
        cuts = sorted({330, *(rng.randrange(1, 330) for _ in range(rng.randrange(1, 8)))})
        assert torch.equal(whole, hidden_states(model, ids, cuts)), cuts


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(128, 384), (128, 1280), (576, 960), (1536, 576), (96, 320)])
def test_rows_of_a_product_do_not_depend_on_their_number(shape: tuple[int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    tiling = RowTiling(dtype, CPU)
    x, weight = torch.randn(1024, shape[0]).to(dtype), torch.randn(shape[1], shape[0]).to(dtype)
    whole = tiling.linear(x, weight, None)
    for rows in (1, 5, 16, 17, 32, 33, 64, 100, 257, 500):
        first = random.Random(rows).randrange(500)
        some = functional.pad(x[first : first + rows], (0, 0, 0, tiling.padded(rows) - rows))
        assert torch.equal(tiling.linear(some, weight, None)[:rows], whole[first : first + rows])


def test_llama_weights_are_held_once(llama: PreTrainedModel, qwen2: PreTrainedModel) -> None:
    for source in (llama, qwen2):
        model = built(source)
        storages = {
            view.untyped_storage().data_ptr(): view.untyped_storage().nbytes() for view in model.parameters().values()
        }
        assert sum(storages.values()) == 4 * sum(p.numel() for p in source.parameters())


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (Qwen2Config(use_sliding_window=True, num_hidden_layers=2, max_window_layers=1), "sliding"),
        (LlamaConfig(hidden_act="gelu"), "silu"),
        (LlamaConfig(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}), "dynamic"),
    ],
)
def test_what_it_does_not_compute_is_refused(config: LlamaConfig | Qwen2Config, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ModelSpec.from_config(config)


def test_other_architectures_are_refused() -> None:
    with pytest.raises(ValueError, match="'mistral'"):
        ModelSpec.from_config(MistralConfig())


@pytest.mark.parametrize("length", [2, 100, 128, 129, 512, 513, 640, 4096])
def test_pools_reach_the_greatest_length(length: int) -> None:
    capacities = pool_capacities(length)
    assert capacities == sorted(set(capacities))
    assert length <= capacities[-1] < length + 32


async def test_greatest_length_must_be_the_models(qwen2: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(ValueError, match="2048"):
        TorchEngine(qwen2, tokenizer, max_num_seqs=1, max_model_len=2049)
