"""What the policy reads that it did not write, and what the simulation LLM is asked.

Templates are text files whose placeholders are names in braces. They are used as they stand: a
final newline belongs to the prompt.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from verl.agent_loop.trajectory import TokenIds
from verl.utils.paths import resolve_path

CORRECTIVE_MESSAGE = (
    "\n\nMy previous action is invalid. To search, I write the query between <search> and </search>. "
    "To answer, I write the answer between <answer> and </answer>. Let me try again.\n\n"
)

NO_RESULTS = "No results were found."

POLICY_PLACEHOLDERS = frozenset({"question"})
SIMULATION_PLACEHOLDERS = frozenset({"query", "label", "kind", "question", "golden_answers", "topk"})
"""``label`` is Useful or Noisy, ``kind`` the same in lower case; ``golden_answers`` are all, as "a; b"."""

_PLACEHOLDER = re.compile(r"\{([A-Za-z_]\w*)\}")
_LONGEST_WORD = 24


@dataclass(frozen=True, slots=True)
class PromptTemplate:
    """A template's text and where it came from."""

    text: str
    source: str

    @property
    def placeholders(self) -> frozenset[str]:
        return frozenset(_PLACEHOLDER.findall(self.text))

    def render(self, **values: str | int) -> str:
        """Every placeholder replaced in one pass, so braces in the values stay as they are."""
        return _PLACEHOLDER.sub(lambda match: str(values[match[1]]), self.text)


def load_prompt_template(name_or_path: str) -> PromptTemplate:
    """The policy's instruction: the name of a packaged template (``search``), a file, or ``pkg://…``.

    Raises ValueError naming file and placeholder unless it holds {question} and no other.
    """
    template = _load(name_or_path, POLICY_PLACEHOLDERS)
    _require(template, "question")
    return template


def load_simulation_template(name_or_path: str) -> PromptTemplate:
    """The simulation LLM's prompt: ``simulate_sft``, ``simulate_prompt``, a file, or ``pkg://…``.

    Raises ValueError naming file and placeholder for unknown ones, and unless {query} and at
    least one of {label} and {kind} are there.
    """
    template = _load(name_or_path, SIMULATION_PLACEHOLDERS)
    _require(template, "query")
    if not template.placeholders & {"label", "kind"}:
        raise ValueError(f"prompt template {template.source} has neither {{label}} nor {{kind}}: noise needs one")
    return template


def _load(name_or_path: str, allowed: frozenset[str]) -> PromptTemplate:
    path = _find(name_or_path)
    try:
        template = PromptTemplate(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"prompt template {name_or_path!r} cannot be read: {error}") from error
    unknown = sorted(template.placeholders - allowed)
    if unknown:
        listed = ", ".join(f"{{{name}}}" for name in unknown)
        known = ", ".join(f"{{{name}}}" for name in sorted(allowed))
        raise ValueError(f"prompt template {path} has unknown placeholders: {listed} (known: {known})")
    return template


def _find(name_or_path: str) -> Path:
    packaged = Path(str(files("zerosearch") / "templates"))
    if re.fullmatch(r"\w+", name_or_path) and (packaged / f"{name_or_path}.txt").is_file():
        return packaged / f"{name_or_path}.txt"
    path = Path(resolve_path(name_or_path))
    if not path.is_file():
        names = ", ".join(sorted(file.stem for file in packaged.glob("*.txt")))
        raise ValueError(f"prompt template {name_or_path!r} is neither a file nor one of the packaged ones: {names}")
    return path


def _require(template: PromptTemplate, placeholder: str) -> None:
    if placeholder not in template.placeholders:
        raise ValueError(f"prompt template {template.source} lacks the placeholder {{{placeholder}}}")


def encode_plain(tokenizer: PreTrainedTokenizerBase, text: str) -> TokenIds:
    """Ids of ``text`` as text: nothing is added and no special id arises from what it says."""
    encoded = tokenizer(text, add_special_tokens=False, split_special_tokens=True, verbose=False)
    return tuple(encoded["input_ids"])


def check_plain_encoding(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises ValueError when the text of some special token cannot be encoded as plain text."""
    special = {i: str(token.content) for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    for text in special.values():
        if special.keys() & set(encode_plain(tokenizer, text)):
            raise ValueError(f"the tokenizer turns the text {text!r} into a special token even as plain text")


def render_information(documents: Sequence[str]) -> str:
    """The observation after a search; documents come without their ``Doc i: `` prefix. A search that
    found none says so in plain words."""
    listed = "\n".join(f"Doc {number}: {text}" for number, text in enumerate(documents, start=1))
    return f"\n\n<information>{listed or NO_RESULTS}</information>\n\n"


@dataclass(frozen=True, slots=True)
class Observation:
    """The tokens that answer a search; ``documents`` as the policy sees them."""

    token_ids: TokenIds
    documents: tuple[str, ...]
    truncated: bool


def encode_information(tokenizer: PreTrainedTokenizerBase, documents: Sequence[str], limit: int) -> Observation:
    """The observation in at most ``limit`` tokens.

    Where it is longer, every document is cut to the same number of words, the largest that fits;
    the layout and the closing tag always stand. (A run of more than 24 characters without white
    space counts as several words.) Raises ValueError when not even the layout fits.
    """
    whole = encode_plain(tokenizer, render_information(documents))
    if len(whole) <= limit:
        return Observation(whole, tuple(documents), truncated=False)
    words = [re.findall(rf"\s*\S{{1,{_LONGEST_WORD}}}", text) for text in documents]
    fits = _cut(tokenizer, words, 0)
    low, high = 0, max(map(len, words), default=0)
    while low < high - 1:
        middle = (low + high) // 2
        candidate = _cut(tokenizer, words, middle)
        if len(candidate.token_ids) <= limit:
            low, fits = middle, candidate
        else:
            high = middle
    if len(fits.token_ids) > limit:
        raise ValueError(f"an observation of {limit} tokens cannot hold the layout of {len(documents)} documents")
    return fits


def _cut(tokenizer: PreTrainedTokenizerBase, words: Sequence[Sequence[str]], count: int) -> Observation:
    documents = tuple("".join(document[:count]).strip() for document in words)
    return Observation(encode_plain(tokenizer, render_information(documents)), documents, truncated=True)
