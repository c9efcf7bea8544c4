"""Stop strings in text, with a tokenizer that merges across their borders."""

from __future__ import annotations

import random

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from verl.workers.rollout.stop import StopFinder

VOCAB = 320


@pytest.fixture
def finder(tokenizer: PreTrainedTokenizerFast) -> StopFinder:
    return StopFinder(tokenizer, VOCAB)


def stopped_at(finder: StopFinder, ids: list[int], strings: tuple[str, ...]) -> tuple[int, str] | None:
    """Number of tokens generated and the string found, when ids are generated one by one."""
    stop = finder.prepare(strings)
    for count in range(1, len(ids) + 1):
        found = finder.find(ids[:count], stop) if stop.watched[ids[count - 1]] else None
        if found is not None:
            return count, found
    return None


@pytest.mark.parametrize(
    ("text", "strings", "found"),
    [
        ("a query</search>.", ("</search>", "</answer>"), "</search>"),
        ("x</search>\ny", ("</search>",), "</search>"),
        ("x<</answer>", ("</search>", "</answer>"), "</answer>"),
        ("ab", ("b",), "b"),
        ("ab", ("ab", "b"), "ab"),
        ("no tag < / search >", ("</search>",), None),
        ("caf\u00e9!", ("\u00e9",), "\u00e9"),
        ("\u65e5\u672c\u3002x", ("\u672c\u3002",), "\u672c\u3002"),
        ("one\n\ntwo", ("\n\n",), "\n\n"),
        ("a b", (" ",), " "),
    ],
)
def test_the_token_that_completes_a_string_ends_the_generation(
    finder: StopFinder, tokenizer: PreTrainedTokenizerFast, text: str, strings: tuple[str, ...], found: str | None
) -> None:
    ids = tokenizer(text)["input_ids"]
    end = stopped_at(finder, ids, strings)
    if found is None:
        assert end is None
        return
    assert end is not None
    count, string = end
    assert string == found
    assert found in tokenizer.decode(ids[:count])
    assert found not in tokenizer.decode(ids[: count - 1])


def test_merges_do_cross_the_tags_borders(tokenizer: PreTrainedTokenizerFast) -> None:
    """Otherwise the table above would test nothing."""
    pieces = tokenizer.convert_ids_to_tokens(tokenizer("x</search>\n")["input_ids"])
    assert "</" in pieces
    assert "h>\u010a" in pieces


def test_any_ids_end_where_the_decoded_text_first_holds_a_string(
    finder: StopFinder, tokenizer: PreTrainedTokenizerFast
) -> None:
    rng = random.Random(0)
    texts = ["</s>", "a>", "\u00e9", "\u20ac\u20ac", "<", "s>b", "\n", "x", "ab", ".", "\U0001f600"]
    strings = ("</s>", "a>b", "\u20ac\u20ac", "\U0001f600")
    for _ in range(300):
        ids = tokenizer("".join(rng.choice(texts) for _ in range(12)))["input_ids"]
        ids.insert(rng.randrange(len(ids)), rng.randrange(256))
        first = next((n for n in range(1, len(ids) + 1) if any(s in tokenizer.decode(ids[:n]) for s in strings)), None)
        end = stopped_at(finder, ids, strings)
        assert (end[0] if end else None) == first


def test_the_string_that_ends_first_wins_then_the_longest(
    finder: StopFinder, tokenizer: PreTrainedTokenizerFast
) -> None:
    (token,) = tokenizer("h>\n")["input_ids"]
    assert stopped_at(finder, [token], ("\n", "h>")) == (1, "h>")
    assert stopped_at(finder, [token], (">", "h>")) == (1, "h>")


def test_special_tokens_can_be_stop_strings(finder: StopFinder, tokenizer: PreTrainedTokenizerFast) -> None:
    assert stopped_at(finder, [65, tokenizer.eos_token_id], ("<|end|>",)) == (2, "<|end|>")


def test_only_tokens_that_can_complete_a_string_are_watched(
    finder: StopFinder, tokenizer: PreTrainedTokenizerFast
) -> None:
    watched = finder.prepare(("</search>",)).watched
    assert len(watched) == VOCAB
    shown = {tokenizer.decode([token]) for token in range(len(tokenizer)) if watched[token]}
    assert shown == {">", ">.", "h>", "h>\n", "r>", "<|end|>", "<|pad|>"}
    assert not any(finder.prepare(()).watched)


def test_a_stop_string_of_spaces_does_not_watch_everything(
    finder: StopFinder, tokenizer: PreTrainedTokenizerFast
) -> None:
    watched = finder.prepare(("\n\n", "  ")).watched
    assert {tokenizer.decode([token]) for token in range(VOCAB) if watched[token]} == {" ", "\n", "h>\n"}


def test_spaces_that_a_decoder_drops_at_the_start_of_a_text_are_seen() -> None:
    core = Tokenizer(models.BPE(vocab={"<unk>": 0, "\u2581": 1, "a": 2, "\u2581a": 3}, merges=[("\u2581", "a")]))
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    core.decoder = decoders.Metaspace(prepend_scheme="first")
    made = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>")
    assert made.decode([3]) == "a"
    assert stopped_at(StopFinder(made, 4), [2, 2, 3, 2], (" a",)) == (3, " a")
    assert list(StopFinder(made, 4).prepare((" ",)).watched) == [0, 1, 0, 1]


def test_empty_stop_strings_are_refused(finder: StopFinder) -> None:
    with pytest.raises(ValueError, match="empty"):
        finder.prepare(("x", ""))
