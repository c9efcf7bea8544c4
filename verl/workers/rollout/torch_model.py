"""Llama, Qwen2 and Qwen3 decoders over packed rows, with arithmetic that does not depend on the batch.

A row is one token of one sequence. Every operation outside attention works on rows, and a row's
result is the same bits whatever the other rows are: see `RowTiling`. Attention is the caller's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.nn import functional
from transformers import PreTrainedConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

_ROTARY = {"llama": LlamaRotaryEmbedding, "qwen2": Qwen2RotaryEmbedding, "qwen3": Qwen3RotaryEmbedding}
_STATIC_ROPE = ("default", "linear", "llama3", "yarn")

HEAD_NAME = "lm_head.weight"
EMBEDDING_NAME = "model.embed_tokens.weight"


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The shape of a dense decoder. ``query_heads`` share ``kv_heads`` in equal groups."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tied: bool

    @classmethod
    def from_config(cls, config: PreTrainedConfig) -> ModelSpec:
        """Raises ValueError for an architecture this engine does not compute exactly."""
        values = config.to_dict()
        _refuse_unsupported(values)
        heads = int(values["num_attention_heads"])
        bias = values["model_type"] == "qwen2" or bool(values.get("attention_bias"))
        return cls(
            vocab_size=values["vocab_size"],
            hidden_size=values["hidden_size"],
            intermediate_size=values["intermediate_size"],
            num_layers=values["num_hidden_layers"],
            query_heads=heads,
            kv_heads=values.get("num_key_value_heads") or heads,
            head_dim=values.get("head_dim") or values["hidden_size"] // heads,
            norm_eps=values["rms_norm_eps"],
            qkv_bias=bias,
            output_bias=bias and values["model_type"] != "qwen2",
            mlp_bias=bool(values.get("mlp_bias")),
            qk_norm=values["model_type"] == "qwen3",
            tied=bool(values["tie_word_embeddings"]),
        )


def _refuse_unsupported(values: Mapping[str, Any]) -> None:
    kind = values["model_type"]
    if kind not in _ROTARY:
        raise ValueError(f"the torch engine runs {', '.join(_ROTARY)}; this model is {kind!r}: use another engine")
    rope = values["rope_parameters"]["rope_type"]
    if rope not in _STATIC_ROPE:
        raise ValueError(f"rope type {rope!r} depends on the length of the batch; supported: {', '.join(_STATIC_ROPE)}")
    if values.get("use_sliding_window") or "sliding_attention" in (values.get("layer_types") or ()):
        raise ValueError("the torch engine has no sliding-window attention")
    if values["hidden_act"] != "silu":
        raise ValueError(f"the torch engine computes silu, not {values['hidden_act']!r}")


def rotary_tables(config: PreTrainedConfig, positions: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Hugging Face's own cosines and sines of positions 0 to ``positions`` - 1, each (positions, head_dim)."""
    rotary = _ROTARY[config.model_type](config=config)
    cos, sin = rotary(torch.zeros(1, dtype=dtype), torch.arange(positions)[None])
    return cos[0], sin[0]


