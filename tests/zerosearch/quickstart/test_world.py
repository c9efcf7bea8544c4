"""The closed world: pure functions of a seed, parts that never meet, documents that follow their rules."""

from __future__ import annotations

from random import Random

import pytest

from zerosearch.quickstart.dataset import test_questions as held_out_questions
from zerosearch.quickstart.dataset import train_questions
from zerosearch.quickstart.documents import corpus, noisy_document, useful_document
from zerosearch.quickstart.relations import CHAINS, ENTITY_TYPES, RELATIONS, EntityType, name_words
from zerosearch.quickstart.tokenizer import encode, train_tokenizer
from zerosearch.quickstart.world import PARTS, Part, World, build_world, draw_questions
from zerosearch.text import normalize_text


@pytest.fixture(scope="module")
def world() -> World:
    return build_world(1)


def entities_in(world: World, text: str) -> list[tuple[EntityType, str]]:
    return [(t, name) for t in ENTITY_TYPES for name in world.names(t) if f" {name}" in f" {text}"]


def test_a_seed_makes_one_world_and_another_seed_another(world: World) -> None:
    again = build_world(1)
    assert again == world
    assert held_out_questions(again) == held_out_questions(world)
    assert corpus(again) == corpus(world)
    assert build_world(2).table != world.table


def test_sizes(world: World) -> None:
    assert len(world.facts()) == 1300
    assert [len(world.entities[t, "held_out"]) for t in ENTITY_TYPES] == [75, 75, 25, 25]


def test_no_name_is_part_of_another(world: World) -> None:
    names = [name for t in ENTITY_TYPES for name in world.names(t)]
    assert len(set(names)) == 800
    assert not [(a, b) for a in names for b in names if a != b and a in b]


@pytest.mark.parametrize("part", PARTS)
def test_facts_stay_in_their_part(world: World, part: Part) -> None:
    facts = world.facts(part)
    for fact in facts:
        relation = RELATIONS[fact.relation]
        assert fact.subject in world.entities[relation.subject_type, part]
        assert fact.value in world.entities[relation.value_type, part]


def test_no_shortcut_past_the_bridge(world: World) -> None:
    """No fact about the subject has the answer of a two-hop question as its value."""
    for first, second in CHAINS:
        for part in PARTS:
            for subject in world.entities[RELATIONS[first].subject_type, part]:
                answer = world.value(second, world.value(first, subject))
                assert answer not in [value for (_, s), value in world.table.items() if s == subject]


@pytest.mark.parametrize("relation", RELATIONS.values(), ids=lambda relation: relation.name)
def test_wordings_of_queries_differ_after_normalisation(relation) -> None:
    subject = {"work": "The Silver Harbor", "person": "Anna Abel", "company": "Orion Labs"}[relation.subject_type]
    assert len({normalize_text(query.format(s=subject)) for query in relation.queries}) == len(relation.queries) >= 4


def test_questions_are_distinct_and_of_their_part(world: World) -> None:
    test, train = held_out_questions(world), train_questions(world)
    assert len({question.text for question in test}) == len(test) == 400
    assert sum(question.bridge is None for question in test) == 240
    assert len({question.text for question in train}) == len(train) == 1200
    assert {q.subject for q in test}.isdisjoint({q.subject for q in train})
    assert {q.answer for q in test}.isdisjoint({q.answer for q in train})


def test_a_question_names_its_subject_and_neither_bridge_nor_answer(world: World) -> None:
    for question in held_out_questions(world):
        assert [name for _, name in entities_in(world, question.text)] == [question.subject]


def test_more_questions_than_facts_are_refused(world: World) -> None:
    with pytest.raises(ValueError, match="held_out part has 325"):
        draw_questions(world, "held_out", 326, 0)


def test_documents_hold_one_entity_of_each_type_and_end_statements_in_the_value(world: World) -> None:
    rng = Random(0)
    for fact in rng.sample(world.facts(), 200):
        relation = RELATIONS[fact.relation]
        useful = useful_document(fact.relation, fact.subject, world.value, rng)
        noisy = noisy_document(fact.relation, fact.subject, relation.subject_type, world.value, rng)
        assert f" {fact.value}." in useful
        assert fact.value not in noisy
        for document in (useful, noisy):
            types = [entity_type for entity_type, _ in entities_in(world, document)]
            assert len(types) == len(set(types)), document
            assert fact.subject in document


def test_the_corpus_states_every_fact_in_both_wordings(world: World) -> None:
    texts = corpus(world)
    assert len(texts) == 2600
    stated = {text.format(s=f.subject, v=f.value) for f in world.facts() for text in RELATIONS[f.relation].statements}
    assert all(any(statement + "." in text for text in texts) for statement in Random(0).sample(sorted(stated), 100))


def test_every_word_of_a_name_is_one_token_and_the_tokenizer_is_a_function_of_the_seed(world: World) -> None:
    tokenizer = train_tokenizer(world)
    assert [word for word in name_words() if len(encode(tokenizer, f" {word}")) != 1] == []
    assert train_tokenizer(world).get_vocab() == tokenizer.get_vocab()
