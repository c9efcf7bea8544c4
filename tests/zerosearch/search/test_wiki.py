from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from tests.zerosearch.search.servers import Fault, SearchR1Wiki, ZeroSearchWiki
from verl.workers.rollout.engine import SampleKey
from zerosearch.config import SearchConfig, WikiConfig
from zerosearch.engines import make_backend
from zerosearch.search.backend import Label, SearchRequest
from zerosearch.search.engine import EngineBackend
from zerosearch.transport import RequestRejectedError, ServerUnavailableError

REQUEST = SearchRequest("who?", "q", ("x",), 0.5, SampleKey(1, 1, "u", 0), turn=1, topk=3)
MakeWiki = Callable[..., EngineBackend]


@pytest.fixture
async def make_wiki() -> AsyncIterator[MakeWiki]:
    made: list[EngineBackend] = []

    def make(address: str, protocol: Any = "auto", **settings: Any) -> EngineBackend:
        values = {"deadline": 5.0, "request_timeout": 5.0} | settings
        made.append(make_backend("wiki", SearchConfig(wiki=WikiConfig(address, protocol), **values)))
        return made[-1]

    yield make
    for backend in made:
        await backend.close()


@pytest.mark.parametrize("protocol", ["auto", "zerosearch"])
async def test_the_original_protocol(make_wiki: MakeWiki, zerosearch_wiki: ZeroSearchWiki, protocol: str) -> None:
    result = await make_wiki(zerosearch_wiki.address, protocol).search(REQUEST)
    assert result.documents == ("who? text 0", "who? text 1", "who? text 2")
    assert (result.label, result.backend, result.attempts, result.engine_calls) == (Label.NONE, "wiki", 1, 1)
    assert zerosearch_wiki.requests[-1] == {"query": "who?", "top_k": 3}


@pytest.mark.parametrize("protocol", ["auto", "search_r1"])
async def test_search_r1(make_wiki: MakeWiki, search_r1_wiki: SearchR1Wiki, protocol: str) -> None:
    result = await make_wiki(search_r1_wiki.address, protocol).search(REQUEST)
    assert result.documents == tuple(f'"Title {i}"\nwho? text' for i in range(3))
    assert search_r1_wiki.requests[-1] == {"queries": ["who?"], "topk": 3, "return_scores": True}


async def test_each_server_is_probed_once(
    make_wiki: MakeWiki, zerosearch_wiki: ZeroSearchWiki, search_r1_wiki: SearchR1Wiki
) -> None:
    backend = make_wiki(f"{zerosearch_wiki.address},{search_r1_wiki.address}")
    for i in range(6):
        await backend.search(SearchRequest(f"query {i}", "q", ("x",), 0.0, REQUEST.key, turn=1, topk=1))
    assert len(zerosearch_wiki.requests) == 1 + 3, "one probe, then its share of the searches"
    assert len(search_r1_wiki.requests) == 2 + 3, "two probes, the first refused"


@pytest.mark.parametrize(("count", "kept", "cut"), [(0, 0, 0), (2, 2, 0), (5, 3, 2)])
async def test_fewer_are_kept_and_more_are_cut(
    make_wiki: MakeWiki, zerosearch_wiki: ZeroSearchWiki, count: int, kept: int, cut: int
) -> None:
    zerosearch_wiki.count = count
    result = await make_wiki(zerosearch_wiki.address).search(REQUEST)
    assert (len(result.documents), result.cut) == (kept, cut)


async def test_a_server_of_neither_protocol(make_wiki: MakeWiki, zerosearch_wiki: ZeroSearchWiki) -> None:
    zerosearch_wiki.script = [Fault(404, {"detail": "Not Found"})] * 2
    with pytest.raises(RequestRejectedError, match=r"neither protocol is answered; .*HTTP 404: Not Found"):
        await make_wiki(zerosearch_wiki.address).search(REQUEST)


async def test_the_wrong_protocol_is_refused_by_the_server(make_wiki: MakeWiki, search_r1_wiki: SearchR1Wiki) -> None:
    with pytest.raises(RequestRejectedError, match="HTTP 422"):
        await make_wiki(search_r1_wiki.address, "zerosearch").search(REQUEST)
    (problem,) = await make_wiki(search_r1_wiki.address, "zerosearch").preflight()
    assert "retriever.wiki.protocol" in problem


@pytest.mark.parametrize(
    "fault", [Fault(500), Fault(429), Fault(200, b"{"), Fault(200, {"result": []}), Fault(200, [{}])]
)
async def test_what_may_go_better_is_retried(
    make_wiki: MakeWiki, zerosearch_wiki: ZeroSearchWiki, fault: Fault
) -> None:
    zerosearch_wiki.script = [fault, fault]
    result = await make_wiki(zerosearch_wiki.address, "zerosearch").search(REQUEST)
    assert (len(result.documents), result.attempts) == (3, 3)


async def test_a_probe_that_meets_a_fault_is_repeated(make_wiki: MakeWiki, search_r1_wiki: SearchR1Wiki) -> None:
    search_r1_wiki.script = [Fault(422), Fault(503)]
    assert len((await make_wiki(search_r1_wiki.address).search(REQUEST)).documents) == 3


async def test_another_server_takes_over(
    make_wiki: MakeWiki, zerosearch_wiki: ZeroSearchWiki, dead_address: str
) -> None:
    result = await make_wiki(f"{dead_address},{zerosearch_wiki.address}").search(REQUEST)
    assert (len(result.documents), result.attempts) == (3, 2)


async def test_a_dead_server_is_a_typed_failure_that_names_it(make_wiki: MakeWiki, dead_address: str) -> None:
    with pytest.raises(ServerUnavailableError, match=f"{dead_address}/retrieve"):
        await make_wiki(dead_address, deadline=0.3).search(REQUEST)
    (problem,) = await make_wiki(dead_address, deadline=0.3).preflight()
    assert "retriever.wiki.address" in problem


async def test_a_silent_server(make_wiki: MakeWiki, zerosearch_wiki: ZeroSearchWiki) -> None:
    zerosearch_wiki.script = [Fault(200, delay=5.0)] * 100
    with pytest.raises(ServerUnavailableError, match=r"no answer within 0\.1 s"):
        await make_wiki(zerosearch_wiki.address, "zerosearch", deadline=0.4, request_timeout=0.1).search(REQUEST)


def test_port_and_path_have_defaults() -> None:
    backend = make_backend("wiki", SearchConfig(wiki=WikiConfig("node1, http://node2:80/find")))
    assert backend.urls == ("http://node1:6002/retrieve", "http://node2:80/find")
