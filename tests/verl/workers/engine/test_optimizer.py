from __future__ import annotations

import math

import pytest

from verl.workers.config import OptimConfig
from verl.workers.engine.optimizer import learning_rate


def rates(total: int, **settings: object) -> list[float]:
    config = OptimConfig(lr=1.0, **settings)  # type: ignore[arg-type]
    return [learning_rate(config, step, total) for step in range(1, total + 1)]


def test_warm_up_reaches_the_full_rate_at_its_last_step() -> None:
    assert rates(6, lr_warmup_steps=4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


@pytest.mark.parametrize("style", ["constant", "cosine"])
@pytest.mark.parametrize("warmup", [0, 1, 2, 50])
@pytest.mark.parametrize("total", [1, 2, 3, 10])
def test_no_step_has_a_rate_of_zero(style: str, warmup: int, total: int) -> None:
    values = rates(total, warmup_style=style, lr_warmup_steps=warmup)
    assert all(0 < value <= 1 for value in values)
    assert warmup > 1 or values[0] == 1


def test_cosine_by_value() -> None:
    expected = [1.0] + [0.1 + 0.9 * (1 + math.cos(math.pi * k / 4)) / 2 for k in range(4)]
    assert rates(5, warmup_style="cosine", min_lr_ratio=0.1, lr_warmup_steps=2) == pytest.approx([0.5, *expected[1:]])
    assert rates(4, warmup_style="cosine") == pytest.approx([(1 + math.cos(math.pi * k / 4)) / 2 for k in range(4)])


@pytest.mark.parametrize("step", [0, 5])
def test_steps_count_from_one(step: int) -> None:
    with pytest.raises(ValueError, match=r"1\.\.4"):
        learning_rate(OptimConfig(), step, 4)
