"""DataProto: values, errors and properties."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from verl import DataProto as PackageDataProto
from verl._protocol.equality import same_value
from verl.protocol import (
    DataProto,
    DataProtoConfig,
    all_gather_data_proto,
    collate_fn,
    deserialize_single_tensor,
    fold_batch_dim,
    list_of_dict_to_dict_of_list,
    pad_dataproto_to_divisor,
    serialize_single_tensor,
    unfold_batch_dim,
    union_numpy_dict,
    union_tensor_dict,
    unpad_dataproto,
)


def proto(rows: int = 3, **meta: Any) -> DataProto:
    tensors = {"x": torch.arange(rows * 2).view(rows, 2), "w": torch.arange(rows) / 2}
    return DataProto.from_dict(tensors, {"uid": [f"u{i}" for i in range(rows)], "n": np.arange(rows)}, meta)


def same(left: DataProto, right: DataProto) -> bool:
    parts = (
        (left.batch, right.batch),
        (left.non_tensor_batch, right.non_tensor_batch),
        (left.meta_info, right.meta_info),
    )
    return type(left) is type(right) and len(left) == len(right) and all(same_value(*pair) for pair in parts)


NAN = float("nan")
ONLY_META = DataProto(meta_info={"step": 3})
ONLY_ARRAYS = DataProto.from_dict(non_tensors={"uid": ["a", "b"]})
NO_ROWS = proto(0)


# Making and looking


def test_package_exports_it() -> None:
    assert PackageDataProto is DataProto


def test_importing_the_package_alone_is_light() -> None:
    code = "import sys, verl; verl.__version__; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


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


def test_item() -> None:
    item = proto(3, step=1)[-1]
    assert item.batch["x"].tolist() == [4, 5]
    assert (item.non_tensor_batch, item.meta_info) == ({"uid": "u2", "n": 2}, {"step": 1})
    assert [item.non_tensor_batch["uid"] for item in proto(3)] == ["u0", "u1", "u2"]
    with pytest.raises(IndexError, match="row 3 of 3 rows"):
        proto(3)[3]


@pytest.mark.parametrize(
    ("index", "rows"),
    [
        (slice(1, None), [1, 2]),
        (slice(None, None, -1), None),
        (slice(0, 3, 2), [0, 2]),
        ([2, 0, 2], [2, 0, 2]),
        ([-1], [2]),
        ([], []),
        ([True, False, True], [0, 2]),
        (np.array([1]), [1]),
        (np.array([False, False, True]), [2]),
        (torch.tensor([2, 1]), [2, 1]),
        (torch.tensor([False, True, True]), [1, 2]),
        (torch.zeros(3, dtype=torch.bool), []),
    ],
)
def test_indexing(index: Any, rows: list[int] | None) -> None:
    if rows is None:
        with pytest.raises(ValueError, match="step"):
            proto(3)[index]
        return
    part = proto(3, step=1)[index]
    assert part.batch["x"][:, 0].tolist() == [2 * row for row in rows]
    assert part.non_tensor_batch["uid"].tolist() == [f"u{row}" for row in rows]
    assert part.non_tensor_batch["n"].tolist() == rows
    assert part.meta_info == {"step": 1}
    assert len(part) == len(rows)


@pytest.mark.parametrize(
    ("index", "error", "message"),
    [
        ([3], IndexError, "row 3 of 3 rows"),
        ([-4], IndexError, "row -4 of 3 rows"),
        ([True], ValueError, "a mask of 1 rows cannot select from 3 rows"),
        ([0.5], ValueError, "integers or booleans, got torch.float64"),
        ([[0]], ValueError, r"one-dimensional index, got shape \(1, 1\)"),
        ("x", TypeError, "not str"),
    ],
)
def test_indexing_errors(index: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        proto(3)[index]


def test_slices_are_views_and_selections_copies() -> None:
    data = proto(4)
    data[1:3].batch["x"][:] = -1
    assert data.batch["x"][:, 0].tolist() == [0, -1, -1, 6]
    data[[0]].batch["x"][:] = 9
    assert data.batch["x"][0, 0] == 0


def test_parts_do_not_share_meta_info() -> None:
    data = proto(2, step=1)
    data.chunk(2)[0].meta_info["step"] = 2
    data[0].meta_info["step"] = 3
    assert data.meta_info == {"step": 1}


# Columns


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


def test_union_of_dictionaries() -> None:
    first = TensorDict({"a": torch.zeros(2)}, batch_size=[2])
    assert set(union_tensor_dict(first, TensorDict({"b": torch.ones(2)}, batch_size=[2])).keys()) == {"a", "b"}
    with pytest.raises(ValueError, match=r"size \(2,\) and \(3,\)"):
        union_tensor_dict(first, TensorDict({}, batch_size=[3]))
    arrays = {"a": np.array([1.0, NAN])}
    assert set(union_numpy_dict(arrays, {"a": np.array([1.0, NAN]), "b": np.arange(2)})) == {"a", "b"}


# Rows


def test_concat_merges_facts_and_gathers_metrics() -> None:
    first, second = proto(1, step=1, metrics={"loss": 1.0}), proto(2, step=1, metrics={"loss": 2.0, "kl": 3.0})
    joined = DataProto.concat([first, second])
    assert joined.batch["x"][:, 0].tolist() == [0, 0, 2]
    assert joined.non_tensor_batch["uid"].tolist() == ["u0", "u0", "u1"]
    assert joined.meta_info == {"step": 1, "metrics": {"loss": [1.0, 2.0], "kl": [3.0]}}
    third = proto(1, metrics=[{"loss": 4.0}, {"loss": 5.0}])
    assert DataProto.concat([first, third]).meta_info["metrics"] == {"loss": [1.0, 4.0, 5.0]}
    assert list_of_dict_to_dict_of_list([]) == {}


def test_concat_errors() -> None:
    with pytest.raises(ValueError, match="meta_info key 'step' has two different values: 1 and 2"):
        DataProto.concat([proto(1, step=1), proto(1, step=2)])
    with pytest.raises(ValueError, match=r"batch keys \['w'\] are in some of the 2 parts only"):
        DataProto.concat([proto(1), proto(1).select(["x"])])
    with pytest.raises(ValueError, match=r"non-tensor keys \['n'\]"):
        DataProto.concat([proto(1), proto(1).select(None, ["uid"])])
    with pytest.raises(ValueError, match="nothing to concatenate"):
        DataProto.concat([])


def test_chunk_and_split_sizes() -> None:
    assert [len(part) for part in proto(6).chunk(3)] == [2, 2, 2]
    assert [len(part) for part in proto(5).chunk(3, ragged=True)] == [2, 2, 1]
    assert [len(part) for part in proto(2).chunk(4, ragged=True)] == [1, 1, 0, 0]
    assert [len(part) for part in proto(5).split(2)] == [2, 2, 1]
    with pytest.raises(ValueError, match="5 rows do not divide into 3 equal chunks"):
        proto(5).chunk(3)
    with pytest.raises(ValueError, match="into 0 chunks"):
        proto(5).chunk(0)
    with pytest.raises(ValueError, match="split_size 0"):
        proto(5).split(0)


def test_automatic_padding_can_be_switched_on(monkeypatch: pytest.MonkeyPatch) -> None:
    data = DataProto.from_dict({"x": torch.arange(3)}, auto_padding=True)
    assert data.is_padding_enabled()
    assert [len(part) for part in data.chunk(2)] == [2, 1]
    assert not proto(3).is_padding_enabled()
    monkeypatch.setattr(DataProtoConfig, "auto_padding", True)
    assert proto(3).is_padding_enabled()


def test_repeats() -> None:
    data = proto(2)
    assert data.repeat(2).non_tensor_batch["uid"].tolist() == ["u0", "u0", "u1", "u1"]
    assert data.repeat(2, interleave=False).batch["w"].tolist() == [0.0, 0.5, 0.0, 0.5]
    assert data.sample_level_repeat([0, 3]).non_tensor_batch["n"].tolist() == [1, 1, 1]
    assert len(data[:0].sample_level_repeat([])) == len(ONLY_META.sample_level_repeat([])) == 0
    with pytest.raises(ValueError, match="one count >= 0 for each of 2 rows"):
        data.sample_level_repeat([1])


def test_reorder_in_place() -> None:
    data = proto(3)
    data.reorder(torch.tensor([2, 0, 1]))
    assert data.non_tensor_batch["uid"].tolist() == ["u2", "u0", "u1"]
    assert data.batch["w"].tolist() == [1.0, 0.0, 0.5]


def test_padding_in_place() -> None:
    data = proto(2)
    data.padding(2)
    data.padding(1, "first")
    assert data.non_tensor_batch["n"].tolist() == [0, 1, 1, 1, 0]


def test_pad_to_divisor_repeats_from_the_head() -> None:
    padded, pad_size = pad_dataproto_to_divisor(proto(2), 5)
    assert (padded.non_tensor_batch["n"].tolist(), pad_size) == ([0, 1, 0, 1, 0], 3)
    assert same(unpad_dataproto(padded, pad_size), proto(2))
    assert pad_dataproto_to_divisor(NO_ROWS, 4)[1] == 0
    with pytest.raises(ValueError, match="cannot remove 3 of 2 rows"):
        unpad_dataproto(proto(2), 3)


def test_unfold_column_chunks() -> None:
    data = DataProto.from_dict({"pairs": torch.arange(8).view(2, 4), "y": torch.arange(2)}, {"uid": ["a", "b"]})
    unfolded = data.unfold_column_chunks(2, ["pairs"])
    assert unfolded.batch["pairs"].tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert unfolded.batch["y"].tolist() == [0, 0, 1, 1]
    assert unfolded.non_tensor_batch["uid"].tolist() == ["a", "a", "b", "b"]
    with pytest.raises(ValueError, match="'pairs' has a second dimension of 4, which does not divide by 3"):
        data.unfold_column_chunks(3, ["pairs"])
    with pytest.raises(ValueError, match=r"batch has no \['nope'\]"):
        data.unfold_column_chunks(2, ["nope"])


def test_fold_and_unfold_batch_dim() -> None:
    folded = fold_batch_dim(proto(6), 2)
    assert (len(folded), folded.batch["x"].shape, folded.non_tensor_batch["uid"].shape) == (2, (2, 3, 2), (2, 3))
    assert same(unfold_batch_dim(folded), proto(6))
    with pytest.raises(ValueError, match="6 rows do not fold into 4"):
        fold_batch_dim(proto(6), 4)


def test_iterator_is_seeded_and_complete() -> None:
    data = proto(6, step=1)
    shuffled = {"shuffle": True}
    runs = [[b.non_tensor_batch["n"].tolist() for b in data.make_iterator(2, 2, 7, shuffled)] for _ in range(2)]
    assert runs[0] == runs[1]
    for epoch in (runs[0][:3], runs[0][3:]):
        assert sorted(row for batch in epoch for row in batch) == list(range(6))
    assert runs[0][:3] != runs[0][3:]
    assert [b.non_tensor_batch["n"].tolist() for b in data.make_iterator(3, 1)] == [[0, 1, 2], [3, 4, 5]]
    assert next(iter(data.make_iterator(3, 1))).meta_info == {"step": 1}
    with pytest.raises(ValueError, match="6 rows do not divide into mini-batches of 4"):
        data.make_iterator(4, 1)


def test_collate() -> None:
    data = proto(3, step=1)
    collated = collate_fn([data[2], data[0]])
    assert collated.batch["x"].tolist() == [[4, 5], [0, 1]]
    assert (collated.non_tensor_batch["uid"].tolist(), collated.meta_info) == (["u2", "u0"], {"step": 1})


def test_to_moves_in_place() -> None:
    data = proto(2)
    assert data.to("meta") is data
    assert data.batch["x"].device.type == "meta"
    assert ONLY_ARRAYS.to("cpu") is ONLY_ARRAYS


# Empty and partial protos


@pytest.mark.parametrize(
    "data", [DataProto(), ONLY_META, ONLY_ARRAYS, NO_ROWS], ids=["empty", "meta", "arrays", "norows"]
)
def test_every_operation_takes_partial_protos(data: DataProto, tmp_path: Path) -> None:
    rows = len(data)
    assert same(DataProto.concat(data.chunk(2, ragged=True)), data)
    assert same(data[:], data)
    assert same(data.select_idxs(list(range(rows))), data)
    assert len(data.repeat(3)) == len(data.repeat(3, interleave=False)) == 3 * rows
    assert same(data.select(deepcopy=True), data)
    assert same(pickle.loads(pickle.dumps(data)), data)
    assert same(data.select().union(data), data)
    padded, pad_size = pad_dataproto_to_divisor(data, 3)
    assert same(unpad_dataproto(padded, pad_size), data)
    assert sum(len(part) for part in data.split(1)) == rows
    assert len(list(data.make_iterator(1, 1))) == rows
    data.save_to_disk(tmp_path / "data")
    assert same(DataProto.load_from_disk(tmp_path / "data"), data)
    data.print_size()
    assert data.get_data_info().startswith("batch")


# Other forms


def test_tensordict_round_trip() -> None:
    data = proto(3, step=1, names=["a"])
    data.non_tensor_batch["n"] = data.non_tensor_batch["n"].astype(object)
    data.non_tensor_batch["rows"] = np.array([{"a": 1}, [1, 2], None], dtype=object)
    packed = data.to_tensordict()
    assert packed.batch_size == (3,)
    assert same(DataProto.from_tensordict(packed), data)
    assert same(DataProto.from_tensordict(packed[1:]), data[1:])
    with pytest.raises(ValueError, match=r"keys \['x'\] are used twice"):
        proto(2, x=1).to_tensordict()


def test_description_and_size(capsys: pytest.CaptureFixture[str]) -> None:
    data = proto(2, step=1)
    assert data.size_in_bytes() == (2 * 2 * 8 + 2 * 4, 2 * 8 + 2 * 8)
    data.print_size("now")
    assert capsys.readouterr().out.startswith("now batch: 0.000000 GiB")
    info = data.get_data_info()
    assert "  x: (2, 2) torch.int64 cpu" in info
    assert "  uid: (2,) object of str" in info
    assert "  step: int" in info


class Labelled(DataProto):
    """A subclass with an attribute of its own."""

    label = "none"


def test_subclasses_survive() -> None:
    data = Labelled.from_dict({"x": torch.arange(4)})
    data.label = "mine"
    parts = [data[:2], data[[0]], data.repeat(2), data.select(), *data.chunk(2), DataProto.concat(data.chunk(2))]
    parts += [pickle.loads(pickle.dumps(data)), pad_dataproto_to_divisor(data, 3)[0]]
    assert {(type(part), part.label) for part in parts} == {(Labelled, "mine")}


# Serialisation


def test_only_the_rows_of_a_view_are_pickled() -> None:
    data = DataProto.from_dict({"x": torch.zeros(1000, 1000)})
    assert len(pickle.dumps(data[:1])) < 10_000


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.uint8])
def test_single_tensors_of_any_dtype(dtype: torch.dtype) -> None:
    tensor = torch.arange(6).reshape(2, 3).to(torch.float32).to(dtype)
    back = deserialize_single_tensor(serialize_single_tensor(tensor.t()))
    assert (back.dtype, back.shape) == (dtype, (3, 2))
    assert torch.equal(back.to(torch.complex64), tensor.t().to(torch.complex64))


def test_read_only_memory_is_copied_so_that_writes_are_safe() -> None:
    dtype, shape, data = serialize_single_tensor(torch.arange(3))
    data.flags.writeable = False
    back = deserialize_single_tensor((dtype, shape, data))
    back[0] = 9
    assert data[0] == 0


def test_nested_tensors_and_devices_survive_pickling() -> None:
    ragged = torch.nested.nested_tensor([torch.arange(2), torch.arange(3)], layout=torch.jagged)
    data = DataProto(TensorDict({"r": ragged}, batch_size=[2], device="cpu"))
    back = pickle.loads(pickle.dumps(data))
    assert [row.tolist() for row in back.batch["r"].unbind()] == [[0, 1], [0, 1, 2]]
    assert back.batch.device == torch.device("cpu")


class Bomb:
    """Leaves a file behind when unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.path),)


