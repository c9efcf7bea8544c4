import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import pytest

from verl.workers.rollout.engine import InfrastructureError
from zerosearch import transport
from zerosearch.simulation.client import ChatClient, ChatSampling, ClientSettings
from zerosearch.simulation.pool import ServerOutageError, ServerPool, parse_addresses
from zerosearch.transport import RequestRejectedError, ServerUnavailableError, error_message

SETTINGS = ClientSettings(request_timeout=2.0, deadline=5.0)
SAMPLING = ChatSampling()
MakeClient = Callable[..., ChatClient]


@pytest.fixture(autouse=True)
def _short_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "_FIRST_BACKOFF", 0.01)


@pytest.fixture
async def make_client() -> AsyncIterator[MakeClient]:
    made: list[ChatClient] = []

    def make(*addresses: str, outage_deadline: float = 30.0, **changes: Any) -> ChatClient:
        pool = ServerPool(parse_addresses(",".join(addresses)), outage_deadline)
        made.append(ChatClient(pool, replace(SETTINGS, **changes)))
        return made[-1]

    yield make
    for client in made:
        await client.close()


async def test_every_sampling_field_is_sent(chat_server: Any, make_client: MakeClient) -> None:
    """A server's or a model's own defaults (a repetition penalty, say) must never apply silently."""
    chat_server.answer = lambda body: body["messages"][0]["content"].upper()
    reply = await make_client(chat_server.address).complete("hello", ChatSampling(0.4, 0.9, 64), seed=7)
    assert (reply.text, reply.attempts) == ("HELLO", 1)
    assert chat_server.requests == [
        {
            "model": "sim",
            "messages": [{"role": "user", "content": "hello"}],
            "temperature": 0.4,
            "top_p": 0.9,
            "max_tokens": 64,
            "seed": 7,
            "n": 1,
            "stream": False,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "repetition_penalty": 1.0,
            "top_k": -1,
            "min_p": 0.0,
        }
    ]


def test_documented_sampling_defaults() -> None:
    assert ChatSampling() == ChatSampling(temperature=0.8, top_p=1.0, max_tokens=600)


async def test_the_model_is_asked_once_when_not_configured(chat_server: Any, make_client: MakeClient) -> None:
    client = make_client(chat_server.address)
    await asyncio.gather(*(client.complete("a", SAMPLING, 1) for _ in range(8)))
    await client.complete("b", SAMPLING, 1)
    assert chat_server.model_requests == 1
    assert {body["model"] for body in chat_server.requests} == {"sim"}


async def test_a_configured_model_is_sent_unasked(chat_server: Any, make_client: MakeClient) -> None:
    await make_client(chat_server.address, model="other").complete("a", SAMPLING, 1)
    assert chat_server.model_requests == 0
    assert chat_server.requests[0]["model"] == "other"


async def test_the_api_key_is_sent(chat_server: Any, make_client: MakeClient) -> None:
    await make_client(chat_server.address, api_key="secret").complete("a", SAMPLING, 1)
    assert chat_server.headers[0]["Authorization"] == "Bearer secret"


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (500, {"error": {"message": "boom"}}),
        (503, {"message": "queue full"}),
        (429, {"error": "slow down"}),
        (408, {"detail": "late"}),
        (200, b"{not json"),
        (200, b""),
        (200, {"choices": []}),
        (200, {"unexpected": 1}),
        (200, {"choices": [{"message": {"content": ["parts"]}}]}),
        (200, [1]),
    ],
)
async def test_what_may_pass_is_retried(
    chat_server: Any, reply: Any, make_client: MakeClient, status: int, body: Any
) -> None:
    chat_server.script = [reply(status, body), reply(status, body)]
    answer = await make_client(chat_server.address).complete("a", SAMPLING, 5)
    assert (answer.text, answer.attempts) == ("Doc 1: nothing", 3)
    assert chat_server.requests[0] == chat_server.requests[1] == chat_server.requests[2], "a retry asks the same"


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [
        (400, {"error": {"message": "prompt too long", "code": 400}}, "prompt too long"),
        (400, {"object": "error", "message": "bad seed"}, "bad seed"),
        (401, {"error": "no key"}, "no key"),
        (403, b"forbidden", "forbidden"),
        (404, {"detail": "Not Found"}, "Not Found"),
        (422, {"detail": [{"loc": ["body"], "msg": "field required"}]}, "field required"),
    ],
)
async def test_a_refusal_fails_at_once_with_url_and_message(
    chat_server: Any, reply: Any, make_client: MakeClient, status: int, body: Any, said: str
) -> None:
    chat_server.script = [reply(status, body)]
    with pytest.raises(RequestRejectedError) as caught:
        await make_client(chat_server.address).complete("a", SAMPLING, 1)
    assert len(chat_server.requests) == 1
    assert isinstance(caught.value, InfrastructureError)
    for part in (chat_server.url, str(status), said):
        assert part in str(caught.value)


