"""The metrics that the tables of the documentation define, and the keys of a metrics row that stand in none."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

DOCS = Path(__file__).parent.parent / "docs"
PAGES = ("metrics.md", "metrics-search.md")
FAMILIES = ("val/{mode}/…", "alarm/{name}", "alarm/search_…")
"""Rows that stand for many metrics, each of which is a row of its own elsewhere: they define none."""

_VARIABLE = re.compile(r"(\{\w+\}|…|(?<=[_/])[A-Z]$)")


def undocumented(keys: Iterable[str]) -> list[str]:
    """The keys that no table defines, neither as they are nor as what is measured in a validation."""
    patterns = [_pattern(name) for name in documented_names()]
    return [key for key in keys if not any(p.fullmatch(form) for p in patterns for form in _forms(key))]


def documented_names() -> list[str]:
    """The first cells of all tables, written out: of ``a/mean``, ``/min`` the second is ``a/min``."""
    cells = [cell for page in PAGES for cell in _first_cells((DOCS / page).read_text())]
    return [name for header, cell in cells for name in _names(header, cell) if name not in FAMILIES]


def _first_cells(text: str) -> Iterator[tuple[str, str]]:
    """(Header, cell) of each row's first column; the rule below a header is no row."""
    header = ""
    for line in text.splitlines():
        cell = line.split("|")[1].strip() if line.startswith("|") else ""
        if header and cell.strip(":-"):
            yield header, cell
        header = (header or cell) if line.startswith("|") else ""


def _names(header: str, cell: str) -> list[str]:
    """A header such as ``alarm/…`` is the beginning of all names below it."""
    beginning = header.strip("`").removesuffix("…") if "…" in header else ""
    names: list[str] = []
    for code in re.findall("`([^`]+)`", cell):
        is_ending = code[0] in "/_"
        names.append((names[-1].rpartition(code[0])[0] if is_ending else beginning) + code)
    return names


def _pattern(name: str) -> re.Pattern[str]:
    return re.compile("".join(_matching(part) for part in _VARIABLE.split(name)))


def _matching(part: str) -> str:
    if part in ("…", "{data_source}"):
        return ".+"
    if part.startswith("{"):
        return "[^/]+"
    return r"\d+" if re.fullmatch("[A-Z]", part) else re.escape(part)


def _forms(key: str) -> list[str]:
    """Validations use the names of training under ``val/MODE/``, and under ``val/`` where no mode is meant."""
    first, *rest = key.split("/")
    return [key, "/".join(rest), "/".join(rest[1:])] if first == "val" else [key]
