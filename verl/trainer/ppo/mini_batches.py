"""The updates of one step: whole groups at a time."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from verl.protocol import DataProto
from verl.trainer.ppo.advantages import group_rows
from verl.trainer.ppo.rollout_batch import deal_by_length


def updates_per_batch(train_batch_size: int, mini_batch_size: int | None, epochs: int) -> int:
    """How many optimizer steps one rollout is used for; sizes count prompts, null is the whole batch."""
    return epochs * -(-train_batch_size // (mini_batch_size or train_batch_size))


def mini_batches(
    batch: DataProto,
    prompts: int | None,
    epochs: int,
    ranks: int,
    shuffle: bool = False,
    seed: tuple[int, ...] = (),
) -> Iterator[DataProto]:
    """``epochs`` passes over parts of ``prompts`` groups (null: the whole batch), each dealt over ``ranks``.

    Which groups meet depends on their uids alone, never on lengths or ranks. ``shuffle`` deals the groups
    anew in each pass, in an order fixed by ``seed`` and the number of the pass. Parts without a trained
    token are left out: there is nothing to learn from them.
    """
    assert batch.batch is not None
    lengths = batch.batch["attention_mask"].sum(1).tolist()
    groups = group_rows(batch.non_tensor_batch["uid"])
    groups.sort(key=lambda rows: batch.non_tensor_batch["uid"][rows[0]])
    size = prompts or len(groups)
    for epoch in range(epochs):
        order = np.random.default_rng([*seed, epoch]).permutation(len(groups)) if shuffle else range(len(groups))
        shuffled = [groups[i] for i in order]
        for start in range(0, len(groups), size):
            rows = [row for group in shuffled[start : start + size] for row in group]
            part = batch.select_idxs([rows[i] for i in deal_by_length([lengths[row] for row in rows], ranks)])
            assert part.batch is not None
            if part.batch["response_mask"].any():
                yield part
