"""The servers of a simulation LLM: their addresses, and which one gets the next request."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ipaddress import IPv6Address
from urllib.parse import urlsplit

DEFAULT_PORT = 6001
DEFAULT_PATH = "/v1"

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


class ServerPool:
    """Several servers of one model. A request goes to the one with the fewest in flight, among
    equals to the one that has waited longest."""

    def __init__(self, urls: Sequence[str]) -> None:
        assert urls and len(set(urls)) == len(urls)
        self._in_flight = dict.fromkeys(urls, 0)
        self._last_turn = dict.fromkeys(urls, 0)
        self._turn = 0

    @property
    def urls(self) -> tuple[str, ...]:
        return tuple(self._in_flight)

    @contextmanager
    def lease(self, avoid: str | None = None) -> Iterator[str]:
        """A base URL, counted as busy meanwhile; not ``avoid`` where there is another one."""
        url = self._pick(avoid)
        self._in_flight[url] += 1
        try:
            yield url
        finally:
            self._in_flight[url] -= 1

    def _pick(self, avoid: str | None) -> str:
        candidates = [url for url in self._in_flight if url != avoid] or list(self._in_flight)
        url = min(candidates, key=lambda u: (self._in_flight[u], self._last_turn[u]))
        self._turn += 1
        self._last_turn[url] = self._turn
        return url
