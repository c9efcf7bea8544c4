"""GSM8K (arXiv 2110.14168): the number after the last ``####`` of a response, compared as a number."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

import numpy as np

MARK = "####"
_NUMBER = re.compile(
    r"(?P<whole>[-+]?\d+)\s+(?P<part>\d+\s*/\s*\d+)|"
    r"(?P<number>[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d{1,4}(?!\d))?)(?:\s*/\s*(?P<divisor>\d+(?:\.\d+)?))?",
    re.ASCII,
)
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
    """Ground truths may still be worked solutions; booleans, mappings and what is not finite are no numbers."""
    if isinstance(value, bool) or not isinstance(value, str | int | float | Decimal):
        return ""
    return str(value).rpartition(MARK)[2]


def _number(text: str) -> Decimal | None:
    """The first number of ``text``: decimal, in scientific notation, a fraction, or a mixed number (1 1/2)."""
    found = _NUMBER.search(text.translate(_DROPPED))
    if found is None:
        return None
    if found["whole"] is None:
        return _quotient(found["number"], found["divisor"] or "1")
    part = _quotient(*found["part"].split("/"))
    sign = -1 if found["whole"].startswith("-") else 1
    return None if part is None else Decimal(found["whole"]) + sign * part


def _quotient(dividend: str, divisor: str) -> Decimal | None:
    if divisor == "1":  # division rounds to 28 digits
        return Decimal(dividend)
    return Decimal(dividend) / Decimal(divisor) if Decimal(divisor) else None
