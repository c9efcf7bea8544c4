from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

from tests.verl.agent_loop.flaky import FlakyConfig, FlakyLoop
from verl.agent_loop.base import AgentLoopContext, RolloutLimits, RunEndingError
from verl.agent_loop.pauses import PauseTeller, telling_pauses


@pytest.fixture
def environment(tmp_path: Path) -> FlakyLoop:
    context = AgentLoopContext(cast(Any, None), RolloutLimits(1, 1, 1), frozenset(), 0, 1, tmp_path)
    return FlakyLoop(FlakyConfig(), context)


def told(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line.partition(" after")[0] for line in capsys.readouterr().out.splitlines()]


def test_several_places_pause_as_one(capsys: pytest.CaptureFixture[str]) -> None:
    teller = PauseTeller()
    for place, pause in ((0, None), (1, "away"), (0, "away"), (1, None), (1, None)):
        teller.note(place, pause)
    assert told(capsys) == ["paused: away"]
    assert teller.paused == {0}
    teller.note(0, None)
    assert told(capsys) == ["resumed"]


async def test_a_pause_during_the_drivers_own_work_is_told(
    environment: FlakyLoop, capsys: pytest.CaptureFixture[str]
) -> None:
    printed: list[str] = []

    async def work() -> str:
        environment.away = "the server is away"
        while not printed:
            await asyncio.sleep(0.01)
            printed.extend(told(capsys))
        environment.away = None
        return "measured"

    assert await telling_pauses(environment, work()) == "measured"
    assert printed == ["paused: the server is away"]
    assert told(capsys) == ["resumed"]


async def test_what_ends_the_run_comes_through(environment: FlakyLoop) -> None:
    async def work() -> None:
        raise RunEndingError("given up")

    with pytest.raises(RunEndingError, match="given up"):
        await telling_pauses(environment, work())
