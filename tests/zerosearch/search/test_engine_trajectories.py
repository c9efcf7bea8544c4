"""Trajectories and runs on real search engines, over sockets."""

from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from tests.zerosearch.search.servers import Fault, SearchR1Wiki, SerpApi
from verl.agent_loop.base import TRAIN, AgentLoopContext, RolloutLimits, RolloutTask, RunEndingError
from verl.agent_loop.trajectory import Prompt, Trajectory, TrajectoryStatus
from verl.utils.config import build_config
from verl.workers.rollout.engine import InfrastructureError, SampleKey, SamplingParams
from zerosearch.agent_loop import SearchAgentLoop
from zerosearch.config import SearchConfig
from zerosearch.metrics import search_metrics
from zerosearch.prompts import encode_plain, render_information
from zerosearch.search.backend import Label
from zerosearch.transport import RequestRejectedError

LIMITS = RolloutLimits(max_response_length=2000, max_turn_length=400, max_observation_length=800)
MakeLoop = Callable[..., SearchAgentLoop]


@pytest.fixture
async def make_loop(
    bpe_tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[MakeLoop]:
    monkeypatch.setenv("SER_API_KEY", SerpApi.key)
    made: list[SearchAgentLoop] = []

    def make(test_freq: int = 0, **settings: Any) -> SearchAgentLoop:
        values = {"topk": 2, "max_turns": 3, "deadline": 2.0, "end_threshold": 0.5} | settings
        config = build_config(SearchConfig, values, "retriever")
        context = AgentLoopContext(bpe_tokenizer, LIMITS, frozenset({2}), 3, 10, tmp_path, test_freq)
        loop = SearchAgentLoop(config, context)
        with loop.services() as served:
            loop.config = served
        made.append(loop)
        return loop

    yield make
    for loop in made:
        await loop.close()


@pytest.fixture
def run(make_engine: Any) -> Callable[..., Any]:
    async def go(loop: SearchAgentLoop, *texts: str, mode: str = TRAIN) -> Trajectory:
        row = {"question": "Where is X?", "golden_answers": ["Title 0"]}
        task = RolloutTask(Prompt("u", (5, 6, 7), "world", row), SampleKey(3, 1, "u", 0), mode, SamplingParams())
        return await loop.run(task, make_engine(*texts), loop.default_reward())

    return go


def google(server: SerpApi) -> dict[str, Any]:
    return {"google": {"base_url": f"http://{server.address}"}}


async def test_training_on_google(
    make_loop: MakeLoop, run: Any, serpapi: SerpApi, bpe_tokenizer: PreTrainedTokenizerFast
) -> None:
    loop = make_loop(search_mode="google", **google(serpapi))
    texts = ("<search>a</search>", "<search>a</search>", "<answer>Title 0</answer>")
    trajectory = await run(loop, *texts)
    assert (trajectory.status, trajectory.reward) == (TrajectoryStatus.ANSWERED, 1.0)
    first, again = trajectory.environment.searches
    assert (first.label, first.backend, first.gold_in_documents) == (Label.NONE, "google", True)
    assert (first.engine_calls, again.engine_calls) == (1, 0)
    assert trajectory.environment.noise_probability == 0.0
    observation = render_information(["Title 0\nSnippet 0", "Title 1\nSnippet 1"])
    assert trajectory.segments[1].token_ids == encode_plain(bpe_tokenizer, observation)
    metrics = loop.metrics([trajectory])
    assert metrics["search/engine_calls"] == 1.0
    assert metrics["search/gold_in_documents/none"] == 1.0
    assert "search/noisy_share" not in metrics
    assert await loop.probe([trajectory]) == {}, "only a simulation LLM could tell the gold answer"


async def test_training_on_a_wiki_retriever(make_loop: MakeLoop, run: Any, search_r1_wiki: SearchR1Wiki) -> None:
    loop = make_loop(search_mode="wiki", wiki={"address": search_r1_wiki.address})
    assert await loop.preflight() == []
    trajectory = await run(loop, "<search>a</search>", "<answer>x</answer>")
    (search,) = trajectory.environment.searches
    assert (search.backend, search.documents) == ("wiki", ('"Title 0"\na text', '"Title 1"\na text'))


async def test_no_results_are_observed_in_plain_words(
    make_loop: MakeLoop, run: Any, serpapi: SerpApi, bpe_tokenizer: PreTrainedTokenizerFast
) -> None:
    serpapi.results = []
    trajectory = await run(
        make_loop(search_mode="google", **google(serpapi)), "<search>a</search>", "<answer>x</answer>"
    )
    assert trajectory.status is TrajectoryStatus.ANSWERED
    assert trajectory.environment.searches[0].documents == ()
    text = "\n\n<information>No results were found.</information>\n\n"
    assert trajectory.segments[1].token_ids == encode_plain(bpe_tokenizer, text)


async def test_failures_of_an_engine_are_not_trained_on(make_loop: MakeLoop, run: Any, serpapi: SerpApi) -> None:
    """A failed search never becomes an observation that says nothing was found."""
    loop = make_loop(search_mode="google", **google(serpapi), deadline=0.3)
    serpapi.script = [Fault(401, {"error": "Invalid API key."})]
    with pytest.raises(RequestRejectedError, match="HTTP 401") as caught:
        await run(loop, "<search>a</search>", "<answer>x</answer>")
    assert caught.value.environment.failed_query == "a"
    assert len(serpapi.requests) == 1, "a refused search is not issued anew"
    serpapi.script = [Fault(429, {"error": "Your account has run out of searches."})] * 1000
    with pytest.raises(RunEndingError, match="run out of searches"):
        await run(loop, "<search>b</search>", "<answer>x</answer>")
    assert len(serpapi.requests) == 2, "nor is one whose quota is spent"
    serpapi.script = [Fault(429, {"error": "slow down"})] * 1000
    with pytest.raises(InfrastructureError, match="slow down"):
        await run(loop, "<search>c</search>", "<answer>x</answer>")


async def test_validation_beside_simulated_training_uses_the_engine_in_its_own_mode(
    make_loop: MakeLoop, run: Any, serpapi: SerpApi, chat_server: Any
) -> None:
    loop = make_loop(test_freq=5, search_engine="google", ip=chat_server.address, **google(serpapi))
    chat_server.answer = lambda _: "Doc 1: simulated"
    assert loop.validation_modes == ("noise_0", "noise_end", "google")
    texts = ("<search>a</search>", "<answer>x</answer>")
    found = {mode: await run(loop, *texts, mode=mode) for mode in (TRAIN, *loop.validation_modes)}
    backends = {mode: t.environment.searches[0].backend for mode, t in found.items()}
    assert backends == {"train": "simulate_sft", "noise_0": "simulate_sft", "noise_end": "simulate_sft"} | {
        "google": "google"
    }
    assert found["noise_end"].environment.noise_probability == 0.5
    assert found["google"].environment.noise_probability == 0.0
    assert len(serpapi.requests) == 1
    assert search_metrics([found["noise_0"]]).get("search/engine_calls") is None


async def test_preflight_asks_everything_that_the_run_will_search(
    make_loop: MakeLoop, serpapi: SerpApi, chat_server: Any, dead_address: str
) -> None:
    both = {"search_engine": "google", "ip": chat_server.address, **google(serpapi)}
    assert await make_loop(test_freq=0, **both).preflight() == []
    assert serpapi.requests == [], "an engine that is not used costs nothing"
    assert await make_loop(test_freq=1, **both).preflight() == []
    assert len(serpapi.requests) == 1
    wrong = {"search_engine": "wiki", "wiki": {"address": dead_address}, "deadline": 0.3}
    problems = await make_loop(test_freq=1, **(both | wrong | {"ip": ""})).preflight()
    assert ["give IP" in problems[0], "retriever.wiki.address" in problems[1]] == [True, True]
    (address,) = await make_loop(search_mode="wiki", wiki={"address": "a:port"}).preflight()
    assert "'port' is not a port" in address


@pytest.mark.parametrize(
    ("settings", "test_freq", "modes", "words"),
    [
        ({}, 5, ("noise_0", "noise_end"), ["noise 0", "noise 0.5"]),
        ({"search_engine": "google"}, 0, ("noise_0", "noise_end"), ["noise 0", "noise 0.5"]),
        ({"search_engine": "google", "end_threshold": 0.0}, 5, ("noise_0", "google"), ["noise 0", "Google search"]),
        ({"search_mode": "google"}, 0, ("google",), ["Google search"]),
        ({"search_mode": "google", "search_engine": "google"}, 5, ("google",), ["Google search"]),
        ({"search_mode": "wiki", "search_engine": "google"}, 0, ("wiki",), ["wiki retriever"]),
        (
            {"search_mode": "wiki", "search_engine": "google"},
            5,
            ("wiki", "google"),
            ["wiki retriever", "Google search"],
        ),
    ],
)
def test_validation_modes(
    make_loop: MakeLoop, settings: dict[str, Any], test_freq: int, modes: tuple[str, ...], words: list[str]
) -> None:
    loop = make_loop(test_freq=test_freq, **settings)
    assert loop.validation_modes == modes
    assert [loop.describe_mode(mode) for mode in modes] == words


def test_keys_are_taken_only_where_they_are_needed(make_loop: MakeLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    with_key = make_loop(search_mode="google", api_key="env:NO_SUCH_KEY")
    assert with_key.config.google.api_key == SerpApi.key
    assert SerpApi.key not in repr(with_key.config)
    monkeypatch.delenv("SER_API_KEY")
    assert make_loop(search_engine="google").config.google.api_key == "env:SER_API_KEY"
    with pytest.raises(ValueError, match="SER_API_KEY is not set"):
        make_loop(search_engine="google", test_freq=1)


async def test_no_server_is_started_for_real_search(make_loop: MakeLoop, tmp_path: Path) -> None:
    loop = make_loop(search_mode="wiki", embedded_model=str(tmp_path / "no_such_model"))
    assert loop.config == replace(loop.config, ip="")
