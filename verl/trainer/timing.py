"""Seconds by phase, measured on the driver's clock."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class PhaseTimer:
    """Adds up the seconds of named phases: of the running step and of the whole run.

    ``progress`` counts what has happened: phases begun and ended, and ``mark``s in between.
    """

    def __init__(self) -> None:
        self._total: dict[str, float] = defaultdict(float)
        self._step: dict[str, float] = defaultdict(float)
        self._running: list[str] = []
        self.progress = 0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        self._running.append(name)
        self.mark()
        try:
            yield
        finally:
            self._running.remove(name)
            self.mark()
            seconds = time.perf_counter() - start
            self._total[name] += seconds
            self._step[name] += seconds

    def mark(self) -> None:
        self.progress += 1

    @property
    def current(self) -> str:
        """The phase that runs, the innermost of several; empty between two."""
        return self._running[-1] if self._running else ""

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
