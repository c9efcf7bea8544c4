"""Tensors as bytes."""

from __future__ import annotations

import pickle

import pytest
import torch
from tensordict import TensorDict

from verl.protocol import (
    DataProto,
    deserialize_single_tensor,
    serialize_single_tensor,
)


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
