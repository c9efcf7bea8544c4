"""How good the starter models are: the simulator's documents and the policy before any training.

All figures are about the 400 test questions, the documents' over every wording of their queries.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from transformers import PreTrainedModel, PreTrainedTokenizerFast

from verl.agent_loop.base import RolloutLimits, RolloutTask
from verl.agent_loop.trajectory import Prompt
from verl.workers.rollout.engine import SampleKey, SamplingParams
from verl.workers.rollout.torch_engine import TorchEngine
from zerosearch.prompts import CORRECTIVE_MESSAGE
from zerosearch.quickstart.dataset import DATA_SOURCE, question_row, test_questions
from zerosearch.quickstart.local_search import SLOTS, LocalSimulation, write_replies
from zerosearch.quickstart.relations import RELATIONS
from zerosearch.quickstart.report import Measure
from zerosearch.quickstart.teacher import MAX_SEARCHES
from zerosearch.quickstart.templates import POLICY_PROMPT
from zerosearch.quickstart.tokenizer import encode_prompt
from zerosearch.quickstart.world import Fact, Question, World
from zerosearch.records import Episode
from zerosearch.reward import contains_gold, score_answer
from zerosearch.search.backend import Label
from zerosearch.turns import TurnRules, Turns

LIMITS = RolloutLimits(max_response_length=544, max_turn_length=48, max_observation_length=96)
END_NOISE = 0.5


@dataclass(frozen=True)
class _Reply:
    """A simulator's reply to a query about `fact`, which serves the hop `hop` of some question."""

    hop: str
    fact: Fact
    label: Label
    text: str

    @property
    def states_fact(self) -> bool:
        statements = RELATIONS[self.fact.relation].statements
        return any(text.format(s=self.fact.subject, v=self.fact.value) in self.text for text in statements)

    @property
    def well_formed(self) -> bool:
        return self.text.startswith("Doc 1: ") and self.text.endswith(".") and self.text.count("Doc ") == 1


def measure_simulator(
    world: World, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, seed: int
) -> list[Measure]:
    """Right facts, leaks, form, and query sensitivity as `zerosearch.probe` defines it."""
    questions = test_questions(world)
    hops = dict.fromkeys(hop for question in questions for hop in _hops(question))
    replies = _ask(model, tokenizer, list(hops), seed)
    measures = []
    for hop in ("one hop", "bridge", "last hop"):
        useful = [r.states_fact for r in replies if r.hop == hop and r.label is Label.USEFUL]
        noisy = [contains_gold(r.text, [r.fact.value]) for r in replies if r.hop == hop and r.label is Label.NOISY]
        measures.append(_share("simulator", f"useful documents that state the fact, {hop}", useful, at_least=0.97))
        measures.append(_share("simulator", f"noisy documents that hold the answer, {hop}", noisy, at_most=0.03))
    well_formed = [reply.well_formed for reply in replies]
    measures.append(_share("simulator", "well-formed documents", well_formed, at_least=0.99))
    return [*measures, _query_sensitivity(questions, replies)]


def measure_policy(
    world: World,
    policy: PreTrainedModel,
    simulator: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    seed: int,
) -> list[Measure]:
    """Held-out F1 and conduct, sampled at temperature 1, at noise 0 and at the curriculum's end."""
    measures = []
    for noise in (0.0, END_NOISE):
        episodes = asyncio.run(_run_episodes(test_questions(world), policy, simulator, tokenizer, noise, seed))
        measures += _conduct(f"policy before training, noise {noise:g}", episodes, clean=noise == 0)
    return measures


def _hops(question: Question) -> list[tuple[str, Fact]]:
    if question.bridge is None:
        return [("one hop", question.facts[0])]
    return [("bridge", question.facts[0]), ("last hop", question.facts[1])]


