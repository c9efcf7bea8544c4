from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config

from verl.models.hf.attention import FLASH_ATTENTION, PACKED_SDPA, packed_attention_implementation
from verl.models.hf.packed import PackedCausalLM
from verl.models.registry import build_packed_model, load_config

TINY = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
    "attention_dropout": 0.5,
    "pad_token_id": None,
}
WINDOW = {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}
CONFIGS = {
    "qwen2": Qwen2Config(**TINY, tie_word_embeddings=True),
    "qwen2 with a sliding window": Qwen2Config(**TINY, **WINDOW),
    "llama": LlamaConfig(**TINY),
    "qwen3": Qwen3Config(**TINY, head_dim=8),
}
LENGTHS = [4, 7, 7, 1, 12]


def saved(config: PretrainedConfig, path: Path) -> str:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return str(path)


def built(path: str, with_weights: bool = True) -> PackedCausalLM:
    return build_packed_model(path, torch.float32, torch.float32, "cpu", with_weights)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_packed_rows_equal_rows_alone(config: PretrainedConfig, tmp_path: Path) -> None:
    path = saved(config, tmp_path)
    model = built(path).train()
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    rows = [torch.randint(0, 50, (length,), generator=torch.Generator().manual_seed(length)) for length in LENGTHS]
    with torch.no_grad():
        hidden = model(
            torch.cat(rows),
            torch.cat([torch.arange(length) for length in LENGTHS]),
            torch.tensor([0, *LENGTHS]).cumsum(0).int(),
            max(LENGTHS),
        )
        expected = torch.cat([plain.model(input_ids=row[None]).last_hidden_state[0] for row in rows])
    torch.testing.assert_close(hidden, expected, atol=1e-5, rtol=1e-5)


def test_the_head_is_the_embedding_where_they_are_tied(tmp_path: Path) -> None:
    tied = built(saved(CONFIGS["qwen2"], tmp_path / "tied"))
    free = built(saved(CONFIGS["llama"], tmp_path / "free"))
    assert tied.head_weight is tied.hf_model.model.embed_tokens.weight
    assert free.head_weight is free.hf_model.lm_head.weight
    assert tied.head_weight.shape == (50, 32)
    assert len(tied.layers) == 2


def test_without_weights_nothing_is_allocated(tmp_path: Path) -> None:
    model = built(saved(CONFIGS["qwen3"], tmp_path), with_weights=False)
    assert {tensor.device.type for tensor in [*model.parameters(), *model.buffers()]} == {"meta"}


def test_an_architecture_that_cannot_be_trained_is_named_with_those_that_can(tmp_path: Path) -> None:
    config = LlamaConfig(**TINY, architectures=["OtherForCausalLM"])
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"OtherForCausalLM.*LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM"):
        load_config(str(tmp_path))


def test_flash_attention_is_for_half_precision_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verl.models.hf.attention.is_flash_attn_2_available", lambda: True)
    assert packed_attention_implementation("cuda", torch.bfloat16) == FLASH_ATTENTION
    assert packed_attention_implementation("cuda", torch.float32) == PACKED_SDPA
    assert packed_attention_implementation("cpu", torch.bfloat16) == PACKED_SDPA
    monkeypatch.setattr("verl.models.hf.attention.is_flash_attn_2_available", lambda: False)
    assert packed_attention_implementation("cuda", torch.bfloat16) == PACKED_SDPA


@pytest.mark.parametrize("name", ["qwen2", "llama"])
def test_a_backbone_is_the_model_without_its_output_projection(name: str, tmp_path: Path) -> None:
    model = built(saved(CONFIGS[name], tmp_path))
    backbone = model.backbone()
    expected = {id(parameter) for parameter in model.hf_model.model.parameters()}
    assert {id(parameter) for parameter in backbone.parameters()} == expected
    assert (id(model.head_weight) in expected) == (name == "qwen2")
    assert (backbone.hidden_size, len(backbone.layers)) == (32, 2)
