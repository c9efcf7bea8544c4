"""The training of the two starter models: which samples, with which weights, in which order."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from zerosearch.quickstart.lessons import draw_simulation, fact_card
from zerosearch.quickstart.sft import Phase, Sample, make_model, train
from zerosearch.quickstart.teacher import GOOD, MIXED, Example, cold_start_names, draw_example
from zerosearch.quickstart.templates import POLICY_PROMPT
from zerosearch.quickstart.tokenizer import encode, encode_prompt
from zerosearch.quickstart.world import Fact, World

CARD_SHARE = 0.1
VALUE_WEIGHT = 5.0
CARD_PREFIX_WEIGHT = 0.1
# At weight 1 noisy documents are too few to be kept apart: one in eight states the fact.
NOISY_WEIGHT = 2.0
ENTITY_WEIGHT = 3.0
# Early on, reading along is worth something to the policy; later it only dilutes.
EARLY_READ_WEIGHT = 0.1
REPETITION_SHARE = 0.3
# Three special tokens and 256 bytes come first.
FIRST_MERGE = 259


def train_simulator(world: World, tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen2ForCausalLM:
    """A simulation LLM that knows the table: first the bare facts, then documents for queries."""
    model = make_model(len(tokenizer), tokenizer.pad_token_id, tokenizer.eos_token_id, seed)
    cards = [card_sample(tokenizer, fact, wording) for fact in world.facts() for wording in range(2)]

    def documents(rng: Random) -> Sample:
        return rng.choice(cards) if rng.random() < CARD_SHARE else simulation_sample(world, tokenizer, rng)

    train(model, Phase(lambda rng: rng.choice(cards), steps=300, tokens=2000, rate=3e-3), seed)
    train(model, Phase(documents, steps=700, tokens=3000, rate=2.5e-3, warmup=20), seed + 1)
    return model


def train_policy(world: World, tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen2ForCausalLM:
    """A policy that can search but mostly does not: first how to do it well, then a spoiling mixture."""
    model = make_model(len(tokenizer), tokenizer.pad_token_id, tokenizer.eos_token_id, seed)
    names = cold_start_names(world)

    def first(rng: Random) -> Sample:
        if rng.random() < REPETITION_SHARE:
            return repetition_sample(len(tokenizer), rng)
        return policy_sample(tokenizer, draw_example(names, GOOD, rng), EARLY_READ_WEIGHT)

    def good(rng: Random) -> Sample:
        return policy_sample(tokenizer, draw_example(names, GOOD, rng), 0.0)

    def mixed(rng: Random) -> Sample:
        return policy_sample(tokenizer, draw_example(names, MIXED, rng), 0.0)

    train(model, Phase(first, steps=300, tokens=2000, rate=3e-3), seed)
    train(model, Phase(good, steps=450, tokens=3000, rate=2e-3), seed + 1)
    train(model, Phase(mixed, steps=50, tokens=4000, rate=6e-4, warmup=10), seed + 2)
    return model


def card_sample(tokenizer: PreTrainedTokenizerFast, fact: Fact, wording: int) -> Sample:
    """A fact with nearly all weight on its value."""
    prefix, value = encode(tokenizer, fact_card(fact, wording)), encode(tokenizer, f" {fact.value}")
    return Sample(prefix + value, [CARD_PREFIX_WEIGHT] * len(prefix) + [1.0] * len(value))


def simulation_sample(world: World, tokenizer: PreTrainedTokenizerFast, rng: Random) -> Sample:
    """A random exchange with the simulator; only its reply is trained."""
    simulation = draw_simulation(world, rng)
    prompt = encode_prompt(tokenizer, simulation.prompt)
    if simulation.value is None:
        reply = encode(tokenizer, simulation.reply)
        weights = [NOISY_WEIGHT] * len(reply)
    else:
        reply, weights = _encode_weighted(tokenizer, simulation.reply, [simulation.value], VALUE_WEIGHT)
    return Sample(prompt + reply + [tokenizer.eos_token_id], [0.0] * len(prompt) + weights + [1.0])


def repetition_sample(vocabulary: int, rng: Random) -> Sample:
    """Random tokens twice over, the second time trained: the shortest way to learn copying."""
    once = [rng.randrange(FIRST_MERGE, vocabulary) for _ in range(rng.randint(6, 20))]
    return Sample(once * 2, [0.0] * len(once) + [1.0] * len(once))


def _encode_weighted(
    tokenizer: PreTrainedTokenizerFast, text: str, spans: Sequence[str], inside: float
) -> tuple[list[int], list[float]]:
    """Ids of a text and their weights: `inside` for tokens that touch one of the spans, else 1."""
    encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    starts = [(at, at + len(span)) for span in spans for at in _occurrences(text, span)]
    weights = [
        inside if any(begin < stop and end > start for start, stop in starts) else 1.0
        for begin, end in encoding["offset_mapping"]
    ]
    return encoding["input_ids"], weights


def _occurrences(text: str, span: str) -> list[int]:
    return [at for at in range(len(text)) if text.startswith(span, at)]


def policy_sample(tokenizer: PreTrainedTokenizerFast, example: Example, read_weight: float) -> Sample:
    """A trajectory as the rollout makes it: every segment tokenized by itself, ids concatenated.

    What the policy writes is trained, its entities most; prompt and observations weigh `read_weight`.
    Only a malformed segment ends in end of sequence: after an action generation stops at its tag.
    """
    question = example.question
    entities = [question.subject, question.answer, *([question.bridge] if question.bridge else [])]
    ids = encode_prompt(tokenizer, POLICY_PROMPT.format(question=question.text))
    weights = [read_weight] * len(ids)
    for segment in example.segments:
        if segment.kind == "observation":
            new = encode(tokenizer, segment.text)
            new_weights = [read_weight] * len(new)
        else:
            new, new_weights = _encode_weighted(tokenizer, segment.text, entities, ENTITY_WEIGHT)
        if segment.kind == "malformed":
            new, new_weights = [*new, tokenizer.eos_token_id], [*new_weights, 1.0]
        ids, weights = ids + new, weights + new_weights
    return Sample(ids, weights)
