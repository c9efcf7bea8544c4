from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest

from verl.agent_loop.alarm_rule import AlarmRule
from verl.trainer.alarms import AlarmRecord, Alarms, trainer_rules
from verl.trainer.compose import compose_config
from verl.trainer.config import AlarmConfig, PPOTrainerConfig, TrainerConfig
from verl.trainer.ppo.parts import TrainerParts
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.trainer.report import RunClock, make_summary, print_report
from verl.trainer.timing import PhaseTimer
from verl.utils.tracking import Tracking

Row = dict[str, float]

HEALTHY: dict[str, list[float]] = {
    "actor/entropy": [0.505, 0.259, 0.115, 0.086, 0.08, 0.075, 0.061, 0.062, 0.061, 0.088],
    "actor/kl_loss": [0.0, 0.005, 0.021, 0.047, 0.23, 0.02, 0.089, 0.05, 0.067, 0.073],
    "response_length/policy/mean": [39.2, 42.8, 48.7, 57.7, 62.1, 61.6, 54.0, 77.7, 84.9, 90.2],
    "group/zero_variance": [0.062, 0.188, 0.25, 0.375, 0.25, 0.188, 0.375, 0.375, 0.562, 0.5],
    "status/truncated": [0.0] * 10,
    "training/rollout_log_prob_diff_mean": [2e-7, *[5e-8] * 9],
    "actor/nonfinite_updates": [0.0] * 10,
}
"""A run that learns: shaped like those of the quickstart, at the edge of what they have shown."""


def rule(
    side: Literal["above", "below"] = "above",
    measure: Literal["value", "times_first", "increase"] = "value",
    **changes: Any,
) -> AlarmRule:
    given: dict[str, Any] = {"name": "x", "metric": "m", "bound": 1.0, "meaning": "it is bad", "remedy": "try less"}
    return AlarmRule(side=side, measure=measure, **(given | changes))


def rows_of(series: dict[str, list[float]]) -> list[Row]:
    return [dict(zip(series, values, strict=True)) for values in zip(*series.values(), strict=True)]


def active_after(alarms: Alarms, values: Sequence[float | None], metric: str = "m") -> list[float | None]:
    """``alarm/x`` after each step; None is a step without the metric."""
    rows: list[Row] = [{} if value is None else {metric: value} for value in values]
    return [alarms.observe(step, row).metrics.get("alarm/x") for step, row in enumerate(rows, 1)]


def begun(rows: Sequence[Row]) -> list[tuple[str, int]]:
    """Names and first steps under the default bounds."""
    alarms = Alarms(trainer_rules(AlarmConfig()), AlarmConfig().steps)
    for step, row in enumerate(rows, 1):
        alarms.observe(step, row)
    return [(record.name, record.first_step) for record in alarms.records]


def test_an_alarm_begins_after_steps_in_a_row_and_ends_after_as_many() -> None:
    values = [2, 2, 0, 2, 2, 2, 0, 0, 2, 0, 0, 0, 2]
    alarms = Alarms([rule()], 3)
    assert active_after(alarms, values) == [0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 0, 0]
    assert alarms.records == [AlarmRecord("x", 6, 11)]


def test_each_alarm_is_told_once_when_it_begins_and_once_when_it_ends() -> None:
    alarms = Alarms([rule()], 2)
    lines = [alarms.observe(step, {"m": value}).lines for step, value in enumerate([2, 3, 4, 0, 0.5, 0], 1)]
    assert lines == [
        [],
        ["alarm: m is 3, above 1: it is bad; try less."],
        [],
        [],
        ["alarm ended: m is 0.5, no longer above 1."],
        [],
    ]


def test_a_value_on_the_bound_is_within_it() -> None:
    assert active_after(Alarms([rule("above")], 1), [1.0, 1.01]) == [0, 1]
    assert active_after(Alarms([rule("below")], 1), [1.0, 0.99]) == [0, 1]


def test_a_step_without_the_metric_changes_nothing() -> None:
    """While only the critic is trained the actor has no metrics."""
    assert active_after(Alarms([rule()], 2), [None, 2, None, 2, None, 0, None, 0]) == [None, 0, 0, 1, 1, 1, 1, 0]


