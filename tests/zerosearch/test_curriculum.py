import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerosearch.curriculum import noise_probability

PROBABILITY = st.floats(0, 1)


@pytest.mark.parametrize(
    ("step", "total", "start", "end", "base", "expected"),
    [
        (1, 200, 0.0, 0.75, 4.0, 0.0),
        (200, 200, 0.0, 0.75, 4.0, 0.75),
        (2, 3, 0.0, 0.75, 4.0, 0.25),  # x = 1/2: (2 - 1)/(4 - 1) = 1/3
        (2, 3, 0.25, 0.5, 4.0, 0.25 + 0.25 / 3),
        (2, 4, 0.0, 1.0, 8.0, 1 / 7),  # x = 1/3: (2 - 1)/(8 - 1)
        (2, 3, 0.0, 0.5, 1.0, 0.25),
        (1, 1, 0.25, 0.5, 4.0, 0.25),
        (7, 5, 0.0, 0.5, 4.0, 0.5),
        (3, 1, 0.25, 0.5, 4.0, 0.25),
    ],
)
def test_values(step: int, total: int, start: float, end: float, base: float, expected: float) -> None:
    assert noise_probability(step, total, start, end, base) == pytest.approx(expected, abs=1e-15)


@given(total=st.integers(2, 500), start=PROBABILITY, end=PROBABILITY, base=st.floats(1, 64))
def test_end_threshold_is_reached_exactly_at_the_last_step(total: int, start: float, end: float, base: float) -> None:
    assert noise_probability(1, total, start, end, base) == start
    assert noise_probability(total, total, start, end, base) == end


@given(total=st.integers(2, 100), start=PROBABILITY, end=PROBABILITY)
def test_between_the_ends_and_monotone(total: int, start: float, end: float) -> None:
    values = [noise_probability(s, total, start, end) for s in range(1, total + 1)]
    steps = [(b - a) * (1 if end >= start else -1) for a, b in itertools.pairwise(values)]
    assert min(steps) >= -1e-12
    assert min(start, end) - 1e-12 <= min(values) <= max(values) <= max(start, end) + 1e-12


@pytest.mark.parametrize("arguments", [(0, 5, 0.0, 1.0), (1, 0, 0.0, 1.0), (1, 5, 0.0, 1.0, 0.5)])
def test_impossible_arguments_are_caught(arguments: tuple[float, ...]) -> None:
    with pytest.raises(AssertionError):
        noise_probability(*arguments)  # type: ignore[arg-type]
