"""The vocabulary of the closed world: words for names, and the relations with all their wordings.

Two rules hold for every wording, because a model this small depends on them: an entity always
follows a space (so its tokens are the same everywhere), and a statement ends in its value.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Literal

EntityType = Literal["work", "person", "company", "city"]

_WORDS: dict[EntityType, tuple[str, str, str]] = {
    "person": (
        "{} {}",
        "Anna Boris Clara David Elena Felix Greta Hugo Irene Jonas Karin Lukas Maria Nils Olga Peter "
        "Quinn Rosa Stefan Tara Ulrich Vera Walter Xenia Yuri Zora Adam Beata Carl Doris Emil Frida "
        "Gustav Helga Ivan Julia Konrad Lena Marek Nora Oskar Paula Ralf Sonja Tomas Uma Viktor Wanda",
        "Abel Berg Cole Dahl Eklund Falk Grau Hahn Iversen Jansen Keller Lund Moreau Novak Olsen Petrov "
        "Quist Reyes Sato Tanaka Urban Varga Weber Yates Zeman Arendt Brandt Castro Duarte Engel Fischer "
        "Gomez Hansen Ibsen Kovac Lopez Mertens Neumann Ortega Pavlov Rossi Silva Thorn Ueda Vogel "
        "Winter Young Ziegler",
    ),
    "work": (
        "The {} {}",
        "Silver Golden Hidden Broken Silent Crimson Distant Frozen Gentle Hollow Iron Jade Lonely Marble "
        "Narrow Orange Paper Quiet Restless Scarlet Tender Velvet Wild Yellow Amber Bitter Copper Dusty "
        "Empty Foggy Green Humble",
        "Harbor Garden Mirror River Castle Lantern Forest Bridge Window Desert Island Journey Kingdom "
        "Ladder Meadow Orchard Palace Railway Shadow Temple Valley Voyage Whisper Anchor Beacon Canyon "
        "Compass Dream Engine Feather Glacier Horizon",
    ),
    "city": (
        "{} {}",
        "Port New Lake Mount Fort San North South East West Upper Lower Old Great Saint Cape",
        "Kelda Sorin Tamar Velo Brisk Corvo Delmar Ester Fenwick Galen Hadro Ilmar Jorvik Kestrel Lorne "
        "Mirador Nimbus Orsay Pelham Quarry Ravel Selby Torvald Ulver Vantage Wexley Yarrow Zephyr Ashby "
        "Bolton Carden Dunmore",
    ),
    "company": (
        "{} {}",
        "Orion Apex Nova Delta Vertex Zenith Lumen Atlas Cobalt Ember Falcon Granite Helix Ionic Jasper Krypton",
        "Labs Works Group Studios Systems Partners Media Motors Foods Press Energy Textiles",
    ),
}

ENTITY_TYPES: tuple[EntityType, ...] = ("work", "person", "company", "city")


@dataclass(frozen=True)
class Relation:
    """One kind of fact. `{s}` stands for the subject and `{v}` for the value.

    `queries` are at least four wordings that stay distinct under the normalisation of search
    queries, so that whoever met a noisy document can ask again and get a new draw. None begins with
    its subject: a policy that samples would choose wording and name in one token, and err in both.
    """

    name: str
    subject_type: EntityType
    value_type: EntityType
    questions: tuple[str, ...]
    statements: tuple[str, ...]
    queries: tuple[str, ...]


RELATIONS: dict[str, Relation] = {
    relation.name: relation
    for relation in (
        Relation(
            "director",
            "work",
            "person",
            ("Who directed {s}?", "Who is the director of {s}?"),
            ("{s} was directed by {v}", "The director of {s} is {v}"),
            ("director of {s}", "find the director of {s}", "who directed {s}", "who is the director of {s}"),
        ),
        Relation(
            "producer",
            "work",
            "company",
            ("Which company produced {s}?", "What company is the producer of {s}?"),
            ("{s} was produced by {v}", "The producer of {s} is {v}"),
            (
                "producer of {s}",
                "find the producer of {s}",
                "which company produced {s}",
                "what company is the producer of {s}",
            ),
        ),
        Relation(
            "birthplace",
            "person",
            "city",
            ("Where was {s} born?", "What is the birthplace of {s}?"),
            ("{s} was born in {v}", "The birthplace of {s} is {v}"),
            ("birthplace of {s}", "find the birthplace of {s}", "where was {s} born", "what is the birthplace of {s}"),
        ),
        Relation(
            "employer",
            "person",
            "company",
            ("Which company does {s} work for?", "What is the employer of {s}?"),
            ("{s} works for {v}", "The employer of {s} is {v}"),
            (
                "employer of {s}",
                "find the employer of {s}",
                "which company does {s} work for",
                "what is the employer of {s}",
            ),
        ),
        Relation(
            "seat",
            "company",
            "city",
            ("Where is {s} based?", "What is the seat of {s}?"),
            ("{s} is based in {v}", "The seat of {s} is {v}"),
            ("seat of {s}", "find the seat of {s}", "where is {s} based", "what is the seat of {s}"),
        ),
    )
}

CHAINS: tuple[tuple[str, str], ...] = tuple(
    (first.name, second.name)
    for first, second in product(RELATIONS.values(), repeat=2)
    if first.value_type == second.subject_type
)
"""Pairs of relations that make a two-hop question: the first one's value is the second one's subject."""


def relations_of(subject_type: EntityType) -> tuple[str, ...]:
    """Names of the relations that an entity of this type has, in the order of `RELATIONS`."""
    return tuple(name for name, relation in RELATIONS.items() if relation.subject_type == subject_type)


def all_names(entity_type: EntityType) -> list[str]:
    """Every name that can be formed for this type, in a fixed order."""
    pattern, first, second = _WORDS[entity_type]
    return [pattern.format(a, b) for a, b in product(first.split(), second.split())]


def name_words() -> list[str]:
    """Every word that occurs in some name."""
    return [word for _, first, second in _WORDS.values() for word in (first + " " + second).split()]
