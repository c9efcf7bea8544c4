"""The search environment on a real server: the embedded one, with a tiny untrained simulation LLM."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from verl.agent_loop.base import TRAIN, AgentLoopContext, RolloutLimits, RolloutTask
from verl.agent_loop.trajectory import Prompt, Trajectory
from verl.workers.rollout.engine import InfrastructureError, SampleKey, SamplingParams
from zerosearch.agent_loop import SearchAgentLoop
from zerosearch.config import EmbeddedConfig, SearchConfig

TEXTS = ("<search>first query</search>", "<search>second query</search>", "<answer>Paris</answer>")


@pytest.fixture(scope="module")
def simulation_llm(bpe_tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(bpe_tokenizer),
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        eos_token_id=bpe_tokenizer.eos_token_id,
        pad_token_id=bpe_tokenizer.pad_token_id,
    )
    path = tmp_path_factory.mktemp("simulation_llm")
    Qwen2ForCausalLM(config).save_pretrained(path)
    bpe_tokenizer.save_pretrained(path)
    return path


def make_loop(model: Path, tokenizer: PreTrainedTokenizerFast, run_dir: Path) -> SearchAgentLoop:
    config = SearchConfig(
        embedded_model=str(model), embedded=EmbeddedConfig(max_num_seqs=8), max_tokens=24, topk=2, end_threshold=0.5
    )
    limits = RolloutLimits(max_response_length=1500, max_turn_length=100, max_observation_length=500)
    return SearchAgentLoop(config, AgentLoopContext(tokenizer, limits, frozenset({2}), 1, 4, run_dir))


async def run_rows(loop: SearchAgentLoop, make_engine: Any, rows: range) -> list[Trajectory]:
    def job(row: int) -> Any:
        values = {"question": f"Question {row}?", "golden_answers": ["Paris"]}
        prompt = Prompt(f"row{row}", (5, 6, 7), "world", values)
        task = RolloutTask(prompt, SampleKey(1, 4, prompt.uid, 0), TRAIN, SamplingParams(max_tokens=100))
        return loop.run(task, make_engine(*TEXTS), loop.default_reward())

    return list(await asyncio.gather(*map(job, rows)))


async def test_trajectories_repeat_whatever_else_runs_and_a_dead_server_is_typed(
    simulation_llm: Path, bpe_tokenizer: PreTrainedTokenizerFast, make_engine: Any, tmp_path: Path
) -> None:
    first, second = (make_loop(simulation_llm, bpe_tokenizer, tmp_path) for _ in range(2))
    with first.services() as config:
        first.config = second.config = config
        assert await first.preflight() == []
        together = await run_rows(first, make_engine, range(6))
        alone = await run_rows(second, make_engine, range(3, 4))
    assert together[3].context_ids == alone[0].context_ids
    assert {t.reward for t in together} == {1.0}
    assert len({t.environment.searches[0].documents for t in together}) == 6, "each row has a seed of its own"
    assert (tmp_path / "logs" / "simulation_server.log").is_file()
    await asyncio.gather(first.close(), second.close())

    late = make_loop(simulation_llm, bpe_tokenizer, tmp_path)
    late.config = replace(config, deadline=0.5, outage_deadline=0.5)
    with pytest.raises(InfrastructureError, match=config.ip):
        await run_rows(late, make_engine, range(1))
    (problem,) = await late.preflight()
    assert "does not answer" in problem
    await late.close()