async def test_a_server_that_stays_dead_ends_the_run_within_the_outage_deadline(
    dead_address: str, make_client: MakeClient
) -> None:
    client = make_client(dead_address, deadline=60, outage_deadline=0.5)
    failures = await asyncio.gather(*(client.complete("a", SAMPLING, i) for i in range(3)), return_exceptions=True)
    for failure in failures:
        assert isinstance(failure, ServerOutageError)
        assert f"http://{dead_address}/v1 does not answer since" in str(failure)
        assert "given up after 0.5 s" in str(failure)


async def test_an_impatient_call_ends_with_its_own_deadline(dead_address: str, make_client: MakeClient) -> None:
    with pytest.raises(ServerUnavailableError, match=r"no answer within 0\.5 s"):
        await make_client(dead_address, deadline=0.5).complete("a", SAMPLING, 1, patient=False)


async def test_calls_wait_past_their_deadline_for_a_server_that_comes_back(
    chat_server: Any, reply: Any, make_client: MakeClient
) -> None:
    """Endless 500s outlast the deadline; then all calls are answered, each once."""
    chat_server.script = [reply(500, {"error": "out of order"})] * 8
    client = make_client(chat_server.address, deadline=0.6)
    replies = await asyncio.gather(*(client.complete(str(i), SAMPLING, i) for i in range(3)))
    assert [r.text for r in replies] == ["Doc 1: nothing"] * 3
    assert max(r.latency for r in replies) > 0.6
    assert client.pause is None


async def test_overload_is_no_outage(chat_server: Any, reply: Any, make_client: MakeClient) -> None:
    chat_server.script = [reply(503, {"message": "queue full"}), reply(429, {"error": "slow"})] * 4
    client = make_client(chat_server.address)
    assert (await client.complete("a", SAMPLING, 1)).attempts == 9
    assert client.paused_seconds(0) == 0


async def test_every_twentieth_request_failing_never_pauses(
    chat_server: Any, reply: Any, make_client: MakeClient
) -> None:
    good = reply(200, {"choices": [{"message": {"content": "fine"}}]})
    chat_server.script = ([good] * 19 + [reply(500, {"error": "boom"})]) * 5
    client = make_client(chat_server.address)
    replies = [await client.complete("a", SAMPLING, i) for i in range(95)]
    assert sum(r.attempts for r in replies) == 99
    assert client.paused_seconds(0) == 0


async def test_a_silent_server_is_a_typed_failure_within_the_deadline(
    chat_server: Any, make_client: MakeClient
) -> None:
    chat_server.delay = 60
    with pytest.raises(ServerUnavailableError, match=r"no answer within 0\.3 s"):
        await make_client(chat_server.address, request_timeout=30, deadline=0.3).complete("a", SAMPLING, 1)


async def test_a_hung_server_pauses_all_calls_and_each_is_answered_once_when_it_goes_on(
    chat_server: Any, make_client: MakeClient
) -> None:
    """Connections are taken and nothing is answered, the model list neither: as a stopped process does."""
    chat_server.answer = lambda body: body["messages"][0]["content"]
    chat_server.hung = True
    client = make_client(chat_server.address, request_timeout=0.1, deadline=60, model="sim")
    calls = [asyncio.create_task(client.complete(str(i), SAMPLING, i)) for i in range(6)]
    while client.pause is None:
        await asyncio.sleep(0.01)
    assert "does not answer since" in client.pause
    assert "no answer within 0.1 s" in client.pause
    assert not any(call.done() for call in calls)
    chat_server.hung = False
    assert [(await call).text for call in calls] == [str(i) for i in range(6)]
    assert client.pause is None
    assert client.paused_seconds(0) > 0


async def test_slowness_within_the_request_timeout_is_neither_retry_nor_pause(
    chat_server: Any, make_client: MakeClient
) -> None:
    chat_server.delay = 0.3
    client = make_client(chat_server.address, request_timeout=30, deadline=60)
    replies = await asyncio.gather(*(client.complete("a", SAMPLING, i) for i in range(16)))
    assert {reply.attempts for reply in replies} == {1}
    assert min(reply.latency for reply in replies) >= 0.3
    assert client.paused_seconds(0) == 0


async def test_a_connection_that_breaks_off_is_tried_again(make_client: MakeClient) -> None:
    connections = 0
    body = b'{"choices": [{"message": {"content": "whole"}}]}'
    head = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await reader.readuntil(b"\r\n\r\n")
        writer.write([b"", head + body[:10], head + body][connections - 1])
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    answer = await make_client(f"127.0.0.1:{port}", model="sim").complete("a", SAMPLING, 1)
    server.close()
    assert (answer.text, answer.attempts) == ("whole", 3)


async def test_a_slow_attempt_is_cut_off_and_tried_again(chat_server: Any, reply: Any, make_client: MakeClient) -> None:
    chat_server.script = [reply(200, {}, delay=60)]
    answer = await make_client(chat_server.address, request_timeout=0.3).complete("a", SAMPLING, 1)
    assert answer.attempts == 2


