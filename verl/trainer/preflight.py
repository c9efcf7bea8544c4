"""What would stop a run, found before a model is loaded: every problem in one list, each with its fix."""

from __future__ import annotations

import asyncio
import inspect
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from verl.agent_loop.base import AgentLoop, RunPlan
from verl.models.registry import packed_model_class
from verl.trainer.config import PPOTrainerConfig
from verl.trainer.model_files import ModelFiles, find_model
from verl.trainer.ppo.core_algos import get_adv_estimator_fn, get_policy_loss_fn
from verl.trainer.resources import Findings, Machine, Sizes, check_disk, check_machine
from verl.trainer.setup import (
    Inputs,
    environment_class,
    environment_config,
    load_inputs,
    make_environment,
    make_prompt_format,
)
from verl.trainer.sizes import check_batches, check_context, check_lengths, check_rows
from verl.trainer.watchdog import watchdog_problems
from verl.utils.dataset.rl_dataset import listed, render_prompt
from verl.utils.dataset.row_files import SUFFIXES, read_columns
from verl.utils.import_path import load_from_file
from verl.utils.paths import resolve_path
from verl.utils.tokenizer import template_notes, tokenizer_problems

MODEL_KEY = "MODEL_PATH (actor_rollout_ref.model.path)"
CRITIC_KEY = "critic.model.path"


def preflight(config: PPOTrainerConfig, machine: Machine | None = None) -> Inputs:
    """Tokenizer and data of a run that can start; its first prompt, notes and announcements are printed.

    ``machine`` is this one when not given. Raises ValueError listing every problem.
    """
    findings = Findings()
    policy = _policy(config, findings)
    critic = _critic(config, policy, findings)
    check_lengths(config, policy.context_length if policy else None, findings)
    check_batches(config, findings)
    findings.problems.extend(watchdog_problems(config))
    readable = _check_data_files(config, findings)
    _check_reward(config, findings)
    sizes = Sizes(_parameters(policy, MODEL_KEY, findings), _parameters(critic, CRITIC_KEY, findings))
    if not os.environ.get("RAY_ADDRESS"):
        check_machine(config, machine or Machine.here(), sizes, findings)
    check_disk(config, sizes.policy, findings)
    inputs = _inputs(config, policy, findings) if policy and readable else None
    _check_environment(config, inputs, findings)
    _check_algorithm(config, findings)  # last: the user's modules, loaded by now, may register names
    refuse(findings.problems)
    assert inputs is not None
    print(describe_first_prompt(config, inputs))
    _tell(findings.warnings)
    return inputs


def refuse(problems: Sequence[str]) -> None:
    """Raises ValueError with every problem, one a paragraph; nothing where there is none."""
    if problems:
        indented = (problem.replace("\n", "\n    ") for problem in problems)
        raise ValueError("this run cannot start:\n" + "\n".join(f"  - {problem}" for problem in indented))


def _policy(config: PPOTrainerConfig, findings: Findings) -> ModelFiles | None:
    path = config.actor_rollout_ref.model.path
    if not path:
        findings.problem(f"no policy: give {MODEL_KEY}")
        return None
    return _model(path, MODEL_KEY, findings)


def _critic(config: PPOTrainerConfig, policy: ModelFiles | None, findings: Findings) -> ModelFiles | None:
    """The critic's checkpoint, the policy's where it names none; it must read the policy's ids and contexts."""
    if not config.algorithm.needs_critic:
        return None
    if not config.critic.model.path:
        return policy
    critic = _model(config.critic.model.path, CRITIC_KEY, findings)
    if critic is None:
        return None
    if policy and policy.vocab_size and critic.vocab_size and policy.vocab_size > critic.vocab_size:
        findings.problem(
            f"{CRITIC_KEY}: its vocabulary has {critic.vocab_size} entries, the policy's {policy.vocab_size}: the "
            "critic reads the policy's token ids, take one with the same tokenizer"
        )
    if critic.context_length is not None:
        check_context(config, critic.context_length, "the critic's", findings)
    return critic


