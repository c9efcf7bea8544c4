"""Which rows meet in an update."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import pytest
import torch

from verl.protocol import DataProto
from verl.trainer.ppo.mini_batches import mini_batches, updates_per_batch
from verl.trainer.ppo.rollout_batch import deal_by_length

UIDS = ["c", "a", "b", "a", "c", "b", "d", "d"]


LENGTHS = [10, 30, 20, 2, 9, 19, 8, 25]


def batch(order: Sequence[int] = range(8), mask: Sequence[int] = (1,) * 8) -> DataProto:
    """Eight rows of four groups, put into another order."""
    attention = torch.tensor([[1] * n + [0] * (30 - n) for n in LENGTHS])
    tensors = {"row": torch.arange(8), "attention_mask": attention, "response_mask": torch.tensor(mask)[:, None]}
    whole = DataProto.from_dict(tensors, {"uid": np.array(UIDS, dtype=object)})
    return whole.select_idxs(list(order))


def rows(parts: Iterable[DataProto]) -> list[list[int]]:
    return [part.batch["row"].tolist() for part in parts if part.batch is not None]


def members(parts: Iterable[DataProto]) -> list[list[int]]:
    return [sorted(part) for part in rows(parts)]


@pytest.mark.parametrize(
    ("prompts", "mini", "epochs", "updates"), [(64, None, 1, 1), (64, 64, 1, 1), (64, 32, 1, 2), (10, 4, 2, 6)]
)
def test_updates_per_batch(prompts: int, mini: int | None, epochs: int, updates: int) -> None:
    assert updates_per_batch(prompts, mini, epochs) == updates


def test_groups_stay_together_and_the_last_part_may_be_smaller() -> None:
    assert members(mini_batches(batch(), 3, 1, 1)) == [[0, 1, 2, 3, 4, 5], [6, 7]]
    assert members(mini_batches(batch(), None, 2, 1)) == [list(range(8))] * 2


@pytest.mark.parametrize("shuffle", [False, True])
def test_which_rows_meet_does_not_depend_on_ranks_or_on_the_order_of_the_batch(shuffle: bool) -> None:
    expected = members(mini_batches(batch(), 2, 2, 1, shuffle, (3, 1)))
    for ranks in (1, 2, 4):
        for order in (range(8), [7, 6, 5, 4, 3, 2, 1, 0], deal_by_length(LENGTHS, ranks)):
            assert members(mini_batches(batch(order), 2, 2, ranks, shuffle, (3, 1))) == expected


def test_each_part_is_dealt_so_that_ranks_hold_about_equally_many_tokens() -> None:
    (part,) = rows(mini_batches(batch(), None, 1, 2))
    tokens = [sum(LENGTHS[row] for row in part[:4]), sum(LENGTHS[row] for row in part[4:])]
    assert sum(tokens) == sum(LENGTHS)
    assert max(tokens) - min(tokens) <= 10  # the batch as it came: 62 and 61 by luck, sorted by length: 94 and 29


def test_every_row_is_used_once_in_each_epoch() -> None:
    parts = rows(mini_batches(batch(), 2, 3, 1, shuffle=True, seed=(7, 1)))
    assert [sorted(parts[i] + parts[i + 1]) for i in (0, 2, 4)] == [list(range(8))] * 3


def test_shuffling_is_fixed_by_seed_and_differs_between_epochs() -> None:
    first, again, other = (rows(mini_batches(batch(), 1, 6, 1, True, (7, step))) for step in (1, 1, 2))
    assert first == again != other
    assert len({str(first[i : i + 4]) for i in range(0, 24, 4)}) > 1


def test_a_part_without_a_trained_token_is_left_out() -> None:
    masked = batch(mask=[1, 0, 1, 0, 1, 1, 1, 1])  # group a is masked as a whole
    assert members(mini_batches(masked, 1, 1, 1)) == [[2, 5], [0, 4], [6, 7]]
