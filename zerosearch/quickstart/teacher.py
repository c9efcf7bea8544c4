"""Example trajectories for the policy's cold start: how to search well, and how to do it badly.

The good ones teach the skills; the mixture spoils them on purpose, so that reinforcement learning
finds every skill somewhere in the samples and has something to choose. The facts are invented anew
for every example, so nothing can be learned by heart, and held-out entities never occur.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Literal, TypeVar

from zerosearch.prompts import CORRECTIVE_MESSAGE, render_information
from zerosearch.quickstart.documents import noisy_document, useful_document
from zerosearch.quickstart.relations import CHAINS, ENTITY_TYPES, RELATIONS, EntityType, all_names, relations_of
from zerosearch.quickstart.world import Question, World, make_question

MAX_SEARCHES = 4
TWO_HOP_SHARE = 0.4

Kind = Literal["policy", "malformed", "observation"]
Reaction = Literal["reformulate", "repeat", "give_up"]
_Choice = TypeVar("_Choice", bound=str)


@dataclass(frozen=True)
class Segment:
    """A piece of the assistant turn. A malformed policy segment ends in the end-of-sequence token."""

    kind: Kind
    text: str


@dataclass(frozen=True)
class Example:
    """A question and everything after the prompt."""

    question: Question
    segments: tuple[Segment, ...]


@dataclass(frozen=True)
class Conduct:
    """How likely the teacher does what. The weights of a choice need not add up to one."""

    noise: float
    behaviours: dict[str, float]
    reactions: dict[Reaction, float]


GOOD = Conduct(noise=0.25, behaviours={"right": 1.0}, reactions={"reformulate": 1.0})
MIXED = Conduct(
    noise=0.25,
    behaviours={"right": 0.22, "guess": 0.40, "malformed": 0.16, "wrong_query": 0.12, "skip_bridge": 0.10},
    reactions={"reformulate": 0.5, "repeat": 0.1, "give_up": 0.4},
)


Names = Mapping[EntityType, Sequence[str]]


def cold_start_names(world: World) -> Names:
    """The train part and every other name of the vocabulary but the held-out ones.

    With the train part alone the model learns which words go together and cannot copy a new pair.
    """
    names: dict[EntityType, list[str]] = {}
    for entity_type in ENTITY_TYPES:
        held_out = set(world.entities[entity_type, "held_out"])
        names[entity_type] = [name for name in all_names(entity_type) if name not in held_out]
    return names


def draw_example(names: Names, conduct: Conduct, rng: Random) -> Example:
    """One trajectory about invented facts on these names, in the given conduct."""
    facts = _InventedFacts(names, rng)
    script = _Script(names, facts, _draw_question(names, facts, rng), conduct, rng)
    _BEHAVIOURS[_weighted(conduct.behaviours, rng)](script)
    return Example(script.question, tuple(script.segments))


class _InventedFacts:
    """Random values, the same for the same (relation, subject) within one example."""

    def __init__(self, names: Names, rng: Random) -> None:
        self._names, self._rng = names, rng
        self._known: dict[tuple[str, str], str] = {}

    def value(self, relation: str, subject: str) -> str:
        if (relation, subject) not in self._known:
            self._known[relation, subject] = self._rng.choice(self._names[RELATIONS[relation].value_type])
        return self._known[relation, subject]


@dataclass
class _Script:
    """A trajectory in the making."""

    names: Names
    facts: _InventedFacts
    question: Question
    conduct: Conduct
    rng: Random
    segments: list[Segment] = field(default_factory=list)
    searches: int = 0

    def guess(self) -> str:
        """Some entity of the type that the question asks for."""
        return self.rng.choice(self.names[RELATIONS[self.question.relations[-1]].value_type])

    def search(self, thought: str, relation: str, subject: str, wording: int) -> None:
        query = RELATIONS[relation].queries[wording].format(s=subject)
        need = f"{thought} I need the {relation} of {subject}.".strip()
        self.segments.append(Segment("policy", f"<think> {need} </think> <search> {query} </search>"))
        self.searches += 1

    def observe(self, document: str) -> None:
        self.segments.append(Segment("observation", render_information([document])))

    def answer(self, thought: str, answer: str) -> None:
        self.segments.append(Segment("policy", f"<think> {thought} </think> <answer> {answer} </answer>"))

    def give_up(self, relation: str, subject: str) -> None:
        self.answer(f"The {relation} of {subject} is not clear.", self.guess())


def _draw_question(names: Names, facts: _InventedFacts, rng: Random) -> Question:
    chain = rng.choice(CHAINS) if rng.random() < TWO_HOP_SHARE else (rng.choice(list(RELATIONS)),)
    subject = rng.choice(names[RELATIONS[chain[0]].subject_type])
    return make_question(chain, subject, facts.value, rng.randrange(2))


def _weighted(weights: dict[_Choice, float], rng: Random) -> _Choice:
    return rng.choices(list(weights), list(weights.values()))[0]


def _right(script: _Script) -> None:
    thought = ""
    for fact in script.question.facts:
        if not _find(script, fact.relation, fact.subject, thought):
            script.give_up(fact.relation, fact.subject)
            return
        thought = f"The {fact.relation} of {fact.subject} is {fact.value}."
    script.answer(thought, script.question.answer)


def _find(script: _Script, relation: str, subject: str, thought: str) -> bool:
    """Search until a useful document came. False: gave up, or no searches left."""
    rng = script.rng
    wording = rng.randrange(len(RELATIONS[relation].queries))
    document = None
    while script.searches < MAX_SEARCHES:
        script.search(thought, relation, subject, wording)
        thought = "This is not clear."
        if document is None and rng.random() >= script.conduct.noise:
            script.observe(useful_document(relation, subject, script.facts.value, rng))
            return True
        if document is None:
            subject_type = RELATIONS[relation].subject_type
            document = noisy_document(relation, subject, subject_type, script.facts.value, rng)
        script.observe(document)
        reaction = _weighted(script.conduct.reactions, rng)
        if reaction == "give_up":
            return False
        if reaction == "reformulate":
            # A fixed order of wordings is the simplest way to never use one twice.
            wording, document = (wording + 1) % len(RELATIONS[relation].queries), None
    return False


def _guess(script: _Script) -> None:
    script.answer("I already know this.", script.guess())


def _malformed(script: _Script) -> None:
    fact = script.question.facts[0]
    query = script.rng.choice(RELATIONS[fact.relation].queries).format(s=fact.subject)
    ending = script.rng.choice([f"<search> {query}", f"<answer> {script.guess()}", query])
    text = f"<think> I need the {fact.relation} of {fact.subject}. </think> {ending}"
    script.segments += [Segment("malformed", text), Segment("observation", CORRECTIVE_MESSAGE)]
    script.rng.choice([_right, _guess])(script)


def _wrong_query(script: _Script) -> None:
    """Asks for another relation of the subject and takes what it says for the answer."""
    asked = script.question.facts[0]
    others = [name for name in relations_of(RELATIONS[asked.relation].subject_type) if name != asked.relation]
    if not others:
        _guess(script)
        return
    relation = script.rng.choice(others)
    script.search("", relation, asked.subject, script.rng.randrange(len(RELATIONS[relation].queries)))
    script.observe(useful_document(relation, asked.subject, script.facts.value, script.rng))
    value = script.facts.value(relation, asked.subject)
    script.answer(f"The {relation} of {asked.subject} is {value}.", value)


def _skip_bridge(script: _Script) -> None:
    """Asks the last relation of the first subject, as if there were one hop, and gives up."""
    first, last = script.question.facts[0], script.question.facts[-1]
    if first is last:
        _right(script)
        return
    script.search("", last.relation, first.subject, script.rng.randrange(len(RELATIONS[last.relation].queries)))
    subject_type = RELATIONS[first.relation].subject_type
    script.observe(noisy_document(last.relation, first.subject, subject_type, script.facts.value, script.rng))
    script.give_up(last.relation, first.subject)


_BEHAVIOURS: dict[str, Callable[[_Script], None]] = {
    "right": _right,
    "guess": _guess,
    "malformed": _malformed,
    "wrong_query": _wrong_query,
    "skip_bridge": _skip_bridge,
}
