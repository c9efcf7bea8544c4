"""Tokenizers as training needs them: with a pad id, every end-of-sequence id known, a template chosen."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils.hub import cached_file


def hf_tokenizer(
    name_or_path: str, trust_remote_code: bool = False, chat_template: str = "auto"
) -> PreTrainedTokenizerBase:
    """A tokenizer with a pad token (its end of sequence where it has none: masks never come from ids).

    ``chat_template`` is ``auto`` (the tokenizer's own), ``never``, or the path of a Jinja file.
    Raises ValueError when there is neither pad nor end-of-sequence token, or the file is missing.
    """
    tokenizer = AutoTokenizer.from_pretrained(name_or_path, trust_remote_code=trust_remote_code)
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
    if not tokenizer.chat_template:
        return []
    marker = "zqxj"
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": marker}]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    assert isinstance(text, str)
    after = tokenizer(text.rpartition(marker)[2], add_special_tokens=False)["input_ids"]
    special = set(tokenizer.all_special_ids)
    return [token for token in after if token in special][:1]
