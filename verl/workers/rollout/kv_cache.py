"""Keys and values: pools of rows by length, kept copies of idle sessions, and attention over them.

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

from verl.workers.rollout.torch_model import ModelSpec

SEGMENT = 256
_ALIGN = 32
_QUERY_CHUNK = 256


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclass(eq=False, slots=True)
class CacheRow:
    """Where a running sequence's keys and values lie; ``length`` positions are filled."""

    pool: Pool
    index: int
    length: int = 0


@dataclass(frozen=True, slots=True)
class KeptKV:
    """A compact copy of ``length`` positions: keys (layers, kv_heads, head_dim, length), values transposed."""

    keys: torch.Tensor
    values: torch.Tensor

    @property
    def length(self) -> int:
        return self.values.shape[2]


class Pool:
    """Rows of one capacity; the first ``len(rows)`` are in use.

    Keys are (layers, rows, kv_heads, head_dim, capacity), values (layers, rows, kv_heads, capacity, head_dim).
    """

    def __init__(self, spec: ModelSpec, capacity: int, device: torch.device) -> None:
        self.capacity = capacity
        self.rows: list[CacheRow] = []
        self._shape = (spec.num_layers, spec.kv_heads, spec.head_dim)
        self._device = device
        self.keys, self.values = self._allocate(0)

    def _allocate(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        # Zeros, because a masked position still takes part with weight 0 and 0 * NaN is NaN.
        layers, heads, dim = self._shape
        keys = torch.zeros(layers, rows, heads, dim, self.capacity, device=self._device)
        return keys, torch.zeros(layers, rows, heads, self.capacity, dim, device=self._device)

    def append(self) -> CacheRow:
        used = len(self.rows)
        if used == self.keys.shape[1]:
            old_keys, old_values = self.keys, self.values
            self.keys, self.values = self._allocate(max(8, 2 * used))
            self.keys[:, :used], self.values[:, :used] = old_keys, old_values
        row = CacheRow(self, used)
        self.rows.append(row)
        return row

    def remove(self, row: CacheRow) -> None:
        """The last row takes the place of ``row``."""
        last = self.rows.pop()
        if last is not row:
            n = last.length
            self.keys[:, row.index, ..., :n] = self.keys[:, last.index, ..., :n]
            self.values[:, row.index, :, :n] = self.values[:, last.index, :, :n]
            last.index = row.index
            self.rows[last.index] = last

    def kept(self, row: CacheRow, length: int) -> KeptKV:
        return KeptKV(self.keys[:, row.index, ..., :length].clone(), self.values[:, row.index, :, :length].clone())

    def fill(self, row: CacheRow, keys: torch.Tensor, values: torch.Tensor, length: int) -> None:
        self.keys[:, row.index, ..., :length] = keys[..., :length]
        self.values[:, row.index, :, :length] = values[:, :, :length]
        row.length = length


class KVCache:
    """All pools. A row lives in the smallest pool that holds it and moves up as it grows."""

    def __init__(self, spec: ModelSpec, max_length: int, device: torch.device) -> None:
        self._spec, self._device = spec, device
        self._capacities = pool_capacities(max_length)
        self.clear()

    def clear(self) -> None:
        self.pools = [Pool(self._spec, capacity, self._device) for capacity in self._capacities]

    def new_row(self, capacity: int) -> CacheRow:
        return next(pool for pool in self.pools if pool.capacity >= capacity).append()

    def restore(self, kept: KeptKV, length: int, capacity: int) -> CacheRow:
        """A new row holding the first ``length`` positions of ``kept``."""
        row = self.new_row(capacity)
        row.pool.fill(row, kept.keys, kept.values, length)
        return row

    def grow(self, row: CacheRow, capacity: int) -> None:
        """Moves ``row`` to a pool with room for ``capacity`` positions if it has none."""
        if row.pool.capacity >= capacity:
            return
        old_pool, old_index, n = row.pool, row.index, row.length
        new = self.new_row(capacity)
        new.pool.fill(new, old_pool.keys[:, old_index, ..., :n], old_pool.values[:, old_index, :, :n], n)
        old_pool.remove(row)
        row.pool, row.index = new.pool, new.index
        row.pool.rows[row.index] = row

    def rows(self) -> list[CacheRow]:
        """Rows in use, in the order in which `BatchAttention` expects their tokens."""
        return [row for pool in self.pools for row in pool.rows]

    @property
    def positions(self) -> int:
        return sum(row.length for row in self.rows())


def pool_capacities(max_length: int) -> list[int]:
    """128, 256, 384, 512, then growing by half, up to ``max_length``."""
    top = round_up(max_length, _ALIGN)
    capacities = [c for c in (128, 256, 384, 512) if c < top]
    while capacities and capacities[-1] >= 512 and round_up(capacities[-1] * 3 // 2, 128) < top:
        capacities.append(round_up(capacities[-1] * 3 // 2, 128))
    return [*capacities, top]


class _PoolDecode:
    """One token for every row of a pool, at the row's next position."""

    def __init__(self, pool: Pool, spec: ModelSpec, start: int) -> None:
        n, device = len(pool.rows), pool.keys.device
        self._pool, self._spec, self._rows = pool, spec, slice(start, start + n)
        positions = torch.tensor([row.length for row in pool.rows], device=device)
        self._length = min(pool.capacity, round_up(int(positions.max()) + 1, _ALIGN))
        masked = torch.arange(self._length, device=device) > positions[:, None]
        self._bias = torch.zeros(masked.shape, device=device).masked_fill_(masked, -torch.inf)[:, None]
        self._index, self._positions = torch.arange(n, device=device), positions

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> None:
        s, n, pool = self._spec, len(self._index), self._pool
        keys, values = pool.keys[layer], pool.values[layer]
        keys[self._index, :, :, self._positions] = k[self._rows].float()
        values[self._index, :, self._positions] = v[self._rows].float()
        group = s.query_heads // s.kv_heads
        queries = q[self._rows].reshape(n * s.kv_heads, group, s.head_dim).float() * s.head_dim**-0.5
        if group == 1:
            # Copied: a stride of 0 sends torch.bmm down a path three times slower.
            queries = queries.expand(-1, 2, -1).contiguous()
        scores = torch.bmm(queries, keys[:n].view(n * s.kv_heads, s.head_dim, -1)[..., : self._length])
        scores.view(n, -1, self._length).add_(self._bias)
        mixed = weighted_values(scores, values[:n].view(n * s.kv_heads, -1, s.head_dim))
        out[self._rows] = mixed[:, :group].reshape(n, -1)


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
        self._spec, self._spans = spec, spans
        self._pools: list[_PoolDecode] = []
        start = 0
        for pool in cache.pools:
            if pool.rows:
                self._pools.append(_PoolDecode(pool, spec, start))
                start += len(pool.rows)

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(q.shape[0], q.shape[1] * q.shape[2], device=q.device)
        for decode in self._pools:
            decode(layer, q, k, v, out)
        for span in self._spans:
            _attend_span(span, self._spec, layer, q, k, v, out)
        return out.to(q.dtype)


def _attend_span(
    span: Span, s: ModelSpec, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor
) -> None:
    pool, index = span.row.pool, span.row.index
    rows = slice(span.start, span.start + span.count)
    keys, values = pool.keys[layer, index], pool.values[layer, index]
    keys[..., span.first : span.first + span.count] = k[rows].permute(1, 2, 0)
    values[:, span.first : span.first + span.count] = v[rows].transpose(0, 1)
    queries = q[rows].unflatten(1, (s.kv_heads, -1)).transpose(0, 1).float() * s.head_dim**-0.5
    for begin in range(0, span.count, _QUERY_CHUNK):
        chunk = queries[:, begin : begin + _QUERY_CHUNK]
        mixed = _causal(chunk, keys, values, span.first + begin)
        out[span.start + begin : span.start + begin + chunk.shape[1]] = mixed.transpose(0, 1).flatten(1)


def _causal(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, first: int) -> torch.Tensor:
    """Queries (kv_heads, n, group, head_dim) at positions from ``first`` → the same shape."""
    heads, n, group, dim = queries.shape
    length = min(keys.shape[-1], round_up(first + n, _ALIGN))
    flat = queries.reshape(heads, n * group, dim)
    scores = torch.bmm(functional.pad(flat, (0, 0, 0, n * group == 1)), keys[..., :length])
    positions = torch.arange(first, first + n, device=keys.device)
    masked = torch.arange(length, device=keys.device) > positions[:, None]
    scores[:, : n * group].view(heads, n, group, length).masked_fill_(masked[:, None], -torch.inf)
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
