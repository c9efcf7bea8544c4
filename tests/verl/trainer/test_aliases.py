from __future__ import annotations

import pytest

from verl.trainer.aliases import rewrite_overrides


def test_aliases_become_our_keys_and_the_rest_stays() -> None:
    given = ["actor_rollout_ref.rollout.n_agent=5", "data.max_start_length=9", "+preset=quickstart", "trainer.seed=1"]
    expected = ["actor_rollout_ref.rollout.n=5", "data.max_prompt_length=9", "+preset=quickstart", "trainer.seed=1"]
    assert rewrite_overrides(given) == expected


@pytest.mark.parametrize(
    "key", ["data.tokenizer", "algorithm.state_masking.start_state_marker", "actor_rollout_ref.rollout.do_sample"]
)
def test_keys_that_would_do_nothing_or_harm_are_refused_with_the_reason(key: str) -> None:
    with pytest.raises(ValueError, match=rf"{key} is not accepted: .+"):
        rewrite_overrides([f"{key}=1"])


def test_one_key_under_two_names_is_an_error() -> None:
    with pytest.raises(ValueError, match="same key"):
        rewrite_overrides(["data.max_prompt_length=4", "data.max_start_length=9"])
