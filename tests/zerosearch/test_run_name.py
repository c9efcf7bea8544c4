from __future__ import annotations

import re

import pytest

from verl.trainer.compose import compose_config
from zerosearch.launch import named_overrides, parse


def name(*words: str, algorithm: str = "grpo") -> str:
    return compose_config(named_overrides(parse(words), algorithm)).config.trainer.experiment_name


OWN = ("MODEL_PATH", "/models/Qwen2.5-3B-Instruct/", "DATA_PATH", "data/ZeroSearch_dataset")


def test_the_name_tells_algorithm_model_data_search_noise_turns_documents_and_steps() -> None:
    words = ("SEARCH_MODE", "simulate_prompt", "SIMULATION_LLM", "Qwen/Qwen2.5-14B", "END_THRESHOLD", "0.25")
    told = "Qwen2.5-3B_ZeroSearch_dataset_simulate_prompt_Qwen2.5-14B_noise0-0.25_turns5_topk5_steps9"
    own = ("MODEL_PATH", "/models/Qwen2.5-3B/", "DATA_PATH", "data/ZeroSearch_dataset")
    assert name(*own, *words, "TOTAL_STEPS", "9", algorithm="ppo") == f"ppo_{told}"


CHANGES = [
    ("TOPK", "4"),
    ("MAX_TURNS", "2"),
    ("START_THRESHOLD", "0.1"),
    ("END_THRESHOLD", "0.75"),
    ("TOTAL_STEPS", "7"),
    ("SEARCH_MODE", "simulate_prompt"),
    ("SIMULATION_LLM", "other"),
    ("trainer.seed=3",),
    ("critic.optim.lr=3e-5",),
    ("actor_rollout_ref.actor.optim.lr=3e-5",),
    ("actor_rollout_ref.rollout.n_agent=8",),
    ("+preset=original",),
    ("data.val_files=[]",),
    ("data.val_files=[data/nq/test.parquet]",),
    ("data.val_files=[data/ZeroSearch_dataset/train.parquet]",),
    ("critic.model.path=runs/A/checkpoints/best",),
    ("critic.model.path=runs/B/checkpoints/best",),
]


def test_runs_that_differ_have_names_that_differ() -> None:
    names = [name(*OWN, *change) for change in [(), *CHANGES]] + [name(*OWN, algorithm="reinforce")]
    assert len(set(names)) == len(names)


def test_places_and_keys_do_not_stand_in_the_name() -> None:
    elsewhere = (
        "IP",
        "10.0.0.9",
        "trainer.default_local_dir=/x",
        "retriever.api_key=env:KEY",
        "trainer.logger=[console]",
    )
    assert name(*OWN, *elsewhere) == name(*OWN)


def test_a_quickstart_is_called_so_and_tells_what_was_changed_of_it() -> None:
    assert name(algorithm="ppo") == "quickstart-ppo"
    assert name("TOTAL_STEPS", "5", "data.shuffle=false") == "quickstart-grpo_total-training-steps5_shuffle-false"


@pytest.mark.parametrize("odd", ["/m/ä b:c*?", "/m/" + "x" * 300, "/m/..", "/m/'quoted'"])
def test_names_are_safe_and_short_enough_for_every_file_system(odd: str) -> None:
    found = name("MODEL_PATH", odd, "DATA_PATH", "/d")
    assert re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.+-]*", found)
    assert len(found) <= 100


def test_checkpoints_of_two_runs_have_the_names_of_their_runs() -> None:
    best = [name("MODEL_PATH", f"runs/{run}/checkpoints/best", "DATA_PATH", "/d") for run in "AB"]
    assert [found.split("_")[1] for found in best] == ["A-best", "B-best"]
    run = "grpo_Qwen2.5-3B-Instruct_ZeroSearch_dataset_simulate_sft_noise0-0.5-20261201-03"
    later = [name("MODEL_PATH", f"runs/{run}{s}/checkpoints/last", "DATA_PATH", "/d") for s in ("0101", "0202")]
    assert later[0] != later[1]
    assert all("-last_d_simulate_sft_" in found for found in later)


def test_validation_data_elsewhere_stands_in_the_name() -> None:
    assert "valdata" not in name(*OWN)
    assert "_ZeroSearch_dataset_valdata-nq_" in name(*OWN, "data.val_files=[data/nq/test.parquet]")
    assert "_ZeroSearch_dataset_valdata-none_" in name(*OWN, "data.val_files=[]")


def test_a_runs_directory_stays_short_and_long_names_that_differ_at_their_end_differ() -> None:
    long = (*OWN, "SIMULATION_LLM", "Simulation_LLM_google_14B", "SEARCH_ENGINE", "google", "trainer.test_freq=5")
    names = [name(*long, "TOTAL_STEPS", steps) for steps in ("203", "204")]
    assert names[0] != names[1]
    assert all(len(f"{found}-20261201-030101") < 120 for found in names)
    assert names[0].startswith("grpo_Qwen2.5-3B-Instruct_ZeroSearch_dataset_simulate_sft_Simulation_LLM_google_14B")


def test_the_users_own_name_stays() -> None:
    assert name(*OWN, "trainer.experiment_name=mine") == "mine"
