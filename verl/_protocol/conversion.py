"""Other forms of a batch: one TensorDict, folded batch dimensions, a description."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from verl._protocol.columns import object_array


def pack_tensordict(
    batch: TensorDict | None, columns: Mapping[str, np.ndarray], meta_info: Mapping[str, Any], rows: int
) -> TensorDict:
    """One TensorDict of all columns and facts. Raises ValueError naming keys that are used twice."""
    packed = TensorDict({}, batch_size=[rows]) if batch is None else batch.copy()
    twice = [key for key in (*columns, *meta_info) if key in packed.keys()]  # noqa: SIM118
    twice += sorted(columns.keys() & meta_info.keys())
    if twice:
        raise ValueError(f"keys {twice} are used twice")
    for key, column in columns.items():
        packed.set(key, NonTensorStack(*(NonTensorData(value) for value in column)))
    for key, value in meta_info.items():
        fact: Any = NonTensorData(value, batch_size=packed.batch_size)
        packed.set(key, fact)
    return packed


def unpack_tensordict(
    packed: TensorDict,
) -> tuple[dict[str, torch.Tensor], dict[str, np.ndarray], dict[str, Any]]:
    """Tensors, object columns and facts of such a TensorDict."""
    tensors: dict[str, torch.Tensor] = {}
    columns: dict[str, np.ndarray] = {}
    facts: dict[str, Any] = {}
    items: Iterator[tuple[str, Any]] = packed.items()
    for key, value in items:
        if isinstance(value, NonTensorStack):
            columns[key] = object_array(element.data for element in value.tensordicts)
        elif isinstance(value, NonTensorData):
            facts[key] = value.data
        else:
            tensors[key] = value
    return tensors, columns, facts


def unfold_columns(columns: Any, n_split: int, keys: set[str]) -> dict[str, Any]:
    """Those of ``keys`` among the columns with the second dimension in ``n_split`` parts, each a row."""
    if n_split < 1:
        raise ValueError(f"a row cannot be unfolded into {n_split}")
    unfolded = {}
    for key in keys & set(columns.keys()):
        if columns[key].ndim < 2:
            raise ValueError(f"{key!r} of shape {tuple(columns[key].shape)} has no second dimension to unfold")
        rows, width, *rest = columns[key].shape
        if width % n_split:
            raise ValueError(f"{key!r} has a second dimension of {width}, which does not divide by {n_split}")
        unfolded[key] = columns[key].reshape(rows * n_split, width // n_split, *rest)
    return unfolded


def describe(
    batch: TensorDict | None, columns: Mapping[str, np.ndarray], meta_info: Mapping[str, Any]
) -> Iterator[str]:
    """Lines that say what is in a batch."""
    yield "batch"
    for key, value in () if batch is None else batch.items():
        yield f"  {key}: {tuple(value.shape)} {value.dtype} {value.device}"
    yield "non_tensor_batch"
    for key, column in columns.items():
        kinds = sorted({type(element).__name__ for element in column.ravel()}) if column.dtype.hasobject else []
        yield f"  {key}: {column.shape} {column.dtype}{' of ' + ', '.join(kinds) if kinds else ''}"
    yield "meta_info"
    for key, value in meta_info.items():
        yield f"  {key}: {type(value).__name__}"
