"""Batches of any make, drawn by hypothesis, and their rows as plain lists."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import settings
from hypothesis import strategies as st

from verl._protocol.columns import object_array
from verl.protocol import DataProto

DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex64,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
]
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=5)
    | st.floats(width=32).map(np.float32)
    | st.integers(0, 4).map(np.arange)
    | st.integers(0, 4).map(torch.arange)
)
PLAIN = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
        | st.tuples(inner, inner)
        | st.lists(inner, max_size=2).map(object_array)
    ),
    max_leaves=6,
)
repeatable = settings(deadline=None, max_examples=60, derandomize=True, database=None)


class Labelled(DataProto):
    """A subclass with an attribute of its own."""

    label = "none"


@st.composite
def protos(draw: st.DrawFn, min_rows: int = 0, ragged: bool = True) -> DataProto:
    """Between no and seven rows of no to three tensors, objects and numbers."""
    rows = draw(st.integers(min_rows, 7))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    tensors = {}
    for name in draw(st.sets(st.sampled_from("abc"))):
        tail = draw(st.lists(st.integers(0, 3), max_size=2))
        tensors[name] = torch.randint(0, 9, (rows, *tail), generator=generator).to(draw(st.sampled_from(DTYPES)))
        if tensors[name].dtype.is_floating_point and tensors[name].numel() and draw(st.booleans()):
            tensors[name].view(-1)[0] = float("nan")
    if ragged and rows and draw(st.booleans()):
        lengths = draw(st.lists(st.integers(1, 4), min_size=rows, max_size=rows))
        tensors["jagged"] = torch.nested.nested_tensor([torch.arange(n) for n in lengths], layout=torch.jagged)
    columns: dict[str, Any] = {
        name: draw(st.lists(PLAIN, min_size=rows, max_size=rows)) for name in draw(st.sets(st.sampled_from("de")))
    }
    if draw(st.booleans()):
        columns["number"] = np.arange(rows, dtype=np.float32)
        columns["text"] = np.array([f"row {row}" for row in range(rows)], dtype="<U8")
    facts = draw(st.dictionaries(st.text(max_size=3), PLAIN, max_size=3))
    kind = draw(st.sampled_from([DataProto, Labelled]))
    data = kind.from_dict(tensors, columns, facts)
    if isinstance(data, Labelled):
        data.label = draw(st.text(max_size=3))
    return data


def table(data: DataProto) -> list[dict[str, Any]]:
    """The rows, each a dictionary of what every column holds in it."""
    columns: dict[str, list[Any]] = {key: list(column) for key, column in data.non_tensor_batch.items()}
    if data.batch is not None:
        columns |= {key: list(tensor.unbind()) for key, tensor in data.batch.items()}
    return [{key: column[row] for key, column in columns.items()} for row in range(len(data))]
