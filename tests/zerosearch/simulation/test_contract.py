"""What sglang and vLLM answer to the requests of a client, row by row: the client must fit both."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from aiohttp import web
from pydantic import TypeAdapter, ValidationError

from zerosearch import transport
from zerosearch.config import SearchConfig
from zerosearch.simulation.client import ChatClient, ChatSampling, ClientSettings
from zerosearch.simulation.pool import ServerPool, parse_addresses
from zerosearch.transport import RequestRejectedError

Connect = Callable[..., ChatClient]
CONTEXT = 1000
FLAT = "sglang"
NESTED = "vllm"


class Dialect:
    """The refusals of one kind of server, as they were seen from real ones."""

    def __init__(self, kind: str, reply: Any, api_key: str = "") -> None:
        self.kind, self._reply, self._api_key = kind, reply, api_key

    def __call__(self, request: web.Request, body: dict[str, Any]) -> Any:
        if self._api_key and request.headers.get("Authorization") != f"Bearer {self._api_key}":
            return self._reply(401, {"error": "Unauthorized"})
        if request.method != "POST":
            return None
        status, said = self._refusal(body)
        return self._reply(status, self._error(status, said)) if status else None

    def _error(self, status: int, said: str) -> dict[str, Any]:
        if self.kind == FLAT:
            return {"object": "error", "message": said, "type": "BadRequest", "param": None, "code": status}
        return {"error": {"message": said, "type": "BadRequestError", "param": None, "code": status}}

    def _refusal(self, body: dict[str, Any]) -> tuple[int, str]:
        """Status and message; 0 where the request is taken."""
        model = body.get("model", "")
        if model is None and self.kind == FLAT:
            return 400, "model must be a string"
        if model and ":" in model and self.kind == FLAT:
            return 400, "no LoRA adapter of that name"
        if model not in (None, "", "sim") and self.kind == NESTED:
            return 404, f"The model `{model}` does not exist."
        return self._refused_values(body)

    def _refused_values(self, body: dict[str, Any]) -> tuple[int, str]:
        content = body["messages"][0]["content"]
        if not isinstance(content, str):
            return 400, "content must be a string"
        if body["max_tokens"] < (0 if self.kind == FLAT else 1):
            return 400, "max_tokens must be at least 1"
        if len(content) + body["max_tokens"] > CONTEXT:
            return 400, f"maximum context length is {CONTEXT} tokens"
        if not 0 <= body["temperature"] <= 2 and self.kind == NESTED:
            return 400, "temperature must be in [0, 2]"
        return 0, ""


@pytest.fixture(params=[FLAT, NESTED])
def server(request: pytest.FixtureRequest, chat_server: Any, reply: Any) -> Any:
    chat_server.refusal = Dialect(request.param, reply)
    return chat_server


@pytest.fixture
async def connect(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Connect]:
    monkeypatch.setattr(transport, "_FIRST_BACKOFF", 0.01)
    made: list[ChatClient] = []

    def connected(server: Any, **settings: Any) -> ChatClient:
        made.append(ChatClient(ServerPool(parse_addresses(server.address), 30), ClientSettings(**settings)))
        return made[-1]

    yield connected
    for client in made:
        await client.close()


async def test_without_a_model_the_servers_own_name_is_sent_and_never_null(server: Any, connect: Connect) -> None:
    await connect(server).complete("a", ChatSampling(), 1)
    assert [body["model"] for body in server.requests] == ["sim"]


async def test_ready_is_what_lists_its_models_and_health_is_never_asked(server: Any, connect: Connect) -> None:
    """/health of sglang generates a token: slow, and 503 until warm."""
    client = connect(server)
    assert await client.served_models(server.url) == ("sim",)
    await client.complete("a", ChatSampling(), 1)
    assert set(server.paths) == {"/v1/models", "/v1/chat/completions"}


async def test_a_wrong_model_name_is_refused_by_vllm_and_ignored_by_sglang(server: Any, connect: Connect) -> None:
    client = connect(server, model="other")
    if server.refusal.kind == FLAT:
        assert (await client.complete("a", ChatSampling(), 1)).attempts == 1
        return
    with pytest.raises(RequestRejectedError, match=r"HTTP 404: The model `other` does not exist\.$"):
        await client.complete("a", ChatSampling(), 1)


async def test_a_colon_in_the_model_name_is_refused_by_both(server: Any, connect: Connect) -> None:
    said = {FLAT: "HTTP 400: no LoRA adapter", NESTED: "HTTP 404: The model `sim:x`"}[server.refusal.kind]
    with pytest.raises(RequestRejectedError, match=said):
        await connect(server, model="sim:x").complete("a", ChatSampling(), 1)


@pytest.mark.parametrize(
    ("prompt", "sampling", "said"),
    [
        ("a" * (CONTEXT + 1), ChatSampling(max_tokens=1), f"HTTP 400: maximum context length is {CONTEXT} tokens$"),
        ("a", ChatSampling(max_tokens=CONTEXT), f"HTTP 400: maximum context length is {CONTEXT} tokens$"),
    ],
)
async def test_what_exceeds_the_context_fails_at_once_with_the_servers_words(
    server: Any, connect: Connect, prompt: str, sampling: ChatSampling, said: str
) -> None:
    with pytest.raises(RequestRejectedError, match=said):
        await connect(server, model="sim").complete(prompt, sampling, 1)
    assert len(server.paths) == 1


@pytest.mark.parametrize(
    "wrong", [{"max_tokens": 0}, {"max_tokens": -1}, {"temperature": 2.1}, {"temperature": -0.1}, {"top_p": 0}]
)
def test_sampling_that_a_server_refuses_or_reads_otherwise_is_no_configuration(wrong: dict[str, Any]) -> None:
    """max_tokens 0 is an empty answer of sglang's, temperature 2.1 is taken by it and refused by vLLM."""
    with pytest.raises(ValidationError, match=next(iter(wrong))):
        TypeAdapter(SearchConfig).validate_python(wrong)


