"""The tokenizer of both starter models: byte-level BPE over the language of the closed world."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from zerosearch.quickstart.lessons import draw_simulation
from zerosearch.quickstart.relations import name_words
from zerosearch.quickstart.teacher import MIXED, cold_start_names, draw_example
from zerosearch.quickstart.templates import (
    CHAT_TEMPLATE,
    END_TOKEN,
    MODEL_LENGTH,
    PAD_TOKEN,
    POLICY_PROMPT,
    START_TOKEN,
    TAGS,
)
from zerosearch.quickstart.world import World

MAX_VOCABULARY = 1280
"""Large enough that every word of a name is one token; at 1,024 some split."""

_SAMPLES = 3000
_WORD_WEIGHT = 50


def train_tokenizer(world: World) -> PreTrainedTokenizerFast:
    """A tokenizer of at most `MAX_VOCABULARY` tokens, the tags among them as ordinary tokens."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=MAX_VOCABULARY - len(TAGS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[PAD_TOKEN, START_TOKEN, END_TOKEN],
        show_progress=False,
    )
    core.train_from_iterator(_texts(world), trainer)
    core.add_tokens([AddedToken(tag, normalized=False, special=False) for tag in TAGS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token=END_TOKEN, pad_token=PAD_TOKEN, model_max_length=MODEL_LENGTH
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def encode(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    """Ids of a text as it stands, nothing added."""
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def encode_prompt(tokenizer: PreTrainedTokenizerFast, message: str) -> list[int]:
    """Ids of the chat with this user message, up to where the assistant begins."""
    chat = [{"role": "user", "content": message}]
    return encode(tokenizer, str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)))


def decode(tokenizer: PreTrainedTokenizerFast, ids: Sequence[int]) -> str:
    """Text of the ids without pad and end of sequence; the tags stay."""
    return str(tokenizer.decode(list(ids), skip_special_tokens=True))


def _texts(world: World) -> Iterator[str]:
    rng, names = Random(f"{world.seed}/tokenizer"), cold_start_names(world)
    for word in name_words():
        yield f" {word}" * _WORD_WEIGHT
    yield "user\nassistant\n" * _WORD_WEIGHT
    for _ in range(_SAMPLES):
        simulation = draw_simulation(world, rng)
        yield f"{simulation.prompt}{simulation.reply}"
        example = draw_example(names, MIXED, rng)
        yield _without_tags(POLICY_PROMPT.format(question=example.question.text))
        for segment in example.segments:
            yield _without_tags(segment.text)


def _without_tags(text: str) -> str:
    for tag in TAGS:
        text = text.replace(tag, "")
    return text
