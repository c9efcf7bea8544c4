from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl.workers.engine.packing import micro_batch_indices, pack, split_by_tokens
from verl.workers.engine.rows import Row, pad_scores, rows_from_batch

CPU = torch.device("cpu")


def row(ids: list[int], mask: list[int], **fields: list[float]) -> Row:
    return Row(torch.tensor(ids), torch.tensor(mask).bool(), {k: torch.tensor(v) for k, v in fields.items()})


def test_pack_by_value() -> None:
    batch = pack([row([5, 6, 7], [1, 0], x=[0.5, 0.25]), row([8, 9, 1, 2, 3], [1, 0, 1], x=[1.0, 2.0, 3.0])], CPU)
    assert batch.input_ids.tolist() == [5, 6, 7, 8, 9, 1, 2, 3]
    assert batch.position_ids.tolist() == [0, 1, 2, 0, 1, 2, 3, 4]
    assert (batch.cu_seqlens.tolist(), batch.cu_seqlens.dtype, batch.max_seqlen) == ([0, 3, 8], torch.int32, 5)
    assert batch.targets.tolist() == [6, 1, 3]
    assert batch.predictors.tolist() == [0, 4, 6]
    assert batch.response_mask.tolist() == [[True, False, False], [True, False, True]]
    assert batch.fields["x"].tolist() == [[0.5, 0.25, 0.0], [1.0, 2.0, 3.0]]


def test_unpack_puts_each_trained_token_in_its_place_and_carries_gradient() -> None:
    batch = pack([row([5, 6, 7], [0, 1]), row([8, 9, 1, 2], [1, 0, 1])], CPU)
    values = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    unpacked = batch.unpack(values)
    assert unpacked.tolist() == [[0, 1, 0], [2, 0, 3]]
    (unpacked * torch.arange(6.0).view(2, 3)).sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [1, 3, 5]


@given(st.lists(st.integers(1, 50), max_size=40), st.integers(1, 120))
def test_parts_hold_every_row_once_within_the_budget(lengths: list[int], budget: int) -> None:
    parts = list(split_by_tokens(lengths, budget))
    assert [i for part in parts for i in part] == list(range(len(lengths)))
    assert all(len(part) == 1 or sum(lengths[i] for i in part) <= budget for part in parts)


def test_micro_batches_do_not_depend_on_the_order_of_rows(make_rows: Any) -> None:
    rows = make_rows(20)
    reordered = rows[7:] + rows[:7]

    def contents(order: list[Row]) -> list[list[list[int]]]:
        return [[order[i].input_ids.tolist() for i in part] for part in micro_batch_indices(order, 60)]

    assert contents(rows) == contents(reordered)


def test_rows_without_trained_tokens_are_left_out(make_rows: Any) -> None:
    rows = make_rows(3)
    rows[1] = replace(rows[1], response_mask=torch.zeros_like(rows[1].response_mask))
    assert sorted(i for part in micro_batch_indices(rows, 10) for i in part) == [0, 2]


def padded() -> dict[str, torch.Tensor]:
    return {
        "prompts": torch.tensor([[0, 0, 4], [0, 6, 0]]),
        "responses": torch.tensor([[7, 0, 0], [8, 9, 0]]),
        "attention_mask": torch.tensor([[0, 0, 1, 1, 1, 0], [0, 1, 1, 1, 1, 1]]),
        "response_mask": torch.tensor([[1, 1, 0], [1, 0, 1]]),
        "advantages": torch.tensor([[1.0, 2.0, 9.0], [3.0, 4.0, 5.0]], dtype=torch.float64),
    }


def test_lengths_come_from_the_mask_where_pad_equals_end_of_sequence() -> None:
    rows = rows_from_batch(padded(), ["advantages"])
    assert [r.input_ids.tolist() for r in rows] == [[4, 7, 0], [6, 0, 8, 9, 0]]
    assert [r.response_mask.tolist() for r in rows] == [[True, True], [True, False, True]]
    assert [r.fields["advantages"].tolist() for r in rows] == [[1, 2], [3, 4, 5]]
    assert rows[0].fields["advantages"].dtype == torch.float32
    assert [(r.prompt_length, r.response_length, r.trained_tokens) for r in rows] == [(1, 2, 2), (2, 3, 2)]


def test_a_missing_key_and_an_empty_prompt_are_named() -> None:
    with pytest.raises(ValueError, match="lacks old_log_probs"):
        rows_from_batch(padded(), ["old_log_probs"])
    batch = padded()
    batch["attention_mask"][0, 2] = 0
    with pytest.raises(ValueError, match="at least one prompt token"):
        rows_from_batch(batch)


def test_scores_go_back_to_the_padded_layout() -> None:
    assert pad_scores([torch.tensor([1.0]), torch.tensor([2.0, 3.0])], 3).tolist() == [[1, 0, 0], [2, 3, 0]]
    assert pad_scores([], 3).shape == (0, 3)
