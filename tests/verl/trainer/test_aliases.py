from __future__ import annotations

import pytest

from tests.verl.trainer.original_keys import ORIGINAL_OVERRIDES
from verl.trainer.aliases import rewrite_overrides
from verl.trainer.compose import compose_config
from verl.trainer.foreign_keys import ALIASED_SECTIONS, ALIASES, REFUSED, STATED, VALUES


def known_keys() -> set[str]:
    def walk(values: dict[str, object], prefix: str = "") -> set[str]:
        found: set[str] = set()
        for name, value in values.items():
            found.add(f"{prefix}{name}")
            found |= walk(value, f"{prefix}{name}.") if isinstance(value, dict) else set()
        return found

    return walk(compose_config([]).plain)


def rewritten_or_reason(override: str) -> list[str] | str:
    try:
        return rewrite_overrides([override])
    except ValueError as error:
        return str(error)


def test_aliases_become_our_keys_and_the_rest_stays() -> None:
    given = ["actor_rollout_ref.rollout.n_agent=5", "data.max_start_length=9", "+preset=quickstart", "trainer.seed=1"]
    expected = ["actor_rollout_ref.rollout.n=5", "data.max_prompt_length=9", "+preset=quickstart", "trainer.seed=1"]
    assert rewrite_overrides(given) == expected


@pytest.mark.parametrize("override", ORIGINAL_OVERRIDES)
def test_every_key_of_the_original_means_something_here_or_is_refused_with_the_reason(override: str) -> None:
    answer = rewritten_or_reason(override)
    if isinstance(answer, str):
        assert override.partition("=")[0] in answer
        assert len(answer.partition(" is not accepted")[2]) > 8
    else:
        assert {key.partition("=")[0] for key in answer} <= known_keys()


def test_the_tables_lead_to_keys_that_exist_and_hide_none() -> None:
    known = known_keys()
    assert set(ALIASES.values()) | set(ALIASED_SECTIONS.values()) | set(VALUES) <= known
    assert not (set(ALIASES) | set(STATED) | set(REFUSED) | set(ALIASED_SECTIONS)) & known
    assert not set(REFUSED) & set(ALIASES)


@pytest.mark.parametrize(
    ("override", "ours"),
    [
        ("critic.model.fsdp_config.param_dtype=bf16", ["critic.fsdp_config.param_dtype=bfloat16"]),
        ("actor_rollout_ref.actor.strategy=fsdp", ["actor_rollout_ref.actor.strategy=fsdp2"]),
        ("trainer.test_freq=-1", ["trainer.test_freq=0"]),
        ("data.train_data_num=null", ["data.train_max_samples=-1"]),
        ("trainer.max_turns=4", ["retriever.max_turns=4"]),
        ("retriever.simulate_llm=m", ["retriever.simulation_llm=m"]),
        ("algorithm.kl_penalty=kl", []),
        ("actor_rollout_ref.rollout.top_p=1.0", []),
        ("actor_rollout_ref.actor.use_kl_loss=False", ["actor_rollout_ref.actor.use_kl_loss=False"]),
    ],
)
def test_keys_and_values_of_other_systems_become_ours(override: str, ours: list[str]) -> None:
    assert rewrite_overrides([override]) == ours


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("algorithm.kl_penalty=mse", "only kl or k1: KL in the reward is k1"),
        ("actor_rollout_ref.rollout.top_p=0.95", "for validation set rollout.val_kwargs.top_p"),
        ("actor_rollout_ref.rollout.top_k=50", "would not follow the policy's gradient"),
        ("actor_rollout_ref.actor.state_masking=false", "observation tokens are never trained"),
        ("actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.95", "give steps: optim.lr_warmup_steps"),
        ("trainer.do_search=false", "retriever.max_turns=0"),
    ],
)
def test_another_value_of_what_is_always_so_is_refused(override: str, reason: str) -> None:
    with pytest.raises(ValueError, match="is not accepted") as error:
        rewrite_overrides([override])
    assert reason in str(error.value)


@pytest.mark.parametrize(
    "key", ["data.tokenizer", "algorithm.state_masking.start_state_marker", "actor_rollout_ref.rollout.do_sample"]
)
def test_keys_that_would_do_nothing_or_harm_are_refused_with_the_reason(key: str) -> None:
    with pytest.raises(ValueError, match=rf"{key} is not accepted: .+"):
        rewrite_overrides([f"{key}=1"])


def test_one_key_under_two_names_is_an_error() -> None:
    with pytest.raises(ValueError, match="same key"):
        rewrite_overrides(["data.max_prompt_length=4", "data.max_start_length=9"])


def test_the_originals_n_of_one_beside_n_agent_is_no_group_size() -> None:
    rollout = "actor_rollout_ref.rollout"
    assert rewrite_overrides([f"{rollout}.n=1", f"{rollout}.n_agent=5"]) == [f"{rollout}.n=5"]
    with pytest.raises(ValueError, match="same key"):
        rewrite_overrides([f"{rollout}.n=4", f"{rollout}.n_agent=5"])


@pytest.mark.parametrize(
    "override",
    [
        "retriever.api_key=s3cret",
        "retriever.api_key='s3cret'",
        "++retriever.google.api_key=s3cret(not in the grammar",
        "++retriever.google={base_url: https://x, api_key: s3cret}",
        "++retriever={google: {'api_key': 's3cret'}}",
        "retriever.google.base_url='https://x/?api_key=s3cret'",
        "retriever.api_key=${oc.env:s3cret}",
    ],
)
def test_a_literal_key_is_refused_and_not_repeated_though_a_later_override_replaces_it(override: str) -> None:
    replaced = [override, "retriever.api_key=env:NAME", "++retriever.google={api_key: env:NAME}"]
    with pytest.raises(ValueError, match=r"^retriever[a-z_.]*: a key given here would be saved and shown") as caught:
        compose_config(replaced)
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize("value", ["env:NAME", "'env:NAME'", '""', "''", ""])
def test_a_key_by_its_environment_variable_passes(value: str) -> None:
    assert rewrite_overrides([f"retriever.api_key={value}"]) == [f"retriever.api_key={value}"]
