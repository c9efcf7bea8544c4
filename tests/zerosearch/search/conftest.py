from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.zerosearch.search.servers import SearchR1Wiki, SerpApi, Server, ZeroSearchWiki
from zerosearch import transport


@pytest.fixture
def _short_http_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "_FIRST_BACKOFF", 0.01)


async def _running(server: Server) -> AsyncIterator[Server]:
    await server.start()
    yield server
    await server.stop()


@pytest.fixture
async def serpapi(_short_http_backoff: None) -> AsyncIterator[Server]:
    async for server in _running(SerpApi()):
        yield server


@pytest.fixture
async def zerosearch_wiki(_short_http_backoff: None) -> AsyncIterator[Server]:
    async for server in _running(ZeroSearchWiki()):
        yield server


@pytest.fixture
async def search_r1_wiki(_short_http_backoff: None) -> AsyncIterator[Server]:
    async for server in _running(SearchR1Wiki()):
        yield server
