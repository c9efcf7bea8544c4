"""What an alarm watches: one metric of a training step and a bound on one side."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Measure = Literal["value", "times_first", "increase"]


@dataclass(frozen=True, slots=True)
class AlarmRule:
    """An alarm rings while a metric is beyond ``bound``, an excluded limit, on one ``side``.

    Compared is the metric itself (``value``), its ratio to its first positive value in the run
    (``times_first``), or how much it grew since the step before, from 0 at its first (``increase``).
    ``per`` divides the metric by another first. A value that is not finite is beyond every bound;
    without a bound the rule is off.

    ``armed_first``: what is low from the start has not fallen, so the alarm waits until the metric
    has been within the bound for as many steps in a row as an alarm takes to begin. ``at_once``: one
    step is enough to begin. ``name`` is that of the metric ``alarm/{name}``; ``meaning`` and
    ``remedy`` are clauses without a full stop.
    """

    name: str
    metric: str
    side: Literal["above", "below"]
    bound: float | None
    meaning: str
    remedy: str
    measure: Measure = "value"
    per: str | None = None
    armed_first: bool = False
    at_once: bool = False

    @property
    def subject(self) -> str:
        """What is measured, in words."""
        return f"{self.metric} per {self.per}" if self.per else self.metric

    @property
    def limit(self) -> str:
        """Where the alarm begins, in words, as in "is 7, above 5"."""
        words = {
            "value": f"{self.side} {self.bound:g}",
            "times_first": f"{self.side} {self.bound:g} times its first value",
            "increase": f"{self.side} the step before by more than {self.bound:g}",
        }
        return words[self.measure]
