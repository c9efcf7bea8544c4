"""The servers of a simulation LLM: their addresses, and which one gets the next request."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from ipaddress import IPv6Address
from urllib.parse import urlsplit

from verl.agent_loop.base import RunEndingError
from zerosearch.simulation.breaker import Breaker, Clock

DEFAULT_PORT = 6001
DEFAULT_PATH = "/v1"
DEFAULT_OUTAGE_DEADLINE = 600.0

_HOST = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?")


def parse_addresses(addresses: str, port: int = DEFAULT_PORT, path: str = DEFAULT_PATH) -> tuple[str, ...]:
    """Base URLs from a comma-separated list of ``host``, ``host:port`` and URLs.

    ``port`` and ``path`` are put where absent, whatever the scheme; the default scheme is http.
    Repeated addresses count once. Raises ValueError naming the wrong item.
    """
    items = [item.strip() for item in addresses.split(",") if item.strip()]
    if not items:
        raise ValueError("no server address: give host, host:port or a URL, comma-separated")
    return tuple(dict.fromkeys(_base_url(item, port, path) for item in items))


def _base_url(item: str, port: int, path: str) -> str:
    parts = urlsplit(item if "://" in item else f"http://{_bracketed(item)}")
    if parts.scheme not in ("http", "https"):
        raise ValueError(f"server address {item!r}: the scheme must be http or https, not {parts.scheme!r}")
    if parts.query or parts.fragment or parts.username is not None:
        raise ValueError(f"server address {item!r}: only scheme, host, port and path are allowed")
    host = _checked_host(parts.hostname, item)
    return f"{parts.scheme}://{host}:{_port(parts.netloc, item, port)}{parts.path.rstrip('/') or path}"


def _bracketed(item: str) -> str:
    """A bare IPv6 address gets its brackets."""
    try:
        return f"[{IPv6Address(item)}]"
    except ValueError:
        return item


def _checked_host(host: str | None, item: str) -> str:
    if host and ":" in host:
        return f"[{host}]"
    if not host or not _HOST.fullmatch(host):
        raise ValueError(f"server address {item!r}: {host or ''!r} is not a host name")
    return host


def _port(netloc: str, item: str, default: int) -> int:
    _, colon, text = netloc.rpartition("]")[2].rpartition(":")
    if not colon:
        return default
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= 65535:
        raise ValueError(f"server address {item!r}: {text!r} is not a port (1 to 65535)")
    return int(text)


class ServerOutageError(RunEndingError):
    """No server of the pool has answered for ``outage_deadline`` seconds."""


@dataclass(frozen=True, slots=True)
class Lease:
    """One request's right to a server. A ``probe`` finds out whether a server that was down is up again."""

    url: str
    probe: bool


class ServerPool:
    """Several servers of one model. A request goes to the one with the fewest in flight, among
    equals to the one that has waited longest; a server that is down gets one probe at a time.

    While every server is down the pool is paused: nothing is admitted but probes. Instants are those
    of ``clock``, ``time.monotonic`` where not given; ``outage_deadline`` in seconds.
    """

    def __init__(
        self, urls: Sequence[str], outage_deadline: float = DEFAULT_OUTAGE_DEADLINE, clock: Clock = time.monotonic
    ) -> None:
        assert urls and len(set(urls)) == len(urls)
        self._clock = clock
        self._outage_deadline = outage_deadline
        self._breakers = {url: Breaker(clock) for url in urls}
        self._in_flight = dict.fromkeys(urls, 0)
        self._last_turn = dict.fromkeys(urls, 0)
        self._turn = 0
        self._outages: list[tuple[float, float]] = []
        self._paused_since: float | None = None
        self.pause: str | None = None
        """While paused: which servers do not answer, since when and why, and how long they are waited for."""

    @property
    def urls(self) -> tuple[str, ...]:
        return tuple(self._in_flight)

    @property
    def admits(self) -> bool:
        """Whether a request may begin now."""
        return any(breaker.admits for breaker in self._breakers.values())

    @property
    def outage_left(self) -> float:
        """Seconds until the pool is given up; infinite while a server is up."""
        if self._paused_since is None:
            return math.inf
        return self._paused_since + self._outage_deadline - self._clock()

    def paused_seconds(self, since: float) -> float:
        """How much of the time from ``since`` to now every server was down. A pause begins with the first
        failure of the server that failed last, though it shows only after further failures."""
        now = self._clock()
        running = [] if self._paused_since is None else [(self._paused_since, now)]
        return sum(max(0.0, end - max(begin, since)) for begin, end in (*self._outages, *running))

    def check(self) -> None:
        """Raises ServerOutageError naming the servers once they were down for longer than the deadline."""
        if self.outage_left <= 0:
            given_up = f"given up after {self._outage_deadline:g} s (retriever.outage_deadline)"
            raise ServerOutageError(f"{self._description()}; {given_up}")

    @contextmanager
    def lease(self, avoid: str | None = None) -> Iterator[Lease]:
        """A server, counted as busy meanwhile; not ``avoid`` where there is another one. Only while ``admits``."""
        url = self._pick(avoid)
        probe = self._breakers[url].enter()
        self._in_flight[url] += 1
        try:
            yield Lease(url, probe)
        finally:
            self._in_flight[url] -= 1
            if probe:
                self._breakers[url].end_probe()

    def succeeded(self, url: str) -> None:
        """The server answered."""
        self._breakers[url].succeed()
        if self._paused_since is not None:
            self._outages.append((self._paused_since, self._clock()))
            self._paused_since = self.pause = None

    def failed(self, url: str, failure: str) -> None:
        """The server could not be reached, was silent or answered with an error of its own. To be overloaded
        is no such failure."""
        self._breakers[url].fail(failure, self._in_flight[url])
        if self._paused_since is None and all(breaker.down for breaker in self._breakers.values()):
            self._paused_since = max(breaker.since or 0.0 for breaker in self._breakers.values())
            self.pause = f"{self._description()}; waiting up to {self._outage_deadline:g} s"

    def _description(self) -> str:
        assert self._paused_since is not None
        begun = time.localtime(time.time() - (self._clock() - self._paused_since))
        does = "do not answer" if len(self._breakers) > 1 else "does not answer"
        last = "; ".join(breaker.last_failure for breaker in self._breakers.values())
        return f"{', '.join(self.urls)} {does} since {time.strftime('%H:%M:%S', begun)} (last failure: {last})"

    def _pick(self, avoid: str | None) -> str:
        admitted = [url for url, breaker in self._breakers.items() if breaker.admits]
        probes = [url for url in admitted if self._breakers[url].down]
        candidates = probes or [url for url in admitted if url != avoid] or admitted
        url = min(candidates, key=lambda u: (self._in_flight[u], self._last_turn[u]))
        self._turn += 1
        self._last_turn[url] = self._turn
        return url
