"""Operations on dictionaries of columns."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from tests.verl._protocol.rows import NAN
from verl.protocol import (
    union_numpy_dict,
    union_tensor_dict,
)


def test_union_of_dictionaries() -> None:
    first = TensorDict({"a": torch.zeros(2)}, batch_size=[2])
    assert set(union_tensor_dict(first, TensorDict({"b": torch.ones(2)}, batch_size=[2])).keys()) == {"a", "b"}
    with pytest.raises(ValueError, match=r"size \(2,\) and \(3,\)"):
        union_tensor_dict(first, TensorDict({}, batch_size=[3]))
    arrays = {"a": np.array([1.0, NAN])}
    assert set(union_numpy_dict(arrays, {"a": np.array([1.0, NAN]), "b": np.arange(2)})) == {"a", "b"}
