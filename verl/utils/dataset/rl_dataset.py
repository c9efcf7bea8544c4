"""Rows of Parquet files as prompts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from transformers import PreTrainedTokenizerBase

from verl.agent_loop.trajectory import Prompt, TokenIds

RowCheck = Callable[[Mapping[str, Any]], None]
MAX_LISTED = 5


@dataclass(frozen=True)
class PromptFormat:
    """How a row becomes prompt ids.

    A row's own ``prompt_key`` messages are taken verbatim; otherwise the question is put into
    ``template`` as the one user message. Never both.
    """

    template: str
    prompt_key: str = "prompt"
    question_key: str = "question"
    max_prompt_length: int = 2048
    filter_overlong: bool = True

    def messages(self, row: Mapping[str, Any]) -> list[dict[str, str]]:
        """Raises ValueError when the row holds neither messages nor a question."""
        own = row.get(self.prompt_key)
        if own:
            return [{"role": message["role"], "content": message["content"]} for message in own]
        question = row.get(self.question_key) or (row.get("extra_info") or {}).get("question")
        if not isinstance(question, str) or not question.strip():
            raise ValueError(f"needs {self.prompt_key!r} (chat messages) or {self.question_key!r} (a non-empty string)")
        return [{"role": "user", "content": self.template.replace("{question}", question.strip())}]


def render_prompt(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, str]]) -> str:
    """The chat template applied; without one the contents joined by blank lines."""
    if tokenizer.chat_template:
        text = tokenizer.apply_chat_template([dict(m) for m in messages], tokenize=False, add_generation_prompt=True)
        assert isinstance(text, str)
        return text
    return "\n\n".join(message["content"] for message in messages) + "\n"


@dataclass(frozen=True, slots=True)
class Row:
    """One usable row: where it stands, its prompt ids, its values."""

    file: str
    index: int
    prompt_ids: TokenIds
    values: Mapping[str, Any]

    def prompt(self, step: int) -> Prompt:
        """The group's prompt at one step; the uid is a function of file, row and step, never random."""
        source = str(self.values.get("data_source") or Path(self.file).stem)
        return Prompt(f"{Path(self.file).name}#{self.index}@{step}", self.prompt_ids, source, self.values)


class RLHFDataset:
    """All usable rows of ``files`` in file order; the first ``max_samples`` of them when not -1.

    Overlong prompts are filtered (or refused), counted in ``overlong`` and listed by file and row.
    Raises ValueError naming file and row for what cannot be used.
    """

    def __init__(
        self,
        files: Sequence[str],
        tokenizer: PreTrainedTokenizerBase,
        prompt_format: PromptFormat,
        check_row: RowCheck | None = None,
        max_samples: int = -1,
    ) -> None:
        self._tokenizer = tokenizer
        self._format = prompt_format
        self._check_row = check_row
        self.overlong: list[str] = []
        self.rows: list[Row] = []
        for file in files:
            self._read(file)
        if max_samples >= 0:
            self.rows = self.rows[:max_samples]
        if not self.rows:
            raise ValueError(f"no usable rows in {list(files)} ({len(self.overlong)} prompts are too long)")

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Row:
        return self.rows[index]

    def _read(self, file: str) -> None:
        problems: list[str] = []
        for index, values in enumerate(read_rows(file)):
            try:
                self._add(file, index, values)
            except ValueError as error:
                problems.append(f"{file} row {index}: {error}")
        if problems:
            more = f"\n… and {len(problems) - MAX_LISTED} more" if len(problems) > MAX_LISTED else ""
            raise ValueError("unusable rows:\n" + "\n".join(problems[:MAX_LISTED]) + more)

    def _add(self, file: str, index: int, values: Mapping[str, Any]) -> None:
        messages = self._format.messages(values)
        if self._check_row is not None:
            self._check_row(values)
        text = render_prompt(self._tokenizer, messages)
        ids = self._tokenizer(text, add_special_tokens=not self._tokenizer.chat_template)["input_ids"]
        if len(ids) <= self._format.max_prompt_length:
            self.rows.append(Row(file, index, tuple(ids), values))
            return
        if not self._format.filter_overlong:
            limit = self._format.max_prompt_length
            raise ValueError(f"the prompt has {len(ids)} tokens, data.max_prompt_length is {limit}")
        self.overlong.append(f"{file} row {index} ({len(ids)} tokens)")


def read_rows(file: str) -> list[dict[str, Any]]:
    """The rows of one Parquet file as plain Python values. Raises ValueError naming the file."""
    if not Path(file).is_file():
        raise ValueError(f"data file {file!r} does not exist")
    try:
        return pq.read_table(file).to_pylist()
    except (OSError, ValueError) as error:
        raise ValueError(f"data file {file!r} is not readable as Parquet: {error}") from error


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
