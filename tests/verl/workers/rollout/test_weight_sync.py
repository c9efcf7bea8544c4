from __future__ import annotations

import pytest
import torch

from verl.workers.rollout.engine import NamedTensor
from verl.workers.rollout.weight_sync import buckets


def stream(*sizes: int) -> list[NamedTensor]:
    """Float32 tensors of ``sizes`` elements, 4 bytes each."""
    return [(f"w{i}", torch.full((size,), float(i))) for i, size in enumerate(sizes)]


@pytest.mark.parametrize(
    ("sizes", "limit", "expected"),
    [
        ((), 8, []),
        ((1, 1, 1), 8, [["w0", "w1"], ["w2"]]),
        ((9, 1), 8, [["w0"], ["w1"]]),
        ((1, 9, 1, 1), 8, [["w0"], ["w1"], ["w2", "w3"]]),
        ((1, 1, 1), 1000, [["w0", "w1", "w2"]]),
    ],
)
def test_buckets_keep_order_and_limit(sizes: tuple[int, ...], limit: int, expected: list[list[str]]) -> None:
    assert [[name for name, _ in bucket] for bucket in buckets(stream(*sizes), limit)] == expected


def test_one_bucket_is_held_at_a_time() -> None:
    """The stream is read only as far as the bucket being sent needs: never a second copy of the model."""
    read = 0

    def counted() -> object:
        nonlocal read
        for item in stream(2, 2, 2, 2):
            read += 1
            yield item

    parts = buckets(counted(), 8)  # type: ignore[arg-type]
    assert [name for name, _ in next(parts)] == ["w0"]
    assert read == 2