def test_loading_a_file_executes_nothing(tmp_path: Path) -> None:
    (tmp_path / "pickled").write_bytes(pickle.dumps(Bomb(tmp_path / "boom")))
    np.savez(tmp_path / "objects.npz", manifest=np.array([Bomb(tmp_path / "boom")], dtype=object))
    for name in ("pickled", "objects.npz"):
        with pytest.raises(ValueError, match="is no readable DataProto file"):
            DataProto.load_from_disk(tmp_path / name)
    assert not (tmp_path / "boom").exists()


def test_what_is_no_plain_data_is_not_saved(tmp_path: Path) -> None:
    path = tmp_path / "data"
    proto(2).save_to_disk(path)
    with pytest.raises(ValueError, match=r"non_tensor_batch\['o'\]\[0\]\['k'\] holds a Bomb"):
        DataProto.from_dict(non_tensors={"o": [{"k": Bomb(tmp_path)}]}).save_to_disk(path)
    assert same(DataProto.load_from_disk(path), proto(2))
    assert [entry.name for entry in tmp_path.iterdir()] == ["data"]


def test_damaged_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "data"
    proto(2).save_to_disk(path)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(ValueError, match="data is no readable DataProto file"):
        DataProto.load_from_disk(path)


def test_all_gather(tmp_path: Path) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        data = proto(3, step=1)
        all_gather_data_proto(data, dist.group.WORLD)
        assert same(data, proto(3, step=1))
    finally:
        dist.destroy_process_group()


