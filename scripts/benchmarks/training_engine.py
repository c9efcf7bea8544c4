"""Forward and backward tokens per second of the training engine against a padded Hugging Face loop.

Run as ``python scripts/benchmarks/training_engine.py [--json PATH]``. Both compute the same
policy-gradient loss on the same ragged rows of a tiny model, one thread, and take turns within each
round; each one's best round counts, so that what else the machine does falls on both alike.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from targets import Target, report
from tiny import VOCABULARY, tiny_qwen2
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM, PreTrainedModel

from verl.trainer.ppo.actor_loss import ActorLoss
from verl.workers.config import ActorConfig, ModelConfig
from verl.workers.engine.fsdp import TrainableFSDPEngine
from verl.workers.engine.logprob import TokenLogProbs
from verl.workers.engine.loss import PolicyBatchLoss
from verl.workers.engine.packing import split_by_tokens
from verl.workers.engine.rows import Row

PROMPT_TOKENS = 50
TOKENS_PER_MICRO_BATCH = 4096
GOAL = 1.5


def ragged_rows(count: int, seed: int) -> list[Row]:
    """Trajectories of one to four turns: policy tokens, then twice as many observation tokens, and so on."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for turns in torch.randint(1, 5, (count,), generator=generator).tolist():
        policy = torch.randint(20, 50, (turns,), generator=generator)
        mask = torch.cat([(torch.arange(3 * n) < n) for n in policy.tolist()])[: -2 * int(policy[-1])]
        length = PROMPT_TOKENS + len(mask)
        fields = {"advantages": torch.randn(1, generator=generator).expand(len(mask)).contiguous()}
        fields["rollout_log_probs"] = torch.full((len(mask),), -7.0)
        rows.append(Row(torch.randint(0, VOCABULARY, (length,), generator=generator), mask, fields))
    return rows


def engine_runner(
    engine: TrainableFSDPEngine[PolicyBatchLoss], config: ActorConfig
) -> Callable[[Sequence[Row]], float]:
    loss = ActorLoss.of(config)

    def run(rows: Sequence[Row]) -> float:
        value = engine.backward(rows, loss)["loss"]
        engine.optimizer.zero_grad()
        return value

    return run


def padded_runner(model: PreTrainedModel) -> Callable[[Sequence[Row]], float]:
    """Rows as they come, padded to the longest of each micro-batch, all logits at once."""

    def run(rows: Sequence[Row]) -> float:
        total = sum(row.trained_tokens for row in rows)
        longest = max(row.length for row in rows)
        loss = 0.0
        for part in split_by_tokens([longest] * len(rows), TOKENS_PER_MICRO_BATCH):
            chosen = [rows[i] for i in part]
            ids = torch.nn.utils.rnn.pad_sequence([row.input_ids for row in chosen], batch_first=True)
            lengths = torch.tensor([row.length for row in chosen])
            mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
            log_probs = model(input_ids=ids, attention_mask=mask).logits[:, :-1].log_softmax(-1)
            chosen_log_probs = log_probs.gather(-1, ids[:, 1:, None])[..., 0]
            weights = torch.zeros(ids.shape)
            for weight, row in zip(weights, chosen, strict=True):
                weight[row.prompt_length : row.length] = row.fields["advantages"] * row.response_mask
            term = -(torch.exp(chosen_log_probs - chosen_log_probs.detach()) * weights[:, 1:]).sum() / total
            term.backward()
            loss += term.item()
        model.zero_grad()
        return loss

    return run


def tokens_per_second(
    runners: dict[str, Callable[[Sequence[Row]], float]], count: int, rounds: int
) -> dict[str, float]:
    """Real tokens per process CPU second: the best of ``rounds``, after one to warm up. The losses must agree."""
    best = dict.fromkeys(runners, 0.0)
    for number in range(rounds + 1):
        rows = ragged_rows(count, number)
        losses = []
        for name, run in runners.items():
            started = time.process_time()
            losses.append(run(rows))
            speed = sum(row.length for row in rows) / (time.process_time() - started)
            if number:
                best[name] = max(best[name], speed)
        assert max(losses) - min(losses) < 1e-4, f"the losses differ: {losses}"
    return best


def measure(path: str, count: int, rounds: int) -> Target:
    config = ActorConfig(use_kl_loss=False, rollout_is_threshold=None, ppo_max_token_len_per_gpu=TOKENS_PER_MICRO_BATCH)
    log_probs = partial(TokenLogProbs, temperature=1.0)
    engine = TrainableFSDPEngine(ModelConfig(path=path), config, init_device_mesh("cpu", (1,)), log_probs, Path(path))
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).train()
    runners = {"engine": engine_runner(engine, config), "padded loop": padded_runner(model)}
    speeds = tokens_per_second(runners, count, rounds)
    for name, speed in speeds.items():
        print(f"{count} rows, {name}: {speed:.0f} tokens per CPU-second", flush=True)
    return Target(f"training_engine_over_padded_loop_{count}_rows", speeds["engine"] / speeds["padded loop"], GOAL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="also write the targets here")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, nargs="+", default=[96])
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with tempfile.TemporaryDirectory() as path:
        tiny_qwen2().save_pretrained(path)
        targets = [measure(path, count, args.rounds) for count in args.rows]
    dist.destroy_process_group()
    report(targets, args.json)


if __name__ == "__main__":
    main()
