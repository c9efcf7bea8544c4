from dataclasses import replace
from typing import Any

import pytest

from tests.glossary import undocumented
from verl.agent_loop.base import ScoredRow
from verl.agent_loop.trajectory import Trajectory, TrajectoryStatus
from zerosearch import report
from zerosearch.actions import InvalidKind
from zerosearch.metrics import search_metrics
from zerosearch.records import Episode, SearchRecord
from zerosearch.reward import Scores
from zerosearch.search.backend import Label

ANSWERED, EXHAUSTED, TRUNCATED, FAILED = TrajectoryStatus
SEARCH = SearchRecord(
    turn=1,
    query="Q",
    normalized_query="q",
    label=Label.USEFUL,
    backend="simulate_sft",
    documents=("a", "b"),
    cut=0,
    truncated=False,
    gold_in_documents=True,
    attempts=1,
    latency=0.5,
)
EPISODE = Episode(question="q", golden_answers=("x",), hops=1, noise_probability=0.25)


def trajectory(status: TrajectoryStatus, episode: Episode | None) -> Trajectory:
    return Trajectory("u", 0, 1, "train", (1,), status=status, environment=episode)


def test_every_metric_of_three_trajectories() -> None:
    noisy = replace(SEARCH, label=Label.NOISY, normalized_query="r", gold_in_documents=False, attempts=3, cut=2)
    repeated = replace(SEARCH, documents=("a",), attempts=0, truncated=True)
    answered = replace(EPISODE, searches=(SEARCH, noisy, repeated), answer="x", scores=Scores(1, 1, 1))
    exhausted = replace(
        EPISODE,
        hops=2,
        noise_probability=0.75,
        searches=(SEARCH,),
        refused_searches=1,
        forged_information=3,
        invalid=(InvalidKind.BLANK_QUERY, InvalidKind.NO_ACTION, InvalidKind.BLANK_QUERY),
    )
    guessed = replace(EPISODE, answer="x y", scores=Scores(0.5, 0, 1))
    metrics = search_metrics(
        [trajectory(ANSWERED, answered), trajectory(EXHAUSTED, exhausted), trajectory(ANSWERED, guessed)]
    )
    expected = {
        "searches": 4 / 3,
        "searches_hops_1": 1.5,
        "searches_hops_2": 1.0,
        "answer_rate": 2 / 3,
        "noise_probability": 1.25 / 3,
        "f1": 0.5,
        "em": 1 / 3,
        "cover_em": 2 / 3,
        "valid_action_share": 7 / 10,
        "invalid/blank_query": 2 / 3,
        "invalid/no_action": 1 / 3,
        "invalid/truncated_turn": 0.0,
        "refused_searches": 1 / 3,
        "forged_information": 1.0,
        "repeated_query_share": 1 / 4,
        "gold_in_documents/useful": 1.0,
        "gold_in_documents/noisy": 0.0,
        "noisy_share": 1 / 4,
        "documents": 7 / 4,
        "documents_cut": 2 / 4,
        "truncated_observation_share": 1 / 4,
        "retries": 2 / 3,
        "survival/0": 1.0,
        "survival/1": 1.0,
        "survival/3": 1.0,
    }
    assert metrics == pytest.approx({f"search/{name}": value for name, value in expected.items()})


def test_every_metric_of_real_engines() -> None:
    """No label, so no share of noisy searches; rows without hops; a trajectory lost in its second search."""
    real = replace(SEARCH, label=Label.NONE, backend="google")
    paged = replace(real, documents=("a", "b", "c"), cut=1, attempts=3, engine_calls=4)
    remembered = replace(real, documents=(), gold_in_documents=False, attempts=0)
    shortened = replace(real, documents=("a",), truncated=True, engine_calls=1)
    plain = replace(EPISODE, hops=None, noise_probability=0.0)
    cut_off = InvalidKind.TRUNCATED_TURN
    metrics = search_metrics(
        [
            trajectory(ANSWERED, replace(plain, searches=(paged, remembered), answer="x", scores=Scores(1, 1, 1))),
            trajectory(EXHAUSTED, replace(plain, searches=(shortened,), invalid=(cut_off,))),
            trajectory(TRUNCATED, replace(plain, invalid=(cut_off, cut_off))),
            trajectory(FAILED, replace(plain, searches=(replace(real, engine_calls=2),), failed_query="r")),
        ]
    )
    expected = {
        "searches": 3 / 3,
        "answer_rate": 1 / 3,
        "noise_probability": 0.0,
        "f1": 1 / 3,
        "em": 1 / 3,
        "cover_em": 1 / 3,
        "valid_action_share": 4 / 7,
        "invalid/blank_query": 0.0,
        "invalid/no_action": 0.0,
        "invalid/truncated_turn": 3 / 3,
        "refused_searches": 0.0,
        "forged_information": 0.0,
        "repeated_query_share": 1 / 3,
        "gold_in_documents/none": 2 / 3,
        "documents": 4 / 3,
        "documents_cut": 1 / 3,
        "truncated_observation_share": 1 / 3,
        "retries": 2 / 2,
        "engine_calls": 4 + 0 + 1 + 2,
        "survival/0": 1.0,
        "survival/1": 1.0,
        "survival/2": 1 / 2,
    }
    assert metrics == pytest.approx({f"search/{name}": value for name, value in expected.items()})


