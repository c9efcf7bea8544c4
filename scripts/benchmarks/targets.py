"""How every benchmark ends: one line per target, and the same as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Target:
    """A measured value and its goal: a lower bound, or an upper one with ``at_most``."""

    name: str
    value: float
    goal: float
    at_most: bool = False

    @property
    def holds(self) -> bool:
        return self.value <= self.goal if self.at_most else self.value >= self.goal


def report(targets: Sequence[Target], path: Path | None) -> None:
    """Prints ``name: value (goal …)`` lines; writes {name: {value, goal, holds}} to ``path``."""
    for target in targets:
        print(f"{target.name}: {target.value:.3g} (goal {'<=' if target.at_most else '>='} {target.goal:g})")
    if path is not None:
        listed = {t.name: {"value": t.value, "goal": t.goal, "holds": t.holds} for t in targets}
        path.write_text(json.dumps(listed, indent=2) + "\n")
