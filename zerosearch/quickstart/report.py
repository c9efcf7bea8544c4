"""Measured figures with their targets, and the table that a person reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Measure:
    """One figure, what it was counted over, and the bounds it should keep."""

    section: str
    name: str
    value: float
    count: int
    at_least: float | None = None
    at_most: float | None = None

    @property
    def passed(self) -> bool:
        above = self.at_least is None or self.value >= self.at_least
        return above and (self.at_most is None or self.value <= self.at_most)

    @property
    def target(self) -> str:
        bounds = [f"≥ {self.at_least:g}"] if self.at_least is not None else []
        bounds += [f"≤ {self.at_most:g}"] if self.at_most is not None else []
        return ", ".join(bounds) or "-"


Report = Mapping[int, Sequence[Measure]]
"""Measures by seed; every seed has the same ones in the same order."""


def as_json(report: Report) -> dict[str, Any]:
    """Plain values for a JSON file."""
    return {
        f"seed {seed}": [asdict(measure) | {"passed": measure.passed} for measure in measures]
        for seed, measures in report.items()
    }


def as_table(report: Report) -> str:
    """A Markdown table, one column for each seed; `!` marks a missed target."""
    seeds = list(report)
    lines = [
        "| | " + " | ".join(f"seed {seed}" for seed in seeds) + " | target | n |",
        "|---|" + "---|" * (len(seeds) + 2),
    ]
    for row in zip(*report.values(), strict=True):
        assert len({(measure.section, measure.name) for measure in row}) == 1
        cells = [f"{measure.value:.3f}{'' if measure.passed else ' !'}" for measure in row]
        counts = "/".join(dict.fromkeys(str(measure.count) for measure in row))
        first = row[0]
        lines.append(f"| {first.section}: {first.name} | {' | '.join(cells)} | {first.target} | {counts} |")
    return "\n".join(lines) + "\n"
