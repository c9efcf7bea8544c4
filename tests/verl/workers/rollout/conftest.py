"""Tiny models and a byte-level tokenizer that merges across tag borders, all made from seeds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from verl.workers.rollout.torch_engine import TorchEngine

VOCAB = 320
ROPE_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 2048,
    "initializer_range": 0.15,
}


def _seeded(make: Callable[[], PreTrainedModel]) -> PreTrainedModel:
    torch.manual_seed(0)
    model = make().eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.1)
    return model


@pytest.fixture(scope="session")
def llama() -> PreTrainedModel:
    """Untied, grouped queries, llama3 rope."""
    config = LlamaConfig(**SHAPE, num_key_value_heads=2, tie_word_embeddings=False, rope_parameters=ROPE_LLAMA3)
    return _seeded(lambda: LlamaForCausalLM(config))


@pytest.fixture(scope="session")
def qwen2() -> PreTrainedModel:
    """Tied, projection biases, one query head per key head."""
    return _seeded(lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE, num_key_value_heads=4, tie_word_embeddings=True)))


@pytest.fixture(scope="session")
def qwen3() -> PreTrainedModel:
    """Norms on queries and keys, a head size apart from hidden_size / heads."""
    config = Qwen3Config(**SHAPE, num_key_value_heads=1, head_dim=32, tie_word_embeddings=True)
    return _seeded(lambda: Qwen3ForCausalLM(config))


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """Bytes, and merges in which the borders of tags disappear: ``>.`` ``</`` ``h>`` ``x<``."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [(">", "."), ("<", "/"), ("h", ">"), ("h>", "\u010a"), ("x", "<"), ("a", "b"), ("r", ">")]
    vocab = {token: index for index, token in enumerate(alphabet + ["".join(pair) for pair in merges])}
    core = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|end|>", pad_token="<|pad|>")


MakeEngine = Callable[..., TorchEngine]


@pytest.fixture
def make_engine(tokenizer: PreTrainedTokenizerFast) -> MakeEngine:
    """A float32 engine of a model; keywords override its size."""

    def make(model: PreTrainedModel, **changes: Any) -> TorchEngine:
        options: dict[str, Any] = {"max_num_seqs": 4, "max_model_len": 400} | changes
        return TorchEngine(model, tokenizer, **options)

    return make
