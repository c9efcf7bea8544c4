"""Operations on the columns of a batch: tensors in a TensorDict, everything else in NumPy arrays."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from verl._protocol.equality import same_value

RowIndex = Sequence[int] | Sequence[bool] | np.ndarray | torch.Tensor


def object_array(values: Iterable[Any]) -> np.ndarray:
    """A one-dimensional object array with one element per value, whatever the values' own shapes."""
    rows = list(values)
    array = np.empty(len(rows), dtype=object)
    for position, row in enumerate(rows):
        array[position] = row
    return array


def row_index(idxs: RowIndex, n_rows: int) -> torch.Tensor:
    """Row numbers (int64) from numbers or from a boolean mask of ``n_rows``.

    Raises ValueError for a mask of another length and IndexError for a row that is not there.
    """
    index = idxs if isinstance(idxs, torch.Tensor) else torch.as_tensor(np.asarray(idxs))
    if index.numel() == 0 and index.dtype != torch.bool:
        return torch.zeros(0, dtype=torch.int64)
    if index.ndim != 1:
        raise ValueError(f"rows are selected by a one-dimensional index, got shape {tuple(index.shape)}")
    if index.dtype == torch.bool:
        if len(index) != n_rows:
            raise ValueError(f"a mask of {len(index)} rows cannot select from {n_rows} rows")
        return index.nonzero(as_tuple=True)[0]
    if index.is_floating_point():
        raise ValueError(f"rows are selected by integers or booleans, got {index.dtype}")
    low, high = int(index.min()), int(index.max())
    if low < -n_rows or high >= n_rows:
        raise IndexError(f"row {low if low < -n_rows else high} of {n_rows} rows")
    return index.to(torch.int64) % n_rows


def even_sizes(n_rows: int, parts: int) -> list[int]:
    """``n_rows`` in ``parts`` whose sizes differ by at most one, the larger first."""
    base, extra = divmod(n_rows, parts)
    return [base + (part < extra) for part in range(parts)]


def union_tensor_dict(tensor_dict1: TensorDict, tensor_dict2: TensorDict) -> TensorDict:
    """Adds the second's columns to the first, in place, and returns the first.

    Raises ValueError when the sizes differ or a column in both has two values (NaN equals NaN).
    """
    if tensor_dict1.batch_size != tensor_dict2.batch_size:
        sizes = tuple(tensor_dict1.batch_size), tuple(tensor_dict2.batch_size)
        raise ValueError(f"cannot unite batches of size {sizes[0]} and {sizes[1]}")
    refuse_conflicts("tensor", tensor_dict1, tensor_dict2)
    for key in tensor_dict2.keys():  # noqa: SIM118 (a TensorDict iterates over its rows)
        if key not in tensor_dict1.keys():  # noqa: SIM118
            tensor_dict1[key] = tensor_dict2[key]
    return tensor_dict1


def union_numpy_dict(tensor_dict1: dict[str, np.ndarray], tensor_dict2: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same for NumPy columns."""
    refuse_conflicts("non-tensor", tensor_dict1, tensor_dict2)
    tensor_dict1.update({key: value for key, value in tensor_dict2.items() if key not in tensor_dict1})
    return tensor_dict1


def union_meta_info(first: dict[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """The same for meta_info."""
    refuse_conflicts("meta_info", first, second)
    first.update(second)
    return first


def refuse_conflicts(kind: str, first: Any, second: Any) -> None:
    """Raises ValueError naming a key to which the two dictionaries give different values."""
    for key in first.keys() & second.keys():
        if not same_value(first[key], second[key]):
            raise ValueError(
                f"{kind} key {key!r} has two different values: {_brief(first[key])} and {_brief(second[key])}"
            )


def _brief(value: Any) -> str:
    if isinstance(value, torch.Tensor | np.ndarray):
        return f"{type(value).__name__} of shape {tuple(value.shape)}, {value.dtype}"
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def list_of_dict_to_dict_of_list(list_of_dict: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Gathers values by key; a key that some dictionaries lack gets the values of those that have it."""
    gathered: dict[str, list[Any]] = {}
    for record in list_of_dict:
        for key, value in record.items():
            gathered.setdefault(key, []).append(value)
    return gathered


def concat_columns(parts: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """NumPy columns one below the other.

    Raises ValueError naming keys that only some parts have, or that hold texts in some and numbers in others.
    """
    refuse_different_keys("non-tensor", [set(part) for part in parts])
    return {key: _concat_column(key, [part[key] for part in parts]) for key in parts[0]}


def _concat_column(key: str, arrays: list[np.ndarray]) -> np.ndarray:
    """NumPy would write numbers as texts in order to join them with texts."""
    texts = [array.dtype.kind in "US" for array in arrays]
    if any(texts) and not all(texts) and not any(array.dtype.hasobject for array in arrays):
        raise ValueError(f"non-tensor key {key!r} has texts and numbers: {[str(array.dtype) for array in arrays]}")
    return np.concatenate(arrays, axis=0)


def refuse_different_keys(kind: str, key_sets: Sequence[set[str]]) -> None:
    """Raises ValueError naming the keys that are not in every set."""
    everywhere = key_sets[0].intersection(*key_sets)
    odd = set().union(*key_sets) - everywhere
    if odd:
        raise ValueError(f"{kind} keys {sorted(odd)} are in some of the {len(key_sets)} parts only")


def merge_meta_info(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One meta_info from several: equal values once, ``metrics`` gathered into lists by name.

    ``metrics`` may be a dictionary or a list of dictionaries in each part. Raises ValueError naming
    the key and both values where parts differ.
    """
    merged: dict[str, Any] = {}
    metrics: list[Mapping[str, Any]] = []
    for part in parts:
        rest = dict(part)
        found = rest.pop("metrics", None) or []
        metrics.extend([found] if isinstance(found, Mapping) else found)
        union_meta_info(merged, rest)
    if metrics:
        merged["metrics"] = list_of_dict_to_dict_of_list(metrics)
    return merged
