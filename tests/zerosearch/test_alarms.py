from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

import pytest

from verl.trainer.alarms import Alarms, trainer_rules
from verl.trainer.compose import compose_config
from verl.trainer.config import AlarmConfig
from verl.trainer.setup import environment_config
from zerosearch.agent_loop import SearchAgentLoop
from zerosearch.alarms import search_rules
from zerosearch.config import SearchAlarmConfig, SearchConfig

Series = dict[str, list[float]]

HEALTHY: Series = {
    "search/answer_rate": [1.0, 0.99, 0.97, 0.96, 0.93, 0.95, 0.92, 0.9, 0.81, 0.81],
    "search/valid_action_share": [0.87, 0.9, 0.95, 0.97, 0.99, 0.97, 1.0, 0.99, 0.98, 0.99],
    "search/searches": [0.75, 0.97, 1.2, 1.23, 1.58, 1.87, 1.66, 2.15, 2.46, 2.66],
    "search/repeated_query_share": [0.0, 0.0, 0.02, 0.03, 0.08, 0.1, 0.15, 0.11, 0.18, 0.19],
    "search/survival/1": [1.0] * 10,
}
COLLAPSED: Series = {
    "actor/entropy": [0.377, 0.276, 0.292, 0.328, 0.365, 0.51, 0.536, 0.503, 0.49, 0.429, 0.461, 0.415, 0.441, 0.434],
    "actor/kl_loss": [0.0, 0.001, 0.009, 0.045, 0.085, 0.203, 0.284, 0.319, 0.404, 0.413, 0.457, 0.84, 0.713, 0.892],
    "group/zero_variance": [0.69, 0.63, 0.75, 0.75, 0.69, 0.63, 0.81, 0.69, 0.56, 0.75, 0.81, 0.69, 0.94, 0.81],
    "search/answer_rate": [1.0, 1.0, 1.0, 1.0, 0.948, 0.958, 0.99, *[1.0] * 6, 0.969],
    "search/valid_action_share": [
        *[0.897, 0.936, 0.887, 0.706, 0.603, 0.37, 0.424],
        *[0.375, 0.392, 0.415, 0.485, 0.65, 0.582, 0.474],
    ],
    "search/searches": [
        *[0.729, 0.979, 0.885, 0.979, 0.927, 0.25, 0.135],
        *[0.094, 0.042, 0.042, 0.031, 0.062, 0.115, 0.156],
    ],
}
"""A policy that lost the format and stopped searching: its reward stayed under 0.07, its entropy did not fall."""


def begun(series: Series) -> list[tuple[str, int]]:
    """Names and first steps of the trainer's and the environment's alarms under the default bounds."""
    rules = [*trainer_rules(AlarmConfig()), *search_rules(SearchAlarmConfig())]
    alarms = Alarms(rules, AlarmConfig().steps)
    for step, values in enumerate(zip(*series.values(), strict=True), 1):
        alarms.observe(step, dict(zip(series, values, strict=True)))
    return [(record.name, record.first_step) for record in alarms.records]


def test_a_policy_that_learns_to_search_raises_none() -> None:
    assert begun(HEALTHY) == []


def test_a_collapse_is_told_by_its_format_its_searches_and_its_kl() -> None:
    assert begun(COLLAPSED) == [("search_valid_actions", 8), ("search_searches", 9), ("kl_loss", 14)]


def test_a_base_model_that_cannot_search_yet_has_not_collapsed() -> None:
    """It has no searches whose queries could repeat, answers nothing and hardly acts, and then it learns."""
    learning: Sequence[float] = [0.0, 0.03, 0.02, 0.0, 0.3, 0.5, 0.7, 0.65, 0.8, 0.9]
    assert begun({name: list(learning) for name in ("search/answer_rate", "search/valid_action_share")}) == []
    assert begun({"search/searches": [0.06, 0.0, 0.0, 0.06, 0.0, 0.1, 0.0, 0.3, 0.5, 1.0]}) == []


@pytest.mark.parametrize(
    ("metric", "values", "name"),
    [
        ("search/answer_rate", [0.9, 0.9, 0.9, 0.5, 0.5, 0.4], "search_answer_rate"),
        ("search/valid_action_share", [0.9, 0.9, 0.9, 0.5, 0.5, 0.4], "search_valid_actions"),
        ("search/searches", [1.0, 1.0, 1.0, 0.1, 0.1, 0.0], "search_searches"),
        ("search/repeated_query_share", [0.1, 0.2, 0.4, 0.6, 0.7, 0.8], "search_repeated_queries"),
        ("search/survival/1", [1.0, 1.0, 1.0, 0.8, 0.7, 0.8], "search_lost"),
    ],
)
def test_each_sign_is_told_at_its_third_step(metric: str, values: list[float], name: str) -> None:
    assert begun({metric: values}) == [(name, 6)]


def test_the_environment_gives_the_trainer_its_rules_as_configured() -> None:
    config = environment_config(compose_config(["retriever.alarms.searches=null"]).config)
    assert isinstance(config, SearchConfig)
    environment = SearchAgentLoop.__new__(SearchAgentLoop)
    environment.config = config
    watched = Alarms(environment.alarm_rules(), 3).rules
    assert {rule.metric for rule in watched} == HEALTHY.keys() - {"search/searches"}
    off = SearchAlarmConfig(**{field.name: None for field in fields(SearchAlarmConfig)})
    assert Alarms(search_rules(off), 3).rules == []
