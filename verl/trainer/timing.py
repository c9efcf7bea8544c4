"""Seconds by phase, measured on the driver's clock."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class PhaseTimer:
    """Adds up the seconds of named phases: of the running step and of the whole run."""

    def __init__(self) -> None:
        self._total: dict[str, float] = defaultdict(float)
        self._step: dict[str, float] = defaultdict(float)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - start
            self._total[name] += seconds
            self._step[name] += seconds

    def take_step(self) -> dict[str, float]:
        """The phases since the last call; starts the next step."""
        taken, self._step = dict(self._step), defaultdict(float)
        return taken

    @property
    def totals(self) -> dict[str, float]:
        return dict(self._total)


def covered_seconds(intervals: Iterable[tuple[float, float]]) -> float:
    """The length of the union of (begin, end) intervals."""
    covered, reached = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        covered += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return covered