def _ask(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, hops: Sequence[tuple[str, Fact]], seed: int
) -> list[_Reply]:
    """Every wording of every hop's query, under both labels."""
    asked = [
        (hop, fact, wording.format(s=fact.subject), label)
        for hop, fact in hops
        for wording in RELATIONS[fact.relation].queries
        for label in (Label.USEFUL, Label.NOISY)
    ]
    texts = write_replies(model, tokenizer, [(query, label) for _, _, query, label in asked], seed)
    return [_Reply(hop, fact, label, text) for (hop, fact, _, label), text in zip(asked, texts, strict=True)]


def _query_sensitivity(questions: Sequence[Question], replies: Sequence[_Reply]) -> Measure:
    """P(gold in documents | own query) - P(gold in documents | query of the next row with another gold)."""
    texts: dict[tuple[str, Fact], list[str]] = {}
    for reply in replies:
        if reply.label is Label.USEFUL:
            texts.setdefault((reply.hop, reply.fact), []).append(reply.text)
    own: list[bool] = []
    other: list[bool] = []
    for index, question in enumerate(questions):
        following = [*questions[index + 1 :], *questions[:index]]
        stranger = next(candidate for candidate in following if candidate.answer != question.answer)
        own += [contains_gold(text, [question.answer]) for text in texts[_hops(question)[-1]]]
        other += [contains_gold(text, [question.answer]) for text in texts[_hops(stranger)[-1]]]
    return Measure("simulator", "query sensitivity", _mean(own) - _mean(other), len(own), at_least=0.95)


async def _run_episodes(
    questions: Sequence[Question],
    policy: PreTrainedModel,
    simulator: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    noise: float,
    seed: int,
) -> list[Episode]:
    """One trajectory for each question, by the rules of the real environment."""
    rules = TurnRules.make(
        tokenizer, LIMITS, max_turns=MAX_SEARCHES, topk=1, think="lenient", corrective_message=CORRECTIVE_MESSAGE
    )
    length = LIMITS.max_response_length + 96
    eos = [tokenizer.eos_token_id]
    engine = TorchEngine(policy, tokenizer, max_num_seqs=SLOTS, max_model_len=length, eos_token_ids=eos)
    backend = LocalSimulation(simulator, tokenizer)

    async def run(index: int, question: Question) -> Episode:
        row = question_row(question, "test", index)
        ids = encode_prompt(tokenizer, POLICY_PROMPT.format(question=question.text))
        prompt = Prompt(row["id"], tuple(ids), DATA_SOURCE, row)
        key = SampleKey(seed, 0, row["id"], 0)
        task = RolloutTask(prompt, key, f"noise {noise:g}", SamplingParams(max_tokens=LIMITS.max_turn_length))
        episode = Episode(question.text, (question.answer,), len(question.facts), noise)
        turns = Turns(rules, task, engine, backend, episode)
        await turns.run()
        return turns.episode

    return await asyncio.gather(*(run(index, question) for index, question in enumerate(questions)))


def _conduct(section: str, episodes: Sequence[Episode], clean: bool) -> list[Measure]:
    def mean(name: str, of: Callable[[Episode], float], hops: int | None = None) -> Measure:
        values = [of(episode) for episode in episodes if hops in (None, episode.hops)]
        return Measure(section, name, _mean(values), len(values))

    f1 = mean("F1", _f1)
    return [
        # Low enough to rise by much, high enough to find rewards from the first step on.
        replace(f1, at_least=0.30, at_most=0.45) if clean else f1,
        mean("F1, one hop", _f1, 1),
        mean("F1, two hops", _f1, 2),
        mean("searches, one hop", lambda episode: len(episode.searches), 1),
        mean("searches, two hops", lambda episode: len(episode.searches), 2),
        mean("answered", lambda episode: episode.answer is not None),
        mean("generations without action", lambda episode: len(episode.invalid)),
        mean("repeated queries", lambda episode: episode.repeated_queries),
    ]


def _f1(episode: Episode) -> float:
    return score_answer(episode.answer, episode.golden_answers).f1


def _share(
    section: str, name: str, hits: Sequence[bool], at_least: float | None = None, at_most: float | None = None
) -> Measure:
    return Measure(section, name, _mean(hits), len(hits), at_least, at_most)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