def test_gold_answers_are_counted_apart_by_label() -> None:
    """``/noisy`` is leakage: what was drawn useful or really searched must not enter it."""
    shown = {Label.USEFUL: (True, True, False), Label.NOISY: (True, False, False, False), Label.NONE: (False, True)}
    searches = [
        replace(SEARCH, label=label, gold_in_documents=gold) for label, golds in shown.items() for gold in golds
    ]
    metrics = search_metrics([trajectory(EXHAUSTED, replace(EPISODE, searches=tuple(searches)))])
    shares = {name: value for name, value in metrics.items() if name.startswith("search/gold_in_documents/")}
    expected = {"useful": 2 / 3, "noisy": 1 / 4, "none": 1 / 2}
    assert shares == pytest.approx({f"search/gold_in_documents/{name}": value for name, value in expected.items()})
    assert metrics["search/noisy_share"] == pytest.approx(4 / 7), "of simulated searches only"


def test_what_the_infrastructure_failed_counts_for_survival_alone() -> None:
    two = replace(EPISODE, searches=(SEARCH, SEARCH), answer="x", scores=Scores(1, 1, 1))
    failed = replace(EPISODE, searches=(SEARCH,), failed_query="r")
    metrics = search_metrics([trajectory(ANSWERED, two), trajectory(FAILED, failed), trajectory(FAILED, None)])
    assert metrics["search/survival/2"] == 0.5
    assert metrics["search/f1"] == 1.0
    assert metrics["search/searches"] == 2.0


def test_nothing_gives_no_metrics() -> None:
    assert search_metrics([]) == {}


def test_every_key_is_documented() -> None:
    episode = replace(EPISODE, searches=(SEARCH, replace(SEARCH, label=Label.NOISY), replace(SEARCH, label=Label.NONE)))
    assert undocumented(search_metrics([trajectory(ANSWERED, episode)])) == []


def test_headline_says_what_was_measured() -> None:
    metrics = {"search/answer_rate": 0.5, "search/searches": 1.25, "reward/mean": 0.5}
    assert report.headline(metrics) == "searches 1.250 | answered 0.500"
    assert report.headline({}) == ""
    shortened = report.headline(metrics | {"search/truncated_observation_share": 0.25})
    assert "warning: documents shortened in 25% of searches" in shortened


def test_figures() -> None:
    validation = {
        "val/noise_0/search/searches": 1.5,
        "val/noise_0/search/searches_hops_1": 1.0,
        "val/noise_0/search/searches_hops_2": 2.0,
        "val/noise_end/search/searches_hops_2": 3.0,
        "val/noise_0/search/answer_rate": 0.75,
        "val/search/query_sensitivity": 0.98,
    }
    assert report.figures(validation, "noise_0") == {
        "searches per question": "1.500",
        "answered": "0.750",
        "query sensitivity": "0.980",
        "searches, 1-hop questions": "1.000",
        "searches, 2-hop questions": "2.000",
    }


def rows(scores: dict[str, Any]) -> list[ScoredRow]:
    return [ScoredRow(row, 0, "d", {"f1": f1, "em": float(f1 == 1)}) for row, f1 in scores.items()]


def test_summary_pairs_rows_by_their_id() -> None:
    before = {"noise_0": rows({"a": 0.0, "b": 0.5, "gone": 1.0}), "noise_end": rows({"a": 0.0})}
    after = {"noise_0": rows({"b": 1.0, "a": 0.5}), "noise_end": rows({"a": 0.25, "b": 0.25})}
    assert report.summary(before, after) == pytest.approx(
        {
            "held_out_n": 2,
            "held_out_f1_before": 0.5,
            "held_out_f1_after": 0.75,
            "held_out_f1_after_end_noise": 0.25,
            "held_out_f1_before_end_noise": 0.0,
            "held_out_em_before_end_noise": 0.0,
            "held_out_em_before": 1 / 3,
            "held_out_em_after": 0.5,
            "held_out_em_after_end_noise": 0.0,
            "held_out_gain_low95": 0.5,
        }
    )


def test_scores_of_different_backends_never_share_a_key() -> None:
    simulated, real = rows({"a": 0.5}), rows({"a": 1.0, "b": 0.0})
    found = report.summary({"noise_0": simulated}, {"noise_0": simulated, "google": real})
    assert (found["held_out_f1_after"], found["held_out_f1_after_google"]) == (0.5, 0.5)
    assert (found["held_out_n"], found["held_out_n_google"]) == (1, 2)
    assert "held_out_f1_before_google" not in found
    only_real = report.summary({"wiki": real}, {"wiki": real})
    assert only_real and all(key.endswith("_wiki") for key in only_real)
    assert report.figures({"val/google/search/searches": 2.0, "val/noise_0/search/searches": 1.0}, "google") == {
        "searches per question": "2.000"
    }


def test_calls_of_real_engines_are_summed_lost_trajectories_included() -> None:
    paid = replace(SEARCH, label=Label.NONE, backend="google", engine_calls=3)
    kept = replace(EPISODE, searches=(paid, replace(paid, attempts=0, engine_calls=0), SEARCH))
    failed = replace(EPISODE, searches=(paid,), failed_query="r")
    assert search_metrics([trajectory(ANSWERED, kept), trajectory(FAILED, failed)])["search/engine_calls"] == 6.0
    assert "search/engine_calls" not in search_metrics([trajectory(ANSWERED, replace(EPISODE, searches=(SEARCH,)))])


def test_several_samples_of_a_row_are_one_row() -> None:
    several = [ScoredRow("a", 0, "d", {"f1": 1.0, "em": 1.0}), ScoredRow("a", 1, "d", {"f1": 0.0, "em": 0.0})]
    found = report.summary({"noise_0": several}, {"noise_0": several})
    assert (found["held_out_n"], found["held_out_f1_after"]) == (1, 0.5)
