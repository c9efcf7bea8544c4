from dataclasses import replace

import pytest

from verl.workers.rollout.engine import SampleKey
from zerosearch.search.backend import Label, SearchRequest
from zerosearch.search.noise import document_seed, draw_label

DRAWN = ["noisy", "noisy", "useful", "useful", "useful", "noisy"]
SEED = 1673815541
KEY = SampleKey(seed=1, step=2, uid="a.parquet#3@2", sample=0)
REQUEST = SearchRequest("Capital of France?", "q", ("Paris",), 0.5, KEY, turn=1, topk=5)


def test_repeating_a_query_repeats_label_and_seed() -> None:
    for query in ("capital of france", "the capital, of FRANCE", "Capital of France?"):
        for turn in (1, 2, 3):
            again = replace(REQUEST, query=query, turn=turn)
            assert draw_label(again, "trajectory") is draw_label(REQUEST, "trajectory")
            assert document_seed(again, "trajectory", 0) == document_seed(REQUEST, "trajectory", 0)


def test_a_new_coin_at_every_call_when_asked_for() -> None:
    requests = [replace(REQUEST, turn=turn) for turn in range(200)]
    assert {draw_label(r, "call") for r in requests} == {Label.USEFUL, Label.NOISY}
    assert len({document_seed(r, "call", 0) for r in requests}) == 200


@pytest.mark.parametrize("change", [{"seed": 9}, {"step": 9}, {"uid": "b"}, {"sample": 9}])
def test_every_part_of_the_key_enters(change: dict[str, int | str]) -> None:
    other = replace(REQUEST, key=replace(KEY, **change))
    assert document_seed(other, "trajectory", 0) != document_seed(REQUEST, "trajectory", 0)
    queries = [f"query {i}" for i in range(40)]
    labels = [[draw_label(replace(r, query=q), "trajectory") for q in queries] for r in (REQUEST, other)]
    assert labels[0] != labels[1]


@pytest.mark.parametrize(("probability", "expected"), [(0.0, 0.0), (0.25, 0.25), (0.75, 0.75), (1.0, 1.0)])
def test_the_share_of_noise_is_its_probability(probability: float, expected: float) -> None:
    requests = [replace(REQUEST, query=f"query {i}", noise_probability=probability) for i in range(4000)]
    share = sum(draw_label(r, "trajectory") is Label.NOISY for r in requests) / len(requests)
    assert share == pytest.approx(expected, abs=0.03 if 0 < probability < 1 else 0)


def test_more_noise_never_turns_a_noisy_search_useful() -> None:
    for i in range(50):
        labels = [draw_label(replace(REQUEST, query=str(i), noise_probability=p / 10), "trajectory") for p in range(11)]
        assert labels == sorted(labels, key=[Label.USEFUL, Label.NOISY].index)


def test_draws_are_the_same_on_every_machine() -> None:
    assert [draw_label(replace(REQUEST, query=str(i)), "trajectory").value for i in range(6)] == DRAWN
    assert document_seed(REQUEST, "trajectory", 0) == SEED
    assert 0 <= document_seed(REQUEST, "trajectory", 1) < 2**31
