"""Google through SerpApi (https://serpapi.com/search-api); every request is paid for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from verl.agent_loop.base import RunEndingError
from zerosearch.search.engine import Found
from zerosearch.search.http import Call, HttpSettings, JsonClient
from zerosearch.simulation.pool import ServerPool
from zerosearch.transport import OverloadedError, RetryableError

_NO_RESULTS = "hasn't returned any results"
_NO_QUOTA = "run out of searches"


class QuotaExhaustedError(RunEndingError):
    """The account has no searches left: no search of this run will be answered."""


@dataclass(frozen=True, slots=True)
class OrganicResult:
    """``link`` tells results apart that two pages share."""

    link: str
    document: str


class GoogleSearch:
    """Organic results as documents: the title, then on a line of its own the snippet.

    Where a page brings fewer than topk, further ones are asked for from the number of results so
    far on, until one brings nothing new; at most ``max_pages``.
    """

    def __init__(self, base_url: str, api_key: str, max_pages: int, settings: HttpSettings) -> None:
        """``settings.secret`` is to be the key."""
        assert settings.secret == api_key
        self._client = JsonClient(ServerPool([base_url.rstrip("/")]), settings)
        self._api_key = api_key
        self._max_pages = max_pages

    @property
    def urls(self) -> tuple[str, ...]:
        return self._client.urls

    @property
    def fix(self) -> str:
        return "check SER_API_KEY (retriever.google.api_key), the account's quota and retriever.google.base_url"

    async def find(self, query: str, topk: int) -> Found:
        """Raises RequestRejectedError (a wrong key), QuotaExhaustedError, ServerUnavailableError (errors, deadline)."""
        documents, call = await self._client.within_deadline(lambda call: self._pages(call, query, topk))
        return Found(documents, call)

    async def _pages(self, call: Call, query: str, topk: int) -> list[str]:
        found: dict[str, str] = {}
        start = 0
        for _ in range(self._max_pages):
            page, first = await self._client.until_answered(call, self._page(query, topk, start)), len(found)
            found |= {r.link: r.document for r in page if r.document and r.link not in found}
            start += len(page)
            if len(found) >= topk or len(found) == first:
                break
        return list(found.values())

    def _page(self, query: str, num: int, start: int) -> Any:
        params: dict[str, str | int] = {
            "engine": "google",
            "q": query,
            "num": num,
            "start": start,
            "api_key": self._api_key,
        }

        async def attempt(base_url: str) -> list[OrganicResult]:
            url = f"{base_url}/search.json"
            try:
                reply = await self._client.request("GET", url, params=params)
            except OverloadedError as error:
                if _NO_QUOTA in str(error):
                    raise QuotaExhaustedError(f"no searches are left at {base_url}: {error}") from None
                raise
            return self._results(url, reply)

        return attempt

    def _results(self, url: str, reply: Any) -> list[OrganicResult]:
        if isinstance(reply, dict) and "organic_results" not in reply and _NO_RESULTS in str(reply.get("error")):
            return []
        try:
            return [_organic(entry) for entry in reply["organic_results"]]
        except (KeyError, TypeError, AttributeError):
            raise RetryableError(f"{url}: a reply without organic results: {self._client.excerpt(reply)}") from None

    async def close(self) -> None:
        await self._client.close()


def _organic(entry: dict[str, Any]) -> OrganicResult:
    """A missing or null title or snippet leaves its line out."""
    lines = [" ".join(str(entry.get(name) or "").split()) for name in ("title", "snippet")]
    document = "\n".join(filter(None, lines))
    return OrganicResult(str(entry.get("link") or document), document)
