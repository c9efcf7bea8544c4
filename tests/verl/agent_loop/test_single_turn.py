from __future__ import annotations

from pathlib import Path

import pytest

from verl.agent_loop.base import AgentLoopContext, RewardInput, RolloutLimits, RolloutTask
from verl.agent_loop.reward import RuleReward
from verl.agent_loop.single_turn import SingleTurnConfig, SingleTurnLoop
from verl.agent_loop.trajectory import Prompt, Trajectory, TrajectoryStatus
from verl.trainer.compose import compose_config
from verl.trainer.setup import environment_config
from verl.utils.paths import resolve_path
from verl.utils.tokenizer import hf_tokenizer
from verl.workers.rollout.engine import Generation, GenerationRequest, SampleKey, SamplingParams, StopReason

ROW = {"data_source": "openai/gsm8k", "reward_model": {"ground_truth": "7"}}
TOKENIZER = hf_tokenizer(resolve_path("pkg://zerosearch.quickstart/assets/policy"), False, "auto")


class OneReply:
    """An engine that gives the same generation to every request."""

    def __init__(self, reason: StopReason) -> None:
        self.reason = reason
        self.requests: list[GenerationRequest] = []
        self.released: list[str] = []

    async def generate(self, request: GenerationRequest) -> Generation:
        self.requests.append(request)
        return Generation((5, 6, 7), (-0.1, -0.2, -0.3), self.reason, None, ((4, 3),))

    async def release(self, session: str) -> None:
        self.released.append(session)


async def run(reason: StopReason, config: SingleTurnConfig | None = None) -> tuple[Trajectory, OneReply, RewardInput]:
    context = AgentLoopContext(TOKENIZER, RolloutLimits(20, 12, 8), frozenset({0}), 0, 1, Path())
    seen: list[RewardInput] = []

    async def reward(given: RewardInput) -> dict[str, float]:
        seen.append(given)
        return {"score": 0.5, "answer_found": 1.0}

    engine = OneReply(reason)
    task = RolloutTask(
        Prompt("u", (1, 2), "openai/gsm8k", ROW), SampleKey(0, 3, "u", 2), "train", SamplingParams(max_tokens=99)
    )
    trajectory = await SingleTurnLoop(config or SingleTurnConfig(), context).run(task, engine, reward)
    return trajectory, engine, seen[0]


async def test_one_generation_within_the_smallest_cap_is_the_whole_trajectory() -> None:
    trajectory, engine, given = await run(StopReason.END_OF_SEQUENCE, SingleTurnConfig(stop=("x",)))
    (request,) = engine.requests
    assert (request.token_ids, request.sampling.max_tokens, request.sampling.stop) == ((1, 2), 12, ("x",))
    assert engine.released == [request.session]
    assert trajectory.response_ids == (5, 6, 7)
    assert trajectory.response_log_probs == (-0.1, -0.2, -0.3)
    assert (trajectory.reward, trajectory.reward_extra) == (0.5, {"answer_found": 1.0})
    assert given.solution_str == TOKENIZER.decode([5, 6, 7])


@pytest.mark.parametrize(
    ("reason", "status"),
    [
        (StopReason.END_OF_SEQUENCE, TrajectoryStatus.ANSWERED),
        (StopReason.STOP_STRING, TrajectoryStatus.ANSWERED),
        (StopReason.LENGTH, TrajectoryStatus.TRUNCATED),
    ],
)
async def test_status_says_whether_it_ended_by_itself(reason: StopReason, status: TrajectoryStatus) -> None:
    assert (await run(reason))[0].status is status


async def test_a_response_without_a_number_scores_zero_and_is_counted() -> None:
    def given(text: str) -> RewardInput:
        return RewardInput("openai/gsm8k", text, None, ROW)

    assert await RuleReward()(given("#### 7")) == {"score": 1.0, "answer_found": 1.0}
    assert await RuleReward()(given("#### 8")) == {"score": 0.0, "answer_found": 1.0}
    assert await RuleReward()(given("seven")) == {"score": 0.0, "answer_found": 0.0}


def test_rows_that_no_rule_scores_are_refused_at_load() -> None:
    SingleTurnLoop.check_reward(ROW)
    with pytest.raises(ValueError, match="'nq'"):
        SingleTurnLoop.check_reward({**ROW, "data_source": "nq"})
    with pytest.raises(ValueError, match="ground_truth"):
        SingleTurnLoop.check_reward({"data_source": "gsm8k"})


@pytest.mark.parametrize("overrides", [[], ["retriever=none"]])
def test_the_environment_alone_empties_the_retrievers_section(overrides: list[str]) -> None:
    config = compose_config(["environment=single_turn", "data.max_response_length=77", *overrides]).config
    assert environment_config(config) == SingleTurnConfig()
    assert config.actor_rollout_ref.rollout.max_turn_length == 77
