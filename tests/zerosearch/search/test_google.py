import asyncio
import traceback
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.zerosearch.search.servers import Fault, SerpApi
from verl.agent_loop.base import RunEndingError
from verl.workers.rollout.engine import InfrastructureError, SampleKey
from zerosearch.search.backend import Label, SearchRequest
from zerosearch.search.engine import EngineBackend
from zerosearch.search.google import GoogleSearch
from zerosearch.search.http import HttpSettings
from zerosearch.transport import RequestRejectedError, ServerUnavailableError

REQUEST = SearchRequest("who?", "q", ("x",), 0.5, SampleKey(1, 1, "u", 0), turn=1, topk=5)
WRONG_KEY = "wr/ong key"
MakeGoogle = Callable[..., EngineBackend]


@pytest.fixture
async def make_google(serpapi: SerpApi) -> AsyncIterator[MakeGoogle]:
    made: list[EngineBackend] = []

    def make(address: str = serpapi.address, key: str = SerpApi.key, pages: int = 3, **settings: Any) -> EngineBackend:
        http = HttpSettings(**({"request_timeout": 5.0, "deadline": 5.0, "secret": key} | settings))
        made.append(EngineBackend("google", GoogleSearch(f"http://{address}", key, pages, http)))
        return made[-1]

    yield make
    for backend in made:
        await backend.close()


async def test_a_search(make_google: MakeGoogle, serpapi: SerpApi) -> None:
    result = await make_google().search(REQUEST)
    assert result.documents == tuple(f"Title {i}\nSnippet {i}" for i in range(5))
    assert (result.label, result.backend) == (Label.NONE, "google")
    assert (result.attempts, result.cut, result.engine_calls) == (1, 0, 1)
    (asked,) = serpapi.requests
    assert asked == {"engine": "google", "q": "who?", "num": "5", "start": "0", "api_key": SerpApi.key}


async def test_short_pages_are_followed_until_topk(make_google: MakeGoogle, serpapi: SerpApi) -> None:
    serpapi.page = 3
    result = await make_google().search(REQUEST)
    assert [asked["start"] for asked in serpapi.requests] == ["0", "3"]
    assert len(result.documents) == 5
    assert (result.cut, result.attempts, result.engine_calls) == (1, 1, 2)


async def test_a_further_page_starts_after_every_result_of_the_last_blank_ones_too(
    make_google: MakeGoogle, serpapi: SerpApi
) -> None:
    blank = {"link": "https://blank"}
    serpapi.results = [serpapi.results[0], blank, *serpapi.results[1:]]
    serpapi.page = 3
    result = await make_google().search(REQUEST)
    assert [asked["start"] for asked in serpapi.requests] == ["0", "3"]
    assert result.documents == tuple(f"Title {i}\nSnippet {i}" for i in range(5))


async def test_pages_end_where_the_results_do_and_at_the_limit(make_google: MakeGoogle, serpapi: SerpApi) -> None:
    serpapi.results = serpapi.results[:2]
    assert len((await make_google().search(REQUEST)).documents) == 2
    assert len(serpapi.requests) == 2
    serpapi.results, serpapi.page = [*serpapi.results, *serpapi.results, *serpapi.results], 2
    assert len((await make_google().search(REQUEST)).documents) == 2, "a page that repeats the last one ends it"
    serpapi.requests.clear()
    serpapi.page = 1
    assert len((await make_google(pages=1).search(REQUEST)).documents) == 1
    assert len(serpapi.requests) == 1


async def test_no_results_are_an_answer(make_google: MakeGoogle, serpapi: SerpApi) -> None:
    serpapi.results = []
    result = await make_google().search(REQUEST)
    assert (result.documents, result.engine_calls) == ((), 1)


async def test_results_without_title_or_snippet(make_google: MakeGoogle, serpapi: SerpApi) -> None:
    serpapi.results = [{"title": "only a title"}, {"snippet": "only text", "title": None}, {"link": "https://nothing"}]
    assert (await make_google().search(REQUEST)).documents == ("only a title", "only text")


async def test_a_repeated_paid_query_costs_once(make_google: MakeGoogle, serpapi: SerpApi) -> None:
    backend = make_google()
    other = replace(REQUEST, query=" who? ", key=SampleKey(1, 7, "other", 3), turn=2)
    both = await asyncio.gather(backend.search(REQUEST), backend.search(other))
    again = await backend.search(REQUEST)
    assert len(serpapi.requests) == 1
    assert [result.engine_calls for result in (*both, again)] == [1, 0, 0]
    assert [result.attempts for result in (*both, again)] == [1, 0, 0]
    assert len({result.documents for result in (*both, again)}) == 1
    await backend.search(replace(REQUEST, topk=2))
    assert len(serpapi.requests) == 2


