"""Tensors as (dtype, shape, bytes).

The bytes are a NumPy array, which pickle protocol 5 and Ray's object store move out of band:
only the rows of a view travel, never the storage it is a view of.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

SerializedTensor = tuple[str, tuple[int, ...], np.ndarray]
SerializedTensorDict = tuple[tuple[int, ...], str | None, dict[str, tuple[str, Any]]]


def serialize_single_tensor(obj: torch.Tensor) -> SerializedTensor:
    """A strided tensor as (dtype name, shape, flat uint8 array); a CPU tensor's memory is shared, not copied."""
    flat = obj.detach().cpu().contiguous().reshape(-1)
    return str(obj.dtype).removeprefix("torch."), tuple(obj.shape), flat.view(torch.uint8).numpy()


def deserialize_single_tensor(arr: SerializedTensor) -> torch.Tensor:
    """The inverse, on the CPU. Read-only memory (Ray's object store) is copied, because tensors have no such flag."""
    dtype_name, shape, data = arr
    dtype = getattr(torch, dtype_name)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{dtype_name!r} is no torch dtype")
    if data.size == 0:
        return torch.empty(shape, dtype=dtype)
    writable = data if data.flags.writeable else data.copy()
    return torch.from_numpy(writable).view(dtype).reshape(shape)


def serialize_tensordict(batch: TensorDictBase) -> SerializedTensorDict:
    """(batch size, device, fields). Each field is ("tensor", …), ("nested", …) or ("tensordict", …)."""
    device = None if batch.device is None else str(batch.device)
    return tuple(batch.batch_size), device, {key: _pack(value) for key, value in batch.items()}


def deserialize_tensordict(arr: SerializedTensorDict) -> TensorDict:
    """The inverse. The device is kept where this machine has it; otherwise the tensors stay on the CPU."""
    batch_size, device, fields = arr
    batch = TensorDict({key: _unpack(*packed) for key, packed in fields.items()}, batch_size=batch_size)
    if device is None or (device.startswith("cuda") and not torch.cuda.is_available()):
        return batch
    return batch.to(device)


def _pack(value: Any) -> tuple[str, Any]:
    if isinstance(value, TensorDictBase):
        return "tensordict", serialize_tensordict(value)
    if not isinstance(value, torch.Tensor):
        return "object", value
    if value.is_nested:
        rows = [serialize_single_tensor(row) for row in value.unbind()]
        return "nested", (str(value.layout).removeprefix("torch."), rows)
    return "tensor", serialize_single_tensor(value)


def _unpack(kind: str, packed: Any) -> Any:
    if kind == "tensordict":
        return deserialize_tensordict(packed)
    if kind == "tensor":
        return deserialize_single_tensor(packed)
    if kind == "nested":
        layout, rows = packed
        return torch.nested.nested_tensor(
            [deserialize_single_tensor(row) for row in rows], layout=getattr(torch, layout)
        )
    return packed
