"""From scores to advantages on a whole batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from verl.agent_loop.trajectory import Segment, SegmentKind, Trajectory, TrajectoryStatus
from verl.trainer.config import (
    ActorConfig,
    ActorRolloutRefConfig,
    AlgorithmConfig,
    KLControlConfig,
    PPOTrainerConfig,
    StatusPolicyConfig,
)
from verl.trainer.ppo.advantage_step import AdvantageStep, accepted
from verl.trainer.ppo.rollout_batch import to_data_proto

ANSWERED, TRUNCATED = TrajectoryStatus.ANSWERED, TrajectoryStatus.TRUNCATED


def trajectory(uid: str, reward: float, status: TrajectoryStatus = ANSWERED) -> Trajectory:
    """Two policy tokens, two observation tokens, one policy token."""
    first = Segment(SegmentKind.POLICY, (5, 6), (-0.5, -0.6), ((0, 2),))
    observed = Segment(SegmentKind.OBSERVATION, (7, 8))
    last = Segment(SegmentKind.POLICY, (9,), (-0.7,), ((0, 1),))
    return Trajectory(uid, 0, 1, "train", (1, 2, 3), [first, observed, last], status, reward)


def run(config: AlgorithmConfig, rows: list[Trajectory], **tensors: torch.Tensor) -> tuple[Any, dict[str, float]]:
    batch = to_data_proto(rows, pad_token_id=0, temperature=1.0)
    assert batch.batch is not None
    for name, value in tensors.items():
        batch.batch[name] = value
    metrics = AdvantageStep(config).run(batch, rows)
    return batch.batch, metrics


ROWS = [trajectory("a", 1.0), trajectory("a", 0.0), trajectory("b", 1.0), trajectory("b", 0.5)]


def test_reinforce_reads_its_baseline_from_the_configuration() -> None:
    for baseline, expected in (("none", [1.0, 0.0, 1.0, 0.5]), ("leave_one_out", [1.0, -1.0, 0.5, -0.5])):
        config = AlgorithmConfig(adv_estimator="reinforce", baseline=baseline)  # type: ignore[arg-type]
        tensors, metrics = run(config, ROWS)
        assert tensors["advantages"][:, 0].tolist() == expected
        assert tensors["advantages"][:, 2:4].abs().sum() == 0  # observation tokens
        assert metrics == {}


def test_gae_uses_gamma_lambda_and_values_over_policy_tokens() -> None:
    values = torch.tensor([[0.1, 0.2, 9.0, 9.0, 0.3]] * 4)
    tensors, _ = run(AlgorithmConfig(adv_estimator="gae", gamma=0.9, lam=0.8), ROWS, values=values)
    expected = []
    for row in ROWS:
        last = row.reward - 0.3
        middle = 0.9 * 0.3 - 0.2 + 0.9 * 0.8 * last
        first = 0.9 * 0.2 - 0.1 + 0.9 * 0.8 * middle
        expected.append([first + 0.1, middle + 0.2, 0.0, 0.0, last + 0.3])
    np.testing.assert_allclose(tensors["returns"].numpy(), expected, atol=1e-6)


def test_masked_statuses_count_in_their_group_but_are_not_trained() -> None:
    rows = [trajectory("a", 1.0), trajectory("a", 0.0, TRUNCATED)]
    config = AlgorithmConfig(adv_estimator="reinforce", status_policy=StatusPolicyConfig(truncated="mask"))
    tensors, _ = run(config, rows)
    assert tensors["advantages"][0, 0] == 1.0  # 1 minus the masked row's 0
    assert tensors["response_mask"].sum(1).tolist() == [3, 0]


def test_kl_in_the_reward_is_taken_off_policy_tokens_only_and_told() -> None:
    old = torch.tensor([[-1.0, -2.0, -50.0, -50.0, -3.0]] * 4)
    reference = torch.tensor([[-1.5, -1.0, 50.0, 50.0, -5.0]] * 4)
    config = AlgorithmConfig(adv_estimator="reinforce", use_kl_in_reward=True, kl_ctrl=KLControlConfig(kl_coef=0.1))
    tensors, metrics = run(config, ROWS, old_log_probs=old, ref_log_prob=reference)
    np.testing.assert_allclose(tensors["token_level_rewards"][0].numpy(), [-0.05, 0.1, 0, 0, 1 - 0.2], atol=1e-6)
    assert metrics["actor/reward_kl_penalty"] == pytest.approx(0.5 - 1.0 + 2.0)
    assert metrics["actor/reward_kl_penalty_coeff"] == 0.1


def test_adaptive_coefficient_rises_while_the_kl_is_above_its_target() -> None:
    control = KLControlConfig(type="adaptive", kl_coef=0.1, target_kl=0.5, horizon=100)
    config = AlgorithmConfig(adv_estimator="reinforce", use_kl_in_reward=True, kl_ctrl=control)
    step = AdvantageStep(config)
    seen = []
    for _ in range(2):
        batch = to_data_proto(ROWS, 0, 1.0)
        assert batch.batch is not None
        batch.batch["old_log_probs"] = torch.zeros(4, 5)
        batch.batch["ref_log_prob"] = torch.full((4, 5), -1.0)
        seen.append(step.run(batch, ROWS)["actor/reward_kl_penalty_coeff"])
    assert seen == [0.1, pytest.approx(0.1 * (1 + 0.2 * 4 / 100))]  # the error is clipped at 0.2


def test_an_estimator_gets_what_it_takes() -> None:
    def few(response_mask: int, config: int) -> None: ...

    def all_of_them(response_mask: int, **further: int) -> None: ...

    given = {"response_mask": 1, "config": 2, "index": 3}
    assert accepted(few, given) == {"response_mask": 1, "config": 2}  # type: ignore[arg-type]
    assert accepted(all_of_them, given) == given  # type: ignore[arg-type]


def test_unknown_estimator_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown advantage estimator 'gea'"):
        AdvantageStep(AlgorithmConfig(adv_estimator="gea"))


def test_what_a_run_needs() -> None:
    without = ActorRolloutRefConfig(actor=ActorConfig(use_kl_loss=False))
    assert [AlgorithmConfig(adv_estimator=name).needs_critic for name in ("gae", "grpo", "reinforce")] == [1, 0, 0]
    assert PPOTrainerConfig().needs_reference
    assert not PPOTrainerConfig(actor_rollout_ref=without).needs_reference
    assert PPOTrainerConfig(actor_rollout_ref=without, algorithm=AlgorithmConfig(use_kl_in_reward=True)).needs_reference