def _model(path: str, key: str, findings: Findings) -> ModelFiles | None:
    """The checkpoint, when it is here (or on the hub) and of an architecture that can be trained."""
    try:
        model = find_model(path, key)
    except ValueError as error:
        findings.problem(str(error))
        return None
    try:
        packed_model_class(PretrainedConfig(architectures=model.config.get("architectures")))
    except ValueError as error:
        findings.problem(f"{key}: {error}")
    return model


def _check_data_files(config: PPOTrainerConfig, findings: Findings) -> bool:
    """Whether prompts can be read: the template and every file, which must have the columns for one."""
    before = len(findings.problems)
    if not config.data.train_files:
        findings.problem("no data: give DATA_PATH (data.train_files)")
    if config.trainer.val_only and not config.data.val_files:
        findings.problem("trainer.val_only=true, but there is nothing to validate on: give data.val_files")
    try:
        prompt_format = make_prompt_format(config)
    except ValueError as error:
        findings.problem(str(error))
        return False
    for file in (*config.data.train_files, *config.data.val_files):
        try:
            wrong = prompt_format.missing_columns(read_columns(resolve_path(file)))
        except ValueError as error:
            findings.problem(f"{error}{_what_lies_there(file)}")
            continue
        if wrong:
            findings.problem(f"data file {file!r} {wrong}")
    return len(findings.problems) == before


def _what_lies_there(file: str) -> str:
    """A fix for a missing file: which data files its folder does hold."""
    folder = Path(file).parent
    if Path(file).exists():
        return ""
    if not folder.is_dir():
        return f": there is no directory {str(folder)!r}; check DATA_PATH, or download the data set there"
    found = sorted(path.name for path in folder.iterdir() if path.suffix in SUFFIXES)
    return f"; {str(folder)!r} holds {', '.join(found[:5]) or 'no data files'}: check DATA_PATH"


def _check_reward(config: PPOTrainerConfig, findings: Findings) -> None:
    reward = config.custom_reward_function
    if reward.path is None:
        return
    try:
        function = load_from_file(reward.path, reward.name)
    except (ValueError, ImportError, SyntaxError) as error:
        findings.problem(f"custom_reward_function.path: {error}")
        return
    takes = ("data_source", "solution_str", "ground_truth", "extra_info")
    try:
        inspect.signature(function).bind(**dict.fromkeys(takes))
    except TypeError as error:
        wants = f"is called as {reward.name}({', '.join(f'{name}=…' for name in takes)})"
        findings.problem(f"custom_reward_function.name: {reward.name!r} of {reward.path} {wants}, but {error}")


def _check_algorithm(config: PPOTrainerConfig, findings: Findings) -> None:
    """The names of estimator and policy loss are those of the registries; an estimator gets all that it takes."""
    algorithm, policy_loss = config.algorithm, config.actor_rollout_ref.actor.policy_loss
    try:
        get_policy_loss_fn(policy_loss)
    except ValueError as error:
        findings.problem(f"actor_rollout_ref.actor.policy_loss: {error}")
    try:
        parameters = inspect.signature(get_adv_estimator_fn(algorithm.adv_estimator)).parameters
    except ValueError as error:
        findings.problem(f"algorithm.adv_estimator: {error}")
        return
    values = parameters.get("values")
    if values is not None and values.default is inspect.Parameter.empty and not algorithm.needs_critic:
        findings.problem(
            f"algorithm.adv_estimator: {algorithm.adv_estimator} takes a critic's values, which only gae has: give "
            "its parameter `values` a default, or take algorithm=ppo"
        )


def _parameters(model: ModelFiles | None, key: str, findings: Findings) -> int | None:
    try:
        return model.parameters() if model else None
    except ValueError as error:
        findings.problem(f"{key}: {error}")
        return None


def _inputs(config: PPOTrainerConfig, policy: ModelFiles, findings: Findings) -> Inputs | None:
    """Tokenizer and data; None where they cannot be used."""
    try:
        inputs = load_inputs(config)
    except ValueError as error:
        findings.problem(str(error))
        return None
    findings.problems += tokenizer_problems(inputs.tokenizer, policy.vocab_size, inputs.eos_token_ids)
    findings.warnings += template_notes(inputs.tokenizer, config.data.chat_template)
    check_rows(config, len(inputs.train_set), findings)
    _note_rows(inputs, findings)
    return inputs


