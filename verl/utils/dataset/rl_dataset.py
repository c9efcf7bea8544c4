"""Rows of data files as prompts."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Literal

import numpy as np
from transformers import PreTrainedTokenizerBase

from verl.agent_loop.trajectory import Prompt, TokenIds
from verl.utils.dataset.ground_truth import ground_truth
from verl.utils.dataset.prompt_format import PromptFormat, render_prompt
from verl.utils.dataset.row_files import Values, read_chunks, read_columns, short_names

__all__ = ["PromptFormat", "RLHFDataset", "Row", "RowCheck", "RowPolicy", "StatefulLoader", "render_prompt"]

RowCheck = Callable[[Values], None]
MAX_LISTED = 5


@dataclass(frozen=True)
class RowPolicy:
    """What happens to rows that cannot be used, and to rows with the prompt and gold answers of an earlier one."""

    invalid: Literal["refuse", "filter"] = "refuse"
    duplicate: Literal["keep", "drop", "refuse"] = "keep"


@dataclass(frozen=True, slots=True)
class Row:
    """One usable row: where it stands, the file's name in uids, its prompt ids, its values."""

    file: str
    index: int
    prompt_ids: TokenIds
    values: Values
    label: str

    def prompt(self, step: int) -> Prompt:
        """The group's prompt at one step; the uid is a function of file, row and step, never random."""
        source = str(self.values.get("data_source") or Path(self.file).stem)
        return Prompt(f"{self.label}#{self.index}@{step}", self.prompt_ids, source, self.values)


