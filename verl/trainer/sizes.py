"""Whether the sizes of a configuration fit each other: tokens, prompts, trajectories, updates."""

from __future__ import annotations

from verl.trainer.config import PPOTrainerConfig
from verl.trainer.resources import Findings

_GROUP_ESTIMATORS = ("grpo", "rloo", "reinforce_plus_plus_baseline")


def check_lengths(config: PPOTrainerConfig, context_length: int | None, findings: Findings) -> None:
    """Token budgets against each other and against the model's context (None: not known)."""
    rollout, data = config.actor_rollout_ref.rollout, config.data
    if rollout.max_turn_length > data.max_response_length:
        findings.problem(
            f"rollout.max_turn_length ({rollout.max_turn_length}) exceeds data.max_response_length "
            f"({data.max_response_length}), which is the budget of the whole trajectory after the prompt: raise it"
        )
    elif rollout.max_turn_length < data.max_response_length < rollout.max_turn_length + rollout.max_observation_length:
        findings.warn(
            f"one turn ({rollout.max_turn_length} tokens) and one observation ({rollout.max_observation_length}) can "
            f"fill data.max_response_length ({data.max_response_length}), the budget of the whole trajectory"
        )
    if context_length is not None:
        check_context(config, context_length, "the model's", findings)


def check_context(config: PPOTrainerConfig, context_length: int, whose: str, findings: Findings) -> None:
    whole = config.data.max_prompt_length + config.data.max_response_length
    if whole > context_length:
        findings.problem(
            f"data.max_prompt_length + data.max_response_length is {whole}, {whose} context "
            f"(max_position_embeddings) is {context_length}: lower them"
        )


def check_batches(config: PPOTrainerConfig, findings: Findings) -> None:
    """Batches, mini-batches, groups and steps against each other."""
    if config.trainer.val_only:
        return
    _check_critic_warmup(config, findings)
    _check_group(config, findings)
    _check_mini_batch(config, "actor_rollout_ref.actor", config.actor_rollout_ref.actor.ppo_mini_batch_size, findings)
    if config.algorithm.needs_critic:
        _check_mini_batch(config, "critic", config.critic.ppo_mini_batch_size, findings)


def _check_critic_warmup(config: PPOTrainerConfig, findings: Findings) -> None:
    trainer = config.trainer
    if trainer.critic_warmup and not config.algorithm.needs_critic:
        findings.problem(
            f"trainer.critic_warmup is {trainer.critic_warmup}, but {config.algorithm.adv_estimator} has no critic: "
            "set it to 0, or take algorithm=ppo"
        )
    elif trainer.critic_warmup >= trainer.total_training_steps:
        findings.problem(
            f"trainer.critic_warmup ({trainer.critic_warmup}) leaves none of the trainer.total_training_steps "
            f"({trainer.total_training_steps}) to the actor: lower it"
        )


def _check_group(config: PPOTrainerConfig, findings: Findings) -> None:
    algorithm = config.algorithm
    leave_one_out = algorithm.adv_estimator == "reinforce" and algorithm.baseline == "leave_one_out"
    if config.actor_rollout_ref.rollout.n == 1 and (algorithm.adv_estimator in _GROUP_ESTIMATORS or leave_one_out):
        findings.problem(
            f"actor_rollout_ref.rollout.n is 1: {algorithm.adv_estimator} compares the trajectories of one prompt, so "
            "every advantage would be 0; give 2 or more"
        )


def _check_mini_batch(config: PPOTrainerConfig, section: str, size: int | None, findings: Findings) -> None:
    batch = config.data.train_batch_size
    if size is None:
        return
    if size > batch:
        findings.problem(
            f"{section}.ppo_mini_batch_size is {size} prompts, data.train_batch_size only {batch}: lower it"
        )
    elif batch % size:
        findings.warn(
            f"{section}.ppo_mini_batch_size {size} does not divide data.train_batch_size {batch}: the last update of "
            f"a pass has {batch % size} prompts"
        )


def check_rows(config: PPOTrainerConfig, rows: int, findings: Findings) -> None:
    batch = config.data.train_batch_size
    if rows < batch and not config.trainer.val_only:
        findings.problem(f"data.train_batch_size is {batch}, but there are only {rows} usable rows: lower it")
