"""Documents of the closed world: what the simulation LLM learns to write and a retriever can index.

A document is two sentences about one entity. It holds at most one entity of each type, the
subject included: with two of one type a small reader goes by position instead of by relation.
"""

from __future__ import annotations

from random import Random

from zerosearch.quickstart.relations import RELATIONS, EntityType, relations_of
from zerosearch.quickstart.world import Lookup, World

EXTRA_FACT_SHARE = 0.4

_KINDS: dict[EntityType, tuple[str, ...]] = {
    "work": ("film", "novel"),
    "person": ("writer", "engineer", "singer"),
    "company": ("company", "firm"),
}
_FILLERS = (
    "Many people still talk about {s} today.",
    "Critics often mention {s} in the local press.",
    "A short note on {s} appeared last year.",
    "Readers continue to ask about {s} and its story.",
)
_VAGUE = (
    "Few details about the {n} of {s} are known.",
    "Sources disagree about the {n} of {s}.",
    "There is no clear record of the {n} of {s}.",
)


def useful_document(relation: str, subject: str, lookup: Lookup, rng: Random) -> str:
    """A document that states the asked fact, and in part another one about the same subject."""
    statement = _statement(relation, subject, lookup, rng)
    return _compose(statement, relation, subject, RELATIONS[relation].subject_type, lookup, rng)


def noisy_document(relation: str, subject: str, subject_type: EntityType, lookup: Lookup, rng: Random) -> str:
    """A document on the subject that does not state the asked fact.

    It also answers a query whose relation does not fit its subject: there is nothing to state.
    """
    vague = rng.choice(_VAGUE).format(n=relation, s=subject)
    return _compose(vague, relation, subject, subject_type, lookup, rng)


def corpus(world: World) -> list[str]:
    """Two useful documents for each fact, one per wording: what stands behind a real search engine."""
    rng = Random(f"{world.seed}/corpus")
    return [
        _compose(
            wording.format(s=fact.subject, v=fact.value) + ".",
            fact.relation,
            fact.subject,
            RELATIONS[fact.relation].subject_type,
            world.value,
            rng,
        )
        for fact in world.facts()
        for wording in RELATIONS[fact.relation].statements
    ]


def _compose(first: str, relation: str, subject: str, subject_type: EntityType, lookup: Lookup, rng: Random) -> str:
    others = [name for name in relations_of(subject_type) if name != relation]
    if others and rng.random() < EXTRA_FACT_SHARE:
        # Always second: the small simulator, once it has told another fact, forgets the asked one.
        return f"{first} {_statement(rng.choice(others), subject, lookup, rng)}"
    if rng.random() < 0.5:
        second = rng.choice(_FILLERS).format(s=subject)
    else:
        second = f"All agree that {subject} is a well known {rng.choice(_KINDS[subject_type])}."
    sentences = [first, second]
    rng.shuffle(sentences)
    return " ".join(sentences)


def _statement(relation: str, subject: str, lookup: Lookup, rng: Random) -> str:
    return rng.choice(RELATIONS[relation].statements).format(s=subject, v=lookup(relation, subject)) + "."
