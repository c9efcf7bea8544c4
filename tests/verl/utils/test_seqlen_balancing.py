from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from verl.utils.seqlen_balancing import (
    ceildiv,
    get_reverse_idx,
    get_seqlen_balanced_partitions,
    karmarkar_karp,
    log_seqlen_unbalance,
    rearrange_micro_batches,
)

LENGTHS = st.lists(st.integers(1, 1000), min_size=6, max_size=30)


@given(LENGTHS, st.integers(1, 6), st.booleans())
def test_partitions_hold_every_row_once(lengths: list[int], parts: int, equal_size: bool) -> None:
    lengths = lengths[: len(lengths) // parts * parts]
    partitions = get_seqlen_balanced_partitions(lengths, parts, equal_size)
    assert len(partitions) == parts
    assert sorted(i for part in partitions for i in part) == list(range(len(lengths)))
    assert all(part == sorted(part) for part in partitions)
    if equal_size:
        assert {len(part) for part in partitions} == {len(lengths) // parts}


def test_a_textbook_case() -> None:
    assert sums([8, 7, 6, 5, 4], 2) == [14, 16]
    assert sums([10, 10, 10, 10, 20, 20], 4) == [20, 20, 20, 20]


def sums(lengths: list[int], parts: int) -> list[int]:
    return sorted(sum(lengths[i] for i in part) for part in karmarkar_karp(lengths, parts, equal_size=False))


def test_within_five_percent_of_the_best_split() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        lengths = torch.randint(1, 100, (10,), generator=generator).tolist()
        ones = [sum(n for n, side in zip(lengths, sides, strict=True) if side) for sides in product((0, 1), repeat=10)]
        best = min(max(one, sum(lengths) - one) for one in ones)
        assert sums(lengths, 2)[1] <= 1.05 * best


def test_the_same_lengths_give_the_same_parts() -> None:
    lengths = [5] * 12 + [7] * 3
    assert karmarkar_karp(lengths, 3, equal_size=True) == karmarkar_karp(list(lengths), 3, equal_size=True)


def test_impossible_requests_are_refused() -> None:
    with pytest.raises(ValueError, match="2 rows cannot fill 3"):
        get_seqlen_balanced_partitions([1, 2], 3, equal_size=False)
    with pytest.raises(ValueError, match="5 rows do not divide"):
        get_seqlen_balanced_partitions([1] * 5, 2, equal_size=True)
    assert karmarkar_karp([], 2, equal_size=False) == [[], []]


def test_the_log_compares_with_consecutive_rows() -> None:
    assert log_seqlen_unbalance([1, 2, 9, 8], [[0, 2], [1, 3]], "tokens") == {
        "tokens/min": 3,
        "tokens/max": 17,
        "tokens/minmax_diff": 14,
        "tokens/balanced_min": 10,
        "tokens/balanced_max": 10,
        "tokens/mean": 10,
    }


@given(st.permutations(range(9)))
def test_the_reverse_index_undoes_a_permutation(permutation: list[int]) -> None:
    values = [f"row {i}" for i in range(9)]
    moved = [values[i] for i in permutation]
    assert [moved[i] for i in get_reverse_idx(permutation)] == values


def test_ceildiv() -> None:
    assert [ceildiv(n, 4) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]


def batch_of(lengths: list[int]) -> TensorDict:
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    return TensorDict({"attention_mask": mask, "row": torch.arange(len(lengths))}, batch_size=len(lengths))


@given(LENGTHS)
def test_micro_batches_keep_to_the_budget(lengths: list[int]) -> None:
    micro_batches, indices = rearrange_micro_batches(batch_of(lengths), max_token_len=1000)
    assert all(int(part["attention_mask"].sum()) <= 1000 for part in micro_batches)
    assert [part["row"].tolist() for part in micro_batches] == indices
    joined = torch.cat([part["row"] for part in micro_batches])
    assert joined[get_reverse_idx(joined.tolist())].tolist() == list(range(len(lengths)))


def test_at_least_as_many_micro_batches_as_asked_for_and_no_row_too_long() -> None:
    assert len(rearrange_micro_batches(batch_of([1, 2, 3]), 100, min_num_micro_batch=2)[0]) == 2
    with pytest.raises(ValueError, match="101 tokens"):
        rearrange_micro_batches(batch_of([3, 101]), 100)
