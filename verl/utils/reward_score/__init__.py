"""Rule rewards: a response is scored by the rule of its row's ``data_source``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from verl.utils.reward_score import gsm8k

__all__ = ["RULES", "Rule", "default_compute_score", "rule_for"]


class Rule(Protocol):
    """A module that scores one kind of task."""

    def extract_solution(self, solution_str: str) -> Any:
        """What the response answers; None where it gives no answer."""
        ...

    def check_ground_truth(self, ground_truth: Any) -> None:
        """Raises ValueError for a ground truth that no response could match."""
        ...

    def compute_score(self, solution_str: str, ground_truth: Any) -> float:
        """In [0, 1]; 0 where there is no answer."""
        ...


RULES: Mapping[str, Rule] = {"openai/gsm8k": gsm8k, "gsm8k": gsm8k}
"""Rules by ``data_source``."""


def rule_for(data_source: str | None) -> Rule:
    """Raises ValueError naming the data sources that have a rule."""
    if data_source is None or data_source not in RULES:
        raise ValueError(
            f"no rule scores the data_source {data_source!r}; known are {', '.join(sorted(RULES))}: "
            "give a reward function of your own with custom_reward_function.path"
        )
    return RULES[data_source]


def default_compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None
) -> float:
    """The score of a response under the rule of its data source.

    ``extra_info`` is part of the signature that reward functions share; no rule here reads it.
    Raises ValueError for a data source without a rule.
    """
    return rule_for(data_source).compute_score(solution_str, ground_truth)
