"""The training loop: what it weighs, that it learns, that it repeats itself, that it drops nothing."""

from __future__ import annotations

from random import Random

import pytest
import torch

from zerosearch.quickstart import sft
from zerosearch.quickstart.report import Measure, as_json, as_table
from zerosearch.quickstart.sft import Phase, Sample, make_model, train


@pytest.fixture(autouse=True)
def _small_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sft, "_POOL", 16)


def draw(rng: Random) -> Sample:
    length = rng.randint(3, 12)
    return Sample([i % 7 + 1 for i in range(length)], [0.0, 0.0] + [1.0] * (length - 2))


def trained(seed: int) -> dict[str, torch.Tensor]:
    model = make_model(16, 0, 2, seed=0)
    train(model, Phase(draw, steps=6, tokens=64, rate=3e-3, warmup=2), seed)
    return model.state_dict()


def test_training_repeats_bit_for_bit_and_depends_on_the_seed() -> None:
    first, again, other = trained(1), trained(1), trained(2)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)


def test_training_learns() -> None:
    model = make_model(16, 0, 2, seed=0)
    batch = [draw(Random(i)) for i in range(8)]
    before = sft._loss(model, batch).item()
    train(model, Phase(draw, steps=30, tokens=64, rate=3e-3, warmup=2), 0)
    assert sft._loss(model, batch).item() < 0.2 * before


def test_the_loss_is_the_weighted_mean_whatever_the_padding() -> None:
    model = make_model(16, 0, 2, seed=0)
    short, long = Sample([1, 2, 3], [0.0, 1.0, 2.0]), Sample([4, 5, 6, 7, 8], [0.0, 0.0, 3.0, 1.0, 1.0])
    apart = [sft._loss(model, [sample]).item() for sample in (short, long)]
    assert sft._loss(model, [short, long]).item() == pytest.approx((3 * apart[0] + 5 * apart[1]) / 8, rel=1e-5)


def test_batches_keep_every_sample_of_a_pool_and_respect_the_budget() -> None:
    phase = Phase(draw, steps=1, tokens=40, rate=1e-3)
    batches = sft._batches(phase, Random(0))
    pool_rng = Random(0)
    expected = sorted(len(draw(pool_rng).ids) for _ in range(16))
    seen: list[int] = []
    while len(seen) < 16:
        batch = next(batches)
        assert len(batch) * max(len(sample.ids) for sample in batch) <= 40
        seen += [len(sample.ids) for sample in batch]
    assert sorted(seen) == expected


def test_the_report_marks_missed_targets() -> None:
    report = {1: [Measure("a", "x", 0.9, 10, at_least=0.95)], 2: [Measure("a", "x", 0.97, 10, at_least=0.95)]}
    assert "| a: x | 0.900 ! | 0.970 | ≥ 0.95 | 10 |" in as_table(report)
    assert [rows[0]["passed"] for rows in as_json(report).values()] == [False, True]
