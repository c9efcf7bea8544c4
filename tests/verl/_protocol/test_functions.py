"""Functions over whole protos."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.verl._protocol.rows import NO_ROWS, proto, same
from verl.protocol import (
    DataProto,
    all_gather_data_proto,
    collate_fn,
    fold_batch_dim,
    pad_dataproto_to_divisor,
    unfold_batch_dim,
    unpad_dataproto,
)


def test_pad_to_divisor_repeats_from_the_head() -> None:
    padded, pad_size = pad_dataproto_to_divisor(proto(2), 5)
    assert (padded.non_tensor_batch["n"].tolist(), pad_size) == ([0, 1, 0, 1, 0], 3)
    assert same(unpad_dataproto(padded, pad_size), proto(2))
    assert pad_dataproto_to_divisor(NO_ROWS, 4)[1] == 0
    with pytest.raises(ValueError, match="cannot remove 3 of 2 rows"):
        unpad_dataproto(proto(2), 3)


def test_fold_and_unfold_batch_dim() -> None:
    folded = fold_batch_dim(proto(6), 2)
    assert (len(folded), folded.batch["x"].shape, folded.non_tensor_batch["uid"].shape) == (2, (2, 3, 2), (2, 3))
    assert same(unfold_batch_dim(folded), proto(6))
    with pytest.raises(ValueError, match="6 rows do not fold into 4"):
        fold_batch_dim(proto(6), 4)


def test_collate() -> None:
    data = proto(3, step=1)
    collated = collate_fn([data[2], data[0]])
    assert collated.batch["x"].tolist() == [[4, 5], [0, 1]]
    assert (collated.non_tensor_batch["uid"].tolist(), collated.meta_info) == (["u2", "u0"], {"step": 1})


def test_all_gather(tmp_path: Path) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        data = proto(3, step=1)
        all_gather_data_proto(data, dist.group.WORLD)
        assert same(data, proto(3, step=1))
    finally:
        dist.destroy_process_group()


def test_rows_of_different_lengths_collate_to_a_jagged_column() -> None:
    ragged = torch.nested.nested_tensor([torch.arange(1), torch.arange(2)], layout=torch.jagged)
    data = DataProto.from_dict({"r": ragged, "x": torch.arange(2)})
    joined = collate_fn([data[1], data[0]])
    assert [row.tolist() for row in joined.batch["r"].unbind()] == [[0, 1], [0]]
    assert joined.batch["x"].tolist() == [1, 0]


def test_ragged_columns_do_not_fold() -> None:
    ragged = torch.nested.nested_tensor([torch.arange(1), torch.arange(2)], layout=torch.jagged)
    with pytest.raises(ValueError, match=r"nested tensors cannot be folded: \['r'\]"):
        fold_batch_dim(DataProto.from_dict({"r": ragged}), 2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: pad_dataproto_to_divisor(proto(2), 0), "size_divisor must be at least 1, got 0"),
        (lambda: unpad_dataproto(proto(2), -1), "cannot remove -1 of 2 rows"),
        (lambda: fold_batch_dim(proto(2), 0), "2 rows do not fold into 0"),
        (lambda: unfold_batch_dim(proto(2), 0), "batch_dims must be at least 1, got 0"),
        (lambda: unfold_batch_dim(proto(2), 2), "tensors differ in their first 2 dimensions"),
        (lambda: collate_fn([]), "no rows to collate"),
    ],
)
def test_errors_of_the_functions(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
