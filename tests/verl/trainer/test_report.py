"""The closing table and summary.json, of a trainer whose validations are given."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from verl.agent_loop.base import ScoredRow, Validation
from verl.trainer.alarms import AlarmRecord
from verl.trainer.report import RunClock, make_summary, print_report

CLOCK = RunClock(setup=1.234, startup=2.0, training=30.555, total=34.0, phases={"rollout": 10.12345, "log": 0.5})


def rows(source: str, **rewards: float) -> list[ScoredRow]:
    """A row of ``source`` for each name, with one sample, whose second score is twice the first."""
    return [ScoredRow(name, 0, source, {"reward": r, "double": 2 * r}) for name, r in rewards.items()]


class Environment:
    reported_scores: tuple[str, ...] = ("reward",)

    def describe_mode(self, mode: str) -> str:
        return mode.upper()

    def figures(self, validation: Mapping[str, float]) -> dict[str, str]:
        return {"searches": f"{validation['val/calm/searches']:.2f}"}

    def summary(self, before: Validation, after: Validation) -> dict[str, float]:
        return {"before": float(len(before)), "after": float(len(after)), "gain": math.nan}


def trained(first: Validation, last: Validation) -> Any:
    validator = SimpleNamespace(
        first=first,
        last=last,
        metrics={"val/calm/searches": 1.5},
        probe={"search/sensitivity": 0.75, "search/pairs": 4.0},
        failures=Counter({"TimeoutError": 1}),
    )
    return SimpleNamespace(
        validator=validator,
        steps_done=7,
        failures=Counter({"TimeoutError": 2, "InfrastructureError": 1}),
        alarms=SimpleNamespace(records=[AlarmRecord("truncated", 3, 5), AlarmRecord("kl_loss", 6, 6)]),
        weights=SimpleNamespace(best_step=4),
    )


def printed(trainer: Any, capsys: pytest.CaptureFixture[str], *scores: str) -> list[list[str]]:
    """The cells of all lines of all tables."""
    environment: Any = Environment()
    environment.reported_scores = scores
    summary = make_summary(trainer, environment, CLOCK, "completed")
    print_report(trainer, environment, summary, {"metrics": "metrics.jsonl"})
    lines = [line for line in capsys.readouterr().out.splitlines() if line[:1] in "│┃"]
    return [[cell.strip() for cell in line.strip("│┃").replace("┃", "│").split("│")] for line in lines if line]


def test_scores_before_and_after_by_mode_and_score(capsys: pytest.CaptureFixture[str]) -> None:
    """Equal rows, so that every resample has the same mean; the gain is over the rows scored on both sides."""
    first = {"calm": rows("nq", a=0.25, b=0.25), "rough": rows("nq", a=0.0)}
    last = {"calm": rows("nq", b=0.75, c=0.75, d=0.75), "rough": rows("nq", a=0.5)}
    table = printed(trained(first, last), capsys, "reward", "double")
    assert table[:5] == [
        ["setting", "score", "n", "before", "after", "gain"],
        ["CALM", "reward", "3", "0.250 [0.250, 0.250]", "0.750 [0.750, 0.750]", "0.500 [0.500, 0.500]"],
        ["CALM", "double", "3", "0.500 [0.500, 0.500]", "1.500 [1.500, 1.500]", "1.000 [1.000, 1.000]"],
        ["ROUGH", "reward", "1", "0.000 [0.000, 0.000]", "0.500 [0.500, 0.500]", "0.500 [0.500, 0.500]"],
        ["ROUGH", "double", "1", "0.000 [0.000, 0.000]", "1.000 [1.000, 1.000]", "1.000 [1.000, 1.000]"],
    ]


def test_each_of_several_data_sets_has_a_row_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    """Two rows of all: a resample has the least or the greatest mean with a probability of 1/4 each."""
    first = {"calm": rows("nq", a=0.5) + rows("hotpot", b=0.5)}
    last = {"calm": rows("nq", a=1.0) + rows("hotpot", b=0.5)}
    table = printed(trained(first, last), capsys, "reward")
    assert table[1:4] == [
        ["CALM", "reward", "2", "0.500 [0.500, 0.500]", "0.750 [0.500, 1.000]", "0.250 [0.000, 0.500]"],
        ["CALM, hotpot", "reward", "1", "0.500 [0.500, 0.500]", "0.500 [0.500, 0.500]", "0.000 [0.000, 0.000]"],
        ["CALM, nq", "reward", "1", "0.500 [0.500, 0.500]", "1.000 [1.000, 1.000]", "0.500 [0.500, 0.500]"],
    ]


def test_samples_of_a_row_are_one_row(capsys: pytest.CaptureFixture[str]) -> None:
    several = [ScoredRow("a", sample, "nq", {"reward": reward}) for sample, reward in enumerate((1.0, 0.0, 0.5))]
    table = printed(trained({}, {"calm": several}), capsys, "reward")
    assert table[1][2:5] == ["1", "-", "0.500 [0.500, 0.500]"]


def test_without_a_validation_before_there_is_a_dash(capsys: pytest.CaptureFixture[str]) -> None:
    """Neither in the whole run nor under one mode of it; rows that were scored on one side only have no gain."""
    after = ["0.500 [0.500, 0.500]", "-"]
    assert printed(trained({}, {"calm": rows("nq", a=0.5)}), capsys, "reward")[1][2:] == ["1", "-", *after]
    other = trained({"calm": rows("nq", b=0.25)}, {"calm": rows("nq", a=0.5), "rough": rows("nq", a=0.5)})
    table = printed(other, capsys, "reward")
    assert table[1] == ["CALM", "reward", "1", "0.250 [0.250, 0.250]", *after]
    assert table[2] == ["ROUGH", "reward", "1", "-", *after]


def test_without_any_validation_there_is_no_score_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(trained({}, {}), capsys, "reward")[0] == ["searches", "1.50"]


def test_the_figures_of_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(trained({}, {}), capsys, "reward") == [
        ["searches", "1.50"],
        ["steps", "7"],
        ["lost to the infrastructure", "{'TimeoutError': 3, 'InfrastructureError': 1}"],
        ["alarms", "truncated (step 3 to 5), kl_loss (step 6)"],
        ["seconds by phase", "rollout 10.1, log 0.5"],
        ["seconds", "setup 1.2, startup 2.0, training 30.6, total 34.0"],
        ["metrics", "metrics.jsonl"],
    ]


OF_EVERY_RUN = {
    "exit_reason": "completed",
    "seconds_setup": 1.23,
    "seconds_startup": 2.0,
    "seconds_training": pytest.approx(30.555, abs=0.006),
    "seconds_total": 34.0,
    "seconds_by_phase": {"rollout": 10.123, "log": 0.5},
}
OF_A_TRAINER = {
    "steps": 7,
    "failures": {"TimeoutError": 3, "InfrastructureError": 1},
    "alarms": [
        {"name": "truncated", "first_step": 3, "last_step": 5},
        {"name": "kl_loss", "first_step": 6, "last_step": 6},
    ],
}


def test_the_summary_of_a_run_with_validations() -> None:
    environment: Any = Environment()
    trainer = trained({}, {"calm": rows("nq", a=0.5)})
    assert make_summary(trainer, environment, CLOCK, "completed") == {
        **OF_EVERY_RUN,
        **OF_A_TRAINER,
        "before": 0.0,
        "after": 1.0,
        "gain": None,
        "sensitivity": 0.75,
        "pairs": 4.0,
        "validation": {"val/calm/searches": 1.5},
        "best_step": 4,
    }


def test_the_summary_of_a_run_that_ended_early() -> None:
    environment: Any = Environment()
    assert make_summary(trained({}, {}), environment, CLOCK, "completed") == OF_EVERY_RUN | OF_A_TRAINER
    nothing = {"steps": 0, "failures": {}, "alarms": []}
    assert make_summary(None, None, CLOCK, "completed") == OF_EVERY_RUN | nothing
