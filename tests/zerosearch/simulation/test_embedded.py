"""The server that a run starts for itself: restarted on its port when it dies, a few times, never when it is closed."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from zerosearch.simulation import embedded
from zerosearch.simulation.embedded import EmbeddedServer

STAND_IN = """
import http.server, json, sys, threading
port = int(sys.argv[sys.argv.index("--port") + 1]) if "--port" in sys.argv else 0
print("a line of the log", file=sys.stderr, flush=True)
if "--dies-when-restarted" in sys.argv and port:
    sys.exit(7)
server = http.server.HTTPServer(("127.0.0.1", port), http.server.BaseHTTPRequestHandler)
print(json.dumps({"url": f"http://127.0.0.1:{server.server_port}/v1", "model": "sim"}), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., EmbeddedServer]]:
    """Servers whose process is a small stand-in: what is tested is the watch over it."""
    script = tmp_path / "stand_in.py"
    script.write_text(STAND_IN)

    def made(*options: str) -> EmbeddedServer:
        server = EmbeddedServer("model", tmp_path / "server.log", options=options)
        monkeypatch.setattr(server, "_command", [sys.executable, str(script), *options])
        return server

    before = threading.active_count()
    yield made
    wait_until(lambda: threading.active_count() <= before)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def kill(server: EmbeddedServer) -> int:
    assert server.pid is not None
    pid = server.pid
    os.kill(pid, signal.SIGKILL)
    return pid


def gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def test_a_killed_server_is_restarted_on_its_port_and_said_with_its_log(
    make: Callable[..., EmbeddedServer], capsys: pytest.CaptureFixture[str]
) -> None:
    printed = ""
    with make() as server:
        url = server.url
        first = kill(server)
        while "is back on" not in printed:
            printed += capsys.readouterr().out
            time.sleep(0.01)
        assert server.pid != first
        assert server.url == url
        second = server.pid
    for part in ("was ended by SIGKILL", "a line of the log", f"restarting it on {url} (1 of at most 3)"):
        assert part in printed
    assert second is not None
    assert gone(first)
    assert gone(second)


def test_restarts_are_bounded_and_the_last_death_is_final(
    make: Callable[..., EmbeddedServer], capsys: pytest.CaptureFixture[str]
) -> None:
    with make("--dies-when-restarted") as server:
        kill(server)
        wait_until(lambda: not server._watcher.is_alive())
        assert server.pid is not None
        assert gone(server.pid)
    printed = capsys.readouterr().out
    assert printed.count("restarting it") == embedded._RESTARTS == 3
    assert printed.count("ended with status 7") == 3
    assert printed.rstrip().endswith("it was restarted 3 times and stays down")


def test_closing_never_restarts(make: Callable[..., EmbeddedServer], capsys: pytest.CaptureFixture[str]) -> None:
    with make() as server:
        pid = server.pid
    assert pid is not None
    assert gone(pid)
    assert server.pid is None
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("moment", ["at the death", "during the restart"])
def test_closing_while_the_server_is_being_restarted_leaves_nothing(
    make: Callable[..., EmbeddedServer], moment: str
) -> None:
    seen: list[int] = []
    for _ in range(5):
        with make() as server:
            seen.append(kill(server))
            if moment == "during the restart":
                wait_until(lambda server=server, dead=seen[-1]: server.pid != dead)  # type: ignore[misc]
                assert server.pid is not None
                seen.append(server.pid)
        assert not server._watcher.is_alive()
    assert all(gone(pid) for pid in seen)
    assert not [pid for pid in os.listdir("/proc") if pid.isdigit() and runs_stand_in(pid, server)]


def runs_stand_in(pid: str, server: EmbeddedServer) -> bool:
    try:
        return server._command[1].encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except (FileNotFoundError, ProcessLookupError):
        return False
