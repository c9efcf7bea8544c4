"""The updates of one step: whole groups at a time."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from verl.protocol import DataProto


def updates_per_batch(train_batch_size: int, mini_batch_size: int | None, epochs: int) -> int:
    """How many optimizer steps one rollout is used for; sizes count prompts, null is the whole batch."""
    return epochs * -(-train_batch_size // (mini_batch_size or train_batch_size))


def mini_batches(
    batch: DataProto, prompts: int | None, epochs: int, shuffle: bool = False, seed: tuple[int, ...] = ()
) -> Iterator[DataProto]:
    """``epochs`` passes over parts of ``prompts`` groups (null: the whole batch).

    ``shuffle`` deals the groups anew in each pass, in an order fixed by ``seed`` and the number of the
    pass. Parts without a trained token are left out: there is nothing to learn from them.
    """
    uids = batch.non_tensor_batch["uid"]
    names = list(dict.fromkeys(uids.tolist()))
    size = prompts or len(names)
    for epoch in range(epochs):
        order = np.random.default_rng([*seed, epoch]).permutation(len(names)) if shuffle else range(len(names))
        shuffled = [names[i] for i in order]
        for start in range(0, len(names), size):
            part = _rows_of(batch, set(shuffled[start : start + size]), len(names))
            assert part.batch is not None
            if part.batch["response_mask"].any():
                yield part


def _rows_of(batch: DataProto, chosen: set[str], groups: int) -> DataProto:
    if len(chosen) == groups:
        return batch
    return batch.select_idxs([row for row, uid in enumerate(batch.non_tensor_batch["uid"]) if uid in chosen])
