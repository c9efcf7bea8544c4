"""Where a generation ends: stop strings in decoded text, end-of-sequence ids, length.

Stop strings are looked for in text and not in ids, because tokenizers merge a tag's characters
with their neighbours. Text is decoded only when the newest token can complete a stop string.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

_REPLACEMENT = "�"
_MARGIN = 8


@dataclass(frozen=True, slots=True)
class StopStrings:
    """``watched[token]`` is 1 where that token may complete one of ``strings``."""

    strings: tuple[str, ...]
    watched: bytes
    window: int


class StopFinder:
    """Finds stop strings in what ``tokenizer`` decodes; ``vocab_size`` is the model's."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._pieces: list[str] | None = None
        self._prepared: dict[tuple[str, ...], StopStrings] = {}

    def prepare(self, strings: tuple[str, ...]) -> StopStrings:
        """Raises ValueError for an empty stop string."""
        if not all(strings):
            raise ValueError("a stop string is empty")
        if strings not in self._prepared:
            if len(self._prepared) >= 64:
                self._prepared.clear()
            # A token adds at least one byte to the text, except at the window's borders.
            window = max((len(s.encode()) for s in strings), default=0) + _MARGIN
            self._prepared[strings] = StopStrings(strings, self._watched(strings), window)
        return self._prepared[strings]

    def _watched(self, strings: tuple[str, ...]) -> bytes:
        if not strings:
            return bytes(self._vocab_size)
        last = {s[-1] for s in strings}
        if any(ord(c) > 127 for c in last):
            last.add(_REPLACEMENT)
        return bytes(not last.isdisjoint(piece) for piece in self._vocabulary())

    def _vocabulary(self) -> list[str]:
        """What each id adds to a text. After a letter, because decoders may drop the space of a text's first token."""
        if self._pieces is None:
            known = min(len(self._tokenizer), self._vocab_size)
            letter = (self._tokenizer("a", add_special_tokens=False)["input_ids"] or [0])[-1]
            pairs = [[letter, token] for token in range(known)]
            before = len(str(self._tokenizer.decode([letter], clean_up_tokenization_spaces=False)))
            texts = self._tokenizer.batch_decode(pairs, clean_up_tokenization_spaces=False)
            self._pieces = [text[before:] for text in texts] + [""] * (self._vocab_size - known)
        return self._pieces

    def find(self, generated: Sequence[int], stop: StopStrings) -> str | None:
        """The stop string that the newest of ``generated`` completed first, the longest of those ending together."""
        tail = str(self._tokenizer.decode(list(generated[-stop.window :]), clean_up_tokenization_spaces=False))
        found = [(tail.find(s) + len(s), -len(s), s) for s in stop.strings if s in tail]
        return min(found)[2] if found else None
