"""The parts of a run, made from its configuration; nothing here starts a process."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from verl.agent_loop.base import AgentLoop, AgentLoopContext, RolloutLimits
from verl.trainer.config import DataConfig, PPOTrainerConfig
from verl.utils.config import build_config
from verl.utils.dataset.rl_dataset import PromptFormat, RLHFDataset, RowCheck, render_prompt
from verl.utils.import_path import load_by_path
from verl.utils.paths import resolve_path
from verl.utils.tokenizer import eos_token_ids, hf_tokenizer


@dataclass(frozen=True)
class Inputs:
    """What the driver reads before anything is started."""

    tokenizer: PreTrainedTokenizerBase
    eos_token_ids: frozenset[int]
    train_set: RLHFDataset
    val_set: RLHFDataset | None


def device_name(config: PPOTrainerConfig) -> str:
    return "cuda" if config.trainer.n_gpus_per_node else "cpu"


def environment_class(config: PPOTrainerConfig) -> type[AgentLoop[Any]]:
    loaded = load_by_path(config.environment.path)
    if not (isinstance(loaded, type) and issubclass(loaded, AgentLoop)):
        raise ValueError(f"environment.path: {config.environment.path} is not an AgentLoop")
    return loaded


def environment_config(config: PPOTrainerConfig) -> Any:
    """The section ``retriever`` as the environment's own Config. Raises ValueError naming the wrong keys."""
    return build_config(environment_class(config).Config, config.retriever, "retriever")


def rollout_limits(config: PPOTrainerConfig) -> RolloutLimits:
    rollout = config.actor_rollout_ref.rollout
    return RolloutLimits(config.data.max_response_length, rollout.max_turn_length, rollout.max_observation_length)


def make_environment(config: PPOTrainerConfig, inputs: Inputs, run_dir: Path) -> AgentLoop[Any]:
    context = AgentLoopContext(
        tokenizer=inputs.tokenizer,
        limits=rollout_limits(config),
        eos_token_ids=inputs.eos_token_ids,
        seed=config.trainer.seed,
        total_steps=config.trainer.total_training_steps,
        run_dir=run_dir,
        test_freq=config.trainer.test_freq,
    )
    return environment_class(config)(environment_config(config), context)


def check_inputs(config: PPOTrainerConfig) -> None:
    """Raises ValueError with every problem that can be seen without loading anything, each with its fix."""
    problems = [*_path_problems(config), *_resource_problems(config), *_size_problems(config)]
    if problems:
        raise ValueError("this run cannot start:\n" + "\n".join(f"  - {problem}" for problem in problems))


def _path_problems(config: PPOTrainerConfig) -> list[str]:
    problems = []
    model = config.actor_rollout_ref.model.path
    if not model:
        problems.append("no policy: give MODEL_PATH (actor_rollout_ref.model.path)")
    elif model.startswith(("/", ".")) and not (Path(model) / "config.json").is_file():
        problems.append(f"actor_rollout_ref.model.path: {model!r} holds no config.json")
    if not config.data.train_files:
        problems.append("no data: give DATA_PATH (data.train_files)")
    files = [*config.data.train_files, *config.data.val_files]
    missing = [f for f in files if not Path(resolve_path(f)).is_file()]
    return problems + [f"data file {file!r} does not exist: check DATA_PATH" for file in missing]


def _resource_problems(config: PPOTrainerConfig) -> list[str]:
    """Only of a run on this machine alone: a cluster's resources are compared when its Ray is joined."""
    trainer = config.trainer
    if trainer.n_gpus_per_node and not os.environ.get("RAY_ADDRESS"):
        present = torch.cuda.device_count()
        if trainer.n_gpus_per_node > present:
            return [
                f"NUM_GPUS_PER_NODE asks for {trainer.n_gpus_per_node} GPUs, {present} are present: lower it (0 = CPU)"
            ]
    return []


def _size_problems(config: PPOTrainerConfig) -> list[str]:
    rollout = config.actor_rollout_ref.rollout
    problems = []
    ranks = config.trainer.ranks_per_node * config.trainer.nnodes
    if rollout.num_replicas > ranks:
        problems.append(
            f"rollout.num_replicas is {rollout.num_replicas}, but only {ranks} training ranks can host one each"
        )
    if rollout.max_turn_length > config.data.max_response_length:
        problems.append(
            f"rollout.max_turn_length ({rollout.max_turn_length}) exceeds data.max_response_length "
            f"({config.data.max_response_length}), which is the budget of the whole trajectory"
        )
    return problems


def load_inputs(config: PPOTrainerConfig) -> Inputs:
    """Tokenizer and data. Raises ValueError naming file and row for what cannot be used."""
    model = config.actor_rollout_ref.model
    path = resolve_path(model.path)
    tokenizer = hf_tokenizer(path, model.trust_remote_code, config.data.chat_template)
    prompt_format = make_prompt_format(config)
    check = environment_class(config).check_row
    data = config.data
    train = _load_rows(data.train_files, tokenizer, prompt_format, check, data.train_max_samples)
    val = _load_rows(data.val_files, tokenizer, prompt_format, check, data.val_max_samples) if data.val_files else None
    return Inputs(tokenizer, eos_token_ids(path, tokenizer), train, val)


def _load_rows(
    files: tuple[str, ...],
    tokenizer: PreTrainedTokenizerBase,
    prompt_format: PromptFormat,
    check: RowCheck,
    max_samples: int,
) -> RLHFDataset:
    rows = RLHFDataset([resolve_path(f) for f in files], tokenizer, prompt_format, check, max_samples)
    if rows.overlong:
        print(f"{len(rows.overlong)} prompts are longer than data.max_prompt_length and left out: {rows.overlong[:5]}")
    return rows


def make_prompt_format(config: PPOTrainerConfig) -> PromptFormat:
    data: DataConfig = config.data
    return PromptFormat(
        template=environment_class(config).prompt_template(data.prompt_template),
        prompt_key=data.prompt_key,
        question_key=data.question_key,
        max_prompt_length=data.max_prompt_length,
        filter_overlong=data.filter_overlong_prompts,
    )


def first_prompt(config: PPOTrainerConfig) -> str:
    """The first training prompt as the policy will see it, with its ids; says so where model or data are not here."""
    model = resolve_path(config.actor_rollout_ref.model.path) if config.actor_rollout_ref.model.path else ""
    files = [resolve_path(f) for f in config.data.train_files]
    if not (Path(model) / "config.json").is_file() or not files or not all(Path(f).is_file() for f in files):
        return "model or data are not on this machine: no prompt to show"
    inputs = load_inputs(config)
    row = inputs.train_set[0]
    text = render_prompt(inputs.tokenizer, make_prompt_format(config).messages(row.values))
    return f"the first prompt ({len(row.prompt_ids)} tokens):\n{text}\nits ids: {list(row.prompt_ids)}"
