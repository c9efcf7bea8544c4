"""A batch in one file."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import numpy as np
import pytest

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
