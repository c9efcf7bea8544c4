"""A plain training loop for the starter models: weighted next-token loss, one process, no framework."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random

import torch
from torch.nn import functional
from transformers import Qwen2Config, Qwen2ForCausalLM

from zerosearch.quickstart.templates import MODEL_LENGTH

logger = logging.getLogger(__name__)

_POOL = 512
_LOG_EVERY = 50
_FINAL_RATE_SHARE = 0.1


@dataclass(frozen=True)
class Sample:
    """Token ids and, for each, its weight in the loss (0: read only). The two are equally long."""

    ids: list[int]
    weights: list[float]

    def __post_init__(self) -> None:
        assert len(self.ids) == len(self.weights)


@dataclass(frozen=True)
class Phase:
    """One stretch of training. `tokens` counts padding too; the rate falls on a cosine to a tenth."""

    draw: Callable[[Random], Sample]
    steps: int
    tokens: int
    rate: float
    warmup: int = 30


def make_model(vocabulary: int, pad_id: int, eos_id: int, seed: int) -> Qwen2ForCausalLM:
    """A fresh starter model of about 0.82 million parameters in fp32."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=MODEL_LENGTH,
        tie_word_embeddings=True,
        # The usual 0.02 leaves a model this narrow without signal for hundreds of steps.
        initializer_range=0.08,
        bos_token_id=None,
        eos_token_id=eos_id,
        pad_token_id=pad_id,
        dtype="float32",
    )
    return Qwen2ForCausalLM(config)


def train(model: Qwen2ForCausalLM, phase: Phase, seed: int) -> None:
    """Run one phase in place. The same model, phase and seed give the same weights on one machine."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=phase.rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    batches = _batches(phase, Random(seed))
    model.train()
    losses: list[float] = []
    for step in range(1, phase.steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = phase.rate * _rate_share(step, phase)
        losses.append(_update(model, optimizer, next(batches)))
        if step % _LOG_EVERY == 0 or step == phase.steps:
            recent = losses[-_LOG_EVERY:]
            logger.info("step %d of %d, loss %.3f", step, phase.steps, sum(recent) / len(recent))
    model.eval()


def _update(model: Qwen2ForCausalLM, optimizer: torch.optim.Optimizer, batch: Sequence[Sample]) -> float:
    loss = _loss(model, batch)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def _loss(model: Qwen2ForCausalLM, batch: Sequence[Sample]) -> torch.Tensor:
    ids, weights = _collate(batch)
    # Rows are padded on the right and attention is causal, so no mask is needed.
    hidden = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
    targets, weights = ids[:, 1:], weights[:, 1:]
    counted = weights > 0
    token_losses = functional.cross_entropy(model.lm_head(hidden[counted]), targets[counted], reduction="none")
    return (token_losses * weights[counted]).sum() / weights.sum()


def _collate(batch: Sequence[Sample]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and weights, each (rows, longest row)."""
    longest = max(len(sample.ids) for sample in batch)
    ids = torch.zeros(len(batch), longest, dtype=torch.long)
    weights = torch.zeros(len(batch), longest)
    for row, sample in enumerate(batch):
        ids[row, : len(sample.ids)] = torch.tensor(sample.ids)
        weights[row, : len(sample.ids)] = torch.tensor(sample.weights)
    return ids, weights


def _batches(phase: Phase, rng: Random) -> Iterator[list[Sample]]:
    while True:
        pool = sorted((phase.draw(rng) for _ in range(_POOL)), key=lambda sample: len(sample.ids))
        # The last, smaller batch holds the longest samples: dropping it would never train them.
        batches = list(_chunks(pool, phase.tokens))
        rng.shuffle(batches)
        yield from batches


def _chunks(pool: Sequence[Sample], tokens: int) -> Iterator[list[Sample]]:
    chunk: list[Sample] = []
    for sample in pool:
        if chunk and (len(chunk) + 1) * len(sample.ids) > tokens:
            yield chunk
            chunk = []
        chunk.append(sample)
    yield chunk


def _rate_share(step: int, phase: Phase) -> float:
    decay = _FINAL_RATE_SHARE + (1 - _FINAL_RATE_SHARE) * 0.5 * (1 + math.cos(math.pi * (step - 1) / phase.steps))
    return min(1.0, step / phase.warmup) * decay
