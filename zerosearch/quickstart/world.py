"""The closed world: one fixed table of facts, and the questions about it. Pure functions of a seed.

Every type of entity is split 75/25 into a train and a held-out part, and a fact never joins the
two: a policy that is trained on the one part meets the other for the first time when judged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal

from zerosearch.quickstart.relations import CHAINS, ENTITY_TYPES, RELATIONS, EntityType, all_names, relations_of

Part = Literal["train", "held_out"]
PARTS: tuple[Part, ...] = ("train", "held_out")
TRAIN_SHARE = 0.75
ENTITY_COUNTS: dict[EntityType, int] = {"work": 300, "person": 300, "company": 100, "city": 100}

Lookup = Callable[[str, str], str]
"""(relation, subject) → value."""

# What a value leads to is drawn before the value itself, and of one subject's relations those that
# begin a chain come first: so `_two_hop_values` knows the answers that the later ones must avoid.
_FACT_ORDER = ("seat", "employer", "birthplace", "director", "producer")


@dataclass(frozen=True)
class Fact:
    """`value` is what `relation` gives for `subject`."""

    relation: str
    subject: str
    value: str


@dataclass(frozen=True)
class World:
    """All entities by type and part, and the value of every (relation, subject)."""

    seed: int
    entities: Mapping[tuple[EntityType, Part], tuple[str, ...]]
    table: Mapping[tuple[str, str], str]

    def value(self, relation: str, subject: str) -> str:
        """The value in the table; a KeyError means that the relation does not fit the subject."""
        return self.table[relation, subject]

    def facts(self, part: Part | None = None) -> list[Fact]:
        """The facts of one part, or of both, in a fixed order."""
        parts = PARTS if part is None else (part,)
        return [
            Fact(name, subject, self.table[name, subject])
            for name, relation in RELATIONS.items()
            for where in parts
            for subject in self.entities[relation.subject_type, where]
        ]

    def names(self, entity_type: EntityType) -> tuple[str, ...]:
        """Entities of one type, both parts."""
        return self.entities[entity_type, "train"] + self.entities[entity_type, "held_out"]


@dataclass(frozen=True)
class Question:
    """A question of one or two hops with the facts that answer it, in the order they are needed."""

    text: str
    facts: tuple[Fact, ...]

    @property
    def answer(self) -> str:
        return self.facts[-1].value

    @property
    def subject(self) -> str:
        """The entity that the question names."""
        return self.facts[0].subject

    @property
    def bridge(self) -> str | None:
        """The entity between the two hops, which the question does not name."""
        return self.facts[0].value if len(self.facts) == 2 else None

    @property
    def relations(self) -> tuple[str, ...]:
        return tuple(fact.relation for fact in self.facts)


def build_world(seed: int) -> World:
    """The world of this seed: 800 entities, 1,300 facts."""
    entities = _draw_entities(Random(f"{seed}/entities"))
    return World(seed, entities, _draw_table(entities, Random(f"{seed}/table")))


def make_question(chain: tuple[str, ...], subject: str, lookup: Lookup, wording: int) -> Question:
    """The question that follows `chain` (one or two relations) from `subject`; values come from `lookup`."""
    facts: list[Fact] = []
    entity = subject
    for relation in chain:
        facts.append(Fact(relation, entity, lookup(relation, entity)))
        entity = facts[-1].value
    topic = subject if len(chain) == 1 else f"the {chain[0]} of {subject}"
    return Question(RELATIONS[chain[-1]].questions[wording].format(s=topic), tuple(facts))


def draw_questions(world: World, part: Part, one_hop: int, two_hop: int) -> list[Question]:
    """Questions about distinct facts (or chains) of one part, wordings at random, in random order."""
    rng = Random(f"{world.seed}/questions/{part}")
    singles = [(relation,) for relation in RELATIONS]
    picked = _draw_starts(world, part, singles, one_hop, rng) + _draw_starts(world, part, CHAINS, two_hop, rng)
    rng.shuffle(picked)
    return [make_question(chain, subject, world.value, rng.randrange(2)) for chain, subject in picked]


def _draw_entities(rng: Random) -> dict[tuple[EntityType, Part], tuple[str, ...]]:
    entities: dict[tuple[EntityType, Part], tuple[str, ...]] = {}
    for entity_type in ENTITY_TYPES:
        names = rng.sample(all_names(entity_type), ENTITY_COUNTS[entity_type])
        cut = int(len(names) * TRAIN_SHARE)
        entities[entity_type, "train"], entities[entity_type, "held_out"] = tuple(names[:cut]), tuple(names[cut:])
    return entities


def _draw_table(entities: Mapping[tuple[EntityType, Part], tuple[str, ...]], rng: Random) -> dict[tuple[str, str], str]:
    table: dict[tuple[str, str], str] = {}
    for name in _FACT_ORDER:
        relation = RELATIONS[name]
        for part in PARTS:
            values = entities[relation.value_type, part]
            for subject in entities[relation.subject_type, part]:
                # Else the answer of a two-hop question could stand in a document about its subject.
                avoid = _two_hop_values(table, relation.subject_type, subject)
                table[name, subject] = rng.choice([value for value in values if value not in avoid])
    return table


def _two_hop_values(table: Mapping[tuple[str, str], str], subject_type: EntityType, subject: str) -> set[str]:
    chains = [chain for chain in CHAINS if chain[0] in relations_of(subject_type) and (chain[0], subject) in table]
    return {table[second, table[first, subject]] for first, second in chains}


def _draw_starts(
    world: World, part: Part, chains: Sequence[tuple[str, ...]], count: int, rng: Random
) -> list[tuple[tuple[str, ...], str]]:
    starts = [
        (chain, subject) for chain in chains for subject in world.entities[RELATIONS[chain[0]].subject_type, part]
    ]
    if count > len(starts):
        raise ValueError(f"{count} distinct questions were asked for, the {part} part has {len(starts)}.")
    return rng.sample(starts, count)
