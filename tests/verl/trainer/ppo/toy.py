"""An environment small enough to enumerate: three tokens, two turns, an observation between them.

Token 0 answers and ends the trajectory, 1 searches and ends the turn, 2 thinks. A first turn has at most two
tokens, a second one, after an observation that follows from the first, has one. So there are 11 trajectories of
one to three policy tokens, and 5 states in which the policy acts.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

VOCABULARY = 3
PROMPT = (2, 1)
OBSERVATIONS = {(1,): (2,), (2, 1): (1, 2), (2, 2): (0, 1)}
"""What follows a first turn without an answer."""


@dataclass(frozen=True)
class Path:
    """One trajectory's response: its tokens and which of them the policy sampled."""

    tokens: tuple[int, ...]
    mask: tuple[bool, ...]

    @property
    def contexts(self) -> tuple[tuple[int, ...], ...]:
        """What the policy had seen before each token."""
        return tuple(self.tokens[:k] for k in range(len(self.tokens)))


def _after_observation(turn: tuple[int, ...], observation: tuple[int, ...], last: int) -> Path:
    mask = (True,) * len(turn) + (False,) * len(observation) + (True,)
    return Path((*turn, *observation, last), mask)


PATHS = (
    Path((0,), (True,)),
    Path((2, 0), (True, True)),
    *(
        _after_observation(turn, seen, last)
        for (turn, seen), last in itertools.product(OBSERVATIONS.items(), range(VOCABULARY))
    ),
)
STATES = sorted({c for path in PATHS for c, chosen in zip(path.contexts, path.mask, strict=True) if chosen})
WIDTH = max(len(path.tokens) for path in PATHS)


def _table(rows: Iterator[list[float]], dtype: torch.dtype) -> torch.Tensor:
    """Ragged rows as (paths, WIDTH), 0 behind their end."""
    return torch.tensor([row + [0] * (WIDTH - len(row)) for row in rows], dtype=dtype)


TOKENS = _table((list(path.tokens) for path in PATHS), torch.int64)
MASK = _table((list(path.mask) for path in PATHS), torch.bool)
STATE_OF = _table(
    ([STATES.index(c) if m else 0 for c, m in zip(p.contexts, p.mask, strict=True)] for p in PATHS), torch.int64
)


def _scores(number: int, path: Path) -> list[float]:
    """0, 1/2 or 1 on the last token, always a policy token, and a cost on the policy tokens before it."""
    return [-0.125 if chosen else 0.0 for chosen in path.mask[:-1]] + [number % 3 / 2]


SCORES = _table((_scores(number, path) for number, path in enumerate(PATHS)), torch.float32)
VALUES = torch.where(MASK, torch.tensor([0.5, -0.25, 0.75, 0.125, 0.375])[STATE_OF], 0.0)
"""Of the state each policy token was sampled in."""


def table_policy(seed: int) -> torch.Tensor:
    """Logits (states, VOCABULARY), float64."""
    generator = torch.Generator().manual_seed(seed)
    return 0.7 * torch.randn(len(STATES), VOCABULARY, dtype=torch.float64, generator=generator)


def log_probs(logits: torch.Tensor) -> torch.Tensor:
    """Of every policy token of every path, (paths, WIDTH), 0 elsewhere; differentiable."""
    return torch.where(MASK, logits.log_softmax(-1)[STATE_OF, TOKENS], 0)


def path_probabilities(token_log_probs: torch.Tensor) -> torch.Tensor:
    """(paths, WIDTH) to (paths,): they add up to 1."""
    return token_log_probs.sum(-1).exp()


def batches(probabilities: torch.Tensor, size: int) -> Iterator[tuple[list[int], float]]:
    """Every batch of ``size`` independent trajectories, regardless of order, and its probability."""
    chances = probabilities.tolist()
    for rows in itertools.combinations_with_replacement(range(len(PATHS)), size):
        orders = math.factorial(size) / math.prod(math.factorial(rows.count(row)) for row in set(rows))
        yield list(rows), orders * math.prod(chances[row] for row in rows)


def ordered_batches(probabilities: torch.Tensor, size: int) -> Iterator[tuple[tuple[int, ...], float]]:
    """Every sequence of ``size`` independent trajectories and its probability."""
    chances = probabilities.tolist()
    for rows in itertools.product(range(len(PATHS)), repeat=size):
        yield rows, math.prod(chances[row] for row in rows)
