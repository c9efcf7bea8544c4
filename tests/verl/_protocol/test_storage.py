"""A batch in one file."""

from __future__ import annotations

import io
import json
import os
import pickle
import zipfile
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from tests.verl._protocol.rows import proto, same
from verl.protocol import (
    DataProto,
)


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


def _tensor(dtype: Any = "float32", shape: Any = (2,), batch_size: Any = (2,)) -> dict:
    return {"tensordict": [list(batch_size), {"dict": [["x", {"tensor": [dtype, list(shape), "a0"]}]]}]}


def _write(path: Path, manifest: Any, array: np.ndarray, compressed: bool = False) -> None:
    save = np.savez_compressed if compressed else np.savez
    with path.open("wb") as file:
        save(file, manifest=np.frombuffer(json.dumps(manifest).encode(), dtype=np.uint8), a0=array)


def _manifest(batch: Any = None, columns: Any = None, meta: Any = None, version: Any = 1) -> dict:
    empty: dict = {"dict": []}
    return {
        "format": f"verl.DataProto/{version}",
        "batch": batch,
        "non_tensor_batch": empty if columns is None else columns,
        "meta_info": empty if meta is None else meta,
    }


EIGHT_BYTES = np.zeros(8, dtype=np.uint8)


def test_the_handwritten_file_is_a_good_one(tmp_path: Path) -> None:
    _write(tmp_path / "good", _manifest(_tensor()), EIGHT_BYTES)
    assert DataProto.load_from_disk(tmp_path / "good").batch["x"].tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("manifest", "message"),
    [
        (_manifest(_tensor(), version=2), "its format is 'verl.DataProto/2', this library reads 'verl.DataProto/1'"),
        (_manifest(_tensor(shape=(10**12, 10**6))), "does not take 8 bytes"),
        (_manifest(_tensor(shape=(-1,))), "does not take 8 bytes"),
        (_manifest(_tensor("float64")), "a float64 tensor of shape .2. does not take 8 bytes"),
        (_manifest(_tensor("load")), "'load' is no torch dtype"),
        (_manifest(_tensor("float31")), "'float31' is no torch dtype"),
        (_manifest(_tensor(3)), "3 is no torch dtype"),
        (_manifest(_tensor(batch_size=(3,))), "batch dimension mismatch"),
        (_manifest({"exec": "a0"}), "exec"),
        (_manifest({}), "not enough values"),
        (_manifest({"array": "a0"}), "does not hold a batch, columns and facts"),
        (_manifest([1]), "does not hold a batch, columns and facts"),
        (_manifest(columns=[1]), "does not hold a batch, columns and facts"),
        (_manifest(meta=3), "does not hold a batch, columns and facts"),
        (_manifest(columns={"dict": [["a", 3]]}), r"non_tensor_batch\['a'\] must be an array with rows, got int"),
        (_manifest(_tensor(), {"dict": [["a", {"array": "a0"}]]}), "has 8 rows, the other columns have 2"),
        (_manifest(columns={"dict": [["a", {"objects": [[3], [1]]}]]}), "cannot reshape"),
        (_manifest(meta={"dict": [["a", {"array": "a9"}]]}), "a9"),
        (_manifest(meta={"dict": [[[1], 2]]}), "unhashable"),
        (_manifest({"nested": ["sparse", []]}), "sparse"),
        ([1], "indices"),
        (None, "NoneType"),
    ],
)
def test_manifests_that_lie_are_refused(manifest: Any, message: str, tmp_path: Path) -> None:
    _write(tmp_path / "hostile", manifest, EIGHT_BYTES)
    with pytest.raises(ValueError, match=f"hostile is no readable DataProto file: .*{message}"):
        DataProto.load_from_disk(tmp_path / "hostile")


def test_an_entry_that_claims_to_be_huge_or_holds_objects_is_refused(tmp_path: Path) -> None:
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "|u1", "fortran_order": False, "shape": (1 << 46,)})
    bomb = io.BytesIO()
    np.lib.format.write_array(bomb, np.array([Bomb(tmp_path / "boom")], dtype=object), allow_pickle=True)
    good = io.BytesIO()
    np.save(good, np.frombuffer(json.dumps(_manifest(_tensor())).encode(), dtype=np.uint8))
    for entry in (header.getvalue(), bomb.getvalue(), b"no array"):
        with zipfile.ZipFile(tmp_path / "hostile", "w") as archive:
            archive.writestr("manifest.npy", good.getvalue())
            archive.writestr("a0.npy", entry)
        with pytest.raises(ValueError, match="hostile is no readable DataProto file"):
            DataProto.load_from_disk(tmp_path / "hostile")
    assert not (tmp_path / "boom").exists()


def test_compressed_entries_are_refused(tmp_path: Path) -> None:
    _write(
        tmp_path / "bomb",
        _manifest(_tensor(shape=(1 << 20,), batch_size=(1 << 20,))),
        np.zeros(1 << 22, np.uint8),
        True,
    )
    with pytest.raises(ValueError, match=r"bomb is no readable DataProto file: its entries .* are compressed"):
        DataProto.load_from_disk(tmp_path / "bomb")


def test_names_that_are_paths_write_nothing(tmp_path: Path) -> None:
    path = tmp_path / "inner" / "data"
    path.parent.mkdir()
    proto(2).save_to_disk(path)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("../escaped.npy", b"x")
        archive.writestr(str(tmp_path / "absolute.npy"), b"x")
    assert same(DataProto.load_from_disk(path), proto(2))
    assert sorted(entry.name for entry in tmp_path.rglob("*")) == ["data", "inner"]


def test_every_truncation_and_flipped_bit_is_named_or_harmless(tmp_path: Path) -> None:
    path = tmp_path / "data"
    proto(2, step=1).save_to_disk(path)
    whole, random = path.read_bytes(), Random(0)
    for end in range(0, len(whole), 37):
        path.write_bytes(whole[:end])
        with pytest.raises(ValueError, match="data is no readable DataProto file"):
            DataProto.load_from_disk(path)
    for _ in range(300):
        flipped = bytearray(whole)
        flipped[random.randrange(len(whole))] ^= 1 << random.randrange(8)
        path.write_bytes(flipped)
        try:
            assert same(DataProto.load_from_disk(path), proto(2, step=1))
        except ValueError as error:
            assert "data is no readable DataProto file" in str(error)  # noqa: PT017  either is right


def test_a_file_that_is_not_there_is_told_as_such(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="missing"):
        DataProto.load_from_disk(tmp_path / "missing")


def test_tensors_without_values_are_not_saved(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"batch\['x'\] is a tensor on the meta device"):
        DataProto.from_dict({"x": torch.zeros(2, device="meta")}).save_to_disk(tmp_path / "data")
    assert list(tmp_path.iterdir()) == []
