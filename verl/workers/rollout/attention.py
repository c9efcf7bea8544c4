"""Attention of one step over pools of keys and values, the same bits in any batch and any cut.

Attention is float32 and its arithmetic depends on nothing but the query, the sequence's own keys
and values and its own length: scores and weighted sums are matrix products with at least two query
rows (with two or more, MKL adds every element up in one order; a single row takes another path),
the sum over positions is cut into segments of `SEGMENT` (longer sums are split by MKL according to
their total length), and masked positions add exact zeros. So a position computed in a prefill of
any cut equals the same position computed token by token, bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from verl.workers.rollout.kv_cache import ALIGN, CacheRow, KVCache, Pool, round_up
from verl.workers.rollout.torch_model import ModelSpec

SEGMENT = 256
_QUERY_CHUNK = 256


@dataclass(frozen=True, slots=True)
class Span:
    """Further tokens of ``row`` in one batch, at positions from ``first``; ``start`` is their first batch row."""

    row: CacheRow
    first: int
    count: int
    start: int


class BatchAttention:
    """Attention for one step: every row of every pool has one token, some have a `Span` after it."""

    def __init__(self, cache: KVCache, spec: ModelSpec, spans: list[Span]) -> None:
        self._parts: list[_PoolDecode | _SpanPrefill] = []
        start = 0
        for pool in cache.pools:
            if pool.rows:
                self._parts.append(_PoolDecode(pool, spec, start))
                start += len(pool.rows)
        # After the pools: a span's queries see the key that its row's first token writes there.
        self._parts.extend(_SpanPrefill(span, spec) for span in spans)

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(q.shape[0], q.shape[1] * q.shape[2], device=q.device)
        for part in self._parts:
            out[part.rows] = part(layer, q[part.rows].float(), k[part.rows].float(), v[part.rows].float())
        return out.to(q.dtype)


class _PoolDecode:
    """One token for every row of a pool, at the row's next position."""

    def __init__(self, pool: Pool, spec: ModelSpec, start: int) -> None:
        n, device = len(pool.rows), pool.keys.device
        self.rows = slice(start, start + n)
        self._pool, self._spec, self._count = pool, spec, n
        self._positions = torch.tensor([row.length for row in pool.rows], device=device)
        self._index = torch.arange(n, device=device)
        self._length = min(pool.capacity, round_up(max(row.length for row in pool.rows) + 1, ALIGN))
        self._bias = _causal_bias(self._positions, self._length)

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        s, n, keys, values = self._spec, self._count, self._pool.keys[layer], self._pool.values[layer]
        keys[self._index, :, :, self._positions] = k
        values[self._index, :, self._positions] = v
        group = s.query_heads // s.kv_heads
        queries = q.reshape(n * s.kv_heads, group, s.head_dim) * s.head_dim**-0.5
        if group == 1:
            # Copied: a stride of 0 sends torch.bmm down a path three times slower.
            queries = queries.expand(-1, 2, -1).contiguous()
        scores = torch.bmm(queries, keys[:n].view(n * s.kv_heads, s.head_dim, -1)[..., : self._length])
        scores.view(n, -1, self._length).add_(self._bias)
        mixed = weighted_values(scores, values[:n].view(n * s.kv_heads, -1, s.head_dim))
        return mixed[:, :group].reshape(n, -1)


class _SpanPrefill:
    """The tokens of a `Span`, a chunk of queries at a time."""

    def __init__(self, span: Span, spec: ModelSpec) -> None:
        self.rows = slice(span.start, span.start + span.count)
        self._row, self._spec = span.row, spec
        self._positions = slice(span.first, span.first + span.count)
        positions = torch.arange(span.first, span.first + span.count, device=span.row.pool.keys.device)
        self._biases = [
            _causal_bias(chunk, min(span.row.pool.capacity, round_up(span.first + end, ALIGN)))
            for end, chunk in _chunks(positions)
        ]

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        s, pool = self._spec, self._row.pool
        keys, values = pool.keys[layer, self._row.index], pool.values[layer, self._row.index]
        keys[..., self._positions] = k.permute(1, 2, 0)
        values[:, self._positions] = v.transpose(0, 1)
        queries = (q * s.head_dim**-0.5).unflatten(1, (s.kv_heads, -1)).transpose(0, 1)
        mixed = [
            _span_chunk(chunk, keys, values, bias)
            for chunk, bias in zip(queries.split(_QUERY_CHUNK, dim=1), self._biases, strict=True)
        ]
        return torch.cat(mixed, dim=1).transpose(0, 1).flatten(1)


def _chunks(positions: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
    """Pieces of at most `_QUERY_CHUNK` with the number of positions up to their end."""
    pieces = positions.split(_QUERY_CHUNK)
    return [(index * _QUERY_CHUNK + len(piece), piece) for index, piece in enumerate(pieces)]


def _causal_bias(positions: torch.Tensor, length: int) -> torch.Tensor:
    """0 up to each position, minus infinity after it: (positions, 1, length)."""
    masked = torch.arange(length, device=positions.device) > positions[:, None]
    return torch.zeros(masked.shape, device=positions.device).masked_fill_(masked, -torch.inf)[:, None]


def _span_chunk(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Queries (kv_heads, n, group, head_dim) → the same shape; ``bias`` (n, 1, length)."""
    heads, n, group, dim = queries.shape
    length = bias.shape[-1]
    flat = queries.reshape(heads, n * group, dim)
    if n * group == 1:
        flat = functional.pad(flat, (0, 0, 0, 1))
    scores = torch.bmm(flat, keys[..., :length])
    scores[:, : n * group].view(heads, n, group, length).add_(bias)
    return weighted_values(scores, values)[:, : n * group].reshape(queries.shape)


def weighted_values(scores: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Softmax of ``scores`` (batch, queries >= 2, length) over ``values`` (batch, >= length, head_dim)."""
    length = scores.shape[-1]
    weights = scores.softmax(dim=-1)
    mixed = torch.bmm(weights[..., :SEGMENT], values[:, : min(SEGMENT, length)])
    for begin in range(SEGMENT, length, SEGMENT):
        end = min(begin + SEGMENT, length)
        mixed.baddbmm_(weights[..., begin:end], values[:, begin:end])
    return mixed
