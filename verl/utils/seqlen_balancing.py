"""Splitting rows of different lengths into parts of nearly equal sums. Everything here is deterministic."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
import torch.distributed as dist
from tensordict import TensorDict


def ceildiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


@dataclass(frozen=True, slots=True)
class _Split:
    """k disjoint sets of row numbers with their sums, the largest sum first."""

    sums: tuple[int, ...]
    sets: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, parts: Sequence[tuple[int, tuple[int, ...]]]) -> Self:
        sums, sets = zip(*sorted(parts, key=lambda part: (-part[0], part[1])), strict=True)
        return cls(sums, sets)

    @property
    def spread(self) -> int:
        return self.sums[0] - self.sums[-1]

    def merged(self, other: Self) -> Self:
        """The largest set of one with the smallest of the other, and so on."""
        pairs = zip(self.sums, self.sets, reversed(other.sums), reversed(other.sets), strict=True)
        return self.of([(a + b, first + second) for a, first, b, second in pairs])


def karmarkar_karp(seqlen_list: Sequence[int], k_partitions: int, equal_size: bool) -> list[list[int]]:
    """The largest differencing method (Karmarkar and Karp 1982) for k parts.

    ``equal_size`` gives every part the same number of rows, which must divide. Returns k lists of row
    numbers, some of them empty where there are fewer rows than parts and ``equal_size`` is off.
    """
    order = sorted(range(len(seqlen_list)), key=lambda i: (seqlen_list[i], i))
    size = k_partitions if equal_size else 1
    heap = []
    for number, start in enumerate(range(0, len(order), size)):
        parts = [(seqlen_list[i], (i,)) for i in order[start : start + size]]
        empty: list[tuple[int, tuple[int, ...]]] = [(0, ())] * (k_partitions - len(parts))
        split = _Split.of(parts + empty)
        heap.append((-split.spread, number, split))
    heapq.heapify(heap)
    number = len(heap)
    while len(heap) > 1:
        _, _, first = heapq.heappop(heap)
        _, _, second = heapq.heappop(heap)
        split = first.merged(second)
        heapq.heappush(heap, (-split.spread, number, split))
        number += 1
    return [sorted(rows) for rows in heap[0][2].sets] if heap else [[] for _ in range(k_partitions)]


def get_seqlen_balanced_partitions(seqlen_list: Sequence[int], k_partitions: int, equal_size: bool) -> list[list[int]]:
    """``k_partitions`` lists of row numbers, each ascending, whose sums of lengths are close.

    Raises ValueError for fewer rows than parts, and with ``equal_size`` for rows that do not divide.
    """
    rows = len(seqlen_list)
    if rows < k_partitions:
        raise ValueError(f"{rows} rows cannot fill {k_partitions} partitions")
    if equal_size and rows % k_partitions:
        raise ValueError(f"{rows} rows do not divide into {k_partitions} partitions of equal size")
    partitions = karmarkar_karp(seqlen_list, k_partitions, equal_size)
    assert sorted(i for part in partitions for i in part) == list(range(rows))
    return partitions


def log_seqlen_unbalance(
    seqlen_list: Sequence[int], partitions: Sequence[Sequence[int]], prefix: str
) -> dict[str, float]:
    """Sums of lengths per part, in tokens.

    ``min``, ``max`` and ``minmax_diff`` are those of consecutive rows in as many parts,
    ``balanced_min`` and ``balanced_max`` those of ``partitions``; ``mean`` is the same for both.
    """
    k, rows = len(partitions), len(seqlen_list)
    consecutive = [sum(seqlen_list[rows * i // k : rows * (i + 1) // k]) for i in range(k)]
    balanced = [sum(seqlen_list[i] for i in part) for part in partitions]
    return {
        f"{prefix}/min": min(consecutive),
        f"{prefix}/max": max(consecutive),
        f"{prefix}/minmax_diff": max(consecutive) - min(consecutive),
        f"{prefix}/balanced_min": min(balanced),
        f"{prefix}/balanced_max": max(balanced),
        f"{prefix}/mean": sum(seqlen_list) / k,
    }


def get_reverse_idx(idx_map: Sequence[int]) -> list[int]:
    """The inverse of a permutation."""
    inverse = [0] * len(idx_map)
    for position, index in enumerate(idx_map):
        inverse[index] = position
    return inverse


def rearrange_micro_batches(
    batch: TensorDict,
    max_token_len: int,
    dp_group: dist.ProcessGroup | None = None,
    same_micro_num_in_dp: bool = True,
    min_num_micro_batch: int | None = None,
) -> tuple[list[TensorDict], list[list[int]]]:
    """Rows in micro-batches of at most ``max_token_len`` tokens, balanced.

    Lengths come from ``attention_mask`` (B, S). With ``dp_group`` all its ranks get the same number of
    micro-batches unless ``same_micro_num_in_dp`` is off. Returns the micro-batches and their row
    numbers. Raises ValueError for a longer row, and for fewer rows than micro-batches.
    """
    lengths: list[int] = batch["attention_mask"].sum(-1).tolist()
    if max(lengths) > max_token_len:
        raise ValueError(f"a row of {max(lengths)} tokens does not fit into max_token_len {max_token_len}")
    count = max(ceildiv(sum(lengths), max_token_len), min_num_micro_batch or 1)
    while not _fits(lengths, count, max_token_len):
        count += 1
    if dp_group is not None and same_micro_num_in_dp:
        agreed = torch.tensor(count)
        dist.all_reduce(agreed, dist.ReduceOp.MAX, dp_group)
        count = int(agreed)
    partitions = get_seqlen_balanced_partitions(lengths, count, equal_size=False)
    return [batch[part] for part in partitions], partitions


def _fits(lengths: Sequence[int], count: int, limit: int) -> bool:
    parts = karmarkar_karp(lengths, count, equal_size=False)
    return all(sum(lengths[i] for i in part) <= limit for part in parts)
