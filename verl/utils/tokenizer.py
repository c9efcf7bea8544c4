"""Tokenizers as training needs them: with a pad id, every end-of-sequence id known, a template chosen."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from jinja2 import TemplateError
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils.hub import cached_file

_MARKER = "zqxj"
"""A text that no template writes by itself."""


def hf_tokenizer(
    name_or_path: str, trust_remote_code: bool = False, chat_template: str = "auto"
) -> PreTrainedTokenizerBase:
    """A tokenizer with a pad token (its end of sequence where it has none: masks never come from ids).

    ``chat_template`` is ``auto`` (the tokenizer's own), ``never``, or the path of a Jinja file.
    Raises ValueError when the tokenizer cannot be loaded or has neither pad nor end-of-sequence token, or the
    file is missing.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(name_or_path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ValueError(f"the tokenizer of {name_or_path!r} cannot be loaded: {error}") from error
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            raise ValueError(f"the tokenizer of {name_or_path!r} has neither a pad nor an end-of-sequence token")
        tokenizer.pad_token = tokenizer.eos_token
    if chat_template == "never":
        tokenizer.chat_template = None
    elif chat_template != "auto":
        if not Path(chat_template).is_file():
            raise ValueError(f"data.chat_template: {chat_template!r} is not auto, never or an existing file")
        tokenizer.chat_template = Path(chat_template).read_text()
    return tokenizer


def eos_token_ids(name_or_path: str, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """generation_config's end-of-sequence ids, the tokenizer's, and the one that ends a turn of its template."""
    ids = set(_generation_config_eos(name_or_path))
    if tokenizer.eos_token_id is not None:
        ids.add(tokenizer.eos_token_id)
    ids.update(_end_of_turn(tokenizer))
    if not ids:
        raise ValueError(f"{name_or_path!r} names no end-of-sequence id in tokenizer or generation_config.json")
    return frozenset(ids)


def _generation_config_eos(name_or_path: str) -> Iterable[int]:
    file = cached_file(name_or_path, "generation_config.json", _raise_exceptions_for_missing_entries=False)
    value = json.loads(Path(file).read_text()).get("eos_token_id") if file else None
    return [] if value is None else [value] if isinstance(value, int) else value


def _end_of_turn(tokenizer: PreTrainedTokenizerBase) -> Iterable[int]:
    """The first special id that the template writes after an assistant's text."""
    text = _rendered(tokenizer, [("user", "q"), ("assistant", _MARKER)])
    if _MARKER not in text:
        return []
    after = tokenizer(text.rpartition(_MARKER)[2], add_special_tokens=False)["input_ids"]
    special = set(tokenizer.all_special_ids)
    return [token for token in after if token in special][:1]


def _rendered(tokenizer: PreTrainedTokenizerBase, turns: Sequence[tuple[str, str]], generate: bool = False) -> str:
    """A conversation by the chat template; empty where there is none or it refuses."""
    if not tokenizer.chat_template:
        return ""
    messages = [{"role": role, "content": content} for role, content in turns]
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=generate)
    except TemplateError:
        return ""
    assert isinstance(text, str)
    return text


def tokenizer_problems(
    tokenizer: PreTrainedTokenizerBase, vocab_size: int | None, eos_ids: frozenset[int]
) -> list[str]:
    """What of a tokenizer does not fit a model of ``vocab_size`` (None: unknown) or cannot make prompts."""
    problems = []
    largest = max([*tokenizer.get_vocab().values(), *eos_ids], default=0)
    if vocab_size is not None and largest >= vocab_size:
        problems.append(
            f"the tokenizer (or generation_config.json) has ids up to {largest}, the model's vocabulary has "
            f"{vocab_size} entries: model and tokenizer do not belong together, or the embeddings were not resized"
        )
    if tokenizer.chat_template and _MARKER not in _rendered(tokenizer, [("user", _MARKER)], generate=True):
        problems.append(
            "the chat template refuses or drops a user message: give another one with data.chat_template=FILE, or none "
            "with data.chat_template=never"
        )
    return problems


def template_notes(tokenizer: PreTrainedTokenizerBase, chat_template: str = "auto") -> list[str]:
    """What a person should know of the template: that there is none, that it opens <think> or removes it."""
    if not tokenizer.chat_template:
        return ["the tokenizer has no chat template: prompts are plain text"] if chat_template == "auto" else []
    notes = []
    if _rendered(tokenizer, [("user", "q")], generate=True).rstrip().endswith("<think>"):
        notes.append("the chat template opens <think> in the prompt: the policy starts inside it")
    thought = _rendered(tokenizer, [("user", "q"), ("assistant", f"<think>{_MARKER}</think>a"), ("user", "q")])
    if thought and _MARKER not in thought:
        notes.append("the chat template removes <think> from earlier assistant messages of a row's own prompt")
    return notes
