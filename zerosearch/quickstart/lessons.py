"""What the simulation LLM is to learn: facts, and a document for every query and label."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from zerosearch.quickstart.documents import noisy_document, useful_document
from zerosearch.quickstart.relations import CHAINS, ENTITY_TYPES, RELATIONS, EntityType
from zerosearch.quickstart.templates import SIMULATION_PROMPT, simulation_reply
from zerosearch.quickstart.world import Fact, World

USEFUL_SHARE = 0.7
OFF_TABLE_SHARE = 0.08
QUESTION_STYLE_SHARE = 0.1


@dataclass(frozen=True)
class Simulation:
    """One exchange with the simulation LLM. `value` is the fact that a useful reply states."""

    prompt: str
    reply: str
    value: str | None


def fact_card(fact: Fact, wording: int) -> str:
    """A fact as one bare statement without its value, which follows after a space."""
    statement = RELATIONS[fact.relation].statements[wording].format(s=fact.subject, v=fact.value)
    return simulation_reply(statement).removesuffix(f" {fact.value}")


def draw_simulation(world: World, rng: Random) -> Simulation:
    """A query of any wording with the document that a simulator of this world gives for it."""
    useful = rng.random() < USEFUL_SHARE
    if rng.random() < OFF_TABLE_SHARE:
        return _off_table(world, useful, rng)
    relation = rng.choice(list(RELATIONS))
    subject_type = RELATIONS[relation].subject_type
    subject = rng.choice(world.names(subject_type))
    prompt = _prompt(_draw_query(relation, subject, rng), useful)
    if useful:
        document = useful_document(relation, subject, world.value, rng)
        return Simulation(prompt, simulation_reply(document), world.value(relation, subject))
    document = noisy_document(relation, subject, subject_type, world.value, rng)
    return Simulation(prompt, simulation_reply(document), None)


def _off_table(world: World, useful: bool, rng: Random) -> Simulation:
    """A query that the table cannot answer in one step, with a vague document whatever the label.

    Either the relation does not fit the subject, or the query asks two hops at once: answering
    that would let a policy skip the bridge.
    """
    if rng.random() < 0.5:
        relation = rng.choice(list(RELATIONS))
        subject_type: EntityType = rng.choice(
            [t for t in ENTITY_TYPES if t not in ("city", RELATIONS[relation].subject_type)]
        )
        subject = topic = rng.choice(world.names(subject_type))
    else:
        first, relation = rng.choice(CHAINS)
        subject_type = RELATIONS[first].subject_type
        subject = rng.choice(world.names(subject_type))
        topic = f"the {first} of {subject}"
    document = noisy_document(relation, subject, subject_type, world.value, rng)
    return Simulation(_prompt(_draw_query(relation, topic, rng), useful), simulation_reply(document), None)


def _draw_query(relation: str, topic: str, rng: Random) -> str:
    query = rng.choice(RELATIONS[relation].queries).format(s=topic)
    if rng.random() < QUESTION_STYLE_SHARE:
        return f"{query[0].upper()}{query[1:]}?"
    return query


def _prompt(query: str, useful: bool) -> str:
    return SIMULATION_PROMPT.format(query=query, label="Useful" if useful else "Noisy")
