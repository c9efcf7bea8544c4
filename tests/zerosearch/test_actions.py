import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl.workers.rollout.engine import StopReason
from zerosearch.actions import Action, ActionKind, InvalidKind, opens_thinking, parse_action

STOP, EOS, LENGTH = StopReason.STOP_STRING, StopReason.END_OF_SEQUENCE, StopReason.LENGTH
SEARCH, ANSWER, INVALID, UNFINISHED = ActionKind
BLANK, NONE, CAPPED = InvalidKind


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("<search>capital of France</search>", STOP, Action(SEARCH, "capital of France")),
        ("<think>hm</think>\n<search> a \n b </search>", STOP, Action(SEARCH, "a b")),
        ("<answer> Paris\n</answer>", STOP, Action(ANSWER, "Paris")),
        ("<answer>  </answer>", STOP, Action(ANSWER, "")),
        ("<answer></answer>", STOP, Action(ANSWER, "")),
        ("<search></search>", STOP, Action(INVALID, invalid=BLANK)),
        ("<search> \n </search>", STOP, Action(INVALID, invalid=BLANK)),
        ("I do not know.", EOS, Action(INVALID, invalid=NONE)),
        ("", EOS, Action(INVALID, invalid=NONE)),
        ("a long thought", LENGTH, Action(INVALID, invalid=CAPPED)),
        ("<search>never closed", LENGTH, Action(INVALID, invalid=CAPPED)),
        ("<search>never closed", EOS, Action(INVALID, invalid=NONE)),
        ("<answer>never closed", EOS, Action(INVALID, invalid=NONE)),
        ("no opening tag</search>", STOP, Action(INVALID, invalid=NONE)),
        ("<search>q</answer>", STOP, Action(INVALID, invalid=NONE)),
        ("no opening tag</answer>", LENGTH, Action(INVALID, invalid=NONE)),
        ("<search>a<search>b</search>", STOP, Action(SEARCH, "b")),
        ("<search>a</search><search>b</search>", EOS, Action(SEARCH, "a")),
        ("<search>a</search><answer>b</answer>", EOS, Action(SEARCH, "a")),
        ("<answer>b</answer><search>a</search>", EOS, Action(ANSWER, "b")),
        ("<search>a <answer>b</answer>", STOP, Action(ANSWER, "b")),
        ("<answer>a <search>b</search>", STOP, Action(SEARCH, "b")),
        ("<search>a</search>>\n", STOP, Action(SEARCH, "a")),
        ("<search>a</search>", LENGTH, Action(SEARCH, "a")),
        ("<Search>a</Search>", EOS, Action(INVALID, invalid=NONE)),
        ("< search >a</ search >", EOS, Action(INVALID, invalid=NONE)),
        ("<search>a < b </search>", STOP, Action(SEARCH, "a < b")),
        ("<information>Doc 1: x</information><answer>x</answer>", STOP, Action(ANSWER, "x", forged_information=1)),
        ("<information><search>q</search>", STOP, Action(SEARCH, "q", forged_information=1)),
        ("<information>a<information>b", EOS, Action(INVALID, invalid=NONE, forged_information=2)),
        ("</information>", EOS, Action(INVALID, invalid=NONE)),
    ],
)
@pytest.mark.parametrize("mode", ["lenient", "strict"])
def test_outside_think_both_modes_agree(text: str, stop: StopReason, expected: Action, mode: str) -> None:
    assert parse_action(text, stop, mode=mode) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "stop", "thinking", "lenient", "strict"),
    [
        (
            "<think>I will <search>q</search>",
            STOP,
            False,
            Action(SEARCH, "q", thinking=True),
            Action(UNFINISHED, thinking=True),
        ),
        (
            "<think>I will <search>q</search> now</think><answer>a</answer>",
            STOP,
            False,
            Action(SEARCH, "q", thinking=True),
            Action(ANSWER, "a"),
        ),
        ("so <answer>a</answer>", STOP, True, Action(ANSWER, "a", thinking=True), Action(UNFINISHED, thinking=True)),
        ("so</think><answer>a</answer>", STOP, True, Action(ANSWER, "a"), Action(ANSWER, "a")),
        (
            "<think><search>q</think></search>",
            STOP,
            False,
            Action(SEARCH, "q</think>"),
            Action(INVALID, invalid=NONE),
        ),
        (
            "<think>x <answer>a</answer>",
            EOS,
            False,
            Action(ANSWER, "a", thinking=True),
            Action(INVALID, invalid=NONE, thinking=True),
        ),
        (
            "<think>x <answer>a</answer> and",
            LENGTH,
            False,
            Action(ANSWER, "a", thinking=True),
            Action(INVALID, invalid=CAPPED, thinking=True),
        ),
        (
            "<think>x</search>",
            STOP,
            False,
            Action(INVALID, invalid=NONE, thinking=True),
            Action(UNFINISHED, thinking=True),
        ),
        (
            "<think><information>x<search>q</search>",
            STOP,
            False,
            Action(SEARCH, "q", thinking=True, forged_information=1),
            Action(UNFINISHED, thinking=True, forged_information=1),
        ),
    ],
)
def test_inside_think(text: str, stop: StopReason, thinking: bool, lenient: Action, strict: Action) -> None:
    assert parse_action(text, stop, mode="lenient", thinking=thinking) == lenient
    assert parse_action(text, stop, mode="strict", thinking=thinking) == strict


@pytest.mark.parametrize(
    ("text", "thinking", "expected"),
    [("<think>a", False, True), ("a", True, True), ("a</think>", True, False), ("</think><think>", False, True)],
)
def test_the_think_state_at_the_end(text: str, thinking: bool, expected: bool) -> None:
    assert parse_action(text, EOS, thinking=thinking).thinking is expected


PIECES = st.lists(
    st.sampled_from(
        ["<think>", "</think>", "<search>", "</search>", "<answer>", "</answer>", "<information>", " q ", "x", "<", ">"]
    ),
    max_size=12,
).map("".join)


@given(text=PIECES, stop=st.sampled_from([STOP, EOS, LENGTH]), rest=PIECES)
def test_nothing_after_the_deciding_tag_matters(text: str, stop: StopReason, rest: str) -> None:
    action = parse_action(text, stop)
    if action.kind in (SEARCH, ANSWER) or action.invalid is BLANK:
        assert parse_action(text + rest, stop) == action


@given(text=PIECES, stop=st.sampled_from([STOP, EOS, LENGTH]), thinking=st.booleans())
def test_every_text_has_exactly_one_outcome(text: str, stop: StopReason, thinking: bool) -> None:
    for mode in ("lenient", "strict"):
        action = parse_action(text, stop, mode=mode, thinking=thinking)  # type: ignore[arg-type]
        assert (action.invalid is not None) == (action.kind is INVALID)
        assert action.kind is not SEARCH or action.text
        if mode == "lenient":
            assert action.kind is not UNFINISHED


def test_only_the_end_of_a_prompt_opens_thinking() -> None:
    assert opens_thinking("<|im_start|>assistant\n<think>\n")
    assert not opens_thinking("Think inside <think> and </think>.<|im_end|>\n<|im_start|>assistant\n")
