from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.verl.trainer.ppo import plain
from verl.trainer.ppo.policy_tokens import PolicyTokens, discounted_sums

MASKS = st.integers(0, 6).flatmap(
    lambda width: st.lists(st.lists(st.booleans(), min_size=width, max_size=width), min_size=1, max_size=5)
)


@given(MASKS)
def test_tokens_move_together_in_order_and_back(rows: list[list[bool]]) -> None:
    mask = torch.tensor(rows, dtype=torch.bool).reshape(len(rows), -1)
    values = torch.arange(1.0, mask.numel() + 1).reshape(mask.shape)
    tokens = PolicyTokens.of(mask.long())
    compact = tokens.compact(values)
    expected = plain.policy_rows(values, mask)
    assert compact.shape == (len(rows), max(map(len, expected)))
    assert compact.dtype == torch.float64
    assert compact.tolist() == [row + [0.0] * (compact.shape[1] - len(row)) for row in expected]
    assert torch.equal(tokens.expand(compact), torch.where(mask, values, 0))


def test_whitening_by_value() -> None:
    tokens = PolicyTokens.of(torch.tensor([[1, 1, 0], [0, 0, 1]]))
    whitened = tokens.whiten(torch.tensor([[1.0, 2.0], [3.0, 99.0]], dtype=torch.float64))
    # Mean 2 and variance 1 of the three tokens; the place behind the second row's end is none of them.
    assert whitened.flatten().tolist() == pytest.approx([-1, 0, 1, 0], abs=1e-7)


def test_sums_by_value() -> None:
    sums = discounted_sums(torch.tensor([[1.0, 0.0, 4.0]], dtype=torch.float64), 0.5)
    assert sums.tolist() == [[2.0, 2.0, 4.0]]
