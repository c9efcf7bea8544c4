"""The columns of a DataProto and the operations that leave its rows alone.

Invariants: ``batch`` has one batch dimension; every column has the same number of rows; columns of
``non_tensor_batch`` are NumPy arrays. A new proto never shares the ``meta_info`` dictionary, nor
the dictionaries of columns, of the one it came from; views (slices, chunks, selections of columns)
share tensor memory.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import torch
from tensordict import TensorDict

from verl._protocol.columns import object_array, refuse_conflicts, union_tensor_dict
from verl._protocol.serialization import deserialize_tensordict, serialize_tensordict


class DataProtoConfig:
    """``auto_padding``: whether every proto may be padded when its rows do not divide among the workers.

    Off unless the environment variable VERL_AUTO_PADDING is TRUE or 1 at import. A single proto
    opts in by ``from_dict(…, auto_padding=True)``.
    """

    auto_padding: bool = os.environ.get("VERL_AUTO_PADDING", "").upper() in ("TRUE", "1")
    auto_padding_key: str = "_verl_auto_padding"


@dataclass(eq=False)
class DataProtoItem:
    """One row: tensors without the batch dimension, values, and the batch's meta_info."""

    batch: TensorDict | None = None
    non_tensor_batch: dict[str, Any] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)


@dataclass(eq=False)
class DataProtoColumns:
    """The columns of a DataProto: making, naming and combining them.

    ``batch``: TensorDict with batch size (rows,), or None. ``non_tensor_batch``: NumPy arrays with
    ``rows`` in the first dimension, object dtype or numeric. ``meta_info``: facts about the batch.
    """

    batch: TensorDict | None = None
    non_tensor_batch: dict[str, np.ndarray] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.check_consistency()

    @classmethod
    def from_dict(
        cls,
        tensors: Mapping[str, torch.Tensor] | None = None,
        non_tensors: Mapping[str, Any] | None = None,
        meta_info: Mapping[str, Any] | None = None,
        num_batch_dims: int = 1,
        auto_padding: bool = False,
    ) -> Self:
        """From columns. Sequences that are no arrays become object arrays, one element a row.

        Raises ValueError naming the column whose leading ``num_batch_dims`` sizes differ.
        """
        meta = dict(meta_info or {})
        if auto_padding:
            meta[DataProtoConfig.auto_padding_key] = True
        columns = {
            key: value if isinstance(value, np.ndarray) else object_array(value)
            for key, value in (non_tensors or {}).items()
        }
        return cls(_tensordict(tensors or {}, num_batch_dims), columns, meta)

    @classmethod
    def from_single_dict(
        cls,
        data: Mapping[str, torch.Tensor | np.ndarray],
        meta_info: Mapping[str, Any] | None = None,
        auto_padding: bool = False,
    ) -> Self:
        """From one dictionary: tensors to ``batch``, arrays to ``non_tensor_batch``, anything else is refused."""
        odd = {
            key: type(value).__name__ for key, value in data.items() if not isinstance(value, torch.Tensor | np.ndarray)
        }
        if odd:
            raise ValueError(f"columns are tensors or NumPy arrays, got {odd}")
        tensors = {key: value for key, value in data.items() if isinstance(value, torch.Tensor)}
        arrays = {key: value for key, value in data.items() if isinstance(value, np.ndarray)}
        return cls.from_dict(tensors, arrays, meta_info, auto_padding=auto_padding)

    def check_consistency(self) -> None:
        """Raises ValueError naming the column that breaks an invariant."""
        if self.batch is not None and self.batch.batch_dims < 1:
            raise ValueError("batch needs a batch dimension")
        rows = None if self.batch is None else self.batch.batch_size[0]
        for key, column in self.non_tensor_batch.items():
            if not isinstance(column, np.ndarray) or column.ndim == 0:
                raise ValueError(f"non_tensor_batch[{key!r}] must be an array with rows, got {type(column).__name__}")
            rows = len(column) if rows is None else rows
            if len(column) != rows:
                raise ValueError(f"non_tensor_batch[{key!r}] has {len(column)} rows, the other columns have {rows}")

    def __len__(self) -> int:
        if self.batch is not None:
            return self.batch.batch_size[0]
        return next((len(column) for column in self.non_tensor_batch.values()), 0)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"batch": None if self.batch is None else serialize_tensordict(self.batch)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        packed = state["batch"]
        self.__dict__.update(state | {"batch": None if packed is None else deserialize_tensordict(packed)})

    def _with(self, batch: TensorDict | None, non_tensor_batch: dict[str, np.ndarray]) -> Self:
        """The same proto, subclass and extra attributes included, with other columns."""
        new = object.__new__(type(self))
        new.__dict__.update(self.__dict__)
        new.batch, new.non_tensor_batch, new.meta_info = batch, non_tensor_batch, dict(self.meta_info)
        return new

    # Columns

    def select(
        self,
        batch_keys: Sequence[str] | None = None,
        non_tensor_batch_keys: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
        deepcopy: bool = False,
    ) -> Self:
        """The named columns and facts; None keeps all of a kind. ``deepcopy`` shares no memory.

        Raises ValueError naming keys that are missing.
        """
        self._require(batch_keys, non_tensor_batch_keys, meta_info_keys)
        batch = self.batch
        if batch is not None:
            batch = batch.copy() if batch_keys is None else batch.select(*batch_keys)
        columns = _pick(self.non_tensor_batch, non_tensor_batch_keys)
        meta = _pick(self.meta_info, meta_info_keys)
        if deepcopy:
            batch, columns, meta = None if batch is None else batch.clone(), copy.deepcopy(columns), copy.deepcopy(meta)
        new = self._with(batch, columns)
        new.meta_info = meta
        return new

    def pop(
        self,
        batch_keys: Sequence[str] | None = None,
        non_tensor_batch_keys: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
    ) -> Self:
        """Removes the named columns and facts and returns them as a proto of their own.

        Raises ValueError naming keys that are missing, before anything is removed.
        """
        self._require(batch_keys, non_tensor_batch_keys, meta_info_keys)
        tensors = {key: self.batch.pop(key) for key in batch_keys or () if self.batch is not None}
        columns = {key: self.non_tensor_batch.pop(key) for key in non_tensor_batch_keys or ()}
        meta = {key: self.meta_info.pop(key) for key in meta_info_keys or ()}
        batch = TensorDict(tensors, batch_size=[len(self)]) if tensors else None
        new = self._with(batch, columns)
        new.meta_info = meta
        return new

    def _require(
        self, batch: Sequence[str] | None, non_tensor: Sequence[str] | None, meta_info: Sequence[str] | None
    ) -> None:
        wanted = (("batch", batch, self._batch_keys()), ("non_tensor_batch", non_tensor, set(self.non_tensor_batch)))
        for kind, keys, have in (*wanted, ("meta_info", meta_info, set(self.meta_info))):
            missing = [key for key in keys or () if key not in have]
            if missing:
                raise ValueError(f"{kind} has no {missing}; it has {sorted(have)}")

    def _batch_keys(self) -> set[str]:
        return set() if self.batch is None else {str(key) for key in self.batch.keys()}  # noqa: SIM118

    def rename(self, old_keys: str | Sequence[str] | None = None, new_keys: str | Sequence[str] | None = None) -> Self:
        """Renames tensor columns in place and returns self."""
        old = [old_keys] if isinstance(old_keys, str) else list(old_keys or ())
        new = [new_keys] if isinstance(new_keys, str) else list(new_keys or ())
        if len(old) != len(new):
            raise ValueError(f"{len(old)} old keys {old} for {len(new)} new keys {new}")
        self._require(old, None, None)
        if self.batch is not None and old:
            kept = [key for key in self.batch.keys() if key not in old]  # noqa: SIM118
            clash = [key for position, key in enumerate(new) if key in kept or key in new[:position]]
            if clash:
                raise ValueError(f"new keys {clash} are taken already")
            values = [self.batch.pop(key) for key in old]
            self.batch.update(dict(zip(new, values, strict=True)))
        return self

    def union(self, other: DataProtoColumns) -> Self:
        """Adds the other's columns and facts, in place, and returns self.

        Raises ValueError when the numbers of rows differ, or naming a key with two different values,
        before anything is added.
        """
        if has_columns(self) and has_columns(other) and len(self) != len(other):
            raise ValueError(f"cannot unite {len(self)} rows with {len(other)} rows")
        refuse_conflicts("non-tensor", self.non_tensor_batch, other.non_tensor_batch)
        refuse_conflicts("meta_info", self.meta_info, other.meta_info)
        if other.batch is not None:
            self.batch = other.batch.copy() if self.batch is None else union_tensor_dict(self.batch, other.batch)
        for key, column in other.non_tensor_batch.items():
            self.non_tensor_batch.setdefault(key, column)
        for key, fact in other.meta_info.items():
            self.meta_info.setdefault(key, fact)
        return self


def has_columns(data: DataProtoColumns) -> bool:
    """Whether the proto has any column, be it of zero rows."""
    return data.batch is not None or bool(data.non_tensor_batch)


def _pick(values: dict[str, Any], keys: Sequence[str] | None) -> dict[str, Any]:
    return dict(values) if keys is None else {key: values[key] for key in keys}


def _tensordict(tensors: Mapping[str, torch.Tensor], num_batch_dims: int) -> TensorDict | None:
    if num_batch_dims < 1:
        raise ValueError(f"num_batch_dims must be at least 1, got {num_batch_dims}")
    if not tensors:
        return None
    sizes = {key: tuple(value.shape[:num_batch_dims]) for key, value in tensors.items()}
    first_key, first = next(iter(sizes.items()))
    for key, size in sizes.items():
        if size != first or len(size) != num_batch_dims:
            raise ValueError(f"tensor {key!r} has batch size {size}, {first_key!r} has {first}")
    return TensorDict(dict(tensors), batch_size=first)
