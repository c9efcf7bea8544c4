"""Tokens per second of the torch engine against transformers' ``generate`` on the same tiny model.

The work is that of a rollout: groups of `GROUP` samples of one prompt, every sample `NEW_TOKENS` long.
Run as ``python scripts/benchmarks/rollout_engine.py [--json PATH]``. Engines take turns within each
round, every round does the same work, and each engine's best round counts, so that what else the
machine does falls on all alike. The targets compare with the faster of the two ``generate``.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections.abc import Callable
from pathlib import Path

import torch
from targets import Target, report
from tiny import VOCABULARY, tiny_qwen2
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from verl.workers.rollout.engine import GenerationRequest, SamplingParams
from verl.workers.rollout.torch_engine import TorchEngine

PROMPT_TOKENS = 100
NEW_TOKENS = 128
GROUP = 8
GOAL = 1.3

Prompts = list[tuple[int, ...]]


def word_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {f"w{index}": index for index in range(VOCABULARY)}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="w0")))


def random_prompts(count: int, seed: int) -> Prompts:
    rng = random.Random(seed)
    return [tuple(rng.randrange(VOCABULARY) for _ in range(PROMPT_TOKENS)) for _ in range(count)]


async def generate_and_release(engine: TorchEngine, request: GenerationRequest) -> int:
    generation = await engine.generate(request)
    await engine.release(request.session)
    return len(generation.token_ids)


def engine_runner(engine: TorchEngine) -> Callable[[Prompts], None]:
    async def generate(prompts: Prompts) -> None:
        sampling = SamplingParams(max_tokens=NEW_TOKENS)
        contexts = [ids for ids in prompts for _ in range(GROUP)]
        requests = [GenerationRequest(f"bench/{i}", ids, sampling, stream=i) for i, ids in enumerate(contexts)]
        lengths = await asyncio.gather(*(generate_and_release(engine, request) for request in requests))
        assert lengths == [NEW_TOKENS] * len(contexts)

    return lambda prompts: asyncio.run(generate(prompts))


def hf_runner(model: Qwen2ForCausalLM, cache: str) -> Callable[[Prompts], None]:
    def generate(prompts: Prompts) -> None:
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=True,
                top_k=0,
                num_return_sequences=GROUP,
                max_new_tokens=NEW_TOKENS,
                cache_implementation=cache,
                pad_token_id=0,
            )
        assert isinstance(out, torch.Tensor)
        assert out.shape == (len(prompts) * GROUP, PROMPT_TOKENS + NEW_TOKENS)

    return generate


def tokens_per_second(runners: dict[str, Callable[[Prompts], None]], batch: int, rounds: int) -> dict[str, float]:
    """Generated tokens per process CPU second: the best of ``rounds``, after one to warm up."""
    best = dict.fromkeys(runners, 0.0)
    for number in range(rounds + 1):
        prompts = random_prompts(batch // GROUP, number)
        for name, run in runners.items():
            started = time.process_time()
            run(prompts)
            speed = batch * NEW_TOKENS / (time.process_time() - started)
            if number:
                best[name] = max(best[name], speed)
    return best


def measure(batch: int, rounds: int) -> Target:
    model = tiny_qwen2()
    engine = TorchEngine(model, word_tokenizer(), max_num_seqs=batch, max_model_len=512)
    runners = {
        "torch engine": engine_runner(engine),
        "generate, dynamic cache": hf_runner(model, "dynamic"),
        "generate, static cache": hf_runner(model, "static"),
    }
    speeds = tokens_per_second(runners, batch, rounds)
    for name, speed in speeds.items():
        print(f"batch {batch}, {name}: {speed:.0f} tokens per CPU-second", flush=True)
    own = speeds.pop("torch engine")
    return Target(f"engine_over_hf_generate_batch_{batch}", own / max(speeds.values()), GOAL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="also write the targets here")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batches", type=int, nargs="+", default=[64, 96])
    args = parser.parse_args()
    torch.set_num_threads(1)
    report([measure(batch, args.rounds) for batch in args.batches], args.json)


if __name__ == "__main__":
    main()
