"""Rewards that carry no signal: with them the held-out score must not rise.

Functions with the arguments of verl's ``compute_score``, for ``custom_reward_function.path`` and ``.name``.
"""

from __future__ import annotations

import hashlib
from typing import Any


def constant(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any) -> float:
    """The same for every trajectory: every advantage is 0."""
    return 0.5


def unrelated(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any) -> float:
    """0 or 1 by a hash of the text: spread like a real reward, independent of whether the answer is right."""
    return float(hashlib.blake2b(f"{extra_info}/{solution_str}".encode(), digest_size=1).digest()[0] % 2)
