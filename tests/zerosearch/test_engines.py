from dataclasses import replace
from typing import Any

import pytest

from verl.agent_loop.base import RunPlan
from verl.utils.config import build_config
from zerosearch.agent_loop import SearchAgentLoop
from zerosearch.config import SearchConfig

PLAN = RunPlan(
    total_steps=200,
    trajectories_per_step=320,
    validation_rows=125,
    validation_samples=2,
    validations=5,
    full_validations=5,
    test_freq=50,
)
UNASKED = replace(PLAN, test_freq=0, validations=2, full_validations=2)
NO_ROWS = replace(PLAN, validation_rows=0, validations=0, full_validations=0)


def config(**values: Any) -> SearchConfig:
    return build_config(SearchConfig, values, "retriever")


def problems(plan: RunPlan = PLAN, **values: Any) -> list[str]:
    return SearchAgentLoop.check(config(**values), plan)


@pytest.fixture(autouse=True)
def _no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SER_API_KEY", raising=False)


def test_a_simulation_needs_a_server_or_a_model() -> None:
    (problem,) = problems()
    assert "give IP (retriever.ip)" in problem
    assert problems(ip="node1") == problems(embedded_model="/m") == []


def test_a_key_is_missed_only_where_it_would_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for plan, values in [
        (PLAN, {"search_mode": "google"}),
        (UNASKED, {"search_mode": "google"}),
        (PLAN, {"search_engine": "google", "ip": "a"}),
    ]:
        (problem,) = problems(plan, **values)
        assert "the environment variable SER_API_KEY is not set): set it, or use another SEARCH_MODE" in problem
    assert problems(UNASKED, search_engine="google", ip="a") == []
    monkeypatch.setenv("SER_API_KEY", "k")
    assert problems(search_mode="google") == []
    (other,) = problems(search_mode="google", google={"api_key": "env:OTHER"})
    assert "the environment variable OTHER is not set" in other


def test_an_engine_is_not_asked_for_where_nothing_is_validated() -> None:
    assert problems(NO_ROWS, search_engine="google", ip="a") == problems(NO_ROWS, search_engine="wiki", ip="a") == []
    (own,) = problems(NO_ROWS, search_mode="google")
    assert "SER_API_KEY is not set" in own
    (off,) = announced(NO_ROWS, search_engine="google")
    assert off == "validation with Google search is off: there is nothing to validate on (data.val_files)"


@pytest.mark.parametrize("key", ["api_key", "google.api_key"])
def test_a_key_itself_is_refused_at_once_without_being_told(key: str) -> None:
    section = {"api_key": "s3cret"}
    with pytest.raises(ValueError, match=f"retriever.{key}: a key given here would be saved") as caught:
        config(**(section if key == "api_key" else {"google": section}))
    assert "env:NAME" in str(caught.value)
    assert "s3cret" not in str(caught.value)


def test_a_key_travels_encrypted_unless_to_this_machine() -> None:
    for url in ("https://proxy.example/serp", "http://localhost:8080", "http://127.0.0.1:99/x"):
        assert config(google={"base_url": url}).google.base_url == url
    for url in ("http://serpapi.com", "http://localhost.example", "http://localhost@evil.example", "ftp://x"):
        with pytest.raises(ValueError, match=r"retriever\.google\.base_url: the key travels with each request"):
            config(google={"base_url": url})


def test_what_is_wrong_with_a_simulation_server_is_seen_before_it_is_asked() -> None:
    found = problems(ip="http://a b:99999", prompt_template="/nowhere.txt", api_key="env:NO_SUCH_KEY")
    assert [problem.partition(":")[0] for problem in found] == [
        "retriever.prompt_template",
        "retriever.ip",
        "retriever.api_key",
    ]
    assert found[2] == "retriever.api_key: the environment variable NO_SUCH_KEY is not set"


def test_an_address_of_the_wiki_retriever() -> None:
    (missing,) = problems(search_mode="wiki")
    assert missing.startswith("the wiki retriever needs retriever.wiki.address")
    (wrong,) = problems(search_engine="wiki", ip="a", wiki={"address": "b:port"})
    assert "'port' is not a port" in wrong
    assert problems(UNASKED, search_engine="wiki", ip="a") == []
    assert problems(search_mode="wiki", wiki={"address": "b"}) == []


def announced(plan: RunPlan = PLAN, **values: Any) -> list[str]:
    return SearchAgentLoop.announce(config(**values), plan)


def test_paid_calls_are_estimated_before_they_are_made() -> None:
    training, validation, more = announced(search_mode="google", max_turns=4)
    assert "up to 256,000 searches (up to 768,000 paid calls) = 320 trajectories a step x 200 steps" in training
    assert "up to 5,000 searches (up to 15,000 paid calls) = 125 rows x 2 trajectories a row x 4 searches" in validation
    assert "x 5 validations (trainer.test_freq=50)" in validation
    assert "3 calls in all (retriever.google.max_pages); retries and trajectories run anew come on top" in more
    (only_validation, _) = announced(search_engine="google", max_turns=4)
    assert only_validation == validation
    (one_page, _) = announced(search_engine="google", max_turns=4, google={"max_pages": 1})
    assert "up to 5,000 searches (up to 5,000 paid calls)" in one_page


def test_paid_validation_beside_another_mode_is_counted_where_every_mode_runs() -> None:
    plan = replace(PLAN, full_validations=2)
    (beside, _) = announced(plan, search_engine="google", max_turns=4)
    assert "up to 2,000 searches" in beside
    assert "x 2 validations (those of every mode: trainer.val_every_mode=false)" in beside
    assert announced(plan, search_mode="wiki", search_engine="google", max_turns=4)[0] == beside
    first_mode = announced(plan, search_mode="google", max_turns=4)[1]
    assert "x 5 validations (trainer.test_freq=50)" in first_mode


def test_what_is_free_or_off_is_not_estimated() -> None:
    assert announced() == announced(search_engine="wiki") == announced(search_mode="wiki") == []
    (off,) = announced(UNASKED, search_engine="google")
    assert off == "validation with Google search is off: it runs only where trainer.test_freq is above 0"
    (own, _) = announced(
        replace(UNASKED, validations=0, full_validations=0), search_mode="google", search_engine="google"
    )
    assert own.startswith("Google search, training")


def test_configuration_of_engines_is_checked() -> None:
    with pytest.raises(ValueError, match=r"retriever\.google\.base_url") as caught:
        config(search_engine="bing", google={"base_url": "https://x/?api_key=1"}, wiki={"protocol": "x"})
    assert "retriever.search_engine" in str(caught.value)
    assert "retriever.wiki.protocol" in str(caught.value)
