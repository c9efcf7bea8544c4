"""Small batches and their comparison."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from verl._protocol.equality import same_value
from verl.protocol import (
    DataProto,
)


def proto(rows: int = 3, **meta: Any) -> DataProto:
    tensors = {"x": torch.arange(rows * 2).view(rows, 2), "w": torch.arange(rows) / 2}
    return DataProto.from_dict(tensors, {"uid": [f"u{i}" for i in range(rows)], "n": np.arange(rows)}, meta)


def same(left: DataProto, right: DataProto) -> bool:
    parts = (
        (left.batch, right.batch),
        (left.non_tensor_batch, right.non_tensor_batch),
        (left.meta_info, right.meta_info),
    )
    return type(left) is type(right) and len(left) == len(right) and all(same_value(*pair) for pair in parts)


NAN = float("nan")


ONLY_META = DataProto(meta_info={"step": 3})


ONLY_ARRAYS = DataProto.from_dict(non_tensors={"uid": ["a", "b"]})


NO_ROWS = proto(0)
