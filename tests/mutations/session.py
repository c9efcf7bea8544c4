"""Pytest sessions with and without a fault, each in a process of its own."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from tests.mutations.mutation import Mutation

SECONDS = 120.0
"""A session that takes longer hangs: every fault has to show as a failure."""

_SECONDS_TO_EXIT = 5.0

_PRELOADED = ["ray", "aiohttp", "hypothesis", "pytest_asyncio", "transformers", "tests.mutations.catalogue"]


@dataclass(frozen=True)
class Failure:
    """A test that failed in its own body, where the error arose and what it said."""

    test: str
    path: str
    message: str

    @property
    def broken(self) -> bool:
        """The fault itself no longer fits the code, so that its failure proves nothing."""
        return (
            "tests/mutations/" in self.path
            or " positional argument" in self.message
            or "unexpected keyword" in self.message
        )


@dataclass
class Recorder:
    """A pytest plugin that keeps the failures of a session."""

    failures: list[Failure] = field(default_factory=list)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and report.when == "call":
            assert not isinstance(report.longrepr, str | tuple | None)
            crash = report.longrepr.reprcrash  # type: ignore[attr-defined]
            self.failures.append(Failure(report.nodeid, crash.path, crash.message.partition("\n")[0]))


@dataclass(frozen=True)
class Outcome:
    """pytest's exit code, failures in order, and the end of what was printed."""

    exit_code: int
    failures: tuple[Failure, ...]
    output: str


@cache
def unmutated(tests: tuple[str, ...]) -> Outcome:
    return run_session("", tests)


def mutated(mutation: Mutation) -> Outcome:
    """Ends at the first failure."""
    return run_session(mutation.name, ("-x", *mutation.tests))


def run_session(mutation: str, arguments: Sequence[str]) -> Outcome:
    """Runs pytest with the plugin of this folder. Raises TimeoutError if it hangs, RuntimeError if it dies."""
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(_PRELOADED)
    receiving, sending = server.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as directory:
        output = Path(directory) / "output"
        process = server.Process(target=_session, args=(mutation, list(arguments), str(output), sending))
        process.start()
        sending.close()
        try:
            return _outcome(receiving, output)
        finally:
            process.join(_SECONDS_TO_EXIT)
            process.kill()


def _outcome(receiving: Connection, output: Path) -> Outcome:
    if not receiving.poll(SECONDS):
        raise TimeoutError(f"no end after {SECONDS:.0f} s:\n{output.read_text()}")
    try:
        exit_code, failures = receiving.recv()
    except EOFError as error:
        raise RuntimeError(f"the session died:\n{output.read_text()}") from error
    return Outcome(exit_code, tuple(failures), output.read_text())


def _session(mutation: str, arguments: list[str], output: str, sending: Connection) -> None:
    from tests.mutations.plugin import VARIABLE

    file = os.open(output, os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ[VARIABLE] = mutation
    recorder = Recorder()
    plugins = ["-p", "tests.mutations.plugin", "-p", "no:cacheprovider", "--tb=short"]
    sending.send((int(pytest.main([*plugins, *arguments], plugins=[recorder])), recorder.failures))
