"""Making the number of rows a multiple of something, and undoing it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
from tensordict import TensorDict

from verl._protocol.columns import object_array
from verl._protocol.data import DataProto, DataProtoItem

ProtoT = TypeVar("ProtoT", bound=DataProto)


def pad_dataproto_to_divisor(data: ProtoT, size_divisor: int) -> tuple[ProtoT, int]:
    """(data with rows repeated from its head until ``size_divisor`` divides them, rows added).

    Nothing is added to a proto without rows.
    """
    if size_divisor < 1:
        raise ValueError(f"size_divisor must be at least 1, got {size_divisor}")
    rows, pad_size = len(data), -len(data) % size_divisor
    if pad_size == 0:
        return data, 0
    numbers = torch.arange(rows + pad_size) % rows
    return data.select_idxs(numbers), pad_size


def unpad_dataproto(data: ProtoT, pad_size: int) -> ProtoT:
    """The data without its last ``pad_size`` rows."""
    if not 0 <= pad_size <= len(data):
        raise ValueError(f"cannot remove {pad_size} of {len(data)} rows")
    return data[: len(data) - pad_size] if pad_size else data


def collate_fn(items: Sequence[DataProtoItem]) -> DataProto:
    """Rows stacked into a proto; meta_info is the first row's."""
    if not items:
        raise ValueError("no rows to collate")
    batches = [item.batch for item in items if item.batch is not None]
    columns = {key: object_array(item.non_tensor_batch[key] for item in items) for key in items[0].non_tensor_batch}
    return DataProto(TensorDict.stack(batches, dim=0) if batches else None, columns, dict(items[0].meta_info))
