"""The client and the search against vLLM's real server, which serves the quickstart's simulation LLM on the CPU."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from verl.workers.rollout.engine import SampleKey
from zerosearch.prompts import load_simulation_template
from zerosearch.search.backend import Label, SearchRequest
from zerosearch.search.simulation import SimulationBackend
from zerosearch.simulation.client import ChatClient, ChatSampling, ClientSettings
from zerosearch.simulation.pool import ServerOutageError, ServerPool, parse_addresses
from zerosearch.transport import RequestRejectedError, ServerUnavailableError

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM: scripts/setup.sh vllm"),
]

MODEL = "zerosearch/quickstart/assets/simulator"
PROMPT = "Query: Who directed The Crimson River?\nUseful Output:"
SAMPLING = ChatSampling(temperature=1.5, max_tokens=32)
START_SECONDS = 240
MakeClient = Callable[..., ChatClient]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _start(port: int, log: Path) -> subprocess.Popen[bytes]:
    command = ["bash", "scripts/serve_simulation.sh", MODEL, "--engine", "vllm", "--host", "127.0.0.1"]
    environment = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    with log.open("wb") as output:
        return subprocess.Popen(
            [*command, "--port", str(port)], env=environment, stdout=output, stderr=output, start_new_session=True
        )


def _wait_until_ready(process: subprocess.Popen[bytes], address: str, log: Path) -> None:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end and process.poll() is None:
        try:
            urllib.request.urlopen(f"http://{address}/v1/models", timeout=5).close()
        except OSError:
            time.sleep(0.5)
        else:
            return
    pytest.fail(f"vLLM did not come up:\n{log.read_text()[-3000:]}")


def _kill(process: subprocess.Popen[bytes]) -> None:
    """The whole session: vLLM's engine is a process of its own."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    log = tmp_path_factory.mktemp("vllm") / "server.log"
    port = _free_port()
    process = _start(port, log)
    try:
        _wait_until_ready(process, f"127.0.0.1:{port}", log)
        yield f"127.0.0.1:{port}", process
    finally:
        _kill(process)


@pytest.fixture
def address(server: tuple[str, subprocess.Popen[bytes]]) -> str:
    return server[0]


@pytest.fixture
async def make_client() -> AsyncIterator[MakeClient]:
    made: list[ChatClient] = []

    def make(address: str, **changes: Any) -> ChatClient:
        settings = ClientSettings(**{"request_timeout": 60.0, "deadline": 120.0, **changes})
        made.append(ChatClient(ServerPool(parse_addresses(address), outage_deadline=2.0), settings))
        return made[-1]

    yield make
    for client in made:
        await client.close()


def make_backend(client: ChatClient) -> SimulationBackend:
    template = load_simulation_template("pkg://zerosearch.quickstart/assets/simulation_prompt.txt")
    return SimulationBackend("simulate_sft", client, template, ChatSampling(0.4, 1.0, 64), "trajectory")


async def test_preflight_finds_nothing_wrong(address: str, make_client: MakeClient) -> None:
    assert await make_backend(make_client(address)).preflight() == []


async def test_the_model_is_asked_when_empty(address: str, make_client: MakeClient) -> None:
    client = make_client(address)
    assert await client.served_models(client.urls[0]) == (MODEL,)
    reply = await client.complete(PROMPT, ChatSampling(0.0, 1.0, 32), seed=1)
    assert "Zora Quist" in reply.text
    assert reply.attempts == 1


async def test_a_wrong_model_name_is_refused_at_once(address: str, make_client: MakeClient) -> None:
    client = make_client(address, model="other")
    with pytest.raises(RequestRejectedError, match=r"HTTP 404.*other"):
        await client.complete(PROMPT, SAMPLING, seed=1)
    (problem,) = await make_backend(client).preflight()
    assert MODEL in problem and "not other" in problem


async def test_a_prompt_over_the_context_is_refused_at_once(address: str, make_client: MakeClient) -> None:
    with pytest.raises(RequestRejectedError, match=r"HTTP 400.*context"):
        await make_client(address).complete("word " * 3000, SAMPLING, seed=1)


async def test_the_seed_is_honoured_also_in_parallel(address: str, make_client: MakeClient) -> None:
    client = make_client(address)
    first = await client.complete(PROMPT, SAMPLING, seed=1)
    same, other = await asyncio.gather(*(client.complete(PROMPT, SAMPLING, seed) for seed in (1, 2)))
    assert same.text == first.text != other.text


async def test_useful_documents_hold_the_fact(address: str, make_client: MakeClient) -> None:
    backend = make_backend(make_client(address))
    key = SampleKey(seed=0, step=1, uid="row", sample=0)
    question = "Who directed The Crimson River?"
    result = await backend.search(SearchRequest(question, question, ("Zora Quist",), 0.0, key, turn=1, topk=1))
    assert result.label is Label.USEFUL
    assert "Zora Quist" in result.documents[0]


async def test_a_killed_server_is_a_typed_failure(
    server: tuple[str, subprocess.Popen[bytes]], make_client: MakeClient
) -> None:
    """The last test: the module's server is gone afterwards."""
    address, process = server
    client = make_client(address)
    assert (await client.complete(PROMPT, SAMPLING, seed=1)).attempts == 1
    _kill(process)
    with pytest.raises(ServerOutageError, match=address):
        await client.complete(PROMPT, SAMPLING, seed=2)
    with pytest.raises(ServerUnavailableError, match=address):
        await make_client(address).served_models(f"http://{address}/v1")