def _note_rows(inputs: Inputs, findings: Findings) -> None:
    findings.warnings += inputs.train_set.notes()
    if inputs.val_set is None:
        return
    findings.warnings += inputs.val_set.notes()
    shared = inputs.train_set.shared_with(inputs.val_set)
    if shared:
        count = f"{len(shared)} validation rows are also training rows"
        findings.warn(f"{count}, so their scores say nothing of unseen questions:\n{listed(shared)}")


def run_plan(config: PPOTrainerConfig, validation_rows: int) -> RunPlan:
    """How much the run will ask of its environment; ``validation_rows`` 0: nothing is validated."""
    trainer, rollout = config.trainer, config.actor_rollout_ref.rollout
    steps = trainer.total_training_steps
    between = (steps - 1) // trainer.test_freq if trainer.test_freq else 0
    ends = 1 if trainer.val_only else int(trainer.val_before_train) + 1
    validations = ends if trainer.val_only else ends + between
    return RunPlan(
        total_steps=0 if trainer.val_only else steps,
        trajectories_per_step=config.data.train_batch_size * rollout.n,
        validation_rows=validation_rows,
        validation_samples=rollout.val_kwargs.n,
        validations=validations if validation_rows else 0,
        full_validations=(validations if trainer.val_every_mode else ends) if validation_rows else 0,
        test_freq=trainer.test_freq if validation_rows else 0,
    )


def _check_environment(config: PPOTrainerConfig, inputs: Inputs | None, findings: Findings) -> None:
    """Adds the environment's own problems, those that only its servers can tell too, where they run already.

    What it announces is printed first: asking may cost something.
    """
    try:
        environment, section = environment_class(config), environment_config(config)
        made = make_environment(config, inputs, Path(config.trainer.default_local_dir)) if inputs else None
    except ValueError as error:
        findings.problem(str(error))
        return
    plan = run_plan(config, len(inputs.val_set) if inputs and inputs.val_set else 0)
    problems = environment.check(section, plan)
    if made and not problems:
        _tell(environment.announce(section, plan))
        problems = [] if made.starts_services else _ask_servers(made)
    findings.problems += problems


def _ask_servers(environment: AgentLoop[Any]) -> list[str]:
    async def ask() -> list[str]:
        try:
            return await environment.preflight()
        finally:
            await environment.close()

    try:
        with environment.services() as environment.config:
            return asyncio.run(ask())
    except ValueError as error:
        return [str(error)]


def _tell(notes: Sequence[str]) -> None:
    for note in notes:
        print("note: " + note.replace("\n", "\n  "), flush=True)


def describe_first_prompt(config: PPOTrainerConfig, inputs: Inputs) -> str:
    """The first training prompt as the policy will see it, with its ids."""
    row = inputs.train_set[0]
    text = render_prompt(inputs.tokenizer, make_prompt_format(config).messages(row.values))
    return f"the first prompt ({len(row.prompt_ids)} tokens):\n{text}\nits ids: {list(row.prompt_ids)}"


def first_prompt(config: PPOTrainerConfig) -> str:
    """As `describe_first_prompt`; says so where model or data are not here."""
    model = resolve_path(config.actor_rollout_ref.model.path) if config.actor_rollout_ref.model.path else ""
    files = [resolve_path(f) for f in config.data.train_files]
    if not (Path(model) / "config.json").is_file() or not files or not all(Path(f).is_file() for f in files):
        return "model or data are not on this machine: no prompt to show"
    return describe_first_prompt(config, load_inputs(config, first_only=True))


def dry_problems(config: PPOTrainerConfig) -> list[str]:
    """Problems of the configuration itself, for which neither files nor resources are looked at."""
    findings = Findings()
    check_lengths(config, None, findings)
    check_batches(config, findings)
    return findings.problems
