"""Equality over nested values in which NaN equals NaN."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase

_NUMBERS = (float, complex, np.inexact, np.datetime64, np.timedelta64)


def same_value(left: Any, right: Any) -> bool:
    """Whether two nested values agree in structure, dtype and content; NaN equals NaN."""
    if left is right:
        return True
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return _same_tensor(left, right)
    if isinstance(left, np.ndarray) and isinstance(right, np.ndarray):
        return _same_array(left, right)
    if isinstance(left, Mapping | TensorDictBase) and isinstance(right, Mapping | TensorDictBase):
        return set(left.keys()) == set(right.keys()) and all(same_value(left[key], right[key]) for key in left.keys())  # noqa: SIM118
    if isinstance(left, list | tuple) and type(left) is type(right):
        return len(left) == len(right) and all(map(same_value, left, right))
    if isinstance(left, _NUMBERS) and isinstance(right, _NUMBERS) and left != left:
        first, second = np.asarray(left), np.asarray(right)
        return first.dtype.kind == second.dtype.kind and bool(np.array_equal(first, second, equal_nan=True))
    if isinstance(left, np.ndarray | torch.Tensor) or isinstance(right, np.ndarray | torch.Tensor):
        return False
    return bool(left == right)


def _same_tensor(left: torch.Tensor, right: torch.Tensor) -> bool:
    if left.is_nested or right.is_nested:
        return left.is_nested == right.is_nested and same_value(list(left.unbind()), list(right.unbind()))
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    if left.is_meta or right.is_meta:
        return left.is_meta and right.is_meta
    right = right.to(left.device)
    if left.is_floating_point() and left.dtype.itemsize == 1:  # torch compares no eight-bit floats
        left, right = left.float(), right.float()
    if torch.equal(left, right):
        return True
    if not (left.is_floating_point() or left.is_complex()):
        return False
    return bool(((left == right) | (left.isnan() & right.isnan())).all())


def _same_array(left: np.ndarray, right: np.ndarray) -> bool:
    if left.shape != right.shape:
        return False
    if left.dtype != right.dtype and not (left.dtype.kind == right.dtype.kind and left.dtype.kind in "US"):
        return False  # the dtype of a text column holds its longest text: the same texts may have two
    if left.dtype.hasobject:
        return all(map(same_value, left.ravel().tolist(), right.ravel().tolist()))
    return bool(np.array_equal(left, right, equal_nan=left.dtype.kind in "fcmM"))
