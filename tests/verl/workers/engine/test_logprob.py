from __future__ import annotations

from typing import Any

import pytest
import torch

from verl.models.registry import build_packed_model
from verl.workers.engine import logprob
from verl.workers.engine.logprob import TokenLogProbs
from verl.workers.engine.packing import MicroBatch, pack

CPU = torch.device("cpu")


def score(scorer: TokenLogProbs, batch: MicroBatch, entropy_needs_grad: bool) -> tuple[torch.Tensor, torch.Tensor]:
    packed = (batch.input_ids, batch.position_ids, batch.cu_seqlens, batch.max_seqlen)
    return scorer(*packed, batch.predictors, batch.targets, entropy_needs_grad)


@pytest.fixture
def scorer(checkpoint: Any) -> TokenLogProbs:
    return TokenLogProbs(build_packed_model(checkpoint("llama"), torch.float32, torch.float32, "cpu", True), 0.7)


def gradients(scorer: TokenLogProbs, batch: MicroBatch) -> list[torch.Tensor]:
    log_probs, entropy = score(scorer, batch, entropy_needs_grad=True)
    return list(torch.autograd.grad((log_probs + 0.3 * entropy).sum(), list(scorer.parameters())))


def test_chunks_change_neither_scores_nor_gradients(
    scorer: TokenLogProbs, make_rows: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = pack(make_rows(6), CPU)
    whole, whole_gradients = score(scorer, batch, False), gradients(scorer, batch)
    monkeypatch.setattr(logprob, "LOGITS_PER_CHUNK", 61 * 5)
    parts, part_gradients = score(scorer, batch, False), gradients(scorer, batch)
    for a, b in zip([*whole, *whole_gradients], [*parts, *part_gradients], strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-5)


def test_logits_are_held_for_one_chunk_at_a_time(
    scorer: TokenLogProbs, make_rows: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What backward keeps of the head are its inputs, never logits."""
    monkeypatch.setattr(logprob, "LOGITS_PER_CHUNK", 61 * 5)
    saved: list[torch.Size] = []

    def remember(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(remember, lambda tensor: tensor):
        score(scorer, pack(make_rows(6), CPU), True)
    assert saved
    assert not [shape for shape in saved if len(shape) == 2 and shape[1] == 61]


def test_entropy_carries_a_gradient_only_where_it_is_asked_for(scorer: TokenLogProbs, make_rows: Any) -> None:
    batch = pack(make_rows(2), CPU)
    assert not score(scorer, batch, False)[1].requires_grad
    assert score(scorer, batch, True)[1].requires_grad