@pytest.mark.parametrize("sampling", [ChatSampling(0.0, 1.0, 1), ChatSampling(2.0, 0.1, 600)])
async def test_the_borders_of_the_configuration_are_taken_by_both(
    server: Any, connect: Connect, sampling: ChatSampling
) -> None:
    """String content, the role user, a seed: sent in every request and accepted by both."""
    assert (await connect(server).complete("a", sampling, 2**31)).attempts == 1
    assert server.requests[0]["messages"] == [{"role": "user", "content": "a"}]
    assert server.requests[0]["seed"] == 2**31


async def test_the_api_key_guards_the_model_list_too(chat_server: Any, reply: Any, connect: Connect) -> None:
    chat_server.refusal = Dialect(NESTED, reply, api_key="secret")
    assert (await connect(chat_server, api_key="secret").complete("a", ChatSampling(), 1)).attempts == 1
    chat_server.paths.clear()
    keyless = connect(chat_server)
    with pytest.raises(RequestRejectedError, match=r"/v1/models: HTTP 401: Unauthorized$"):
        await keyless.complete("a", ChatSampling(), 1)
    assert chat_server.paths == ["/v1/models"], "refused once, not asked again"


@pytest.mark.parametrize("status", [404, 405])
async def test_a_wrong_path_is_a_refusal_with_its_detail(
    chat_server: Any, reply: Any, connect: Connect, status: int
) -> None:
    chat_server.refusal = lambda *_: reply(status, {"detail": "Not Found"})
    with pytest.raises(RequestRejectedError, match=f"HTTP {status}: Not Found$"):
        await connect(chat_server).served_models(chat_server.url)


async def test_a_full_queues_503_without_retry_after_is_overload_and_no_outage(
    chat_server: Any, reply: Any, connect: Connect
) -> None:
    chat_server.script = [reply(503, {"message": "The request queue is full."})] * 24
    client = connect(chat_server)
    replies = await asyncio.gather(*(client.complete("a", ChatSampling(), i) for i in range(6)))
    assert sum(r.attempts for r in replies) == 30
    assert client.pause is None
    assert client.paused_seconds(0) == 0


async def test_a_503_of_the_model_list_while_a_server_warms_up_is_waited_for(
    chat_server: Any, reply: Any, connect: Connect
) -> None:
    chat_server.models_script = [reply(503, {"message": "warming up"})] * 6
    assert (await connect(chat_server).complete("a", ChatSampling(), 1)).attempts == 7
