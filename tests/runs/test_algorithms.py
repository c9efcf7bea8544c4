"""PPO and REINFORCE on the quickstart, shortened: each script alone learns, and writes what its algorithm measures."""

from __future__ import annotations

import math

import pytest

from tests.glossary import undocumented
from tests.runs.script import SHORT, Finished, Start

TWO_RANKS = (
    "TOTAL_STEPS",
    "2",
    "trainer.nproc_per_node=2",
    "data.val_max_samples=16",
    "trainer.critic_warmup=1",
    "actor_rollout_ref.actor.ppo_mini_batch_size=8",
    "actor_rollout_ref.actor.ppo_epochs=2",
    "actor_rollout_ref.actor.shuffle=true",
    "actor_rollout_ref.actor.use_kl_loss=false",
    "critic.ppo_epochs=2",
    "algorithm.use_kl_in_reward=true",
    "algorithm.kl_ctrl.type=adaptive",
    "algorithm.gamma=0.99",
    "algorithm.lam=0.95",
)


def _learns(run: Finished) -> None:
    assert run.code == 0, run.output
    assert run.summary["exit_reason"] == "completed"
    assert run.summary["held_out_f1_after"] - run.summary["held_out_f1_before"] > 0.15
    assert run.summary["held_out_gain_low95"] > 0.05
    assert not run.processes_left


def test_ppo_learns_to_search_and_its_critic_to_predict(start: Start) -> None:
    run = start(*SHORT, algorithm="ppo").finish()
    _learns(run)
    assert not undocumented(name for row in run.metrics for name in row)
    steps = [row for row in run.metrics if "critic/vf_loss" in row]
    assert len(steps) == 5
    assert steps[0]["critic/values/max"] == steps[0]["critic/values/min"] == 0.0  # a new critic predicts 0
    assert steps[-1]["critic/values/mean"] > 0.2
    assert steps[-1]["critic/vf_loss"] < steps[0]["critic/vf_loss"]
    assert all(abs(row["critic/advantages/mean"]) < 1e-6 for row in steps)  # whitened


@pytest.mark.slow
def test_reinforce_learns_to_search(start: Start) -> None:
    run = start(*SHORT, algorithm="reinforce").finish()
    _learns(run)
    assert not any(name.startswith("critic/vf") for row in run.metrics for name in row)


@pytest.mark.slow
def test_ppo_on_two_ranks_with_warm_up_several_updates_and_kl_in_the_reward(start: Start) -> None:
    run = start(*TWO_RANKS, algorithm="ppo").finish()
    assert run.code == 0, run.output
    first, second = (row for row in run.metrics if "critic/vf_loss" in row)
    assert "actor/loss" not in first  # the critic's warm-up
    assert second["actor/ppo_kl"] != 0  # later updates of a batch are off its policy
    assert first["actor/reward_kl_penalty"] == second["actor/reward_kl_penalty"] == 0  # nothing has moved yet
    assert second["actor/reward_kl_penalty_coeff"] < first["actor/reward_kl_penalty_coeff"] == 0.001
    assert math.isfinite(second["actor/grad_norm"])
    assert not run.processes_left
