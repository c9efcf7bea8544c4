from collections.abc import Callable
from dataclasses import replace

import pytest

from verl.agent_loop.base import RunEndingError
from verl.agent_loop.trajectory import Trajectory, TrajectoryStatus
from verl.workers.rollout.engine import InfrastructureError
from zerosearch.probe import probe_pairs, query_sensitivity
from zerosearch.records import Episode, SearchRecord
from zerosearch.search.backend import Label, SearchRequest, SearchResult

SEARCH = SearchRecord(1, "q", "q", Label.NOISY, "sim", (), 0, False, False, 1, 0.0)


def trajectory(row: int, gold: str, *queries: str, sample: int = 0) -> Trajectory:
    searches = tuple(replace(SEARCH, query=query, turn=i + 1) for i, query in enumerate(queries))
    episode = Episode(f"Question {row}?", (gold,), 1, 0.5, searches)
    return Trajectory(f"u{row}", sample, 0, "noise_0", (1,), status=TrajectoryStatus.ANSWERED, environment=episode)


class Simulator:
    """Answers a request with the text that ``says`` makes of it."""

    def __init__(self, says: Callable[[SearchRequest], str]) -> None:
        self._says = says

    async def search(self, request: SearchRequest) -> SearchResult:
        return SearchResult((self._says(request),), Label.USEFUL, "sim", 1, 0.0)

    async def preflight(self) -> list[str]:
        return []

    async def close(self) -> None: ...


WORLD = [trajectory(i, f"gold{i}", "first hop", f"query{i}") for i in range(6)]
FACTS = {f"query{i}": f"It is gold{i}." for i in range(6)}


async def test_a_simulator_that_answers_the_query_has_sensitivity_one() -> None:
    pairs = probe_pairs(WORLD, 64, seed=1, topk=2)
    found = await query_sensitivity(Simulator(lambda request: FACTS[request.query]), pairs)
    assert found == {
        "search/query_sensitivity": 1.0,
        "search/gold_given_own_query": 1.0,
        "search/gold_given_other_query": 0.0,
        "search/probe_pairs": 6.0,
    }


async def test_a_simulator_that_copies_the_gold_answer_has_sensitivity_zero() -> None:
    pairs = probe_pairs(WORLD, 64, seed=1, topk=2)
    found = await query_sensitivity(Simulator(lambda request: request.golden_answers[0]), pairs)
    assert (found["search/query_sensitivity"], found["search/gold_given_other_query"]) == (0.0, 1.0)


def test_pairs_take_the_last_search_and_the_next_rows_query() -> None:
    pairs = probe_pairs(WORLD, 64, seed=1, topk=2)
    assert [(p.own.query, p.other.query) for p in pairs] == [(f"query{i}", f"query{(i + 1) % 6}") for i in range(6)]
    for pair in pairs:
        assert pair.other == replace(pair.own, query=pair.other.query), "question and gold answers stay the row's own"
        assert pair.own.noise_probability == 0
        assert pair.own.key.seed == 1


def test_rows_with_the_same_question_or_answer_are_not_paired() -> None:
    same_gold = [trajectory(0, "Gold", "a"), trajectory(1, "the gold", "b"), trajectory(2, "other", "c")]
    assert [p.other.query for p in probe_pairs(same_gold, 64, 1, 2)] == ["c", "c", "a"]
    assert probe_pairs(same_gold[:2], 64, 1, 2) == []


def test_limit_samples_and_rows_without_searches() -> None:
    rows = [trajectory(0, "x", "a"), trajectory(0, "x", "b", sample=1), trajectory(1, "y"), trajectory(2, "z", "c")]
    assert [p.own.query for p in probe_pairs(rows, 64, 1, 2)] == ["a", "c"]
    assert len(probe_pairs(WORLD, 3, 1, 2)) == 3
    assert probe_pairs(WORLD, 0, 1, 2) == []


async def test_failed_pairs_are_left_out() -> None:
    def says(request: SearchRequest) -> str:
        if request.question == "Question 0?":
            raise InfrastructureError("down")
        return FACTS[request.query]

    found = await query_sensitivity(Simulator(says), probe_pairs(WORLD, 64, 1, 2))
    assert (found["search/probe_pairs"], found["search/query_sensitivity"]) == (5.0, 1.0)

    def never(request: SearchRequest) -> str:
        raise InfrastructureError(f"down: {request.query}")

    assert await query_sensitivity(Simulator(never), probe_pairs(WORLD, 64, 1, 2)) == {}


async def test_an_outage_given_up_ends_the_run_and_is_no_failed_pair() -> None:
    def says(request: SearchRequest) -> str:
        if request.question == "Question 0?":
            raise RunEndingError("given up")
        return FACTS[request.query]

    with pytest.raises(RunEndingError, match="given up"):
        await query_sensitivity(Simulator(says), probe_pairs(WORLD, 64, 1, 2))
