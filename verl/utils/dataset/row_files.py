"""Reading the files that hold rows."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

CHUNK = 2048
"""Rows read and tokenised at once."""
SUFFIXES = (".parquet", ".jsonl")

Values = Mapping[str, Any]


def read_columns(file: str) -> list[str]:
    """Names of a file's columns, without reading its rows (JSONL: those of its first row).

    Raises ValueError for a file that is missing or of neither form.
    """
    _must_exist(file)
    if file.endswith(".jsonl"):
        return list(next(iter(_json_rows(file)), {}))
    try:
        return list(pq.read_schema(file).names)
    except (OSError, ValueError) as error:
        raise _unreadable(file, error) from error


def read_chunks(file: str, size: int = CHUNK) -> Iterator[list[Values]]:
    """The rows of one Parquet or JSONL file as plain Python values, ``size`` at a time.

    Raises ValueError naming the file, for JSONL also the line.
    """
    _must_exist(file)
    if file.endswith(".jsonl"):
        rows = _json_rows(file)
        while chunk := list(islice(rows, size)):
            yield chunk
        return
    try:
        with pq.ParquetFile(file) as parquet:
            for batch in parquet.iter_batches(size):
                yield batch.to_pylist()
    except (OSError, ValueError) as error:
        raise _unreadable(file, error) from error


def read_rows(file: str) -> list[Values]:
    """All rows of one file, see `read_chunks`."""
    return [row for chunk in read_chunks(file) for row in chunk]


def _must_exist(file: str) -> None:
    if not Path(file).is_file():
        raise ValueError(f"data file {file!r} does not exist")


def _unreadable(file: str, error: OSError | ValueError) -> ValueError:
    return ValueError(
        f"data file {file!r} is not readable as Parquet: {error} (JSON lines are read too, from files named *.jsonl; "
        "other forms: pandas.read_csv(…).to_parquet(…))"
    )


def _json_rows(file: str) -> Iterator[Values]:
    with Path(file).open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            place = f"data file {file!r} line {number}"
            try:
                text = line.decode("utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(f"{place} is not UTF-8 ({error}): write the file in that encoding") from error
            if text.strip():
                yield _json_row(text, place)


def _json_row(line: str, place: str) -> Values:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{place} is not JSON: {error}") from error
    if not isinstance(row, dict):
        raise ValueError(f"{place} is not a JSON object")
    return row


def short_names(files: Sequence[str]) -> list[str]:
    """A name for every file that no other one of them has: the last parts of its path, as many as it takes.

    Raises ValueError for a file listed twice.
    """
    doubled = [file for file, count in Counter(files).items() if count > 1]
    if doubled:
        raise ValueError(f"data file {doubled[0]!r} is listed twice")
    parts = [Path(file).parts for file in files]
    for length in range(1, max(map(len, parts), default=0) + 1):
        names = ["/".join(part[-length:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return list(files)
