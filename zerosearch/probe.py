"""Query sensitivity: does a simulated search answer the query, or would any query do?"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

from verl.agent_loop.base import RunEndingError
from verl.agent_loop.trajectory import Trajectory
from verl.workers.rollout.engine import InfrastructureError, SampleKey
from zerosearch.records import Episode
from zerosearch.reward import contains_gold
from zerosearch.search.backend import SearchBackend, SearchRequest
from zerosearch.text import normalize_text


@dataclass(frozen=True, slots=True)
class ProbePair:
    """A row's last search, and the same search with the query of another row whose answers differ."""

    own: SearchRequest
    other: SearchRequest


def probe_pairs(trajectories: Sequence[Trajectory], limit: int, seed: int, topk: int) -> list[ProbePair]:
    """One pair for each of the first ``limit`` rows that searched, noise 0.

    Each row takes the query of the next row around the circle whose question and gold answers are
    all different; a row without such another one is left out.
    """
    requests = list({t.uid: r for t in reversed(trajectories) if (r := _last_search(t, seed, topk))}.values())
    chosen = requests[::-1][:limit]
    return [ProbePair(own, other) for i, own in enumerate(chosen) if (other := _with_query_of_another(chosen, i))]


def _last_search(trajectory: Trajectory, seed: int, topk: int) -> SearchRequest | None:
    episode = trajectory.environment
    if not isinstance(episode, Episode) or not episode.searches:
        return None
    last = episode.searches[-1]
    key = SampleKey(seed, trajectory.step, trajectory.uid, trajectory.sample)
    return SearchRequest(last.query, episode.question, episode.golden_answers, 0.0, key, last.turn, topk)


def _with_query_of_another(requests: Sequence[SearchRequest], index: int) -> SearchRequest | None:
    own = requests[index]
    for other in [*requests[index + 1 :], *requests[:index]]:
        if _differ(own, other):
            return replace(own, query=other.query)
    return None


def _differ(a: SearchRequest, b: SearchRequest) -> bool:
    golds = [{normalize_text(gold) for gold in request.golden_answers} for request in (a, b)]
    return normalize_text(a.question) != normalize_text(b.question) and not golds[0] & golds[1]


async def query_sensitivity(backend: SearchBackend, pairs: Sequence[ProbePair]) -> dict[str, float]:
    """P(gold in documents | own query) - P(gold in documents | another row's query).

    1: only the right query is answered; 0: the simulator tells the gold whatever it is asked. Pairs
    that the infrastructure failed are left out; empty where none remains. Raises RunEndingError.
    """
    outcomes = await asyncio.gather(*(_outcome(backend, pair) for pair in pairs))
    done = [outcome for outcome in outcomes if outcome is not None]
    if not done:
        return {}
    own = sum(outcome[0] for outcome in done) / len(done)
    other = sum(outcome[1] for outcome in done) / len(done)
    return {
        "search/query_sensitivity": own - other,
        "search/gold_given_own_query": own,
        "search/gold_given_other_query": other,
        "search/probe_pairs": float(len(done)),
    }


async def _outcome(backend: SearchBackend, pair: ProbePair) -> tuple[bool, bool] | None:
    try:
        return await _finds_gold(backend, pair.own), await _finds_gold(backend, pair.other)
    except RunEndingError:
        raise
    except InfrastructureError:
        return None


async def _finds_gold(backend: SearchBackend, request: SearchRequest) -> bool:
    result = await backend.search(request)
    return any(contains_gold(text, request.golden_answers) for text in result.documents)
