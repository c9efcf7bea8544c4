"""Columns: making, naming, combining."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from tests.verl._protocol.rows import NAN, ONLY_META, proto, same
from verl.protocol import (
    DataProto,
)


def test_lists_of_lists_stay_one_element_a_row() -> None:
    column = DataProto.from_dict(non_tensors={"golden": [["a", "b"], ["c", "d"]]}).non_tensor_batch["golden"]
    assert column.shape == (2,)
    assert column[1] == ["c", "d"]


def test_from_single_dict_sorts_by_type() -> None:
    data = DataProto.from_single_dict({"x": torch.zeros(2, 3), "uid": np.array(["a", "b"], dtype=object)}, {"k": 1})
    assert (list(data.batch.keys()), list(data.non_tensor_batch), data.meta_info) == (["x"], ["uid"], {"k": 1})
    with pytest.raises(ValueError, match="'y': 'list'"):
        DataProto.from_single_dict({"y": [1, 2]})  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("tensors", "arrays", "message"),
    [
        ({"x": torch.zeros(2), "y": torch.zeros(3)}, {}, r"tensor 'y' has batch size \(3,\), 'x' has \(2,\)"),
        ({"x": torch.zeros(2)}, {"uid": [1, 2, 3]}, r"non_tensor_batch\['uid'\] has 3 rows, the other columns have 2"),
        ({}, {"a": [1], "b": [1, 2]}, r"non_tensor_batch\['b'\] has 2 rows, the other columns have 1"),
        ({"x": torch.tensor(1)}, {}, r"tensor 'x' has batch size \(\)"),
    ],
)
def test_columns_of_different_lengths_are_refused(tensors: dict, arrays: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DataProto.from_dict(tensors, arrays)


def test_consistency_is_checked_again_on_demand() -> None:
    data = proto(3)
    data.non_tensor_batch["bad"] = np.arange(4)
    with pytest.raises(ValueError, match=r"'bad'.* has 4 rows"):
        data.check_consistency()


def test_select_and_deepcopy() -> None:
    data = proto(2, a=1, b=[2])
    part = data.select(["x"], [], ["b"])
    assert (set(part.batch.keys()), part.non_tensor_batch, part.meta_info) == ({"x"}, {}, {"b": [2]})
    assert part.batch["x"].data_ptr() == data.batch["x"].data_ptr()
    copied = data.select(deepcopy=True)
    assert same(copied, data)
    assert copied.batch["x"].data_ptr() != data.batch["x"].data_ptr()
    assert copied.meta_info["b"] is not data.meta_info["b"]
    assert len(data.select([], [])) == 2


def test_pop_moves_columns_out() -> None:
    data = proto(2, step=1)
    popped = data.pop(["x"], ["uid"], ["step"])
    assert (set(popped.batch.keys()), list(popped.non_tensor_batch), popped.meta_info) == ({"x"}, ["uid"], {"step": 1})
    assert (set(data.batch.keys()), list(data.non_tensor_batch), data.meta_info) == ({"w"}, ["n"], {})


@pytest.mark.parametrize("method", ["pop", "select"])
@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"batch_keys": ["x", "y"]}, r"batch has no \['y'\]; it has \['w', 'x'\]"),
        ({"batch_keys": ["x"], "non_tensor_batch_keys": ["y"]}, r"non_tensor_batch has no \['y'\]"),
        ({"meta_info_keys": ["y"]}, r"meta_info has no \['y'\]; it has \['step'\]"),
    ],
)
def test_missing_keys_are_named_and_nothing_is_removed(method: str, keys: dict, message: str) -> None:
    data = proto(2, step=1)
    with pytest.raises(ValueError, match=message):
        getattr(data, method)(**keys)
    assert same(data, proto(2, step=1))


def test_rename_in_place() -> None:
    data = proto(2)
    assert data.rename("x", "y") is data
    assert set(data.batch.keys()) == {"y", "w"}
    assert set(data.rename(["y", "w"], ["w", "y"]).batch.keys()) == {"y", "w"}
    assert data.batch["w"].tolist() == [[0, 1], [2, 3]]
    with pytest.raises(ValueError, match=r"batch has no \['z'\]"):
        data.rename("z", "a")
    with pytest.raises(ValueError, match=r"new keys \['w'\] are taken"):
        data.rename("y", "w")
    with pytest.raises(ValueError, match=r"2 old keys .* for 1 new keys"):
        data.rename(["y", "w"], "a")


def test_union_adds_in_place_and_accepts_equal_values() -> None:
    left = DataProto.from_dict({"x": torch.tensor([1.0, NAN])}, {"o": [{"a": NAN}, [np.arange(2)]]}, {"m": {"v": NAN}})
    right = DataProto.from_dict(
        {"x": torch.tensor([1.0, NAN]), "y": torch.zeros(2)},
        {"o": [{"a": NAN}, [np.arange(2)]]},
        {"m": {"v": NAN}, "k": 1},
    )
    assert left.union(right) is left
    assert (set(left.batch.keys()), left.meta_info["k"]) == ({"x", "y"}, 1)
    assert same(DataProto().union(proto(2)), proto(2))
    assert same(proto(2).union(ONLY_META), proto(2, step=3))


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (DataProto.from_dict({"x": torch.zeros(3, 2, dtype=torch.int64)}), "tensor key 'x' has two different values"),
        (DataProto.from_dict({"x": proto(3).batch["x"].int()}), "tensor key 'x' .* torch.int64 .* torch.int32"),
        (DataProto.from_dict(non_tensors={"uid": ["u0", "u1", "v"]}), "non-tensor key 'uid' has two different values"),
        (DataProto(meta_info={"step": 2}), "meta_info key 'step' has two different values: 1 and 2"),
        (proto(2), "cannot unite 3 rows with 2 rows"),
    ],
)
def test_union_conflicts_name_the_key(other: DataProto, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        proto(3, step=1).union(other)


@pytest.mark.parametrize("conflict", [{"non_tensors": {"uid": ["u0", "v"]}}, {"meta_info": {"step": 2}}])
def test_a_union_that_fails_adds_nothing(conflict: dict) -> None:
    data = proto(2, step=1)
    with pytest.raises(ValueError, match="two different values"):
        data.union(DataProto.from_dict({"new": torch.zeros(2)}, **conflict))
    assert same(data, proto(2, step=1))


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (np.float32("nan"), np.float32("nan")),
        (float("nan"), np.float64("nan")),
        (complex(float("nan"), 1), complex(float("nan"), 1)),
        (np.datetime64("NaT"), np.datetime64("NaT")),
        (np.array(["a", "b"]), np.array(["a", "b"], dtype="<U9")),
        (torch.tensor([NAN, 1.0]).to(torch.float8_e5m2), torch.tensor([NAN, 1.0]).to(torch.float8_e5m2)),
        (np.int64(3), 3),
    ],
)
def test_union_takes_what_means_the_same(left: Any, right: Any) -> None:
    assert DataProto(meta_info={"a": left}).union(DataProto(meta_info={"a": right})).meta_info["a"] is left


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (float("nan"), 1.0),
        (1.0, float("nan")),
        (np.arange(2), [0, 1]),
        ([1, 2], (1, 2)),
        (np.arange(2), np.arange(2.0)),
        (torch.zeros(2), torch.zeros(2, device="meta")),
        ({"a": [1]}, {"a": [1], "b": 2}),
        (torch.zeros(2).to(torch.float8_e5m2), torch.ones(2).to(torch.float8_e5m2)),
    ],
)
def test_union_tells_what_differs(left: Any, right: Any) -> None:
    with pytest.raises(ValueError, match="meta_info key 'a' has two different values"):
        DataProto(meta_info={"a": left}).union(DataProto(meta_info={"a": right}))


def test_batch_dimensions_are_at_least_one() -> None:
    assert DataProto.from_dict({"x": torch.zeros(2, 3)}, num_batch_dims=2).batch.batch_size == (2, 3)
    with pytest.raises(ValueError, match="num_batch_dims must be at least 1, got 0"):
        DataProto.from_dict({"x": torch.zeros(2)}, num_batch_dims=0)
    with pytest.raises(ValueError, match="batch needs a batch dimension"):
        DataProto(TensorDict({}, batch_size=[]))


@pytest.mark.parametrize("column", [[1, 2], np.array(1)])
def test_columns_that_are_no_arrays_are_refused(column: Any) -> None:
    with pytest.raises(ValueError, match=r"non_tensor_batch\['u'\] must be an array with rows"):
        DataProto(None, {"u": column})
