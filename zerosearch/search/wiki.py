"""A retrieval server over Wikipedia, in either of the two protocols in use.

``zerosearch``: POST {"query", "top_k"} answers [{"text"}, …]. ``search_r1``: POST {"queries", "topk",
"return_scores"} answers {"result": [[{"document": {"contents"}, "score"}, …]]} (Search-R1,
arXiv 2503.09516), whose contents are the title in quotes and, on the next line, the text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from zerosearch.search.engine import Found
from zerosearch.search.http import Call, HttpSettings, JsonClient
from zerosearch.search.single_flight import SingleFlight
from zerosearch.simulation.pool import ServerPool
from zerosearch.transport import RequestRejectedError, RetryableError

WikiProtocol = Literal["auto", "zerosearch", "search_r1"]

_PROBE = "capital of France"


@dataclass(frozen=True, slots=True)
class _Protocol:
    """``read`` raises KeyError, IndexError or TypeError for a reply of another shape."""

    body: Callable[[str, int], dict[str, Any]]
    read: Callable[[Any], list[str]]


def _read_search_r1(reply: Any) -> list[str]:
    return [_text(entry["document"]["contents"]) for entry in reply["result"][0]]


def _read_zerosearch(reply: Any) -> list[str]:
    if not isinstance(reply, list):
        raise TypeError
    return [_text(entry["text"]) for entry in reply]


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value.strip()


_PROTOCOLS = {
    "zerosearch": _Protocol(lambda query, topk: {"query": query, "top_k": topk}, _read_zerosearch),
    "search_r1": _Protocol(
        lambda query, topk: {"queries": [query], "topk": topk, "return_scores": True}, _read_search_r1
    ),
}


class WikiRetriever:
    """``protocol`` auto tries both on each server once and keeps to the one that it answers."""

    def __init__(self, urls: Sequence[str], protocol: WikiProtocol, settings: HttpSettings) -> None:
        self._client = JsonClient(ServerPool(urls), settings)
        self._protocol: WikiProtocol = protocol
        self._known: SingleFlight[str] = SingleFlight(len(urls))

    @property
    def urls(self) -> tuple[str, ...]:
        return self._client.urls

    @property
    def fix(self) -> str:
        return "start the retrieval server, or correct retriever.wiki.address and retriever.wiki.protocol"

    async def find(self, query: str, topk: int) -> Found:
        """Raises RequestRejectedError or ServerUnavailableError."""

        async def attempt(url: str) -> list[str]:
            return await self._ask(url, await self._protocol_of(url), query, topk)

        async def job(call: Call) -> list[str]:
            return await self._client.until_answered(call, attempt)

        documents, call = await self._client.within_deadline(job)
        return Found(list(filter(None, documents)), call)

    async def _protocol_of(self, url: str) -> str:
        if self._protocol != "auto":
            return self._protocol
        return (await self._known.get(url, lambda: self._probe(url)))[0]

    async def _probe(self, url: str) -> str:
        """Raises RequestRejectedError when the server refuses both, RetryableError when it may yet answer."""
        failures: list[RequestRejectedError | RetryableError] = []
        for name in _PROTOCOLS:
            try:
                await self._ask(url, name, _PROBE, 1)
            except (RequestRejectedError, RetryableError) as error:
                failures.append(error)
            else:
                return name
        said = f"neither protocol is answered; {'; '.join(map(str, failures))}"
        if all(isinstance(failure, RequestRejectedError) for failure in failures):
            raise RequestRejectedError(said)
        raise RetryableError(said)

    async def _ask(self, url: str, name: str, query: str, topk: int) -> list[str]:
        protocol = _PROTOCOLS[name]
        reply = await self._client.request("POST", url, body=protocol.body(query, topk))
        try:
            return protocol.read(reply)
        except (KeyError, IndexError, TypeError):
            raise RetryableError(f"{url}: no documents as of {name}: {self._client.excerpt(reply)}") from None

    async def close(self) -> None:
        await self._known.close()
        await self._client.close()
