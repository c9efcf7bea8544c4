"""Rows as the engine sees them: ragged, without padding.

Padding exists only on the other side of ``rows_from_batch`` and ``pad_scores``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """One trajectory of the batch.

    ``input_ids`` (length,) int64 is prompt and response; ``response_mask`` (response_length,) bool
    marks the trained tokens; ``fields`` holds what the loss reads, each (response_length,) float32.
    """

    input_ids: torch.Tensor
    response_mask: torch.Tensor
    fields: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.prompt_length < 1:
            raise ValueError("a row needs at least one prompt token: the first response token is predicted from it")
        assert all(value.shape == self.response_mask.shape for value in self.fields.values())

    @property
    def length(self) -> int:
        return self.input_ids.numel()

    @property
    def response_length(self) -> int:
        return self.response_mask.numel()

    @property
    def prompt_length(self) -> int:
        return self.length - self.response_length

    @property
    def trained_tokens(self) -> int:
        return int(self.response_mask.sum())


def rows_from_batch(batch: Mapping[str, torch.Tensor], fields: Sequence[str] = ()) -> list[Row]:
    """The rows of a padded batch.

    Args:
        batch: ``prompts`` (B, P) int64 left-padded, ``responses`` (B, R) int64 right-padded,
            ``attention_mask`` (B, P + R) and ``response_mask`` (B, R), which is 1 on trained tokens.
            Lengths come from ``attention_mask``, never from token ids.
        fields: further keys to carry along, each (B, R).

    Raises ValueError for a key that is missing and a prompt that is empty.
    """
    missing = [key for key in ("prompts", "responses", "attention_mask", "response_mask", *fields) if key not in batch]
    if missing:
        raise ValueError(f"the batch lacks {', '.join(missing)}")
    width = batch["prompts"].shape[1]
    mask = batch["attention_mask"]
    prompt_lengths, response_lengths = mask[:, :width].sum(1).tolist(), mask[:, width:].sum(1).tolist()
    return [
        Row(
            input_ids=torch.cat([batch["prompts"][i, width - p :], batch["responses"][i, :r]]).long(),
            response_mask=batch["response_mask"][i, :r].bool(),
            fields={key: batch[key][i, :r].float() for key in fields},
        )
        for i, (p, r) in enumerate(zip(prompt_lengths, response_lengths, strict=True))
    ]


def pad_scores(values: Sequence[torch.Tensor], response_width: int) -> torch.Tensor:
    """Per-row values as (B, response_width), 0 where there is no token."""
    padded = torch.zeros(len(values), response_width)
    for target, value in zip(padded, values, strict=True):
        target[: value.numel()] = value
    return padded
