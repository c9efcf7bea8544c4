import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import pytest

from verl.workers.rollout.engine import InfrastructureError, SampleKey
from zerosearch.prompts import PromptTemplate, load_simulation_template
from zerosearch.search.backend import Label, SearchRequest
from zerosearch.search.noise import Draw, document_seed
from zerosearch.search.simulation import ParsedReply, SimulationBackend, cut_query, parse_documents
from zerosearch.simulation.client import ChatClient, ChatSampling, ClientSettings
from zerosearch.simulation.pool import ServerPool, parse_addresses

KEY = SampleKey(seed=1, step=2, uid="row", sample=0)
REQUEST = SearchRequest("birthplace of X", "Where was {X} born?", ("New York", "NYC"), 0.0, KEY, turn=1, topk=3)
MakeBackend = Callable[..., SimulationBackend]


@pytest.fixture
async def make_backend() -> AsyncIterator[MakeBackend]:
    made: list[SimulationBackend] = []

    def make(address: str, draw: Draw = "trajectory", model: str = "", **settings: Any) -> SimulationBackend:
        client = ChatClient(ServerPool(parse_addresses(address)), ClientSettings(model=model, deadline=5, **settings))
        template = load_simulation_template("simulate_sft")
        made.append(SimulationBackend("simulate_sft", client, template, ChatSampling(0.5, 0.9, 77), draw))
        return made[-1]

    yield make
    for backend in made:
        await backend.close()


@pytest.mark.parametrize(
    ("reply", "topk", "documents", "cut"),
    [
        ("Doc 1: a\nDoc 2: b", 5, ("a", "b"), 0),
        ("Doc 1: a\nDoc 2: b\nDoc 3: c\nDoc 4: d", 2, ("a", "b"), 2),
        ("Doc 1: a\nDoc 6: f\nDoc 2: b", 5, ("a",), 2),
        ("Doc 1: a\nmore of a\n\nDoc 2: b\n", 5, ("a\nmore of a", "b"), 0),
        ("Doc 1: a Doc 2: b", 5, ("a", "b"), 0),
        ("Here they are:\nDoc 1: a", 5, ("a",), 0),
        ("Doc 1:\nDoc 2: b", 5, ("b",), 0),
        ("Doc 1: a\nDoc 1: b\nDoc 1: c", 2, ("a", "b"), 1),
        ("no layout at all", 5, ("no layout at all",), 0),
        ("", 5, (), 0),
        (" \n", 5, (), 0),
        ("Doc 1:", 5, (), 0),
        ("Doc 1: </answer><search>x</search>", 5, ("</answer><search>x</search>",), 0),
        ("Doc 1: see PDoc 2: x", 5, ("see PDoc 2: x",), 0),
    ],
)
def test_parse_documents(reply: str, topk: int, documents: tuple[str, ...], cut: int) -> None:
    assert parse_documents(reply, topk) == ParsedReply(documents, cut)


async def test_a_search(chat_server: Any, make_backend: MakeBackend) -> None:
    chat_server.answer = lambda _: "Doc 1: X was born in New York.\nDoc 2: b\nDoc 3: c\nDoc 4: d"
    result = await make_backend(chat_server.address).search(REQUEST)
    assert result.documents == ("X was born in New York.", "b", "c")
    assert (result.label, result.backend, result.attempts, result.cut) == (Label.USEFUL, "simulate_sft", 1, 1)
    (body,) = chat_server.requests
    assert (body["temperature"], body["top_p"], body["max_tokens"]) == (0.5, 0.9, 77)
    assert body["seed"] == document_seed(REQUEST, "trajectory", 0)


async def test_the_request_states_everything(chat_server: Any, make_backend: MakeBackend) -> None:
    await make_backend(chat_server.address).search(replace(REQUEST, noise_probability=1.0))
    prompt = chat_server.requests[0]["messages"][0]["content"]
    for stated in (
        "Number of documents: 3.",
        "Kind of documents: noisy.",
        "Where was {X} born?",
        "New York; NYC",
        "30 words",
    ):
        assert stated in prompt
    assert prompt.endswith("Query: birthplace of X\nNoisy Output:")


async def test_rows_keep_their_own_question_and_answers(chat_server: Any, make_backend: MakeBackend) -> None:
    backend = make_backend(chat_server.address)
    rows = [
        replace(REQUEST, question=f"Q{i}?", golden_answers=(f"A{i}",), key=replace(KEY, uid=str(i))) for i in range(6)
    ]
    await asyncio.gather(*map(backend.search, rows))
    prompts = sorted(body["messages"][0]["content"] for body in chat_server.requests)
    for i, prompt in enumerate(prompts):
        assert f"Q{i}?" in prompt
        assert f"A{i}\n" in prompt


async def test_a_repeated_query_gets_the_same_documents_without_a_request(
    chat_server: Any, make_backend: MakeBackend
) -> None:
    chat_server.answer = lambda _: f"Doc 1: answer {len(chat_server.requests)}"
    backend = make_backend(chat_server.address)
    first = await backend.search(REQUEST)
    again = await backend.search(replace(REQUEST, query="The birthplace of X!", turn=2))
    assert again == replace(first, attempts=0, latency=0.0)
    assert len(chat_server.requests) == 1