async def test_retry_after_is_honoured(chat_server: Any, reply: Any, make_client: MakeClient) -> None:
    chat_server.script = [reply(429, {"error": "wait"}, {"Retry-After": "1"})]
    answer = await make_client(chat_server.address).complete("a", SAMPLING, 1)
    assert answer.attempts == 2
    assert answer.latency >= 1


async def test_retry_after_beyond_the_deadline_fails_now(chat_server: Any, reply: Any, make_client: MakeClient) -> None:
    chat_server.script = [reply(429, {"error": "quota"}, {"Retry-After": "3600"})]
    begin = time.monotonic()
    with pytest.raises(ServerUnavailableError, match="quota"):
        await make_client(chat_server.address, deadline=30).complete("a", SAMPLING, 1)
    assert time.monotonic() - begin < 20


def test_retry_after_reads_seconds_and_dates() -> None:
    retry_after = transport._retry_after
    assert retry_after({"Retry-After": "7"}) == 7
    assert retry_after({}) == 0
    assert retry_after({"Retry-After": "soon"}) == 0
    later = format_datetime(datetime.now(UTC) + timedelta(seconds=90))
    assert 80 < retry_after({"Retry-After": later}) <= 90
    assert retry_after({"Retry-After": "Fri, 31 Dec 1999 23:59:59 GMT"}) == 0


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b'{"error": {"message": "nested"}}', "nested"),
        (b'{"error": "plain"}', "plain"),
        (b'{"message": "flat"}', "flat"),
        (b'{"detail": "Not Found"}', "Not Found"),
        (b'{"other": 1}', '{"other": 1}'),
        (b"<html>", "<html>"),
        (b"[1]", "[1]"),
        (b"", "(empty body)"),
        (b"\xff\xfe", "\ufffd\ufffd"),
    ],
)
def test_error_message(body: bytes, said: str) -> None:
    assert error_message(body) == said


async def test_null_content_is_an_empty_reply(chat_server: Any, make_client: MakeClient) -> None:
    chat_server.answer = lambda _: None
    assert (await make_client(chat_server.address).complete("a", SAMPLING, 1)).text == ""


async def test_concurrency_is_limited(chat_server: Any, make_client: MakeClient) -> None:
    chat_server.delay = 0.02
    client = make_client(chat_server.address, max_concurrency=3)
    await asyncio.gather(*(client.complete("a", SAMPLING, i) for i in range(12)))
    assert chat_server.most_in_flight == 3


async def test_requests_spread_over_servers_and_leave_a_dead_one(
    chat_servers: Any, dead_address: str, make_client: MakeClient
) -> None:
    first, second = await chat_servers(), await chat_servers()
    first.delay = second.delay = 0.05
    client = make_client(first.address, second.address)
    await asyncio.gather(*(client.complete("a", SAMPLING, i) for i in range(8)))
    assert len(first.requests) == len(second.requests) == 4
    with_dead = make_client(dead_address, first.address)
    replies = await asyncio.gather(*(with_dead.complete("a", SAMPLING, i) for i in range(4)))
    assert {reply.attempts for reply in replies} <= {1, 2}


async def test_a_server_that_comes_up_late_is_reached(chat_server: Any, reply: Any, make_client: MakeClient) -> None:
    chat_server.models_script = [reply(503, {"message": "loading"})]
    assert (await make_client(chat_server.address).complete("a", SAMPLING, 1)).attempts == 2


@pytest.mark.parametrize("body", [{"data": []}, {"models": []}, {"data": [{"name": "x"}]}])
async def test_a_model_list_without_names_is_a_failure(
    chat_server: Any, reply: Any, make_client: MakeClient, body: Any
) -> None:
    chat_server.models_script = [reply(200, body)]
    with pytest.raises(ServerUnavailableError, match="model"):
        await make_client(chat_server.address).served_models(chat_server.url)


async def test_cancelling_a_call_frees_its_place(chat_server: Any, make_client: MakeClient) -> None:
    chat_server.delay = 60
    client = make_client(chat_server.address, max_concurrency=1)
    stuck = asyncio.create_task(client.complete("a", SAMPLING, 1))
    while not chat_server.requests:
        await asyncio.sleep(0.01)
    stuck.cancel()
    await asyncio.gather(stuck, return_exceptions=True)
    chat_server.delay = 0
    assert (await client.complete("b", SAMPLING, 2)).attempts == 1


def test_one_client_serves_several_event_loops() -> None:
    """The driver runs preflight and probe in loops of their own."""
    client = ChatClient(ServerPool(parse_addresses("127.0.0.1:9"), 0.05), replace(SETTINGS, deadline=0.05))

    async def call() -> None:
        with pytest.raises(InfrastructureError):
            await client.complete("a", SAMPLING, 1)
        await client.close()

    asyncio.run(call())
    asyncio.run(call())
