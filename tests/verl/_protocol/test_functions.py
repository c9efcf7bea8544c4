"""Functions over whole protos."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from tests.verl._protocol.rows import NO_ROWS, proto, same
from verl.protocol import (
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
