"""What a run says of itself at its end: summary.json and a table."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from verl.agent_loop.base import AgentLoop, ScoredRow, Validation, scores_by_row
from verl.trainer.alarms import AlarmRecord
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.utils.intervals import Interval, bootstrap_mean


@dataclass
class RunClock:
    """Seconds of the parts of a run; ``setup`` is the installation that preceded it."""

    setup: float = 0.0
    startup: float = 0.0
    training: float = 0.0
    total: float = 0.0
    phases: dict[str, float] = field(default_factory=dict)


def make_summary(
    trainer: RayPPOTrainer | None, environment: AgentLoop[Any] | None, clock: RunClock, exit_reason: str
) -> dict[str, Any]:
    """Everything summary.json holds; a run that ended early holds what it got to."""
    summary: dict[str, Any] = {
        "exit_reason": exit_reason,
        "steps": trainer.steps_done if trainer else 0,
        "seconds_setup": round(clock.setup, 2),
        "seconds_startup": round(clock.startup, 2),
        "seconds_training": round(clock.training, 2),
        "seconds_total": round(clock.total, 2),
        "seconds_by_phase": {name: round(value, 3) for name, value in clock.phases.items()},
        "failures": dict(trainer.failures + trainer.validator.failures) if trainer else {},
        "alarms": [asdict(record) for record in trainer.alarms.records] if trainer else [],
    }
    if trainer and environment and trainer.validator.last:
        validator = trainer.validator
        summary |= environment.summary(validator.first, validator.last)
        summary |= {name.rpartition("/")[2]: value for name, value in validator.probe.items()}
        summary["validation"] = validator.metrics
        summary["best_step"] = trainer.weights.best_step
    return {name: _finite(value) for name, value in summary.items()}


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def print_report(
    trainer: RayPPOTrainer, environment: AgentLoop[Any], summary: Mapping[str, Any], places: Mapping[str, str]
) -> None:
    """The closing tables: held-out scores before and after, the environment's figures, time, places."""
    console = Console(width=110, highlight=False)
    if trainer.validator.last:
        console.print(_score_table(environment, trainer.validator.first, trainer.validator.last))
    figures = Table(title="The run", show_header=False)
    for name, value in environment.figures(trainer.validator.metrics).items():
        figures.add_row(name, value)
    figures.add_row("steps", str(summary["steps"]))
    figures.add_row("lost to the infrastructure", str(summary["failures"] or "none"))
    figures.add_row("alarms", ", ".join(map(_alarm, trainer.alarms.records)) or "none")
    phases = ", ".join(f"{name} {seconds:.1f}" for name, seconds in summary["seconds_by_phase"].items())
    figures.add_row("seconds by phase", phases)
    times = ("setup", "startup", "training", "total")
    figures.add_row("seconds", ", ".join(f"{name} {summary[f'seconds_{name}']:.1f}" for name in times))
    for name, place in places.items():
        figures.add_row(name, place)
    console.print(figures)


def _alarm(record: AlarmRecord) -> str:
    last = f" to {record.last_step}" if record.last_step > record.first_step else ""
    return f"{record.name} (step {record.first_step}{last})"


def _score_table(environment: AgentLoop[Any], first: Validation, last: Validation) -> Table:
    """A row per mode and score; where a mode has several data sets, each has rows of its own as well."""
    table = Table(title="Held-out scores (95 % bootstrap intervals over questions)")
    for column in ("setting", "score", "n", "before", "after", "gain"):
        table.add_column(column, justify="left" if column in ("setting", "score") else "right")
    for mode, rows in last.items():
        sources = sorted({row.data_source for row in rows})
        for source in [None, *sources] if len(sources) > 1 else [None]:
            setting = environment.describe_mode(mode) + (f", {source}" if source else "")
            before, after = (_of_source(validation.get(mode, ()), source) for validation in (first, last))
            for score in environment.reported_scores:
                table.add_row(setting, score, *_before_and_after(before, after, score))
    return table


def _of_source(rows: Sequence[ScoredRow], source: str | None) -> list[ScoredRow]:
    return [row for row in rows if source is None or row.data_source == source]


def _before_and_after(first: Sequence[ScoredRow], last: Sequence[ScoredRow], score: str) -> tuple[str, str, str, str]:
    """n, score before, score after, gain: over the rows scored on either side, the gain over those on both."""
    before, after = scores_by_row(first, score), scores_by_row(last, score)
    gains = [after[key] - before[key] for key in after if key in before]
    intervals = [bootstrap_mean(values) for values in (list(before.values()), list(after.values()), gains)]
    return str(len(after)), _interval(intervals[0]), _interval(intervals[1]), _interval(intervals[2])


def _interval(interval: Interval) -> str:
    if not interval.n:
        return "-"
    return f"{interval.mean:.3f} [{interval.low:.3f}, {interval.high:.3f}]"