class RLHFDataset:
    """All usable rows of ``files`` in file order; the first ``max_samples`` of them when not -1.

    Rows are dropped or refused as ``prompt_format.filter_overlong`` and ``policy`` say. ``overlong``,
    ``invalid`` and ``duplicates`` list them by file and row; ``own_prompts`` counts rows whose own
    messages are used. Raises ValueError naming file and row for what cannot be used.
    """

    def __init__(
        self,
        files: Sequence[str],
        tokenizer: PreTrainedTokenizerBase,
        prompt_format: PromptFormat,
        check_row: RowCheck | None = None,
        max_samples: int = -1,
        policy: RowPolicy | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._format = prompt_format
        self._check_row = check_row
        self._policy = policy or RowPolicy()
        self.overlong: list[str] = []
        self.invalid: list[str] = []
        self.duplicates: list[str] = []
        self.own_prompts = 0
        self.rows: list[Row] = []
        self.places: dict[bytes, str] = {}
        """File and row by content: the prompt's ids and the gold answers."""
        for label, file in zip(short_names(files), files, strict=True):
            self._read(file, label, max_samples)
        if max_samples >= 0:
            self.rows = self.rows[:max_samples]
        self._refuse(list(files))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Row:
        return self.rows[index]

    def _read(self, file: str, label: str, max_samples: int) -> None:
        wrong = self._format.missing_columns(read_columns(file))
        if wrong:
            raise ValueError(f"data file {file!r} {wrong}")
        start = 0
        for chunk in read_chunks(file):
            if 0 <= max_samples <= len(self.rows):
                return
            self._add_chunk(file, label, start, chunk)
            start += len(chunk)
        if not start:
            raise ValueError(f"data file {file!r} holds no rows")

    def _add_chunk(self, file: str, label: str, start: int, chunk: Sequence[Values]) -> None:
        texts: list[str] = []
        usable: list[tuple[int, Values]] = []
        for index, values in enumerate(chunk, start):
            try:
                texts.append(self._text(values))
                usable.append((index, values))
            except ValueError as error:
                self.invalid.append(f"{file} row {index}: {error}")
        if texts:
            encoded = self._tokenizer(texts, add_special_tokens=not self._tokenizer.chat_template, verbose=False)
            for (index, values), ids in zip(usable, encoded["input_ids"], strict=True):
                self._add(Row(file, index, tuple(ids), values, label))

    def _text(self, values: Values) -> str:
        messages = self._format.messages(values)
        ground_truth(values)  # of a wrong type, it is this row's fault whichever reward is used
        if self._check_row is not None:
            self._check_row(values)
        return render_prompt(self._tokenizer, messages)

    def _add(self, row: Row) -> None:
        place = f"{row.file} row {row.index}"
        if len(row.prompt_ids) > self._format.max_prompt_length:
            self.overlong.append(f"{place} ({len(row.prompt_ids)} tokens)")
            return
        content = _content_key(row)
        if content in self.places:
            self.duplicates.append(f"{place} repeats {self.places[content]}")
            if self._policy.duplicate == "drop":
                return
        self.places.setdefault(content, place)
        self.own_prompts += bool(row.values.get(self._format.prompt_key))
        self.rows.append(row)

    def _refuse(self, files: list[str]) -> None:
        refused = []
        if self.invalid and self._policy.invalid == "refuse":
            refused.append("unusable rows (data.invalid_rows=filter leaves them out):\n" + listed(self.invalid))
        if self.overlong and not self._format.filter_overlong:
            limit = self._format.max_prompt_length
            refused.append(f"prompts longer than data.max_prompt_length ({limit}):\n" + listed(self.overlong))
        if self.duplicates and self._policy.duplicate == "refuse":
            refused.append("rows given twice (data.duplicate_rows=keep or drop):\n" + listed(self.duplicates))
        if not self.rows and not refused:
            counts = f"{len(self.invalid)} cannot be used, {len(self.overlong)} prompts are too long"
            refused.append(f"no usable rows in {files} ({counts})")
        if refused:
            raise ValueError("\n".join(refused))

    def notes(self) -> list[str]:
        """What a person should know of rows left out, repeated, or of two kinds; each kind counted, the first named."""
        limit, kept = self._format.max_prompt_length, self._policy.duplicate == "keep"
        kinds = (
            (self.overlong, f"prompts are longer than data.max_prompt_length ({limit}) and left out"),
            (self.invalid, "rows cannot be used and are left out"),
            (self.duplicates, f"rows repeat an earlier one and are {'kept' if kept else 'left out'}"),
        )
        notes = [f"{len(rows)} {words}:\n{listed(rows)}" for rows, words in kinds if rows]
        if 0 < self.own_prompts < len(self.rows):
            share = f"{self.own_prompts} of {len(self.rows)} rows"
            notes.append(f"{share} bring chat messages of their own, the others a question: two kinds of prompt")
        return notes

    def shared_with(self, other: RLHFDataset) -> list[str]:
        """Rows of ``other`` with the prompt and gold answers of one of these, by file and row."""
        return [f"{place} is also {self.places[key]}" for key, place in other.places.items() if key in self.places]


def listed(rows: Sequence[str]) -> str:
    """The first few, one a line, and how many more there are."""
    more = [f"… and {len(rows) - MAX_LISTED} more"] if len(rows) > MAX_LISTED else []
    return "\n".join([*rows[:MAX_LISTED], *more])


def _content_key(row: Row) -> bytes:
    told = json.dumps(ground_truth(row.values), default=repr, sort_keys=True, ensure_ascii=False)
    return blake2b(np.asarray(row.prompt_ids, dtype=np.int64).tobytes() + told.encode(), digest_size=16).digest()


class StatefulLoader:
    """Batches of row indices in an order fixed by (seed, epoch).

    Every batch is full: an epoch's remainder is left over for the next permutation. The state is
    (epoch, position), so a resumed loader goes on exactly where the saved one stood.
    """

    def __init__(self, rows: int, batch_size: int, seed: int, shuffle: bool = True) -> None:
        if batch_size > rows:
            raise ValueError(f"data.train_batch_size is {batch_size}, but there are only {rows} usable rows")
        self._rows = rows
        self._batch_size = batch_size
        self._seed = seed
        self._shuffle = shuffle
        self._epoch = 0
        self._position = 0

    def next_batch(self) -> list[int]:
        if self._position + self._batch_size > self._rows:
            self._epoch, self._position = self._epoch + 1, 0
        start, self._position = self._position, self._position + self._batch_size
        return self._order()[start : self._position]

    def _order(self) -> list[int]:
        if not self._shuffle:
            return list(range(self._rows))
        return np.random.default_rng([self._seed, self._epoch]).permutation(self._rows).tolist()

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self._epoch, "position": self._position, "rows": self._rows}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Raises ValueError when the data set has another number of rows than when it was saved."""
        if state["rows"] != self._rows:
            raise ValueError(f"the checkpoint was made with {state['rows']} rows, the data now has {self._rows}")
        self._epoch, self._position = state["epoch"], state["position"]
