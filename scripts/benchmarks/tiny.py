"""The model that the engine benchmarks run."""

from __future__ import annotations

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

VOCABULARY = 1280


def tiny_qwen2() -> Qwen2ForCausalLM:
    """0.8 million parameters: the size of the quickstart's models. It has no end-of-sequence id."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=1024,
        initializer_range=0.08,
        tie_word_embeddings=True,
        eos_token_id=None,
        bos_token_id=None,
    )
    return Qwen2ForCausalLM(config).eval()