class RowTiling:
    """How rows are padded and cut so that each row of a matrix product is the same bits in any batch.

    Measured with MKL and oneDNN (torch 2.13): in float32 on one thread every product of at least 16
    rows sums each element in the same order, whatever the number of rows; with fewer rows, in
    bfloat16, or with several threads the order depends on the number of rows. There all products
    have exactly ``TILE`` rows. Row counts are multiples of 32, so that elementwise kernels have no
    scalar tail, which rounds differently from their vector body.
    """

    TILE = 64
    FLOOR = 32

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        free = dtype == torch.float32 and device.type == "cpu" and torch.get_num_threads() == 1
        self.tile = None if free else self.TILE
        self._multiple = self.tile or self.FLOOR

    def padded(self, rows: int) -> int:
        return max(1, -(-rows // self._multiple)) * self._multiple

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """``x`` (padded rows, in) → (padded rows, out)."""
        if self.tile is None or x.shape[0] == self.tile:
            return functional.linear(x, weight, bias)
        return torch.cat([functional.linear(tile, weight, bias) for tile in x.split(self.tile)])


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer: query, key and value projections stacked, gate and up projections stacked."""

    input_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    output: torch.Tensor
    output_bias: torch.Tensor | None
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor
    down_bias: torch.Tensor | None


class Attention(Protocol):
    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """(rows, query_heads, head_dim), (rows, kv_heads, head_dim) twice → (rows, query_heads * head_dim)."""
        ...


class DecoderModel:
    """The weights, held once, and the forward pass."""

    def __init__(self, config: PreTrainedConfig, max_positions: int, dtype: torch.dtype, device: torch.device) -> None:
        self.spec = ModelSpec.from_config(config)
        self.dtype, self.device = dtype, device
        self.tiling = RowTiling(dtype, device)
        cos, sin = rotary_tables(config, max_positions, dtype)
        half = self.spec.head_dim // 2
        # rotate_half(x) * sin is written as swap_halves(x) * signed sin, which is the same bits.
        signed = torch.cat((-sin[:, :half], sin[:, half:]), dim=-1)
        self._cos, self._sin = cos[:, None].to(device), signed[:, None].to(device)
        self.embedding = self._empty(self.spec.vocab_size, self.spec.hidden_size)
        self.head = self.embedding if self.spec.tied else torch.empty_like(self.embedding)
        self.final_norm = self._empty(self.spec.hidden_size)
        self.layers = [self._empty_layer() for _ in range(self.spec.num_layers)]

    def _empty(self, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def _empty_layer(self) -> LayerWeights:
        s, new = self.spec, self._empty
        attention, qkv = s.query_heads * s.head_dim, (s.query_heads + 2 * s.kv_heads) * s.head_dim
        return LayerWeights(
            input_norm=new(s.hidden_size),
            qkv=new(qkv, s.hidden_size),
            qkv_bias=new(qkv) if s.qkv_bias else None,
            query_norm=new(s.head_dim) if s.qk_norm else None,
            key_norm=new(s.head_dim) if s.qk_norm else None,
            output=new(s.hidden_size, attention),
            output_bias=new(s.hidden_size) if s.output_bias else None,
            mlp_norm=new(s.hidden_size),
            gate_up=new(2 * s.intermediate_size, s.hidden_size),
            gate_up_bias=new(2 * s.intermediate_size) if s.mlp_bias else None,
            down=new(s.hidden_size, s.intermediate_size),
            down_bias=new(s.hidden_size) if s.mlp_bias else None,
        )

    def parameters(self) -> dict[str, torch.Tensor]:
        """Hugging Face name → the place of that tensor in the fused weights; without a tied head."""
        named = {EMBEDDING_NAME: self.embedding, "model.norm.weight": self.final_norm}
        if not self.spec.tied:
            named[HEAD_NAME] = self.head
        for index, layer in enumerate(self.layers):
            named.update((f"model.layers.{index}.{name}", view) for name, view in self._layer_parameters(layer))
        return named

    def _layer_parameters(self, w: LayerWeights) -> Iterator[tuple[str, torch.Tensor]]:
        s = self.spec
        heads = [s.query_heads * s.head_dim, s.kv_heads * s.head_dim, s.kv_heads * s.head_dim]
        fused = [
            (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), w.qkv, w.qkv_bias, heads),
            (("mlp.gate_proj", "mlp.up_proj"), w.gate_up, w.gate_up_bias, [s.intermediate_size] * 2),
            (("self_attn.o_proj",), w.output, w.output_bias, [s.hidden_size]),
            (("mlp.down_proj",), w.down, w.down_bias, [s.hidden_size]),
        ]
        for names, weight, bias, sizes in fused:
            for name, view in zip(names, weight.split(sizes), strict=True):
                yield f"{name}.weight", view
            if bias is not None:
                for name, view in zip(names, bias.split(sizes), strict=True):
                    yield f"{name}.bias", view
        yield "input_layernorm.weight", w.input_norm
        yield "post_attention_layernorm.weight", w.mlp_norm
        if w.query_norm is not None and w.key_norm is not None:
            yield "self_attn.q_norm.weight", w.query_norm
            yield "self_attn.k_norm.weight", w.key_norm

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, attend: Attention) -> torch.Tensor:
        """``tokens`` and ``positions`` (padded rows,) → hidden states before the last norm (padded rows, hidden)."""
        x = functional.embedding(tokens, self.embedding)
        cos, sin = self._cos[positions], self._sin[positions]
        for index, weights in enumerate(self.layers):
            q, k, v = self._project(x, weights, cos, sin)
            x = x + self.tiling.linear(attend(index, q, k, v), weights.output, weights.output_bias)
            x = x + self._mlp(x, weights)
        return x

    def _project(
        self, x: torch.Tensor, w: LayerWeights, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        s = self.spec
        fused = self.tiling.linear(self._norm(x, w.input_norm), w.qkv, w.qkv_bias).view(x.shape[0], -1, s.head_dim)
        qk, v = fused[:, : s.query_heads + s.kv_heads], fused[:, s.query_heads + s.kv_heads :]
        if w.query_norm is not None and w.key_norm is not None:
            q, k = qk[:, : s.query_heads], qk[:, s.query_heads :]
            qk = torch.cat((self._norm(q, w.query_norm), self._norm(k, w.key_norm)), dim=1)
        half = s.head_dim // 2
        qk = qk * cos + torch.cat((qk[..., half:], qk[..., :half]), dim=-1) * sin
        return qk[:, : s.query_heads], qk[:, s.query_heads :], v

    def _mlp(self, x: torch.Tensor, w: LayerWeights) -> torch.Tensor:
        gate, up = self.tiling.linear(self._norm(x, w.mlp_norm), w.gate_up, w.gate_up_bias).chunk(2, dim=-1)
        return self.tiling.linear(functional.silu(gate) * up, w.down, w.down_bias)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, weight.shape, weight, self.spec.norm_eps)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states (rows, hidden), any number of rows → float32 logits (rows, vocab)."""
        rows = hidden.shape[0]
        padded = functional.pad(hidden, (0, 0, 0, self.tiling.padded(rows) - rows))
        return self.tiling.linear(self._norm(padded, self.final_norm), self.head, None)[:rows].float()
