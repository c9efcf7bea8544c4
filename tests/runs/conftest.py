"""Whole runs, and one pair of them that several tests look at."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.runs.script import SHORT, Finished, RunningScript, Start


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts the script; whatever a failed test left running is killed."""
    started: list[RunningScript] = []

    def begin(*arguments: str, algorithm: str = "grpo") -> RunningScript:
        started.append(RunningScript(tmp_path, arguments, algorithm))
        return started[-1]

    yield begin
    for script in started:
        if script.process.poll() is None:
            script.process.kill()


@pytest.fixture(scope="session")
def twin_runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Finished, Finished]:
    """The short quickstart twice with one seed, shared by the tests that look at it."""
    root = tmp_path_factory.mktemp("twins")
    first = RunningScript(root, SHORT).finish()
    return first, RunningScript(root, SHORT).finish()
