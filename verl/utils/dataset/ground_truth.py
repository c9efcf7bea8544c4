"""Where a data row keeps what its answer is compared with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def reward_model_truth(row: Mapping[str, Any]) -> Any:
    """``reward_model.ground_truth``; None where it is missing or null. Raises ValueError for no mapping there."""
    reward_model = row.get("reward_model")
    if reward_model is None:
        return None
    if not isinstance(reward_model, Mapping):
        raise ValueError(f"'reward_model' is {reward_model!r}, it must be a mapping with 'ground_truth'")
    return reward_model.get("ground_truth")


def ground_truth(row: Mapping[str, Any]) -> Any:
    """``reward_model.ground_truth`` where a row has it, else ``golden_answers``; None without either.

    Files that mix rows of both kinds hold nulls in the column a row does not use. Raises as `reward_model_truth`.
    """
    truth = reward_model_truth(row)
    return row.get("golden_answers") if truth is None else truth
