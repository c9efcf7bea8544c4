"""Causal attention over packed sequences, as an attention function of Hugging Face models.

Invariant: a token attends only to its own sequence, so packing never changes a result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import is_flash_attn_2_available

PACKED_SDPA = "packed_sdpa"
FLASH_ATTENTION = "flash_attention_2"


def packed_attention_implementation(device_type: str, compute_dtype: torch.dtype) -> str:
    """The best packed attention of this machine: flash-attn where it is installed and knows the type."""
    half = compute_dtype in (torch.bfloat16, torch.float16)
    return FLASH_ATTENTION if device_type == "cuda" and half and is_flash_attn_2_available() else PACKED_SDPA


def packed_sdpa(
    _module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    *,
    sequence_lengths: Sequence[int],
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """One ``scaled_dot_product_attention`` per run of equally long sequences.

    ``query`` is (1, heads, total_nnz, head_dim), ``key`` and ``value`` the same with their own
    number of heads, ``sequence_lengths`` add up to total_nnz. Returns (1, total_nnz, heads, head_dim).
    """
    assert attention_mask is None and not dropout
    runs = _runs(sequence_lengths)
    sizes = [count * length for count, length in runs]
    parts = zip(runs, query.split(sizes, 2), key.split(sizes, 2), value.split(sizes, 2), strict=True)
    outputs = [
        _attend(_unpack(q, *run), _unpack(k, *run), _unpack(v, *run), scaling, sliding_window) for run, q, k, v in parts
    ]
    return torch.cat([output.transpose(1, 2).flatten(0, 1) for output in outputs])[None], None


def _runs(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Neighbouring equal lengths as (count, length)."""
    runs: list[tuple[int, int]] = []
    for length in lengths:
        if runs and runs[-1][1] == length:
            runs[-1] = (runs[-1][0] + 1, length)
        else:
            runs.append((1, length))
    return runs


def _unpack(packed: torch.Tensor, count: int, length: int) -> torch.Tensor:
    """(1, heads, count * length, head_dim) as (count, heads, length, head_dim)."""
    return packed[0].unflatten(1, (count, length)).transpose(0, 1)


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None, window: int | None
) -> torch.Tensor:
    grouped = query.shape[1] != key.shape[1]
    if window is None or query.shape[2] <= window:
        return scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=grouped)
    position = torch.arange(query.shape[2], device=query.device)
    distance = position[:, None] - position[None]
    mask = (distance >= 0) & (distance < window)
    return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling, enable_gqa=grouped)


# Without a mask function of the same name Hugging Face models build no mask at all, which is what packing needs.
ALL_ATTENTION_FUNCTIONS.register(PACKED_SDPA, packed_sdpa)
