"""What holds of every batch, against lists of rows."""

from __future__ import annotations

import pickle
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.verl._protocol.random_protos import protos, repeatable, table
from tests.verl._protocol.rows import same
from verl._protocol.equality import same_value
from verl.protocol import (
    DataProto,
    collate_fn,
    fold_batch_dim,
    pad_dataproto_to_divisor,
    unfold_batch_dim,
    unpad_dataproto,
)


def _plain(value: Any) -> Any:
    """Collating makes objects of NumPy's numbers and texts."""
    return value.item() if isinstance(value, np.generic) else value


@repeatable
@given(protos(), st.integers(1, 5))
def test_concat_undoes_chunk_and_split(data: DataProto, n: int) -> None:
    parts = data.chunk(n, ragged=True)
    assert len(parts) == n
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert same(DataProto.concat(parts), data)
    if len(data):
        assert same(DataProto.concat(data.split(n)), data)
        assert {len(part) for part in data.split(n)[:-1]} <= {n}


@repeatable
@given(protos(), st.integers(1, 9))
def test_unpad_undoes_pad(data: DataProto, divisor: int) -> None:
    padded, pad_size = pad_dataproto_to_divisor(data, divisor)
    rows = table(data)
    assert len(padded) % divisor == 0
    assert pad_size < divisor
    assert same_value(table(padded), [rows[row % len(rows)] for row in range(len(rows) + pad_size)])
    assert same(unpad_dataproto(padded, pad_size), data)


@repeatable
@given(protos(), st.randoms(use_true_random=False))
def test_reorder_back(data: DataProto, random: Random) -> None:
    order = random.sample(range(len(data)), len(data))
    rows, moved = table(data), data[:]
    moved.reorder(order)
    assert same_value(table(moved), [rows[row] for row in order])
    moved.reorder(np.argsort(order))
    assert same(moved, data)


@repeatable
@given(protos(min_rows=1), st.data())
def test_rows_are_those_of_a_list(data: DataProto, draws: st.DataObject) -> None:
    rows, n = table(data), len(data)
    numbers = draws.draw(st.lists(st.integers(-n, n - 1), max_size=9)) if n else []
    assert same_value(table(data[numbers]), [rows[row] for row in numbers])
    assert same_value(table(data[torch.tensor(numbers, dtype=torch.int32)]), [rows[row] for row in numbers])
    mask = draws.draw(st.lists(st.booleans(), min_size=n, max_size=n))
    assert same_value(table(data[mask]), [row for row, kept in zip(rows, mask, strict=True) if kept])
    start, end = draws.draw(st.integers(-9, 9)), draws.draw(st.integers(-9, 9))
    assert same_value(table(data[start:end]), rows[start:end])


@repeatable
@given(protos(), st.integers(0, 3), st.data())
def test_repeat_is_a_plain_loop(data: DataProto, times: int, draws: st.DataObject) -> None:
    rows = table(data)
    assert same_value(table(data.repeat(times)), [row for row in rows for _ in range(times)])
    assert same_value(table(data.repeat(times, interleave=False)), rows * times)
    counts = draws.draw(st.lists(st.integers(0, 3), min_size=len(rows), max_size=len(rows)))
    expected = [row for row, count in zip(rows, counts, strict=True) for _ in range(count)]
    assert same_value(table(data.sample_level_repeat(counts)), expected)


@repeatable
@given(protos(), st.data())
def test_pop_leaves_what_select_does_not_take(data: DataProto, draws: st.DataObject) -> None:
    have = (set() if data.batch is None else set(data.batch.keys()), set(data.non_tensor_batch), set(data.meta_info))
    keys = [sorted(key for key in kind if draws.draw(st.booleans())) for kind in have]
    rest = data.select()
    popped = rest.pop(*keys)
    complement = [sorted(kind - set(taken)) for kind, taken in zip(have, keys, strict=True)]
    assert same(rest, data.select(*complement))
    assert same_value(dict(popped.non_tensor_batch), {key: data.non_tensor_batch[key] for key in keys[1]})
    assert same_value(popped.meta_info, {key: data.meta_info[key] for key in keys[2]})
    assert [key for key in keys[0] if not same_value(popped.batch[key], data.batch[key])] == []


@repeatable
@given(protos())
def test_union_with_itself_changes_nothing(data: DataProto) -> None:
    assert same(data.select().union(data.select(deepcopy=True)), data)


@repeatable
@given(protos())
def test_pickle_round_trip(data: DataProto) -> None:
    back = pickle.loads(pickle.dumps(data))
    assert same(back, data)
    assert back.__dict__.keys() == data.__dict__.keys()


@repeatable
@given(protos())
def test_disk_round_trip(tmp_path_factory: pytest.TempPathFactory, data: DataProto) -> None:
    path = tmp_path_factory.getbasetemp() / "property.data"
    data.save_to_disk(path)
    assert same(type(data).load_from_disk(path), data)


@repeatable
@given(protos(min_rows=1, ragged=False), st.data())
def test_unfold_undoes_fold(data: DataProto, draws: st.DataObject) -> None:
    divisors = [n for n in range(1, len(data) + 1) if len(data) % n == 0] or [1]
    folded = fold_batch_dim(data, size := draws.draw(st.sampled_from(divisors)))
    assert len(folded) == (size if data.batch is not None or data.non_tensor_batch else 0)
    assert same(unfold_batch_dim(folded), data)


@repeatable
@given(protos())
def test_tensordict_round_trip(data: DataProto) -> None:
    data = data.select(meta_info_keys=[])
    back = type(data).from_tensordict(data.to_tensordict())
    assert same_value(back.batch, data.batch)
    assert back.non_tensor_batch.keys() == data.non_tensor_batch.keys()
    for key, column in data.non_tensor_batch.items():
        assert same_value(list(back.non_tensor_batch[key]), list(column))


@repeatable
@given(protos(min_rows=1))
def test_collate_undoes_taking_single_rows(data: DataProto) -> None:
    if len(data):
        joined = collate_fn(list(data))
        assert same_value(
            [{key: _plain(value) for key, value in row.items()} for row in table(joined)],
            [{key: _plain(value) for key, value in row.items()} for row in table(data)],
        )
        assert same_value(joined.meta_info, data.meta_info)


@repeatable
@given(protos())
def test_deep_copies_share_nothing(data: DataProto) -> None:
    before, copied = pickle.loads(pickle.dumps(data)), data.select(deepcopy=True)
    for tensor in () if copied.batch is None else copied.batch.values():
        (tensor.values() if tensor.is_nested else tensor).zero_()
    for column in copied.non_tensor_batch.values():
        for value in column:
            if isinstance(value, list | dict):
                value.clear()
        column[:] = None if column.dtype.hasobject else column.dtype.type()
    assert same(data, before)
