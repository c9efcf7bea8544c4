"""The parts of a run, made from its configuration; nothing here starts a process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from verl.agent_loop.base import AgentLoop, AgentLoopContext, RolloutLimits
from verl.trainer.config import DataConfig, PPOTrainerConfig
from verl.utils.config import build_config
from verl.utils.dataset.rl_dataset import PromptFormat, RLHFDataset, RowCheck, RowPolicy
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
    settings = environment_class(config).Config
    try:
        return build_config(settings, config.retriever, "retriever")
    except ValueError as error:
        known = [setting.name for setting in fields(settings)]
        raise ValueError(f"{error}{_whose_keys(config, known)}") from error


def _whose_keys(config: PPOTrainerConfig, known: Sequence[str]) -> str:
    """For unknown keys: which environment is asked, and that a preset may be written for another one."""
    if set(config.retriever) <= set(known):
        return ""
    return (
        f"\n  retriever.* are the settings of environment.path={config.environment.path}, which knows "
        f"{', '.join(known) or 'none'}: an unknown key is misspelt, or of another environment, for which a "
        "preset (+preset=…) was written: then leave out either the preset or environment=…"
    )


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
        test_freq=config.trainer.test_freq if inputs.val_set else 0,
    )
    return environment_class(config)(environment_config(config), context)


def load_inputs(config: PPOTrainerConfig, first_only: bool = False) -> Inputs:
    """Tokenizer and data; ``first_only`` reads just the first usable training row.

    Raises ValueError naming file and row for what cannot be used, of both data sets at once.
    """
    model, data = config.actor_rollout_ref.model, config.data
    path = resolve_path(model.path)
    tokenizer = hf_tokenizer(path, model.trust_remote_code, data.chat_template)
    eos = eos_token_ids(path, tokenizer)
    sets: list[RLHFDataset] = []
    problems: list[str] = []
    train = (data.train_files, 1 if first_only else data.train_max_samples)
    val = (() if first_only else data.val_files, data.val_max_samples)
    for files, max_samples in (train, val):
        try:
            sets += [_load_rows(config, files, max_samples, tokenizer)] if files else []
        except ValueError as error:
            problems.append(str(error))
    if problems:
        raise ValueError("\n".join(problems))
    return Inputs(tokenizer, eos, sets[0], sets[1] if len(sets) > 1 else None)


def _load_rows(
    config: PPOTrainerConfig, files: Sequence[str], max_samples: int, tokenizer: PreTrainedTokenizerBase
) -> RLHFDataset:
    policy = RowPolicy(config.data.invalid_rows, config.data.duplicate_rows)
    check = _row_check(config)
    prompt_format = make_prompt_format(config)
    return RLHFDataset([resolve_path(f) for f in files], tokenizer, prompt_format, check, max_samples, policy)


def _row_check(config: PPOTrainerConfig) -> RowCheck:
    environment = environment_class(config)
    if config.custom_reward_function.path:
        return environment.check_row

    def check(row: Mapping[str, Any]) -> None:
        environment.check_row(row)
        environment.check_reward(row)

    return check


def make_prompt_format(config: PPOTrainerConfig) -> PromptFormat:
    data: DataConfig = config.data
    return PromptFormat(
        template=environment_class(config).prompt_template(data.prompt_template),
        prompt_key=data.prompt_key,
        question_key=data.question_key,
        max_prompt_length=data.max_prompt_length,
        filter_overlong=data.filter_overlong_prompts,
    )
