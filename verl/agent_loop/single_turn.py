"""One generation and a rule: question in, response out, scored at its end."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from verl.agent_loop.base import AgentLoop, RewardFn, RewardInput, RolloutTask, Validation, scores_by_row
from verl.agent_loop.reward import RuleReward
from verl.agent_loop.trajectory import Segment, SegmentKind, Trajectory, TrajectoryStatus
from verl.utils.config import ReadableAsMapping
from verl.utils.dataset.ground_truth import ground_truth
from verl.utils.reward_score import rule_for
from verl.workers.rollout.engine import Generation, GenerationRequest, RolloutEngine, StopReason

PLAIN = "plain"
"""The prompt template that is the question and nothing else."""


@dataclass(frozen=True)
class SingleTurnConfig(ReadableAsMapping):
    """``stop`` strings end a generation as an end-of-sequence id does."""

    stop: tuple[str, ...] = ()


class SingleTurnLoop(AgentLoop[SingleTurnConfig]):
    """The policy generates once; the rule of the row's data source, or the user's function, scores it.

    A trajectory is ANSWERED when it ended by itself and TRUNCATED at ``rollout.max_turn_length`` or
    ``data.max_response_length``; both are scored.
    """

    Config: ClassVar[type] = SingleTurnConfig

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return self.config.stop

    async def run(self, task: RolloutTask, engine: RolloutEngine, reward: RewardFn) -> Trajectory:
        begin = time.perf_counter()
        generation = await self._generate(task, engine)
        seconds = time.perf_counter() - begin
        given = RewardInput(task.prompt.data_source, self.policy_text(generation.token_ids), None, task.prompt.row)
        scores = await reward(given)
        return task.trajectory(
            segments=[_segment(generation)],
            status=_status(generation),
            reward=scores["score"],
            reward_extra={name: value for name, value in scores.items() if name != "score"},
            timings={"generate": seconds},
        )

    async def _generate(self, task: RolloutTask, engine: RolloutEngine) -> Generation:
        key, limits = task.key, self.context.limits
        room = min(task.sampling.max_tokens, limits.max_turn_length, limits.max_response_length)
        sampling = replace(task.sampling, max_tokens=room, stop=self.config.stop)
        request = GenerationRequest(task.session, task.prompt.prompt_ids, sampling, key.stream("policy"))
        try:
            return await engine.generate(request)
        finally:
            await engine.release(task.session)

    def default_reward(self) -> RewardFn:
        return RuleReward()

    @classmethod
    def prompt_template(cls, name: str) -> str:
        return "{question}" if name == PLAIN else super().prompt_template(name)

    @classmethod
    def check_reward(cls, row: Mapping[str, Any]) -> None:
        rule_for(row.get("data_source")).check_ground_truth(ground_truth(row))

    def metrics(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """``score/{name}``: the mean of every further score that the reward returned, over those that have it."""
        values: dict[str, list[float]] = {}
        for trajectory in trajectories:
            for name, value in trajectory.reward_extra.items():
                values.setdefault(f"score/{name}", []).append(value)
        return {name: sum(listed) / len(listed) for name, listed in sorted(values.items())}

    def headline(self, metrics: Mapping[str, float]) -> str:
        length = metrics.get("response_length/policy/mean", 0.0)
        return f"ended {metrics['status/answered']:.2f} | {length:.0f} tokens"

    def summary(self, before: Validation, after: Validation) -> dict[str, float]:
        return _held_out(before, "before") | _held_out(after, "after")


def _segment(generation: Generation) -> Segment:
    return Segment(SegmentKind.POLICY, generation.token_ids, generation.log_probs, generation.weights_versions)


def _status(generation: Generation) -> TrajectoryStatus:
    at_cap = generation.stop_reason is StopReason.LENGTH
    return TrajectoryStatus.TRUNCATED if at_cap else TrajectoryStatus.ANSWERED


def _held_out(validation: Validation, when: str) -> dict[str, float]:
    """Mean reward over data rows, and their number; nothing where no row was scored."""
    rewards = list(scores_by_row(next(iter(validation.values()), ()), "reward").values())
    if not rewards:
        return {}
    return {f"held_out_reward_{when}": sum(rewards) / len(rewards), "held_out_n": float(len(rewards))}