@pytest.mark.parametrize(
    "fault",
    [
        Fault(429, {"error": "slow down"}, {"Retry-After": "0"}),
        Fault(500, b"oops"),
        Fault(503, {"error": "busy"}),
        Fault(200, b"{not json"),
        Fault(200, {"error": "We couldn't get valid results for this search. Please try again later."}),
        Fault(200, {"organic_results": None}),
        Fault(200, []),
    ],
)
async def test_what_may_go_better_is_retried(make_google: MakeGoogle, serpapi: SerpApi, fault: Fault) -> None:
    serpapi.script = [fault, fault]
    result = await make_google().search(REQUEST)
    assert len(result.documents) == 5
    assert (result.attempts, result.engine_calls) == (3, 3)


async def test_a_spent_quota_ends_the_run_at_once(make_google: MakeGoogle, serpapi: SerpApi) -> None:
    serpapi.script = [Fault(429, {"error": "Your account has run out of searches."})] * 2
    with pytest.raises(RunEndingError, match="run out of searches"):
        await make_google().search(REQUEST)
    assert len(serpapi.requests) == 1


async def test_a_wrong_key_fails_at_once_and_is_not_told(make_google: MakeGoogle, serpapi: SerpApi) -> None:
    with pytest.raises(RequestRejectedError, match="HTTP 401: Invalid API key") as caught:
        await make_google(key=WRONG_KEY).search(REQUEST)
    assert len(serpapi.requests) == 1
    assert_untold(caught.value, WRONG_KEY)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (Fault(429, {"error": f"quota of {SerpApi.key} spent"}), "HTTP 429: quota of"),
        (Fault(429, {"error": "later"}, {"Retry-After": "100"}), "HTTP 429: later"),
        (Fault(500, f"GET /search.json?api_key={SerpApi.key}".encode()), "HTTP 500"),
        (Fault(200, b"api_key=se%2Fcret%20key {"), "malformed JSON"),
        (Fault(200, {"error": f"odd {SerpApi.key}"}), "without organic results"),
        (Fault(200, {}, delay=5.0), "no answer within 0.1 s"),
    ],
)
async def test_a_deadline_ends_in_a_typed_failure_without_the_key(
    make_google: MakeGoogle, serpapi: SerpApi, fault: Fault, words: str
) -> None:
    serpapi.script = [fault] * 1000
    with pytest.raises(ServerUnavailableError, match=words) as caught:
        await make_google(deadline=0.4, request_timeout=0.1).search(REQUEST)
    assert f"http://{serpapi.address}" in str(caught.value)
    assert_untold(caught.value, SerpApi.key)


async def test_a_redirect_is_not_followed(make_google: MakeGoogle, serpapi: SerpApi) -> None:
    serpapi.script = [Fault(302, {}, {"Location": "/elsewhere"})]
    with pytest.raises(RequestRejectedError, match="HTTP 302"):
        await make_google().search(REQUEST)
    assert len(serpapi.requests) == 1


async def test_broken_http_does_not_tell_the_key(make_google: MakeGoogle) -> None:
    """aiohttp's own error for a broken status line holds the whole URL."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"NOT HTTP AT ALL\r\n\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    with pytest.raises(ServerUnavailableError) as caught:
        await make_google(address, deadline=0.3).search(REQUEST)
    assert_untold(caught.value, SerpApi.key)
    server.close()


async def test_nobody_listens(make_google: MakeGoogle, dead_address: str) -> None:
    with pytest.raises(ServerUnavailableError, match=dead_address):
        await make_google(dead_address, deadline=0.3).search(REQUEST)


async def test_a_failure_is_not_remembered(make_google: MakeGoogle, serpapi: SerpApi) -> None:
    backend = make_google(deadline=0.2)
    serpapi.script = [Fault(500)] * 1000
    with pytest.raises(InfrastructureError):
        await backend.search(REQUEST)
    serpapi.script = []
    assert len((await backend.search(REQUEST)).documents) == 5


async def test_preflight_takes_one_call_and_names_the_fix(make_google: MakeGoogle, serpapi: SerpApi) -> None:
    assert await make_google().preflight() == []
    assert len(serpapi.requests) == 1
    (problem,) = await make_google(key=WRONG_KEY).preflight()
    assert "SER_API_KEY" in problem
    assert WRONG_KEY not in problem


def test_settings_do_not_show_the_key() -> None:
    assert SerpApi.key not in repr(HttpSettings(secret=SerpApi.key))


def assert_untold(error: Exception, key: str) -> None:
    told = "".join(traceback.format_exception(error)) + repr(error)
    for form in (key, key.replace("/", "%2F"), key.replace("/", "%2F").replace(" ", "%20"), key.replace(" ", "+")):
        assert form not in told
    assert "api_key=se" not in told
