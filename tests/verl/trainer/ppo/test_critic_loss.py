from __future__ import annotations

import pickle

import pytest
import torch

from verl.trainer.ppo.critic_loss import CriticLoss
from verl.trainer.ppo.value_loss import compute_value_loss
from verl.workers.config import CriticConfig
from verl.workers.engine.loss import BatchTotals, combine_metrics
from verl.workers.engine.packing import MicroBatch

MASK = torch.tensor([[1, 0, 1], [1, 0, 0], [0, 1, 1]]).bool()
RETURNS, OLD, NEW = torch.randn(3, 3, 3, generator=torch.Generator().manual_seed(0))


def micro_batch(rows: slice) -> MicroBatch:
    empty = torch.zeros(0, dtype=torch.int64)
    targets = torch.zeros(int(MASK[rows].sum()), dtype=torch.int64)
    return MicroBatch(
        empty, empty, empty, 0, empty, targets, MASK[rows], {"returns": RETURNS[rows], "values": OLD[rows]}
    )


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"])
def test_micro_batches_add_up_to_the_loss_and_the_metrics_of_the_batch(mode: str) -> None:
    loss = CriticLoss.of(CriticConfig(loss_agg_mode=mode, cliprange_value=0.4))
    totals = BatchTotals(tokens=5, sequences=3)
    parts = [loss(NEW[rows], micro_batch(rows), totals) for rows in (slice(0, 1), slice(1, 3))]
    expected, clipped = compute_value_loss(NEW, RETURNS, OLD, MASK, 0.4, mode)
    metrics = combine_metrics(part.metrics for part in parts)
    assert sum(part.loss for part in parts).item() == pytest.approx(expected.item())
    assert metrics == pytest.approx(
        {
            "critic/vf_loss": expected.item(),
            "critic/vf_clipfrac": clipped.item(),
            "critic/vpred_mean": NEW[MASK].mean().item(),
        }
    )
    assert 0 < clipped.item() < 1


def test_it_names_its_fields_and_travels_to_workers() -> None:
    loss = CriticLoss.of(CriticConfig())
    assert loss.fields == ("returns", "values")
    assert pickle.loads(pickle.dumps(loss)) == loss
