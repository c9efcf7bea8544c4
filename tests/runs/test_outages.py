"""Simulation servers that die, hang or are slow in mid-rollout: nothing is lost, doubled or learned from it."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.runs.proxy import FaultyProxy
from tests.runs.script import Finished, RunningScript, Start
from tests.runs.servers import ExternalServer, stop_with_requests_inside

Twins = tuple[Finished, Finished]

TINY = (
    "TOTAL_STEPS",
    "5",
    "trainer.val_before_train=false",
    "trainer.test_freq=0",
    "data.val_max_samples=8",
    "retriever.end_threshold=0.2",
)
"""The same five training steps as the undisturbed runs', with hardly any validation."""
NOT_COMPARED = ("timing_s/", "perf/", "val/", "search/retries")
UNCHANGED = ("uid", "sample", "status", "reward", "scores", "prompt_ids", "segments", "failure")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ExternalServer]:
    running = ExternalServer(tmp_path / "server.log")
    running.start()
    yield running
    running.kill()


def assert_undisturbed(run: Finished, reference: Finished) -> None:
    """The run ended well, told nothing as lost, and took every step of the reference with the same trajectories."""
    assert run.code == 0, run.output
    assert run.summary["failures"] == {}
    assert training_rows(run) == training_rows(reference)
    for step in range(1, 6):
        own, undisturbed = (trajectories(r, step) for r in (run, reference))
        assert len(own) == 96, "lost or doubled"
        assert own == undisturbed
    assert run.processes_left == []


def training_rows(run: Finished) -> list[dict[str, Any]]:
    rows = [row for row in run.metrics if "reward/mean" in row]
    return [{k: v for k, v in row.items() if not k.startswith(NOT_COMPARED)} for row in rows]


def trajectories(run: Finished, step: int) -> dict[tuple[str, int], dict[str, Any]]:
    """By uid and sample, without times and counts of attempts."""
    assert run.directory is not None
    lines = (run.directory / "trajectories" / f"step_{step:06d}.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    by_key = {(r["uid"], r["sample"]): {name: r[name] for name in UNCHANGED} for r in records}
    assert len(by_key) == len(records), "doubled"
    return by_key


def assert_paused_once(script: RunningScript) -> None:
    output = script.log.read_text()
    assert (output.count("paused: http://"), output.count("resumed after")) == (1, 1), output


def test_a_server_killed_in_mid_rollout_and_restarted_loses_nothing(
    start: Start, server: ExternalServer, twin_runs: Twins
) -> None:
    script = start(*TINY, "IP", server.address)
    script.wait_for("step   1/5")
    stop_with_requests_inside(server.pid)
    server.kill()
    script.wait_for("paused: http://")
    server.start()
    script.wait_for("resumed after")
    run = script.finish()
    assert_paused_once(script)
    assert_undisturbed(run, twin_runs[0])


@pytest.mark.slow
def test_a_server_that_hangs_and_goes_on_loses_nothing(start: Start, server: ExternalServer, twin_runs: Twins) -> None:
    script = start(*TINY, "IP", server.address, "retriever.request_timeout=5")
    script.wait_for("step   1/5")
    stop_with_requests_inside(server.pid)
    script.wait_for("paused: http://")
    assert "no answer within 5 s" in script.log.read_text()
    os.kill(server.pid, signal.SIGCONT)
    script.wait_for("resumed after")
    assert_undisturbed(script.finish(), twin_runs[0])


@pytest.mark.slow
def test_a_server_that_stays_down_ends_the_run_with_one_error_and_keeps_what_is_done(
    start: Start, server: ExternalServer, twin_runs: Twins
) -> None:
    script = start(*TINY, "IP", server.address, "retriever.outage_deadline=5")
    script.wait_for("step   1/5")
    stop_with_requests_inside(server.pid)
    server.kill()
    run = script.finish(180)
    assert run.code == 1, run.output
    assert run.output.count("Traceback") == 1, run.output
    told = [line for line in run.output.splitlines() if "given up after 5 s" in line]
    said = {line.partition("ServerOutageError: ")[2].partition("; everything of this run")[0] for line in told}
    assert len(said) == 1, said
    assert run.summary["exit_reason"].startswith(f"ServerOutageError: http://{server.address}/v1 does not answer")
    steps = run.summary["steps"]
    assert steps >= 1
    assert training_rows(run) == training_rows(twin_runs[0])[:steps]
    for step in range(1, steps + 1):
        assert trajectories(run, step) == trajectories(twin_runs[0], step)
    assert run.directory is not None
    assert list((run.directory / "checkpoints" / "last").glob("*.safetensors"))
    assert run.processes_left == []


@pytest.mark.slow
def test_the_runs_own_server_is_restarted_and_nothing_is_lost(start: Start, twin_runs: Twins) -> None:
    script = start(*TINY)
    script.wait_for("step   1/5")
    (pid,) = script.pids_of("zerosearch.simulation.server")
    stop_with_requests_inside(pid)
    os.kill(pid, signal.SIGKILL)
    script.wait_for("resumed after")
    run = script.finish()
    assert "the embedded server was ended by SIGKILL" in run.output
    assert "(1 of at most 3)" in run.output
    assert_undisturbed(run, twin_runs[0])


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["ten times slower", "one request in twenty fails"])
def test_a_slow_or_faulty_server_is_neither_alarm_nor_pause(
    start: Start, server: ExternalServer, twin_runs: Twins, fault: str
) -> None:
    slow = fault == "ten times slower"
    with FaultyProxy(server.address, slowdown=10 if slow else 1, fail_every=0 if slow else 20) as proxy:
        run = start(*TINY, "IP", proxy.address).finish(1200)
    assert "paused" not in run.output
    assert run.summary["alarms"] == twin_runs[0].summary["alarms"]
    assert proxy.failed == (0 if slow else proxy.requests // 20)
    assert_undisturbed(run, twin_runs[0])