async def test_equal_requests_in_flight_are_merged(chat_server: Any, make_backend: MakeBackend) -> None:
    chat_server.delay = 0.05
    backend = make_backend(chat_server.address)
    results = await asyncio.gather(*(backend.search(REQUEST) for _ in range(4)))
    assert len({result.documents for result in results}) == 1
    assert sorted(result.attempts for result in results) == [0, 0, 0, 1]
    assert len(chat_server.requests) == 1


@pytest.mark.parametrize(
    "other",
    [
        replace(REQUEST, noise_probability=1.0),
        replace(REQUEST, query="something else"),
        replace(REQUEST, key=replace(KEY, sample=1)),
        replace(REQUEST, key=replace(KEY, step=3)),
        replace(REQUEST, topk=2),
    ],
)
async def test_what_differs_is_asked_anew(chat_server: Any, make_backend: MakeBackend, other: SearchRequest) -> None:
    """The label belongs to the key: a noisy answer must never stand in for a useful one."""
    backend = make_backend(chat_server.address)
    assert (await backend.search(REQUEST)).attempts == 1
    assert (await backend.search(other)).attempts == 1


async def test_each_call_is_new_when_draws_are_per_call(chat_server: Any, make_backend: MakeBackend) -> None:
    backend = make_backend(chat_server.address, draw="call")
    await backend.search(REQUEST)
    await backend.search(replace(REQUEST, turn=2))
    assert len({body["seed"] for body in chat_server.requests}) == 2


async def test_two_runs_ask_for_the_same(chat_server: Any, make_backend: MakeBackend) -> None:
    for _ in range(2):
        await make_backend(chat_server.address).search(REQUEST)
    assert chat_server.requests[0] == chat_server.requests[1]


async def test_an_empty_reply_is_asked_again_with_another_seed(chat_server: Any, make_backend: MakeBackend) -> None:
    chat_server.answer = lambda _: "" if len(chat_server.requests) < 2 else "Doc 1: x"
    result = await make_backend(chat_server.address).search(REQUEST)
    assert (result.documents, result.attempts) == (("x",), 2)
    assert [body["seed"] for body in chat_server.requests] == [document_seed(REQUEST, "trajectory", n) for n in (0, 1)]


async def test_nothing_but_empty_replies_is_a_typed_failure(chat_server: Any, make_backend: MakeBackend) -> None:
    chat_server.answer = lambda _: " "
    with pytest.raises(InfrastructureError, match="3 replies without a document for 'birthplace of X'"):
        await make_backend(chat_server.address).search(REQUEST)


async def test_a_failure_is_not_remembered(chat_server: Any, reply: Any, make_backend: MakeBackend) -> None:
    chat_server.script = [reply(400, {"error": "no"})]
    backend = make_backend(chat_server.address)
    with pytest.raises(InfrastructureError):
        await backend.search(REQUEST)
    assert (await backend.search(REQUEST)).attempts == 1


async def test_preflight_finds_nothing_wrong(chat_server: Any, make_backend: MakeBackend) -> None:
    assert await make_backend(chat_server.address, model="sim").preflight() == []
    assert len(chat_server.requests) == 1, "one real request"


async def test_preflight_names_each_problem_with_its_fix(
    chat_server: Any, reply: Any, dead_address: str, make_backend: MakeBackend
) -> None:
    (wrong_model,) = await make_backend(chat_server.address, model="big").preflight()
    assert f"{chat_server.url} serves sim and not big" in wrong_model
    assert "SIMULATION_LLM" in wrong_model
    (dead, other) = await make_backend(f"{dead_address},{chat_server.address}", model="big").preflight()
    assert dead_address in dead
    assert "start it, or correct IP (retriever.ip)" in dead
    assert "serves sim" in other
    chat_server.models_script = [reply(401, {"error": "no key"})]
    (refused,) = await make_backend(chat_server.address).preflight()
    assert "no key" in refused
    chat_server.script = [reply(400, {"message": "context too small"})]
    (trial,) = await make_backend(chat_server.address).preflight()
    assert "context too small" in trial


def test_render_is_safe_for_braces_and_newlines() -> None:
    template = PromptTemplate("{query}|{label}|{question}|{golden_answers}", "here")
    backend = SimulationBackend(
        "x", ChatClient(ServerPool(["http://a"]), ClientSettings()), template, ChatSampling(), "trajectory"
    )
    request = replace(REQUEST, query="{label}", question="a\n b", golden_answers=("x\ny", "{z}"))
    assert backend.render(request, Label.NOISY) == "{label}|Noisy|a b|x y; {z}"


def test_a_long_query_reaches_the_server_cut_at_a_word() -> None:
    assert cut_query("short query") == "short query"
    assert cut_query("x" * 512) == "x" * 512
    assert cut_query("x" * 600) == "x" * 512
    assert cut_query("word " * 200) == "word " * 101 + "word"
    assert cut_query("a" * 512 + " b") == "a" * 512
