from __future__ import annotations

from typing import Any

import pytest

from verl.utils.dataset.ground_truth import ground_truth


@pytest.mark.parametrize(
    ("row", "truth"),
    [
        ({"reward_model": {"ground_truth": "a"}, "golden_answers": ["b"]}, "a"),
        ({"reward_model": {"ground_truth": None}, "golden_answers": ["b"]}, ["b"]),
        ({"reward_model": None, "golden_answers": ["b"]}, ["b"]),
        ({"reward_model": {"ground_truth": 0}}, 0),
        ({"golden_answers": ["b"]}, ["b"]),
        ({"reward_model": {"style": "rule"}}, None),
        ({}, None),
    ],
)
def test_nulls_of_files_that_mix_both_kinds_of_row_fall_back_to_golden_answers(row: dict[str, Any], truth: Any) -> None:
    assert ground_truth(row) == truth


def test_a_reward_model_that_is_no_mapping_is_refused_in_words() -> None:
    with pytest.raises(ValueError, match="'reward_model' is 'rule', it must be a mapping"):
        ground_truth({"reward_model": "rule", "golden_answers": ["a"]})
