"""Servers on real ports that speak SerpApi and both protocols of wiki retrievers."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

RESULTS = [
    {"position": i + 1, "title": f"Title {i}", "link": f"https://x/{i}", "snippet": f"Snippet\n {i}"} for i in range(30)
]


@dataclass
class Fault:
    """One scripted reply. ``body`` bytes are sent as they are."""

    status: int
    body: Any = None
    headers: dict[str, str] = field(default_factory=dict)
    delay: float = 0.0


class Server:
    """Plays ``script`` first; ``requests`` holds what was asked."""

    def __init__(self) -> None:
        self.script: list[Fault] = []
        self.requests: list[dict[str, Any]] = []

    async def start(self) -> None:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.address = f"127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        await self._runner.cleanup()

    async def _handle(self, request: web.Request) -> web.Response:
        asked = dict(request.query) if request.method == "GET" else await request.json()
        self.requests.append(asked)
        if not self.script:
            return self.answer(request, asked)
        fault = self.script.pop(0)
        await asyncio.sleep(fault.delay)
        if isinstance(fault.body, bytes):
            return web.Response(status=fault.status, body=fault.body, headers=fault.headers)
        return web.json_response(fault.body, status=fault.status, headers=fault.headers)

    def answer(self, request: web.Request, asked: dict[str, Any]) -> web.Response:
        raise NotImplementedError


class SerpApi(Server):
    """Gives at most ``page`` results at once, of ``results``."""

    key = "se/cret key"

    def __init__(self) -> None:
        super().__init__()
        self.results: list[dict[str, Any]] = RESULTS
        self.page = 100

    def answer(self, request: web.Request, asked: dict[str, Any]) -> web.Response:
        assert (request.method, request.path, asked["engine"]) == ("GET", "/search.json", "google")
        if asked["api_key"] != self.key:
            return web.json_response({"error": f"Invalid API key {asked['api_key']}."}, status=401)
        start = int(asked["start"])
        found = self.results[start : start + min(int(asked["num"]), self.page)]
        if not found:
            return web.json_response({"error": "Google hasn't returned any results for this query."})
        return web.json_response({"search_metadata": {"status": "Success"}, "organic_results": found})


class ZeroSearchWiki(Server):
    """Gives ``count`` documents whatever number was asked for, that number where None."""

    count: int | None = None

    def answer(self, request: web.Request, asked: dict[str, Any]) -> web.Response:
        if (request.method, request.path) != ("POST", "/retrieve") or set(asked) != {"query", "top_k"}:
            return web.json_response({"detail": "field required"}, status=422)
        count = asked["top_k"] if self.count is None else self.count
        return web.json_response([{"text": f"{asked['query']} text {i}"} for i in range(count)])


class SearchR1Wiki(Server):
    def answer(self, request: web.Request, asked: dict[str, Any]) -> web.Response:
        if (request.method, request.path) != ("POST", "/retrieve") or set(asked) != {
            "queries",
            "topk",
            "return_scores",
        }:
            return web.json_response({"detail": [{"msg": "field required"}]}, status=422)
        rows = [
            [{"document": {"contents": f'"Title {i}"\n{query} text'}, "score": 1.0} for i in range(asked["topk"])]
            for query in asked["queries"]
        ]
        return web.json_response({"result": rows})
