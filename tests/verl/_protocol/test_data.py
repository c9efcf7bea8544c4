"""Rows: taking, ordering, repeating, joining."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.verl._protocol.rows import NO_ROWS, ONLY_ARRAYS, ONLY_META, proto, same
from verl import DataProto as PackageDataProto
from verl.protocol import (
    DataProto,
    DataProtoConfig,
    list_of_dict_to_dict_of_list,
    pad_dataproto_to_divisor,
    unpad_dataproto,
)


def test_package_exports_it() -> None:
    assert PackageDataProto is DataProto


def test_importing_the_package_alone_is_light() -> None:
    code = "import sys, verl; verl.__version__; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


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
    with pytest.raises(ValueError, match="one whole count >= 0 for each of 2 rows"):
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


def test_to_moves_in_place() -> None:
    data = proto(2)
    assert data.to("meta") is data
    assert data.batch["x"].device.type == "meta"
    assert ONLY_ARRAYS.to("cpu") is ONLY_ARRAYS


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


class Labelled(DataProto):
    """A subclass with an attribute of its own."""

    label = "none"


def test_subclasses_survive() -> None:
    data = Labelled.from_dict({"x": torch.arange(4)})
    data.label = "mine"
    parts = [data[:2], data[[0]], data.repeat(2), data.select(), *data.chunk(2), DataProto.concat(data.chunk(2))]
    parts += [pickle.loads(pickle.dumps(data)), pad_dataproto_to_divisor(data, 3)[0]]
    assert {(type(part), part.label) for part in parts} == {(Labelled, "mine")}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda data: data.repeat(-1), "cannot be repeated -1 times"),
        (lambda data: data.sample_level_repeat([0.5, 1.0]), "one whole count >= 0 for each of 2 rows"),
        (lambda data: data.sample_level_repeat([-1, 1]), "one whole count >= 0 for each of 2 rows"),
        (lambda data: data.padding(1, "middle"), "'first' or 'last', not 'middle'"),
        (lambda data: data.padding(-1), "cannot append -1 copies of one of 2 rows"),
        (lambda data: data[:0].padding(2), "cannot append 2 copies of one of 0 rows"),
        (lambda data: data.make_iterator(0, 1), "2 rows do not divide into mini-batches of 0"),
    ],
)
def test_numbers_that_make_no_rows_are_refused(call: Callable[[DataProto], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(proto(2))


def test_shuffling_no_rows_gives_no_batches() -> None:
    assert list(proto(0).make_iterator(2, 3, 0, {"shuffle": True})) == []


def test_metrics_of_none_are_no_metrics() -> None:
    joined = DataProto.concat([proto(1, metrics=None), proto(1, metrics={"loss": 1.0})])
    assert joined.meta_info["metrics"] == {"loss": [1.0]}


def test_texts_of_other_widths_join_and_numbers_do_not_become_texts() -> None:
    def column(values: list) -> DataProto:
        return DataProto.from_dict(non_tensors={"s": np.array(values)})

    assert DataProto.concat([column(["a"]), column(["longer"])]).non_tensor_batch["s"].tolist() == ["a", "longer"]
    with pytest.raises(ValueError, match="'s' has texts and numbers"):
        DataProto.concat([column(["a"]), column([1])])


def test_rows_of_the_meta_device_are_taken_without_values() -> None:
    data = DataProto.from_dict({"x": torch.zeros(4, 2, device="meta")})
    assert [tuple(part.batch["x"].shape) for part in (data[1:], data[[0, 0]], *data.chunk(2))] == [
        (3, 2),
        (2, 2),
        (2, 2),
        (2, 2),
    ]
    assert data.union(data.select()) is data


def test_deep_copies_of_a_whole_proto_are_their_own() -> None:
    data = proto(2, facts=[1])
    copied = copy.deepcopy(data)
    copied.batch["x"][:] = 9
    copied.non_tensor_batch["n"][:] = 9
    copied.meta_info["facts"].append(2)
    assert same(data, proto(2, facts=[1]))
