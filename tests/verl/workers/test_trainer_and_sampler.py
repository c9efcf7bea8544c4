"""After an update and a stream of weights, the sampler's probabilities are the trainer's."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedTokenizerFast

from verl.trainer.ppo.actor_loss import ActorLoss
from verl.workers.config import ActorConfig, ModelConfig
from verl.workers.engine.fsdp import TrainableFSDPEngine
from verl.workers.engine.logprob import TokenLogProbs
from verl.workers.engine.loss import PolicyBatchLoss
from verl.workers.engine.rows import Row
from verl.workers.rollout.engine import Generation, GenerationRequest, SamplingParams
from verl.workers.rollout.torch_engine import TorchEngine
from verl.workers.rollout.weight_sync import buckets

TEMPERATURE = 0.8
LOG_PROBS = partial(TokenLogProbs, temperature=TEMPERATURE)
CONFIG = ActorConfig(use_kl_loss=False)


async def sync_and_generate(
    engine: TorchEngine, trainer: TrainableFSDPEngine[PolicyBatchLoss], prompts: list[list[int]]
) -> list[Generation]:
    await engine.begin_weights(1)
    for bucket in buckets(trainer.full_tensors(), 4000):
        await engine.load_weights(bucket)
    await engine.end_weights(1)
    sampling = SamplingParams(temperature=TEMPERATURE, max_tokens=12)
    requests = [GenerationRequest(f"s{i}", tuple(ids), sampling, stream=i) for i, ids in enumerate(prompts)]
    return list(await asyncio.gather(*(engine.generate(request) for request in requests)))


def sample_after_update(mesh: DeviceMesh, path: str, rows: list[Row]) -> list[tuple[tuple[float, ...], list[float]]]:
    """Sampler's and trainer's log-probabilities of each generation."""
    trainer = TrainableFSDPEngine(
        ModelConfig(path=path), CONFIG, mesh, partial(TokenLogProbs, temperature=TEMPERATURE), Path()
    )
    vocabulary = {f"w{i}": i for i in range(61)}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="w0")))
    engine = TorchEngine(path, tokenizer, max_num_seqs=4, max_model_len=64)
    trainer.train_batch(rows, ActorLoss.of(CONFIG), 1e-2)
    prompts = [row.input_ids.tolist() for row in rows]
    generations = asyncio.run(sync_and_generate(engine, trainer, prompts))
    sampled = [
        Row(torch.tensor([*ids, *g.token_ids]), torch.ones(len(g.token_ids)).bool())
        for ids, g in zip(prompts, generations, strict=True)
    ]
    scores = trainer.score(sampled)
    assert {g.weights_versions for g in generations} == {((1, 12),)}
    return [(g.log_probs, score[0].tolist()) for g, score in zip(generations, scores, strict=True)]


@pytest.mark.parametrize("architecture", ["qwen2", "llama", "qwen3"])
def test_sampler_and_trainer_agree_after_an_update(
    ranks: Any, checkpoint: Any, make_rows: Any, architecture: str
) -> None:
    (pairs,) = ranks(sample_after_update, [(checkpoint(architecture), make_rows(6))])
    for sampler, trainer in pairs:
        assert sampler == pytest.approx(trainer, abs=1e-4)