def test_the_first_positive_value_is_the_measure_whenever_it_comes() -> None:
    alarms = Alarms([rule("below", "times_first", bound=0.5)], 1)
    assert active_after(alarms, [None, 0.0, math.nan, 4.0, 2.0, 1.9]) == [None, 0, 1, 0, 0, 1]
    (line,) = Alarms([rule("below", "times_first", bound=0.5)], 1).observe(1, {"m": math.nan}).lines
    assert "is nan" in line
    alarms = Alarms([rule("below", "times_first", bound=0.5)], 1)
    alarms.observe(1, {"m": 4.0})
    assert alarms.observe(2, {"m": 1.0}).lines == [
        "alarm: m is 1, below 0.5 times its first value (4): it is bad; try less."
    ]


def test_a_counter_rings_at_once_when_it_grows_and_not_for_having_grown() -> None:
    alarms = Alarms([rule("above", "increase", bound=0.0, at_once=True)], 3)
    assert active_after(alarms, [0, 0, 1, 1, 1, 1, 1, 2]) == [0, 0, 1, 1, 1, 0, 0, 1]
    assert active_after(Alarms([rule("above", "increase", bound=0.0, at_once=True)], 3), [1]) == [1]


def test_what_was_never_within_the_bound_has_not_fallen() -> None:
    """A base model that cannot answer yet raises nothing; one that could and cannot any more does."""
    alarms = Alarms([rule("below", armed_first=True)], 2)
    assert active_after(alarms, [0, 0, 0, 2, 0, 0, 2, 2, 0, 0]) == [0, 0, 0, 0, 0, 0, 0, 0, 0, 1]


def test_a_rule_per_another_metric() -> None:
    alarms = Alarms([rule(per="tokens", bound=0.5)], 1)
    reports = [alarms.observe(step, {"m": 30.0, "tokens": tokens}) for step, tokens in enumerate([100.0, 0.0, 50.0], 1)]
    assert [report.metrics["alarm/x"] for report in reports] == [0, 0, 1]
    assert reports[2].lines == ["alarm: m per tokens is 0.6, above 0.5: it is bad; try less."]


def test_without_a_bound_a_rule_is_off() -> None:
    assert active_after(Alarms([rule(bound=None)], 1), [5.0]) == [None]
    bounds = [field.name for field in fields(AlarmConfig) if field.name != "steps"]
    off = compose_config([f"trainer.alarms.{name}=null" for name in bounds]).config.trainer.alarms
    assert Alarms(trainer_rules(off), 1).rules == []


def test_two_rules_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="two alarms have one name: x"):
        Alarms([rule(), rule(metric="n")], 1)


def test_a_state_saved_at_any_step_goes_on_as_if_unbroken() -> None:
    values = [2, 2, 0, 2, 2, 2, 0, 0, 2, 0, 0, 0, 2, 2, 2]
    rules = [rule("below", "times_first", name="y", bound=0.5, armed_first=True), rule()]
    whole = Alarms(rules, 3)
    expected = [whole.observe(step, {"m": value}) for step, value in enumerate(values, 1)]
    for cut in range(len(values)):
        before, after = Alarms(rules, 3), Alarms(rules, 3)
        reports = [before.observe(step, {"m": values[step - 1]}) for step in range(1, cut + 1)]
        after.load_state_dict(json.loads(json.dumps(before.state_dict())))
        reports += [after.observe(step, {"m": values[step - 1]}) for step in range(cut + 1, len(values) + 1)]
        assert reports == expected
        assert after.state_dict() == whole.state_dict()


def test_a_run_that_learns_raises_none() -> None:
    assert begun(rows_of(HEALTHY)) == []


def test_a_slower_server_raises_none() -> None:
    slow = {
        "timing_s/step": 300.0,
        "timing_s/rollout": 299.0,
        "perf/rollout_seconds": 299.0,
        "perf/overhead_share": 0.9,
    }
    assert begun([row | slow for row in rows_of(HEALTHY)]) == []
    assert not [r for r in trainer_rules(AlarmConfig()) if r.metric.startswith(("timing_s/", "perf/"))]


