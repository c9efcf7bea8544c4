"""Sampling against plain references."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from verl.workers.rollout.sampling import RowSampling, sample, uniforms

GOLDEN = 0x9E3779B97F4A7C15
MASK = (1 << 64) - 1


def mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def plain_uniform(stream: int, position: int) -> float:
    state = mix((stream + GOLDEN) & MASK) ^ (((position + 1) * GOLDEN) & MASK)
    return (mix(mix(state)) >> 11) * 2.0**-53


def rows(n: int, *, temperature: float = 1.0, top_p: float = 1.0, first_stream: int = 0) -> RowSampling:
    return RowSampling(
        streams=np.arange(first_stream, first_stream + n, dtype=np.uint64),
        positions=np.full(n, 7, dtype=np.int64),
        temperatures=np.full(n, temperature, dtype=np.float32),
        top_ps=np.full(n, top_p, dtype=np.float32),
    )


def test_uniforms_equal_the_integer_reference() -> None:
    streams = [0, 1, 2**63, MASK, 0x0123456789ABCDEF]
    positions = [0, 1, 511, 2**20, 3]
    got = uniforms(np.array(streams, dtype=np.uint64), np.array(positions, dtype=np.int64))
    assert got.tolist() == [plain_uniform(s, p) for s, p in zip(streams, positions, strict=True)]


def test_uniforms_look_uniform_over_positions_and_over_streams() -> None:
    positions = np.arange(20000, dtype=np.int64)
    for drawn in (
        uniforms(np.full(20000, 12345, dtype=np.uint64), positions),
        uniforms(positions.astype(np.uint64), np.full(20000, 5, dtype=np.int64)),
    ):
        assert drawn.min() >= 0
        assert drawn.max() < 1
        counts, _ = np.histogram(drawn, bins=20, range=(0, 1))
        # Chi-square with 19 degrees of freedom: 43.8 is the 0.1 % point.
        assert ((counts - 1000) ** 2 / 1000).sum() < 43.8
        assert abs(np.corrcoef(drawn[:-1], drawn[1:])[0, 1]) < 0.03


def test_tokens_are_the_inverse_of_the_cumulative_distribution() -> None:
    torch.manual_seed(0)
    logits = torch.randn(50, 11) * 2
    how = rows(50, temperature=0.7)
    tokens, log_probs = sample(logits, how)
    draws = uniforms(how.streams, how.positions)
    for row in range(50):
        expected = torch.softmax(logits[row].double() / 0.7, dim=-1)
        cumulative = expected.cumsum(0)
        assert tokens[row] == int((cumulative <= draws[row]).sum())
        assert log_probs[row] == pytest.approx(float(expected[tokens[row]].log()), abs=1e-5)


def test_frequencies_follow_the_probabilities() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0])
    tokens, _ = sample(logits.expand(20000, 4), rows(20000, temperature=1.5))
    shares = np.bincount(tokens, minlength=4) / 20000
    np.testing.assert_allclose(shares, torch.softmax(logits / 1.5, -1).numpy(), atol=0.015)


def test_temperature_zero_is_greedy_with_log_probs_at_temperature_one() -> None:
    torch.manual_seed(1)
    logits = torch.randn(5, 9)
    tokens, log_probs = sample(logits, rows(5, temperature=0.0))
    assert tokens.tolist() == logits.argmax(-1).tolist()
    np.testing.assert_allclose(log_probs, logits.log_softmax(-1).max(-1).values.numpy())


def test_rows_of_any_temperature_and_top_p_share_a_batch() -> None:
    torch.manual_seed(2)
    logits = torch.randn(6, 30)
    mixed = RowSampling(
        np.arange(6, dtype=np.uint64),
        np.arange(6, dtype=np.int64),
        np.array([0, 1, 0.5, 0, 1, 2], dtype=np.float32),
        np.array([1, 0.3, 1, 0.5, 1, 0.9], dtype=np.float32),
    )
    tokens, log_probs = sample(logits, mixed)
    for row in range(6):
        one = RowSampling(
            *(array[row : row + 1] for array in (mixed.streams, mixed.positions)),
            *(array[row : row + 1] for array in (mixed.temperatures, mixed.top_ps)),
        )
        token, log_prob = sample(logits[row : row + 1], one)
        assert (token[0], log_prob[0]) == (tokens[row], log_probs[row])


def test_top_p_draws_only_from_the_smallest_sufficient_set() -> None:
    probabilities = torch.tensor([0.5, 0.05, 0.25, 0.2])
    tokens, log_probs = sample(probabilities.log().expand(4000, 4), rows(4000, top_p=0.7))
    assert set(tokens.tolist()) == {0, 2}
    assert (tokens == 0).mean() == pytest.approx(2 / 3, abs=0.03)
    assert log_probs[tokens == 0][0] == pytest.approx(np.log(0.5), abs=1e-6)
    certain, _ = sample(probabilities.log().expand(100, 4), rows(100, top_p=1e-6))
    assert set(certain.tolist()) == {0}


def test_impossible_tokens_are_never_drawn_whatever_the_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest number below 1, and exactly 0, with impossible tokens at both ends."""
    logits = torch.full((1, 600), -torch.inf)
    logits[0, 100:500] = torch.linspace(-3, 3, 400)
    for number in (0.0, 1 - 2.0**-53):
        monkeypatch.setattr("verl.workers.rollout.sampling.uniforms", lambda *_, n=number: np.array([n]))
        for top_p in (1.0, 0.999999):
            tokens, log_probs = sample(logits, rows(1, top_p=top_p))
            assert 100 <= tokens[0] < 500
            assert np.isfinite(log_probs[0])


def test_not_a_number_shows_in_its_row_only() -> None:
    logits = torch.zeros(3, 5)
    logits[1, 2] = torch.nan
    tokens, log_probs = sample(logits, rows(3))
    assert np.isfinite(log_probs).tolist() == [True, False, True]
    assert ((tokens >= 0) & (tokens < 5)).all()
