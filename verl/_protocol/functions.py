"""Functions over whole protos: padding, collating, folding, gathering."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from tensordict import TensorDict

from verl._protocol.base import DataProtoItem
from verl._protocol.columns import object_array
from verl._protocol.data import DataProto

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


def collate_fn(x: Sequence[DataProtoItem]) -> DataProto:
    """Rows stacked into a proto; meta_info is the first row's. Tensors of different lengths become jagged."""
    if not x:
        raise ValueError("no rows to collate")
    batches = [item.batch for item in x if item.batch is not None]
    columns = {key: object_array(item.non_tensor_batch[key] for item in x) for key in x[0].non_tensor_batch}
    return DataProto(_stack(batches) if batches else None, columns, dict(x[0].meta_info))


def _stack(rows: list[TensorDict]) -> TensorDict:
    ragged = [key for key, value in rows[0].items() if any(row[key].shape != value.shape for row in rows)]
    batch = TensorDict.stack([row.exclude(*ragged) for row in rows], dim=0)
    for key in ragged:
        batch[key] = torch.nested.nested_tensor([row[key] for row in rows], layout=torch.jagged)
    return batch


def fold_batch_dim(data: ProtoT, new_batch_size: int) -> ProtoT:
    """(rows, …) to (new_batch_size, rows / new_batch_size, …) in every column.

    Raises ValueError where rows do not divide.
    """
    if new_batch_size < 1 or len(data) % new_batch_size:
        raise ValueError(f"{len(data)} rows do not fold into {new_batch_size}")
    tensors = () if data.batch is None else data.batch.items()
    nested = [key for key, value in tensors if isinstance(value, torch.Tensor) and value.is_nested]
    if nested:
        raise ValueError(f"nested tensors cannot be folded: {nested}")
    inner = len(data) // new_batch_size
    batch = None if data.batch is None else data.batch.reshape(new_batch_size, inner)
    if batch is not None:
        batch.batch_size = torch.Size([new_batch_size])
    columns = data.non_tensor_batch.items()
    return data._with(batch, {key: column.reshape(new_batch_size, inner, *column.shape[1:]) for key, column in columns})


def unfold_batch_dim(data: ProtoT, batch_dims: int = 2) -> ProtoT:
    """The first ``batch_dims`` dimensions of every column as one; undoes fold_batch_dim."""
    if batch_dims < 1:
        raise ValueError(f"batch_dims must be at least 1, got {batch_dims}")
    batch = None
    if data.batch is not None:
        sizes = {tuple(value.shape[:batch_dims]) for value in data.batch.values()} or {tuple(data.batch.batch_size)}
        if len(sizes) > 1:
            raise ValueError(f"tensors differ in their first {batch_dims} dimensions: {sorted(sizes)}")
        batch = data.batch.copy()
        batch.batch_size = torch.Size(sizes.pop())
        batch = batch.reshape(-1)
    columns = data.non_tensor_batch.items()
    return data._with(batch, {key: column.reshape(-1, *column.shape[batch_dims:]) for key, column in columns})


def all_gather_data_proto(data: DataProto, process_group: dist.ProcessGroup) -> None:
    """Replaces the data, in place, by the concatenation of every rank's, in rank order.

    Ranks may have different numbers of rows. meta_info stays this rank's own.
    """
    device = None if data.batch is None else data.batch.device
    mine = data._with(None if data.batch is None else data.batch.cpu(), data.non_tensor_batch)
    mine.meta_info = {}
    gathered: list[Any] = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(gathered, mine, group=process_group)
    everything = DataProto.concat(gathered)
    data.batch, data.non_tensor_batch = everything.batch, everything.non_tensor_batch
    if device is not None:
        data.to(device)
