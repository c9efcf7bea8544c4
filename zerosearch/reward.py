"""Scores of an answer against gold answers: F1, exact match, cover exact match.

All three compare normalised text (`zerosearch.text.normalize_text`) and take the maximum over the
gold answers. F1 >= EM always: where nothing is left of an answer after normalisation, all are 0.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from verl.agent_loop.base import RewardInput
from verl.utils.dataset.ground_truth import reward_model_truth
from zerosearch.text import normalize_text

Metric = Literal["f1", "em", "cover_em"]


@dataclass(frozen=True, slots=True)
class Scores:
    """Each in [0, 1]."""

    f1: float = 0.0
    em: float = 0.0
    cover_em: float = 0.0


def score_answer(answer: str | None, golds: Iterable[str]) -> Scores:
    """F1 = 2 * overlap / (words of the answer + words of the gold); EM: equal strings; cover EM: the
    gold's words stand in the answer as a contiguous run. No answer scores 0."""
    predicted = normalize_text(answer or "").split()
    single = [_score_one(predicted, normalize_text(gold).split()) for gold in golds]
    if not single:
        return Scores()
    return Scores(max(s.f1 for s in single), max(s.em for s in single), max(s.cover_em for s in single))


def _score_one(predicted: Sequence[str], gold: Sequence[str]) -> Scores:
    if not predicted or not gold:
        return Scores()
    overlap = (Counter(predicted) & Counter(gold)).total()
    f1 = 2 * overlap / (len(predicted) + len(gold))
    return Scores(f1, float(predicted == gold), float(_contains(predicted, gold)))


def contains_gold(text: str, golds: Iterable[str]) -> bool:
    """Whether the words of any gold answer stand in ``text`` as a contiguous run."""
    words = normalize_text(text).split()
    return any(_contains(words, normalize_text(gold).split()) for gold in golds)


def _contains(words: Sequence[str], run: Sequence[str]) -> bool:
    length = len(run)
    return length > 0 and any(words[i : i + length] == run for i in range(len(words) - length + 1))


class SearchReward:
    """The reward of a trajectory: one of the three scores; the other two are logged beside it."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric

    async def __call__(self, given: RewardInput) -> dict[str, float]:
        scores: dict[str, float] = asdict(score_answer(given.answer, golden_answers(given.row)))
        return {"score": scores[self._metric], **scores}


def golden_answers(row: Mapping[str, Any]) -> tuple[str, ...]:
    """The gold answers of a data row, in order, without repetitions.

    Taken from ``golden_answers``, else from ``reward_model.ground_truth`` (a list, one value, or
    ``{"target": …}`` holding either). Numbers count as their decimal form (1998.0 as "1998"),
    booleans as "yes"/"true" and "no"/"false". Values that normalise to nothing are left out.
    Raises ValueError when none remains, or for a value of another type.
    """
    key, value = _raw_golds(row)
    golds = [text for item in _as_list(value) for text in _gold_texts(item, key)]
    usable = tuple(dict.fromkeys(text for text in golds if normalize_text(text)))
    if not usable:
        raise ValueError(f"{key!r} holds no usable gold answer: {value!r}")
    return usable


def _raw_golds(row: Mapping[str, Any]) -> tuple[str, Any]:
    if row.get("golden_answers") is not None:
        return "golden_answers", row["golden_answers"]
    truth = reward_model_truth(row)
    if truth is None:
        raise ValueError("needs gold answers: 'golden_answers' or 'reward_model.ground_truth'")
    if not isinstance(truth, Mapping):
        return "reward_model.ground_truth", truth
    if truth.get("target") is None:
        raise ValueError(f"'reward_model.ground_truth' is a mapping without 'target': {dict(truth)!r}")
    return "reward_model.ground_truth.target", truth["target"]


def _as_list(value: Any) -> list[Any]:
    plain = value.tolist() if isinstance(value, np.ndarray | np.generic) else value
    return list(plain) if isinstance(plain, list | tuple) else [plain]


def _gold_texts(value: Any, key: str) -> tuple[str, ...]:
    plain = value.item() if isinstance(value, np.generic) else value
    match plain:
        case bool():
            return ("yes", "true") if plain else ("no", "false")
        case str():
            return (plain.strip(),)
        case int():
            return (str(plain),)
        case float() if math.isfinite(plain):
            return (f"{plain:.0f}" if plain.is_integer() else repr(plain),)
    raise ValueError(f"{key!r} holds {value!r}, which is no text, number or boolean")


def question_of(row: Mapping[str, Any]) -> str:
    """The question of a data row: ``question`` or ``extra_info.question``. Raises ValueError without one."""
    value = row.get("question") or (row.get("extra_info") or {}).get("question")
    if not isinstance(value, str) or not value.strip():
        raise ValueError("needs 'question' or 'extra_info.question', a non-empty string: the search is told it")
    return value.strip()
