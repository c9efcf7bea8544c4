from __future__ import annotations

from pathlib import Path

import pytest

from verl.trainer.compose import compose_config
from zerosearch.launch import main, parse, to_overrides


def overrides(*words: str) -> list[str]:
    return to_overrides(parse(words), "grpo")


def test_no_arguments_is_the_quickstart() -> None:
    assert overrides() == ["+preset=quickstart", "algorithm=grpo"]


def test_pairs_in_any_order_mean_the_same() -> None:
    words = ["MODEL_PATH", "/m", "TOPK", "3", "TOTAL_STEPS", "7", "START_THRESHOLD", "0.25"]
    pairs = [words[i : i + 2] for i in range(0, 8, 2)]
    expected = sorted(overrides(*words))
    assert sorted(overrides(*[w for pair in reversed(pairs) for w in pair])) == expected
    config = compose_config(overrides(*words)).config
    assert config.trainer.total_training_steps == 7
    assert config.retriever["topk"] == 3
    assert config.retriever["start_threshold"] == 0.25
    assert config.actor_rollout_ref.model.path == "/m"


def test_overrides_pass_through_between_pairs_and_win() -> None:
    config = compose_config(overrides("TOPK", "3", "retriever.topk=4", "MODEL_PATH", "/m")).config
    assert config.retriever["topk"] == 4


@pytest.mark.parametrize("value", ["a b/c,d", "it's=odd", "http://[::1]:80/v1", "{x}", "plain"])
def test_odd_values_reach_the_configuration_unchanged(value: str) -> None:
    assert compose_config(overrides("MODEL_PATH", value)).config.actor_rollout_ref.model.path == value


def test_data_path_is_a_directory_a_file_or_a_list(tmp_path: Path) -> None:
    (tmp_path / "train.parquet").touch()
    data = compose_config(overrides("DATA_PATH", str(tmp_path))).config.data
    assert (data.train_files, data.val_files) == ((f"{tmp_path}/train.parquet",), ())
    (tmp_path / "test.parquet").touch()
    data = compose_config(overrides("DATA_PATH", str(tmp_path))).config.data
    assert data.val_files == (f"{tmp_path}/test.parquet",)
    data = compose_config(overrides("DATA_PATH", "a.parquet,b.parquet")).config.data
    assert (data.train_files, data.val_files) == (("a.parquet", "b.parquet"), ())


def test_a_local_simulation_checkpoint_is_served_here_unless_an_address_is_given(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    own = compose_config(overrides("SIMULATION_LLM", str(tmp_path), "MODEL_PATH", "/m")).config.retriever
    assert own["embedded_model"] == str(tmp_path)
    remote = ("SIMULATION_LLM", str(tmp_path), "IP", "10.0.0.1:7000", "MODEL_PATH", "/m")
    served = compose_config(overrides(*remote)).config.retriever
    assert (served["simulation_llm"], served["ip"]) == (str(tmp_path), "10.0.0.1:7000")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("TOTAL_STEP", "3"), "did you mean TOTAL_STEPS"),
        (("topk", "3"), "did you mean TOPK"),
        (("TOPK",), "TOPK has no value"),
        (("TOPK", "MAX_TURNS", "3"), "TOPK has no value"),
        (("TOPK", "data.shuffle=false"), "TOPK has no value"),
        (("TOPK", "3", "TOPK", "4"), "given twice"),
        (("TOPK", "0"), "TOPK: 0 is out of range"),
        (("TOPK", "many"), "TOPK: 'many' is not an integer"),
        (("END_THRESHOLD", "1.5"), "END_THRESHOLD: 1.5 is out of range"),
        (("SEARCH_MODE", "simulate_stf"), "did you mean simulate_sft"),
        (("--dryrun",), "unknown option --dryrun"),
    ],
)
def test_wrong_command_lines_name_the_fix(
    words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main("grpo", words) == 2
    assert message in capsys.readouterr().err


def test_dry_run_needs_neither_path_nor_server(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["MODEL_PATH", "/nowhere", "DATA_PATH", "/nowhere/data", "IP", "192.0.2.1", "--dry-run"]
    assert main("grpo", words) == 0
    out = capsys.readouterr().out
    assert "path: /nowhere" in out
    assert "nothing was started" in out


def test_help_lists_every_argument(capsys: pytest.CaptureFixture[str]) -> None:
    assert main("grpo", ["--help"]) == 0
    assert "END_THRESHOLD" in capsys.readouterr().out
