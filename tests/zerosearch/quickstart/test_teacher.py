"""The cold start's examples: nothing held out, real formats, and an example of every conduct."""

from __future__ import annotations

import re
from itertools import pairwise
from random import Random

import pytest

from verl.workers.rollout.engine import StopReason
from zerosearch.actions import ActionKind, parse_action
from zerosearch.prompts import CORRECTIVE_MESSAGE
from zerosearch.quickstart.quality import LIMITS
from zerosearch.quickstart.recipes import policy_sample
from zerosearch.quickstart.relations import ENTITY_TYPES
from zerosearch.quickstart.teacher import GOOD, MAX_SEARCHES, MIXED, Conduct, Example, cold_start_names, draw_example
from zerosearch.quickstart.tokenizer import decode, encode, train_tokenizer
from zerosearch.quickstart.world import World, build_world
from zerosearch.text import normalize_text


@pytest.fixture(scope="module")
def world() -> World:
    return build_world(1)


def examples(world: World, conduct: Conduct, count: int) -> list[Example]:
    rng, names = Random(0), cold_start_names(world)
    return [draw_example(names, conduct, rng) for _ in range(count)]


def queries(example: Example) -> list[str]:
    found = [re.search(r"<search>(.*)</search>", s.text) for s in example.segments if s.kind == "policy"]
    return [normalize_text(match[1]) for match in found if match]


@pytest.mark.parametrize("conduct", [GOOD, MIXED])
def test_no_example_mentions_a_held_out_entity(world: World, conduct: Conduct) -> None:
    held_out = [name for t in ENTITY_TYPES for name in world.entities[t, "held_out"]]
    text = "\n".join(e.question.text + "".join(s.text for s in e.segments) for e in examples(world, conduct, 3000))
    assert [name for name in held_out if name in text] == []


def test_good_conduct_never_asks_twice_and_answers_right_unless_the_searches_ran_out(world: World) -> None:
    for example in examples(world, GOOD, 500):
        asked = queries(example)
        assert len(example.question.facts) <= len(asked) <= MAX_SEARCHES
        assert len(set(asked)) == len(asked)
        right = f"<answer> {example.question.answer} </answer>" in example.segments[-1].text
        assert right or len(asked) == MAX_SEARCHES


def test_a_repeated_query_meets_the_same_document(world: World) -> None:
    repeats = 0
    for example in examples(world, MIXED, 3000):
        segments = example.segments
        seen: dict[str, str] = {}
        for before, after in pairwise(segments):
            if before.kind == "policy" and after.kind == "observation":
                query = before.text.partition("<search>")[2]
                repeats += query in seen
                assert seen.setdefault(query, after.text) == after.text
    assert repeats > 20


def test_segments_are_what_the_real_parser_takes_them_for(world: World) -> None:
    kinds = set()
    for example in examples(world, MIXED, 500):
        *turns, last = [segment for segment in example.segments if segment.kind != "observation"]
        for segment in turns:
            stop = StopReason.STOP_STRING if segment.kind == "policy" else StopReason.END_OF_SEQUENCE
            kind = parse_action(segment.text, stop).kind
            assert kind is (ActionKind.SEARCH if segment.kind == "policy" else ActionKind.INVALID)
            kinds.add(kind)
        assert parse_action(last.text, StopReason.STOP_STRING).kind is ActionKind.ANSWER
    assert kinds == {ActionKind.SEARCH, ActionKind.INVALID}


def test_samples_are_separately_tokenized_segments_with_the_right_tokens_trained(world: World) -> None:
    tokenizer = train_tokenizer(world)
    for example in examples(world, MIXED, 200):
        sample = policy_sample(tokenizer, example, read_weight=0.0)
        trained = decode(tokenizer, [i for i, w in zip(sample.ids, sample.weights, strict=True) if w > 0])
        assert trained == "".join(s.text for s in example.segments if s.kind != "observation")
        ends = sum(i == tokenizer.eos_token_id and w > 0 for i, w in zip(sample.ids, sample.weights, strict=True))
        assert ends == sum(segment.kind == "malformed" for segment in example.segments)
        tail = encode(tokenizer, example.segments[-1].text)
        assert sample.ids[-len(tail) :] == tail


def test_examples_fit_the_limits_of_the_rollout(world: World) -> None:
    tokenizer = train_tokenizer(world)
    assert len(encode(tokenizer, CORRECTIVE_MESSAGE)) <= LIMITS.max_observation_length
    for example in examples(world, GOOD, 300) + examples(world, MIXED, 300):
        lengths = {kind: 0 for kind in ("policy", "malformed", "observation")}
        for segment in example.segments:
            lengths[segment.kind] = max(lengths[segment.kind], len(encode(tokenizer, segment.text)))
        assert max(lengths["policy"], lengths["malformed"] + 1) <= LIMITS.max_turn_length
        assert lengths["observation"] <= LIMITS.max_observation_length
        assert sum(len(encode(tokenizer, s.text)) + 1 for s in example.segments) <= LIMITS.max_response_length
