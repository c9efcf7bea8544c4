"""Other forms of a batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.verl._protocol.rows import proto, same
from verl.protocol import (
    DataProto,
)


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


def test_what_has_no_second_dimension_is_not_unfolded() -> None:
    with pytest.raises(ValueError, match=r"'w' of shape \(2,\) has no second dimension"):
        proto(2).unfold_column_chunks(2, ["w"])
    with pytest.raises(ValueError, match="cannot be unfolded into 0"):
        proto(2).unfold_column_chunks(0, ["x"])
