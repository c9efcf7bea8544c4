import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl.agent_loop.base import RewardInput
from zerosearch.reward import Scores, SearchReward, contains_gold, golden_answers, question_of, score_answer

WORDS = st.lists(st.sampled_from(["a", "the", "Paris", "paris", "new", "York", "u.s.", "!", "42", "ﬁn"]), max_size=6)
TEXT = st.one_of(st.text(max_size=30), WORDS.map(" ".join))


@pytest.mark.parametrize(
    ("answer", "golds", "f1", "em", "cover_em"),
    [
        ("Paris", ["Paris"], 1, 1, 1),
        ("the PARIS!", ["paris"], 1, 1, 1),
        ("in Paris", ["Paris"], 2 / 3, 0, 1),
        ("Paris France", ["London", "Paris, France"], 1, 1, 1),
        ("France Paris", ["Paris France"], 1, 0, 0),
        ("new new york", ["new york"], 0.8, 0, 1),
        ("york", ["new york"], 2 / 3, 0, 0),
        ("category", ["cat"], 0, 0, 0),
        ("Ｐａｒｉｓ", ["Paris"], 1, 1, 1),
        ("Cafe\u0301", ["Café"], 1, 1, 1),
        ("The", ["The"], 1, 1, 1),
        ("", ["Paris"], 0, 0, 0),
        (" \n", ["Paris"], 0, 0, 0),
        ("?!", ["!?"], 0, 0, 0),
        (None, ["Paris"], 0, 0, 0),
        ("Paris", [], 0, 0, 0),
        ("1998", ["1998"], 1, 1, 1),
        ("u.s.", ["US"], 1, 1, 1),
    ],
)
def test_scores(answer: str | None, golds: list[str], f1: float, em: float, cover_em: float) -> None:
    scores = score_answer(answer, golds)
    assert (scores.f1, scores.em, scores.cover_em) == pytest.approx((f1, em, cover_em))


@given(answer=TEXT, golds=st.lists(TEXT, max_size=3))
def test_f1_is_never_below_exact_match(answer: str, golds: list[str]) -> None:
    scores = score_answer(answer, golds)
    assert scores.f1 >= scores.em
    assert scores.cover_em >= scores.em
    assert 0 <= scores.f1 <= 1


@given(text=TEXT)
def test_a_text_equals_itself_unless_nothing_is_left_of_it(text: str) -> None:
    assert score_answer(text, [text]) in (Scores(1, 1, 1), Scores(0, 0, 0))


def test_exact_match_is_not_substring_match() -> None:
    assert score_answer("the cat sat", ["cat"]).em == 0
    assert score_answer("concatenate", ["cat"]).cover_em == 0


def test_contains_gold_needs_whole_words_in_a_row() -> None:
    assert contains_gold("Doc: it was New York, in 1998.", ["Boston", "new york"])
    assert not contains_gold("York is new", ["new york"])
    assert not contains_gold("Newark", ["new"])
    assert not contains_gold("anything", ["?"])


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"golden_answers": ["a b", "c"]}, ("a b", "c")),
        ({"golden_answers": np.array(["x", "y"], dtype=object)}, ("x", "y")),
        ({"golden_answers": "Paris"}, ("Paris",)),
        ({"golden_answers": [" Paris ", "Paris", "!"]}, ("Paris",)),
        ({"golden_answers": ["The"]}, ("The",)),
        ({"golden_answers": 7}, ("7",)),
        ({"golden_answers": np.int64(7)}, ("7",)),
        ({"golden_answers": np.array([1998.0, 2.5])}, ("1998", "2.5")),
        ({"golden_answers": [True]}, ("yes", "true")),
        ({"golden_answers": [np.bool_(False)]}, ("no", "false")),
        ({"reward_model": {"ground_truth": "x"}}, ("x",)),
        ({"reward_model": {"ground_truth": ["x", "y"]}}, ("x", "y")),
        ({"reward_model": {"ground_truth": {"target": np.array(["x"])}}}, ("x",)),
        ({"reward_model": {"ground_truth": {"target": "x"}}, "golden_answers": None}, ("x",)),
        ({"golden_answers": ["first"], "reward_model": {"ground_truth": "second"}}, ("first",)),
    ],
)
def test_golden_answers(row: dict[str, Any], expected: tuple[str, ...]) -> None:
    assert golden_answers(row) == expected


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({}, "needs gold answers"),
        ({"golden_answers": []}, "no usable gold answer"),
        ({"golden_answers": ["", "?"]}, "no usable gold answer"),
        ({"golden_answers": [None]}, "no text, number or boolean"),
        ({"golden_answers": [math.nan]}, "no text, number or boolean"),
        ({"golden_answers": [{"a": 1}]}, "no text, number or boolean"),
        ({"reward_model": {"ground_truth": {"answer": "x"}}}, "without 'target'"),
        ({"reward_model": {"style": "rule"}}, "needs gold answers"),
    ],
)
def test_unusable_gold_answers_say_what_is_wrong(row: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        golden_answers(row)


def test_question_of() -> None:
    assert question_of({"question": " who? "}) == "who?"
    assert question_of({"extra_info": {"question": "who?"}}) == "who?"
    for row in ({}, {"question": " "}, {"question": 3}, {"extra_info": None}):
        with pytest.raises(ValueError, match=r"extra_info\.question"):
            question_of(row)


@pytest.mark.parametrize(("metric", "expected"), [("f1", 2 / 3), ("em", 0.0), ("cover_em", 1.0)])
async def test_reward_is_the_chosen_score(metric: Any, expected: float) -> None:
    given_ = RewardInput("nq", "text", "in Paris", {"golden_answers": ["Paris"]})
    scores = await SearchReward(metric)(given_)
    assert scores["score"] == pytest.approx(expected)
    assert set(scores) == {"score", "f1", "em", "cover_em"}


async def test_no_answer_scores_zero_and_raises_nothing() -> None:
    row = {"golden_answers": ["Paris"]}
    given_ = RewardInput("nq", "I think it is <answer>Paris", None, row)
    assert (await SearchReward("f1")(given_))["score"] == 0


def test_a_reward_model_that_is_no_mapping_is_refused_in_words() -> None:
    with pytest.raises(ValueError, match="'reward_model' is 'rule', it must be a mapping"):
        golden_answers({"reward_model": "rule"})
