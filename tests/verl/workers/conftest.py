"""Ranks to run test code on, tiny checkpoints and the plain loop that the engine must equal."""

from __future__ import annotations

import inspect
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
import torch.distributed as dist
from ray import cloudpickle
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config

from verl.trainer.ppo.kl import kl_penalty
from verl.workers.config import ActorConfig
from verl.workers.engine.rows import Row

cloudpickle.register_pickle_by_value(sys.modules[__name__])

VOCABULARY = 61
TINY = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
    "eos_token_id": 0,
}
ARCHITECTURES: dict[str, PretrainedConfig] = {
    "qwen2": Qwen2Config(**TINY, tie_word_embeddings=True),
    "llama": LlamaConfig(**TINY, tie_word_embeddings=False),
    "qwen3": Qwen3Config(**TINY, head_dim=8, tie_word_embeddings=True),
}


@ray.remote(num_cpus=0)
class Rank:
    """One process of a process group that runs whatever it is given."""

    def __init__(self, rank: int, world_size: int, port: int) -> None:
        torch.set_num_threads(1)
        dist.init_process_group("cpu:gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
        self.mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("fsdp",))

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(self.mesh, *args)


Ranks = Callable[..., list[Any]]


@pytest.fixture(scope="session")
def ranks(ray_session: None) -> Iterator[Ranks]:
    """``ranks(function, arguments_of_each_rank)``: calls ``function(mesh, *arguments)`` on every rank of a mesh
    of as many ranks as there are argument tuples, one or two."""
    groups = {}
    for size in (1, 2):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        groups[size] = [Rank.remote(rank, size, port) for rank in range(size)]

    def call(function: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        cloudpickle.register_pickle_by_value(inspect.getmodule(function))
        group = groups[len(arguments)]
        return ray.get([rank.run.remote(function, *args) for rank, args in zip(group, arguments, strict=True)])

    yield call
    for rank in [rank for group in groups.values() for rank in group]:
        ray.kill(rank)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """A tiny checkpoint of an architecture, made from a seed."""
    root = tmp_path_factory.mktemp("checkpoints")

    def make(architecture: str, seed: int = 0) -> str:
        path = root / f"{architecture}-{seed}"
        if not path.exists():
            torch.manual_seed(seed)
            AutoModelForCausalLM.from_config(ARCHITECTURES[architecture]).save_pretrained(path)
        return str(path)

    return make


@pytest.fixture(scope="session")
def make_rows() -> Callable[..., list[Row]]:
    """Ragged rows whose policy and observation tokens alternate; 0, end and often pad id, occurs inside them."""

    def make(count: int, seed: int = 0) -> list[Row]:
        generator = torch.Generator().manual_seed(seed)

        def number(low: int, high: int) -> int:
            return int(torch.randint(low, high, (1,), generator=generator))

        rows = []
        for _ in range(count):
            prompt, response = number(1, 9), number(2, 30)
            mask = torch.arange(response) // number(1, 6) % 2 == 0
            rows.append(
                Row(
                    input_ids=torch.randint(0, VOCABULARY, (prompt + response,), generator=generator),
                    response_mask=mask,
                    fields={
                        "advantages": torch.randn(1, generator=generator).expand(response).contiguous(),
                        "rollout_log_probs": -3 - torch.rand(response, generator=generator),
                        "old_log_probs": -3 - torch.rand(response, generator=generator),
                        "ref_log_prob": -3 - torch.rand(response, generator=generator),
                    },
                )
            )
        return rows

    return make


def scores_of_row(model: torch.nn.Module, row: Row, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability and entropy of every response token, one padded Hugging Face call for the row."""
    ids = torch.nn.functional.pad(row.input_ids, (0, 5))[None]
    attention = (torch.arange(ids.shape[1]) < row.length).long()[None]
    logits = model(input_ids=ids, attention_mask=attention).logits[0, row.prompt_length - 1 : row.length - 1]
    log_probs = (logits / temperature).log_softmax(-1)
    targets = row.input_ids[row.prompt_length :]
    return log_probs[torch.arange(len(targets)), targets], -(log_probs.exp() * log_probs).sum(-1)


@pytest.fixture(scope="session")
def plain_scores() -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    return scores_of_row


@pytest.fixture(scope="session")
def plain_gradient() -> Callable[..., tuple[float, dict[str, torch.Tensor]]]:
    """The actor's loss and every gradient, token by token, in one process."""

    def compute(
        path: str, rows: Sequence[Row], config: ActorConfig, temperature: float
    ) -> tuple[float, dict[str, torch.Tensor]]:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        low, high = config.clip_range
        trained = [row for row in rows if row.trained_tokens]
        tokens = sum(row.trained_tokens for row in trained)
        loss = torch.zeros(())
        for row in trained:
            log_probs, entropys = scores_of_row(model, row, temperature)
            for j in row.response_mask.nonzero()[:, 0].tolist():
                advantage = row.fields["advantages"][j]
                old = row.fields.get("old_log_probs", log_probs.detach())[j]
                ratio = torch.exp(log_probs[j] - old)
                policy = -torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)
                if advantage < 0:
                    policy = torch.minimum(policy, -advantage * config.clip_ratio_c)
                weight = torch.exp(old - row.fields["rollout_log_probs"][j]).clamp(max=config.rollout_is_threshold)
                kl = kl_penalty(log_probs[j], row.fields["ref_log_prob"][j], config.kl_loss_type)
                term = weight * policy - config.entropy_coeff * entropys[j]
                term = term + config.kl_loss_coef * ratio.detach() * kl
                loss = loss + term / token_share(row, config.loss_agg_mode, tokens, len(trained))
        loss.backward()
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        return loss.item(), {name: gradient for name, gradient in gradients.items() if gradient is not None}

    return compute


def token_share(row: Row, mode: str, tokens: int, sequences: int) -> float:
    return {
        "token-mean": tokens,
        "seq-mean-token-sum": sequences,
        "seq-mean-token-mean": sequences * row.trained_tokens,
    }[mode]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return tmp_path / "run"
