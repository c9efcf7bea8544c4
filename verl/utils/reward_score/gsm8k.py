"""GSM8K (arXiv 2110.14168): the number after the last ``####`` of a response, compared as a number."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

import numpy as np

MARK = "####"
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)", re.ASCII)
_DROPPED = str.maketrans({"−": "-"} | dict.fromkeys(",$€£¥₹"))


def extract_solution(solution_str: str) -> Decimal | None:
    """The first number behind the last mark, without commas and currency signs; None without mark or number."""
    _, mark, rest = solution_str.rpartition(MARK)
    return _number(rest) if mark else None


def compute_score(solution_str: str, ground_truth: Any) -> float:
    """1 where the response's number equals that of any ground truth, else 0."""
    answer = extract_solution(solution_str)
    return float(answer is not None and answer in _numbers(ground_truth))


def check_ground_truth(ground_truth: Any) -> None:
    """Raises ValueError unless every ground truth holds a number: one value, a list, or ``{"target": …}``."""
    _numbers(ground_truth)


def _numbers(ground_truth: Any) -> list[Decimal]:
    truth = ground_truth["target"] if isinstance(ground_truth, Mapping) and "target" in ground_truth else ground_truth
    plain = truth.tolist() if isinstance(truth, np.ndarray | np.generic) else truth
    listed = list(plain) if isinstance(plain, Sequence) and not isinstance(plain, str) else [plain]
    numbers = [number for value in listed if (number := _number(_behind_mark(value))) is not None]
    if not numbers or len(numbers) < len(listed):
        raise ValueError(f"'reward_model.ground_truth' is {ground_truth!r}, but gsm8k is scored by numbers")
    return numbers


def _behind_mark(value: Any) -> str:
    """Ground truths may still be worked solutions; booleans and mappings are no numbers."""
    if isinstance(value, bool) or not isinstance(value, str | int | float | Decimal):
        return ""
    return str(value).rpartition(MARK)[2]


def _number(text: str) -> Decimal | None:
    found = _NUMBER.search(text.translate(_DROPPED))
    return Decimal(found.group()) if found else None