@pytest.mark.parametrize(
    ("metric", "values", "name"),
    [
        ("actor/entropy", [0.5, 0.024, 0.02, 0.01], "entropy_low"),
        ("actor/entropy", [0.5, 1.6, 2.0, 4.0], "entropy_high"),
        ("actor/kl_loss", [0.457, 0.84, 0.713, 0.892], "kl_loss"),
        ("response_length/policy/mean", [50.0, 4.0, 3.0, 3.0], "response_short"),
        ("response_length/policy/mean", [50.0, 260.0, 300.0, 400.0], "response_long"),
        ("status/truncated", [0.2, 0.6, 0.7, 0.9], "truncated"),
        ("group/zero_variance", [0.7, 0.94, 1.0, 0.94], "zero_variance"),
        ("training/rollout_log_prob_diff_mean", [0.05, 0.2, 0.3, 0.2], "sampler_mismatch"),
    ],
)
def test_each_sign_of_collapse_is_told_at_its_third_step(metric: str, values: list[float], name: str) -> None:
    assert begun([{metric: value} for value in values]) == [(name, 4)]


@pytest.mark.parametrize("model", ["actor", "critic"])
def test_a_skipped_update_is_told_at_once(model: str) -> None:
    assert begun([{f"{model}/nonfinite_updates": value} for value in (0.0, 1.0)]) == [(f"{model}_nonfinite_updates", 2)]


def test_kl_in_the_reward_is_measured_per_policy_token() -> None:
    lengths = {"response_length/policy/mean": 100.0}
    assert begun([lengths | {"actor/reward_kl_penalty": 49.0}] * 3) == []
    assert begun([lengths | {"actor/reward_kl_penalty": 51.0}] * 3) == [("reward_kl", 3)]


def trainer_in(directory: Path) -> RayPPOTrainer:
    """A trainer without workers whose environment watches ``searches``; it logs to ``directory``."""
    watched = rule("below", name="searches", metric="searches", bound=0.5)
    environment = SimpleNamespace(
        stop_strings=(),
        validation_modes=("validation",),
        alarm_rules=lambda: (watched,),
        headline=lambda _: "",
        figures=lambda _: {},
    )
    parts: dict[str, Any] = {
        "config": PPOTrainerConfig(trainer=TrainerConfig(alarms=AlarmConfig(steps=2))),
        "environment": environment,
        "rollout_group": SimpleNamespace(workers=[]),
        "run": SimpleNamespace(path=directory),
        "train_set": [None] * 64,
        "timer": PhaseTimer(),
        "tracking": Tracking("p", "e", (), directory=directory),
    }
    absent = {name: None for name in TrainerParts.__dataclass_fields__ if name not in parts}
    return RayPPOTrainer(TrainerParts(**parts, **absent))


def test_a_run_tells_logs_and_lists_its_alarms(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = trainer_in(tmp_path)
    for step, (searches, kl) in enumerate([(0.9, 0.6), (0.4, 0.7), (0.3, 0.1), (0.2, 0.1)], 1):
        trainer._log(step, {"reward/mean": 0.5, "searches": searches, "actor/kl_loss": kl})
    told = capsys.readouterr().out.splitlines()
    assert [line.split(" is ")[0] for line in told] == [
        "alarm: actor/kl_loss",
        "alarm: searches",
        "alarm ended: actor/kl_loss",
    ]
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["alarm/kl_loss"] for row in rows] == [0, 1, 1, 0]
    assert [row["alarm/searches"] for row in rows] == [0, 0, 1, 1]
    summary = make_summary(trainer, None, RunClock(), "completed")
    assert summary["alarms"] == [
        {"name": "kl_loss", "first_step": 2, "last_step": 3},
        {"name": "searches", "first_step": 3, "last_step": 4},
    ]
    print_report(trainer, trainer._parts.environment, summary, {})
    assert "kl_loss (step 2 to 3), searches (step 3 to 4)" in capsys.readouterr().out


def test_a_run_that_never_started_lists_no_alarms() -> None:
    assert make_summary(None, None, RunClock(), "interrupted")["alarms"] == []
