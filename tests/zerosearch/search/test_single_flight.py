import asyncio

import pytest

from zerosearch.search.single_flight import SingleFlight


async def test_equal_calls_in_flight_are_merged_and_later_ones_remembered() -> None:
    calls = []
    flight: SingleFlight[int] = SingleFlight(8)

    async def compute() -> int:
        calls.append(1)
        await asyncio.sleep(0.01)
        return 5

    assert sorted(await asyncio.gather(*(flight.get("k", compute) for _ in range(3)))) == [
        (5, False),
        (5, True),
        (5, True),
    ]
    assert await flight.get("k", compute) == (5, True)
    assert len(calls) == 1


async def test_failures_reach_all_who_wait_and_are_not_kept() -> None:
    flight: SingleFlight[int] = SingleFlight(8)
    outcomes = [RuntimeError("down"), 7]

    async def compute() -> int:
        await asyncio.sleep(0)
        outcome = outcomes.pop(0)
        if isinstance(outcome, RuntimeError):
            raise outcome
        return outcome

    first = await asyncio.gather(*(flight.get("k", compute) for _ in range(2)), return_exceptions=True)
    assert [str(error) for error in first] == ["down", "down"]
    assert await flight.get("k", compute) == (7, False)


async def test_a_cancelled_caller_does_not_disturb_the_others() -> None:
    flight: SingleFlight[int] = SingleFlight(8)
    gate = asyncio.Event()

    async def compute() -> int:
        await gate.wait()
        return 1

    first, second = (asyncio.create_task(flight.get("k", compute)) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    gate.set()
    assert await second == (1, True)
    with pytest.raises(asyncio.CancelledError):
        await first


async def test_the_least_recently_used_goes_first() -> None:
    flight: SingleFlight[str] = SingleFlight(2)

    async def ask(key: str) -> bool:
        async def compute() -> str:
            return key

        value, shared = await flight.get(key, compute)
        assert value == key
        return shared

    assert [await ask(key) for key in ("a", "b", "a", "c", "a", "b")] == [False, False, True, False, True, False]


async def test_close_ends_what_is_running() -> None:
    flight: SingleFlight[None] = SingleFlight(2)
    waiting = asyncio.create_task(flight.get("k", asyncio.Event().wait))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    await flight.close()
    with pytest.raises(asyncio.CancelledError):
        await waiting
