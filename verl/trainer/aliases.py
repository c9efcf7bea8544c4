"""Other names for our keys, and keys that elsewhere did nothing.

Hydra refuses keys it does not know, so overrides are rewritten before it composes.
"""

from __future__ import annotations

from collections.abc import Sequence

ALIASES: dict[str, str] = {
    "actor_rollout_ref.rollout.n_agent": "actor_rollout_ref.rollout.n",
    "data.max_start_length": "data.max_prompt_length",
    "data.max_obs_length": "actor_rollout_ref.rollout.max_observation_length",
    "trainer.total_steps": "trainer.total_training_steps",
}

REFUSED: dict[str, str] = {
    "data.tokenizer": "the tokenizer is the model's own",
    "actor_rollout_ref.rollout.do_sample": "training always samples; for validation set rollout.val_kwargs.do_sample",
    "actor_rollout_ref.rollout.top_k": "training on truncated sampling would not follow the policy's gradient",
    "actor_rollout_ref.rollout.top_p": "training on truncated sampling would not follow the policy's gradient; "
    "for validation set rollout.val_kwargs.top_p",
    "retriever.simulate_llm": "name the model with retriever.simulation_llm (empty: the server is asked)",
    "algorithm.no_think_rl": "it did nothing",
    "algorithm.state_masking": "observation tokens are never trained",
    "trainer.default_hdfs_dir": "runs are written below trainer.default_local_dir",
}


def rewrite_overrides(overrides: Sequence[str]) -> list[str]:
    """Overrides with every alias replaced. Raises ValueError for a refused key, and for a key given twice
    under two names."""
    rewritten: list[str] = []
    seen: dict[str, str] = {}
    for override in overrides:
        key, equals, value = override.partition("=")
        name = key.lstrip("+~")
        _check_refused(name)
        target = ALIASES.get(name, name)
        if equals and seen.setdefault(target, name) != name:
            raise ValueError(f"{name} and {seen[target]} are the same key: give one of them")
        rewritten.append(f"{target}{equals}{value}" if name in ALIASES else override)
    return rewritten


def _check_refused(name: str) -> None:
    for refused, reason in REFUSED.items():
        if name == refused or name.startswith(refused + "."):
            raise ValueError(f"{name} is not accepted: {reason}")
