from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from verl.utils.reward_score import default_compute_score, gsm8k, rule_for


@pytest.mark.parametrize(
    ("response", "truth", "score"),
    [
        ("so #### 72", "72", 1),
        ("so #### 72.0", "72", 1),
        ("so ####72.", 72, 1),
        ("#### $1,234", "1234", 1),
        ("#### £-5.50 each", "-5.5", 1),
        ("#### 3 then #### 4", "4", 1),
        ("#### 3 then #### 4", "3", 0),
        ("the answer is 72", "72", 0),
        ("#### seventy-two", "72", 0),
        ("#### ", "0", 0),
        ("", "0", 0),
        ("#### 7", ["6", "7"], 1),
        ("#### 7", {"target": ["6", "7"]}, 1),
        ("#### 7", {"target": "7"}, 1),
        ("#### 7", np.array(["6", "7"]), 1),
        ("#### 18", "She makes 9 * 2 = 18.\n#### 18", 1),
        ("#### 0.1", 0.1, 1),
    ],
)
def test_the_number_behind_the_last_mark_is_compared_as_a_number(response: str, truth: Any, score: float) -> None:
    assert default_compute_score("openai/gsm8k", response, truth) == score


@pytest.mark.parametrize(
    ("response", "truth", "score"),
    [
        ("#### 10000000000000000", 1e16, 1),
        ("#### 1", 1e16, 0),
        ("#### 1e16", 10**16, 1),
        ("#### 1e3", "1000", 1),
        ("#### 1e3", "1", 0),
        ("#### 1.5E-2", 0.015, 1),
        ("#### 1/2", "1", 0),
        ("#### 1/2", "0.5", 1),
        ("#### 1/2", "1/2", 1),
        ("#### -1 1/2", "-1.5", 1),
        ("#### 1 1/2", "1", 0),
        ("#### 1/0", "1", 0),
        ("#### 6 / 4", "1.5", 1),
        ("#### 18 apples", "18", 1),
        ("#### -5", "-5", 1),
        ("#### -5", "5", 0),
        ("#### -$1,234.50", "-1234.5", 1),
        ("#### $1,234.50", 1234.5, 1),
        ("#### 50%", "50", 1),
        ("#### 5 eggs", "5", 1),
        ("#### 5e", "5", 1),
        ("#### 12345678901234567890123456789012345", "12345678901234567890123456789012345", 1),
        ("#### 12345678901234567890123456789012346", "12345678901234567890123456789012345", 0),
    ],
)
def test_only_the_whole_number_counts_not_its_first_digits(response: str, truth: Any, score: float) -> None:
    assert default_compute_score("gsm8k", response, truth) == score


@pytest.mark.parametrize("truth", [float("inf"), float("nan"), None, "many", [], True, ["7", "x"], {"answer": "7"}])
def test_a_ground_truth_without_a_number_is_refused(truth: Any) -> None:
    with pytest.raises(ValueError, match="ground_truth"):
        gsm8k.check_ground_truth(truth)


def test_an_unknown_data_source_names_the_known_ones_and_the_way_out() -> None:
    with pytest.raises(ValueError, match=r"'mine'.*openai/gsm8k.*custom_reward_function.path"):
        rule_for("mine")