# Properties

DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
]
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
        | st.tuples(inner, inner)
        | st.integers(0, 4).map(np.arange)
        | st.integers(0, 4).map(torch.arange)
    ),
    max_leaves=6,
)


@st.composite
def protos(draw: st.DrawFn, min_rows: int = 0) -> DataProto:
    rows = draw(st.integers(min_rows, 7))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    tensors = {}
    for name in draw(st.sets(st.sampled_from("abc"))):
        tail = draw(st.lists(st.integers(0, 3), max_size=2))
        tensors[name] = torch.randint(0, 9, (rows, *tail), generator=generator).to(draw(st.sampled_from(DTYPES)))
    objects = {
        name: draw(st.lists(PLAIN, min_size=rows, max_size=rows)) for name in draw(st.sets(st.sampled_from("de")))
    }
    numbers = {"f": np.arange(rows, dtype=np.float32)} if draw(st.booleans()) else {}
    return DataProto.from_dict(
        tensors, objects | numbers, draw(st.dictionaries(st.text(max_size=3), PLAIN, max_size=3))
    )


@settings(deadline=None, max_examples=60)
@given(protos(), st.integers(1, 5))
def test_concat_undoes_chunk_and_split(data: DataProto, n: int) -> None:
    data.meta_info.pop("metrics", None)
    assert same(DataProto.concat(data.chunk(n, ragged=True)), data)
    if len(data):
        assert same(DataProto.concat(data.split(n)), data)


