"""Example trajectories for the policy's cold start: how to search well, and how to do it badly.

The good ones teach the skills; the mixture spoils them on purpose, so that reinforcement learning
finds every skill somewhere in the samples and has something to choose. Entities come from the
train part only and the facts are invented anew for every example: nothing can be learned by heart.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Literal, TypeVar

from zerosearch.prompts import CORRECTIVE_MESSAGE, render_information
from zerosearch.quickstart.documents import noisy_document, useful_document
from zerosearch.quickstart.relations import CHAINS, RELATIONS, relations_of
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
    behaviours={"right": 0.25, "guess": 0.35, "malformed": 0.15, "wrong_query": 0.15, "skip_bridge": 0.10},
    reactions={"reformulate": 0.4, "repeat": 0.2, "give_up": 0.4},
)


def draw_example(world: World, conduct: Conduct, rng: Random) -> Example:
    """One trajectory about an invented fact, in the given conduct."""
    script = _Script(world, _draw_question(world, rng), conduct, rng)
    _BEHAVIOURS[_weighted(conduct.behaviours, rng)](script)
    return Example(script.question, tuple(script.segments))


class _InventedFacts:
    """Random train-part values, the same for the same (relation, subject) within one example."""

    def __init__(self, world: World, rng: Random) -> None:
        self._world, self._rng = world, rng
        self._known: dict[tuple[str, str], str] = {}

    def value(self, relation: str, subject: str) -> str:
        if (relation, subject) not in self._known:
            values = self._world.entities[RELATIONS[relation].value_type, "train"]
            self._known[relation, subject] = self._rng.choice(values)
        return self._known[relation, subject]


@dataclass
class _Script:
    """A trajectory in the making."""

    world: World
    question: Question
    conduct: Conduct
    rng: Random
    segments: list[Segment] = field(default_factory=list)
    searches: int = 0

    def __post_init__(self) -> None:
        self._facts = _InventedFacts(self.world, self.rng)
        self._pinned = {(fact.relation, fact.subject): fact.value for fact in self.question.facts}

    def lookup(self, relation: str, subject: str) -> str:
        return self._pinned.get((relation, subject)) or self._facts.value(relation, subject)

    def guess(self) -> str:
        """Some entity of the type that the question asks for."""
        value_type = RELATIONS[self.question.relations[-1]].value_type
        return self.rng.choice(self.world.entities[value_type, "train"])

    def search(self, thought: str, relation: str, subject: str, wording: int) -> None:
        query = RELATIONS[relation].queries[wording].format(s=subject)
        need = f"{thought} I need the {relation} of {subject}.".strip()
        self.segments.append(Segment("policy", f"<think> {need} </think> <search> {query} </search>"))
        self.searches += 1

    def observe(self, document: str) -> None:
        self.segments.append(Segment("observation", render_information([document])))

    def answer(self, thought: str, answer: str) -> None:
        self.segments.append(Segment("policy", f"<think> {thought} </think> <answer> {answer} </answer>"))


def _draw_question(world: World, rng: Random) -> Question:
    chain = rng.choice(CHAINS) if rng.random() < TWO_HOP_SHARE else (rng.choice(list(RELATIONS)),)
    subject = rng.choice(world.entities[RELATIONS[chain[0]].subject_type, "train"])
    return make_question(chain, subject, _InventedFacts(world, rng).value, rng.randrange(2))


def _weighted(weights: dict[_Choice, float], rng: Random) -> _Choice:
    return rng.choices(list(weights), list(weights.values()))[0]


def _right(script: _Script) -> None:
    thought = ""
    for fact in script.question.facts:
        if not _find(script, fact.relation, fact.subject, thought):
            script.answer(f"The {fact.relation} of {fact.subject} is not clear.", script.guess())
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
            script.observe(useful_document(relation, subject, script.lookup, rng))
            return True
        if document is None:
            subject_type = RELATIONS[relation].subject_type
            document = noisy_document(relation, subject, subject_type, script.lookup, rng)
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
    ending = script.rng.choice([f"<search> {query} <search>", f"<answer> {script.guess()}", query])
    text = f"<think> I need the {fact.relation} of {fact.subject}. </think> {ending}"
    script.segments += [Segment("malformed", text), Segment("observation", CORRECTIVE_MESSAGE)]
    script.rng.choice([_right, _guess])(script)


def _wrong_query(script: _Script) -> None:
    """Asks for something else and takes what it says for the answer."""
    asked = script.question.facts[0]
    subject_type = RELATIONS[asked.relation].subject_type
    others = [name for name in relations_of(subject_type) if name != asked.relation]
    if others and script.rng.random() < 0.6:
        relation, subject = script.rng.choice(others), asked.subject
    else:
        relation, subject = asked.relation, script.rng.choice(script.world.entities[subject_type, "train"])
    script.search("", relation, subject, script.rng.randrange(len(RELATIONS[relation].queries)))
    script.observe(useful_document(relation, subject, script.lookup, script.rng))
    value = script.lookup(relation, subject)
    script.answer(f"The {relation} of {subject} is {value}.", value)


def _skip_bridge(script: _Script) -> None:
    """Asks the last relation of the first subject, as if there were one hop, then guesses."""
    first, last = script.question.facts[0], script.question.facts[-1]
    if first is last:
        _right(script)
        return
    script.search("", last.relation, first.subject, script.rng.randrange(len(RELATIONS[last.relation].queries)))
    subject_type = RELATIONS[first.relation].subject_type
    script.observe(noisy_document(last.relation, first.subject, subject_type, script.lookup, script.rng))
    guess = script.guess()
    script.answer(f"The {last.relation} of {first.subject} is {guess}.", guess)


_BEHAVIOURS: dict[str, Callable[[_Script], None]] = {
    "right": _right,
    "guess": _guess,
    "malformed": _malformed,
    "wrong_query": _wrong_query,
    "skip_bridge": _skip_bridge,
}
