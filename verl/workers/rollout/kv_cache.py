"""Keys and values of running sequences, in pools of rows by length, and copies of idle ones.

A row lies in the smallest pool that holds it, so that attention reads little more than what is
filled; the rows in use of a pool are contiguous, so that it is one batched matrix product.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from verl.workers.rollout.torch_model import ModelSpec

ALIGN = 32
"""Lengths read are multiples of this."""


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
        """Rows in use, in the order in which `attention.BatchAttention` expects their tokens."""
        return [row for pool in self.pools for row in pool.rows]

    @property
    def positions(self) -> int:
        return sum(row.length for row in self.rows())


def pool_capacities(max_length: int) -> list[int]:
    """128, 256, 384, 512, then growing by half, up to ``max_length``."""
    top = round_up(max_length, ALIGN)
    capacities = [c for c in (128, 256, 384, 512) if c < top]
    while capacities and capacities[-1] >= 512 and round_up(capacities[-1] * 3 // 2, 128) < top:
        capacities.append(round_up(capacities[-1] * 3 // 2, 128))
    return [*capacities, top]
