"""Pools of keys and values, what is kept of idle sequences, and attention over them."""

from __future__ import annotations

import random

import pytest
import torch
from torch.nn import functional

from verl.workers.rollout.attention import BatchAttention, Span, weighted_values
from verl.workers.rollout.kept_sequences import KeptSequence, KeptSequences
from verl.workers.rollout.kv_cache import CacheRow, KeptKV, KVCache
from verl.workers.rollout.torch_model import ModelSpec

CPU = torch.device("cpu")


def spec(query_heads: int = 4, kv_heads: int = 2, head_dim: int = 16) -> ModelSpec:
    return ModelSpec(
        vocab_size=32,
        hidden_size=64,
        intermediate_size=64,
        num_layers=2,
        query_heads=query_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=1e-6,
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        qk_norm=False,
        tied=True,
    )


def attend(cache: KVCache, s: ModelSpec, counts: dict[CacheRow, int]) -> dict[CacheRow, torch.Tensor]:
    """Fills ``counts`` new positions of each row with values made from the row and position, layer 0.

    Returns the attention output (count, query_heads * head_dim) of each row.
    """
    rows = cache.rows()
    places = {row: [index] for index, row in enumerate(rows)}
    spans = []
    total = len(rows)
    for row in rows:
        if counts[row] > 1:
            spans.append(Span(row, row.length + 1, counts[row] - 1, total))
            places[row] += range(total, total + counts[row] - 1)
            total += counts[row] - 1
    q, k, v = (torch.zeros(total, heads, s.head_dim) for heads in (s.query_heads, s.kv_heads, s.kv_heads))
    for row in rows:
        q[places[row]], k[places[row]], v[places[row]] = tensors(row, s, row.length, counts[row])
    out = BatchAttention(cache, s, spans)(0, q, k, v)
    for row in rows:
        row.length += counts[row]
    return {row: out[places[row]] for row in rows}


NAMES: dict[CacheRow, int] = {}


def tensors(row: CacheRow, s: ModelSpec, first: int, count: int) -> tuple[torch.Tensor, ...]:
    """Queries, keys, values of positions ``first`` to ``first + count`` of a row, from its name."""
    generator = torch.Generator().manual_seed(NAMES[row])
    return tuple(
        torch.randn(400, heads, s.head_dim, generator=generator)[first : first + count]
        for heads in (s.query_heads, s.kv_heads, s.kv_heads)
    )


def reference(row: CacheRow, s: ModelSpec, first: int, count: int) -> torch.Tensor:
    q, k, v = (x.transpose(0, 1)[None] for x in tensors(row, s, 0, first + count))
    out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out[0].transpose(0, 1)[first:].flatten(1)


@pytest.mark.parametrize(("query_heads", "kv_heads", "head_dim"), [(4, 2, 16), (4, 4, 8), (6, 1, 32)])
def test_attention_equals_pytorchs_while_rows_come_grow_and_go(query_heads: int, kv_heads: int, head_dim: int) -> None:
    s = spec(query_heads, kv_heads, head_dim)
    cache = KVCache(s, 400, CPU)
    rng = random.Random(0)
    for step in range(60):
        rows = cache.rows()
        if len(rows) < 5 and step < 50:
            new = cache.new_row(rng.choice([1, 130, 260]))
            NAMES[new] = 1000 * query_heads + step
        elif rows and rng.random() < 0.3:
            leaving = rng.choice(rows)
            leaving.pool.remove(leaving)
        counts = {row: rng.choice([1, 1, 2, 30, 90]) for row in cache.rows()}
        counts = {row: min(count, 400 - row.length) for row, count in counts.items()}
        for row in [row for row in cache.rows() if counts[row] == 0]:
            row.pool.remove(row)
        for row in cache.rows():
            cache.grow(row, row.length + counts[row])
        if not cache.rows():
            continue
        before = {row: row.length for row in cache.rows()}
        for row, out in attend(cache, s, counts).items():
            torch.testing.assert_close(out, reference(row, s, before[row], counts[row]), rtol=0, atol=2e-6)


