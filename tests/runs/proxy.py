"""A proxy before a simulation server that slows its answers down or answers some itself with an error."""

from __future__ import annotations

import asyncio
import threading
import time

from aiohttp import ClientSession, ClientTimeout, TCPConnector, web


class FaultyProxy:
    """Runs in a thread while the ``with`` block runs.

    An answer takes ``slowdown`` times as long as the server's; of the requests for text every
    ``fail_every``-th (0: none) is answered with a 500.
    """

    def __init__(self, upstream: str, *, slowdown: float = 1.0, fail_every: int = 0) -> None:
        self._upstream, self._slowdown, self._fail_every = upstream, slowdown, fail_every
        self._listens = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),))
        self.requests = self.failed = 0
        self.address = ""

    def __enter__(self) -> FaultyProxy:
        self._thread.start()
        assert self._listens.wait(30)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
        self._loop.close()

    async def _serve(self) -> None:
        self._stop = asyncio.Event()
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._forward)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=1024).start()
        self.address = f"127.0.0.1:{runner.addresses[0][1]}"
        async with ClientSession(connector=TCPConnector(limit=0), timeout=ClientTimeout()) as self._session:
            self._listens.set()
            await self._stop.wait()
            await runner.cleanup()

    async def _forward(self, request: web.Request) -> web.Response:
        if request.method == "POST":
            self.requests += 1
            if self._fail_every and self.requests % self._fail_every == 0:
                self.failed += 1
                return web.json_response({"error": {"message": "out of luck"}}, status=500)
        begin = time.monotonic()
        url = f"http://{self._upstream}{request.path}"
        async with self._session.request(request.method, url, data=await request.read()) as answer:
            body = await answer.read()
        await asyncio.sleep((self._slowdown - 1) * (time.monotonic() - begin))
        return web.Response(status=answer.status, body=body, content_type="application/json")
