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


@pytest.mark.parametrize("truth", [None, "many", [], True, ["7", "x"], {"answer": "7"}])
def test_a_ground_truth_without_a_number_is_refused(truth: Any) -> None:
    with pytest.raises(ValueError, match="ground_truth"):
        gsm8k.check_ground_truth(truth)


def test_an_unknown_data_source_names_the_known_ones_and_the_way_out() -> None:
    with pytest.raises(ValueError, match=r"'mine'.*openai/gsm8k.*custom_reward_function.path"):
        rule_for("mine")