@pytest.mark.parametrize("own", [1, 250, 257, 300, 500, 777])
def test_mixed_values_do_not_depend_on_masked_positions_or_other_queries(own: int) -> None:
    """Without segments MKL cuts sums of more than about 400 positions by their total length."""
    torch.manual_seed(own)
    scores, values = torch.randn(3, 40, 1280), torch.randn(3, 1280, 32)
    scores[..., own:] = -torch.inf
    whole = weighted_values(scores, values)
    for length in range(-(-own // 32) * 32, 1281, 96):
        for first, count in ((0, 2), (7, 3), (20, 20)):
            some = weighted_values(scores[1:, first : first + count, :length].contiguous(), values[1:])
            assert torch.equal(some, whole[1:, first : first + count]), (length, count)


def test_rows_know_where_they_are() -> None:
    cache = KVCache(spec(), 400, CPU)
    rows = [cache.new_row(10) for _ in range(20)]
    for row in rows[3::4]:
        cache.grow(row, 200)
    for row in rows[::5]:
        row.pool.remove(row)
    left = [row for row in rows if row not in rows[::5]]
    assert sorted(map(id, cache.rows())) == sorted(map(id, left))
    for pool in cache.pools:
        assert [row.index for row in pool.rows] == list(range(len(pool.rows)))
        assert all(row.pool is pool for row in pool.rows)


def test_what_is_kept_is_a_copy_that_can_be_restored_in_part() -> None:
    s = spec()
    cache = KVCache(s, 400, CPU)
    row = cache.new_row(100)
    NAMES[row] = 5
    attend(cache, s, {row: 90})
    kept = row.pool.kept(row, 90)
    row.pool.remove(row)
    other = cache.new_row(100)
    NAMES[other] = 6
    attend(cache, s, {other: 90})
    restored = cache.restore(kept, 60, 200)
    NAMES[restored] = 5
    assert restored.length == 60
    out = attend(cache, s, {other: 1, restored: 5})
    torch.testing.assert_close(out[restored], reference(restored, s, 60, 5), rtol=0, atol=2e-6)


def test_nan_left_by_another_sequence_does_not_spread_after_a_reset() -> None:
    s = spec()
    cache = KVCache(s, 400, CPU)
    row = cache.new_row(100)
    row.pool.keys.fill_(torch.nan)
    row.pool.values.fill_(torch.nan)
    cache.clear()
    fresh = cache.new_row(100)
    NAMES[fresh] = 7
    assert torch.isfinite(attend(cache, s, {fresh: 5})[fresh]).all()


def kept(ids: tuple[int, ...]) -> KeptSequence:
    return KeptSequence(ids, KeptKV(torch.zeros(1, 1, 2, len(ids)), torch.zeros(1, 1, len(ids), 2)))


def test_least_recently_used_sequences_are_forgotten_first() -> None:
    store = KeptSequences()
    store.keep_session("a", kept((1, 2, 3)))
    store.keep_prompt(kept((4, 5)))
    store.keep_session("b", kept((6,)))
    assert store.prompt((4, 5)) is not None
    assert store.positions == 6
    store.shrink(3)
    assert store.take_session("a") is None
    assert store.prompt((4, 5)) is not None
    store.shrink(2)
    assert store.take_session("b") is None
    assert store.positions == 2
    store.shrink(-1)
    assert store.prompt((4, 5)) is None
    assert store.positions == 0


def test_a_session_is_kept_once_and_taken_once() -> None:
    store = KeptSequences()
    store.keep_session("a", kept((1, 2, 3)))
    store.keep_session("a", kept((1, 2, 3, 4)))
    store.keep_prompt(kept((9,)))
    store.keep_prompt(kept((9,)))
    assert store.positions == 5
    taken = store.take_session("a")
    assert taken is not None
    assert taken.ids == (1, 2, 3, 4)
    assert store.take_session("a") is None
    assert store.positions == 1
