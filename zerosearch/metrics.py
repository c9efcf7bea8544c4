"""Search metrics of a set of trajectories; docs/metrics-search.md defines every key."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from verl.agent_loop.trajectory import Trajectory
from zerosearch.actions import InvalidKind
from zerosearch.records import Episode, SearchRecord
from zerosearch.search.backend import Label


def search_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Keys ``search/…``; a share or mean over nothing is left out.

    Trajectories that the infrastructure failed enter nothing but ``search/survival`` and ``search/engine_calls``.
    """
    valid = [t for t in trajectories if not t.lost]
    episodes = [episode for t in valid if (episode := _episode(t)) is not None]
    searches = [search for episode in episodes for search in episode.searches]
    values = {
        **_episode_metrics(episodes),
        **_action_metrics(episodes),
        **_search_metrics(searches),
        **_engine_calls(trajectories),
        **_survival(trajectories),
    }
    return {f"search/{name}": value for name, value in values.items() if value is not None}


def _episode(trajectory: Trajectory) -> Episode | None:
    return trajectory.environment if isinstance(trajectory.environment, Episode) else None


def _mean(values: Iterable[float]) -> float | None:
    listed = list(values)
    return sum(listed) / len(listed) if listed else None


def _episode_metrics(episodes: Sequence[Episode]) -> dict[str, float | None]:
    hops = sorted({e.hops for e in episodes if e.hops is not None})
    by_hops = {f"searches_hops_{h}": _mean(len(e.searches) for e in episodes if e.hops == h) for h in hops}
    return {
        "searches": _mean(len(e.searches) for e in episodes),
        **by_hops,
        "answer_rate": _mean(e.answer is not None for e in episodes),
        "noise_probability": _mean(e.noise_probability for e in episodes),
        "f1": _mean(e.scores.f1 for e in episodes),
        "em": _mean(e.scores.em for e in episodes),
        "cover_em": _mean(e.scores.cover_em for e in episodes),
    }


def _action_metrics(episodes: Sequence[Episode]) -> dict[str, float | None]:
    valid = sum(e.valid_actions for e in episodes)
    counts = Counter(kind for e in episodes for kind in e.invalid)
    actions = valid + counts.total()
    return {
        "valid_action_share": valid / actions if actions else None,
        **{f"invalid/{kind}": _mean(e.invalid.count(kind) for e in episodes) for kind in InvalidKind},
        "refused_searches": _mean(e.refused_searches for e in episodes),
        "forged_information": _mean(e.forged_information for e in episodes),
        "repeated_query_share": _share_of_searches(episodes),
    }


def _share_of_searches(episodes: Sequence[Episode]) -> float | None:
    searches = sum(len(e.searches) for e in episodes)
    return sum(e.repeated_queries for e in episodes) / searches if searches else None


def _search_metrics(searches: Sequence[SearchRecord]) -> dict[str, float | None]:
    simulated = [s for s in searches if s.label is not Label.NONE]
    asked = [s for s in searches if s.attempts]
    gold = {f"gold_in_documents/{x}": _mean(s.gold_in_documents for s in searches if s.label is x) for x in Label}
    return {
        **gold,
        "noisy_share": _mean(s.label is Label.NOISY for s in simulated),
        "documents": _mean(len(s.documents) for s in searches),
        "documents_cut": _mean(s.cut for s in searches),
        "truncated_observation_share": _mean(s.truncated for s in searches),
        "retries": _mean(s.attempts - 1 for s in asked),
    }


def _engine_calls(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Lost trajectories included: their calls were paid for as well."""
    searches = [s for t in trajectories if (episode := _episode(t)) is not None for s in episode.searches]
    real = [search.engine_calls for search in searches if search.label is Label.NONE]
    return {"engine_calls": float(sum(real))} if real else {}


def _survival(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    begun, lost = Counter[int](), Counter[int]()
    for trajectory in trajectories:
        episode = _episode(trajectory)
        if episode is not None:
            begun[episode.searches_begun] += 1
            lost[episode.searches_begun] += trajectory.lost
    return {f"survival/{count}": 1 - lost[count] / begun[count] for count in sorted(begun)}