@settings(deadline=None, max_examples=60)
@given(protos(), st.integers(1, 9))
def test_unpad_undoes_pad(data: DataProto, divisor: int) -> None:
    padded, pad_size = pad_dataproto_to_divisor(data, divisor)
    assert len(padded) % divisor == 0
    assert same(unpad_dataproto(padded, pad_size), data)


@settings(deadline=None, max_examples=60)
@given(protos(), st.randoms(use_true_random=False))
def test_reorder_back(data: DataProto, random: Any) -> None:
    order = random.sample(range(len(data)), len(data))
    moved = data[:]
    moved.reorder(order)
    moved.reorder(np.argsort(order))
    assert same(moved, data)


@settings(deadline=None, max_examples=60)
@given(protos())
def test_union_with_itself_changes_nothing(data: DataProto) -> None:
    assert same(data.select().union(data.select(deepcopy=True)), data)


@settings(deadline=None, max_examples=60)
@given(protos())
def test_pickle_round_trip(data: DataProto) -> None:
    assert same(pickle.loads(pickle.dumps(data)), data)


@settings(deadline=None, max_examples=60)
@given(protos())
def test_disk_round_trip(tmp_path_factory: pytest.TempPathFactory, data: DataProto) -> None:
    path = tmp_path_factory.getbasetemp() / "property.data"
    data.save_to_disk(path)
    assert same(DataProto.load_from_disk(path), data)
