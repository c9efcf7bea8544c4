"""Which rows meet in an update."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from verl.protocol import DataProto
from verl.trainer.ppo.mini_batches import mini_batches, updates_per_batch

UIDS = ["c", "a", "b", "a", "c", "b", "d", "d"]


def batch(mask: list[int] | None = None) -> DataProto:
    tensors = {"row": torch.arange(8), "response_mask": torch.tensor(mask or [1] * 8)[:, None]}
    return DataProto.from_dict(tensors, {"uid": np.array(UIDS, dtype=object)})


def rows(parts: list[DataProto]) -> list[list[int]]:
    return [part.batch["row"].tolist() for part in parts if part.batch is not None]


@pytest.mark.parametrize(
    ("prompts", "mini", "epochs", "updates"), [(64, None, 1, 1), (64, 64, 1, 1), (64, 32, 1, 2), (10, 4, 2, 6)]
)
def test_updates_per_batch(prompts: int, mini: int | None, epochs: int, updates: int) -> None:
    assert updates_per_batch(prompts, mini, epochs) == updates


def test_whole_batch_is_one_part_untouched() -> None:
    whole = batch()
    assert [part is whole for part in mini_batches(whole, None, 2)] == [True, True]


def test_groups_stay_together_and_the_last_part_may_be_smaller() -> None:
    assert rows(list(mini_batches(batch(), 3, 1))) == [[0, 1, 2, 3, 4, 5], [6, 7]]


def test_every_row_is_used_once_in_each_epoch() -> None:
    parts = rows(list(mini_batches(batch(), 2, 3, shuffle=True, seed=(7, 1))))
    assert [sorted(parts[i] + parts[i + 1]) for i in (0, 2, 4)] == [list(range(8))] * 3


def test_shuffling_is_fixed_by_seed_and_differs_between_epochs() -> None:
    first, again, other = (rows(list(mini_batches(batch(), 1, 6, True, (7, step)))) for step in (1, 1, 2))
    assert first == again != other
    assert len({str(first[i : i + 4]) for i in range(0, 24, 4)}) > 1


def test_a_part_without_a_trained_token_is_left_out() -> None:
    masked = batch([1, 0, 1, 0, 1, 1, 1, 1])  # group a is masked as a whole
    assert rows(list(mini_batches(masked, 1, 1))) == [[0, 4], [2, 5], [6, 7]]
