from __future__ import annotations

from dataclasses import asdict

import pytest

from verl.trainer.compose import compose_config
from verl.trainer.config import PPOTrainerConfig
from verl.trainer.setup import environment_config
from verl.utils.config import build_config


def test_yaml_and_dataclasses_hold_the_same_defaults() -> None:
    composed = compose_config([]).config
    plain = asdict(composed)
    plain["retriever"] = {}
    assert plain == asdict(build_config(PPOTrainerConfig, {}))


def test_retriever_yaml_and_the_environments_config_hold_the_same_defaults() -> None:
    composed = compose_config([]).config
    assert environment_config(composed) == type(environment_config(composed))()


def test_quickstart_preset_composes_and_overrides_still_win() -> None:
    config = compose_config(["+preset=quickstart", "trainer.total_training_steps=3"]).config
    assert config.actor_rollout_ref.model.path.startswith("pkg://")
    assert config.trainer.total_training_steps == 3
    environment_config(config)


def test_one_data_file_needs_no_brackets() -> None:
    assert compose_config(["data.train_files=a.parquet"]).config.data.train_files == ("a.parquet",)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("data.train_batchsize=3", "data.train_batch_size"),
        ("trainer.total_training_steps=0", "greater than 0"),
        ("actor_rollout_ref.actor.kl_loss_type=k1", "k1"),
        ("actor_rollout_ref.actor.loss_agg_mode=mean", "loss_agg_mode"),
        ("trainer.seed=[", "composed"),
    ],
)
def test_wrong_overrides_are_named(override: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        compose_config([override])


def test_unknown_retriever_key_is_named() -> None:
    with pytest.raises(ValueError, match=r"retriever\.topic: unknown key"):
        environment_config(compose_config(["+retriever.topic=3"]).config)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("+preset=orignal", "preset is one of original, quickstart, did you mean original?"),
        ("preset=original", "write +preset=original"),
        ("trainer=foo", "trainer is one of default"),
        (
            "trainer.default_local_dir=/tmp/my runs é",
            "quote the value twice: \"trainer.default_local_dir='/tmp/my runs é'\"",
        ),
    ],
)
def test_what_hydra_refuses_is_told_with_its_fix(override: str, said: str) -> None:
    with pytest.raises(ValueError, match="cannot be composed") as error:
        compose_config([override])
    assert said in str(error.value)


def test_an_experiment_name_stays_below_its_directory() -> None:
    with pytest.raises(ValueError, match=r"trainer\.experiment_name"):
        compose_config(["trainer.experiment_name=../x"])
