"""Which architectures can be trained, and how one is built."""

from __future__ import annotations

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from verl.models.hf.attention import packed_attention_implementation
from verl.models.hf.packed import PackedCausalLM

PACKED_MODELS: dict[str, type[PackedCausalLM]] = {
    "LlamaForCausalLM": PackedCausalLM,
    "Qwen2ForCausalLM": PackedCausalLM,
    "Qwen3ForCausalLM": PackedCausalLM,
}


def packed_model_class(config: PretrainedConfig) -> type[PackedCausalLM]:
    """The adapter for a checkpoint's architecture. Raises ValueError naming the supported ones."""
    names = config.architectures or []
    for name in names:
        if name in PACKED_MODELS:
            return PACKED_MODELS[name]
    raise ValueError(f"cannot train the architecture {names}; supported: {', '.join(sorted(PACKED_MODELS))}")


def load_config(path: str, trust_remote_code: bool = False) -> PretrainedConfig:
    """The checkpoint's configuration, dropout off: sampling and training must see the same distribution."""
    config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    packed_model_class(config)
    config.attention_dropout = 0.0
    return config


def build_packed_model(
    path: str,
    dtype: torch.dtype,
    compute_dtype: torch.dtype,
    device_type: str,
    with_weights: bool,
    trust_remote_code: bool = False,
) -> PackedCausalLM:
    """The model of a checkpoint directory or hub name, on CPU with its weights or on ``meta`` without.

    ``dtype`` is that of the parameters, ``compute_dtype`` the one the forward pass will run in on
    ``device_type``. Raises ValueError for an architecture that is not supported.
    """
    config = load_config(path, trust_remote_code)
    implementation = packed_attention_implementation(device_type, compute_dtype)
    if with_weights:
        model = AutoModelForCausalLM.from_pretrained(
            path, config=config, dtype=dtype, attn_implementation=implementation, trust_remote_code=trust_remote_code
        )
    else:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation=implementation, trust_remote_code=trust_remote_code
            )
    return packed_model_class(config)(model)
