"""Rows into packed micro-batches.

Invariant: the micro-batches are a function of the set of rows, not of their order, so the same
trajectories give the same update bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from verl.workers.engine.rows import Row


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """Packed rows for the model, and what the loss reads of them, padded to the longest response.

    Shapes, with n rows, m trained tokens and responses of at most r tokens: ``input_ids`` and
    ``position_ids`` (total_nnz,), ``cu_seqlens`` (n + 1,) int32, ``predictors`` (m,) positions whose
    hidden states predict ``targets`` (m,), row by row; ``response_mask`` (n, r) bool with m ones;
    ``fields`` each (n, r) float32.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    cu_seqlens: torch.Tensor
    max_seqlen: int
    predictors: torch.Tensor
    targets: torch.Tensor
    response_mask: torch.Tensor
    fields: dict[str, torch.Tensor]

    def unpack(self, values: torch.Tensor) -> torch.Tensor:
        """(m,) values of the trained tokens as (n, r), 0 elsewhere; differentiable."""
        return values.new_zeros(self.response_mask.shape).masked_scatter(self.response_mask, values)


def row_order(rows: Sequence[Row]) -> list[int]:
    """Indices of ``rows`` by length, equal lengths by content."""
    return sorted(range(len(rows)), key=lambda i: (rows[i].length, rows[i].input_ids.numpy().tobytes()))


def split_by_tokens(lengths: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
    """Consecutive indices whose lengths add up to at most ``max_tokens``; a longer row stands alone."""
    part: list[int] = []
    total = 0
    for index, length in enumerate(lengths):
        if part and total + length > max_tokens:
            yield part
            part, total = [], 0
        part.append(index)
        total += length
    if part:
        yield part


def micro_batch_indices(rows: Sequence[Row], max_tokens: int) -> list[list[int]]:
    """Which rows form each micro-batch. Rows without trained tokens are left out: they contribute nothing."""
    order = [i for i in row_order(rows) if rows[i].trained_tokens]
    return [[order[k] for k in part] for part in split_by_tokens([rows[i].length for i in order], max_tokens)]


def pack(rows: Sequence[Row], device: torch.device) -> MicroBatch:
    """``rows`` end to end. All rows carry the same fields."""
    lengths = torch.tensor([row.length for row in rows])
    starts = lengths.cumsum(0) - lengths
    width = max(row.response_length for row in rows)
    response_starts = starts + torch.tensor([row.prompt_length for row in rows])
    trained = torch.cat(
        [start + row.response_mask.nonzero()[:, 0] for start, row in zip(response_starts, rows, strict=True)]
    )
    input_ids = torch.cat([row.input_ids for row in rows])
    return MicroBatch(
        input_ids=input_ids.to(device),
        position_ids=torch.cat([torch.arange(row.length) for row in rows]).to(device),
        cu_seqlens=torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(device, torch.int32),
        max_seqlen=int(lengths.max()),
        predictors=(trained - 1).to(device),
        targets=input_ids[trained].to(device),
        response_mask=_pad([row.response_mask for row in rows], width).to(device),
        fields={key: _pad([row.fields[key] for row in rows], width).to(device) for key in rows[0].fields},
    )


def _pad(values: Sequence[torch.Tensor], width: int) -> torch.Tensor:
    return torch.stack([torch.nn.functional.pad(value, (0, width - value.numel())) for value in values])


def dummy_row() -> Row:
    """A row that only keeps ranks in step: its scores are multiplied by 0."""
    return Row(input_ids=torch.zeros(2, dtype=torch.int64), response_mask=torch.ones(1, dtype=torch.bool))
