from __future__ import annotations

import re
from pathlib import Path

import pytest

from verl.trainer.compose import compose_config
from verl.trainer.main_ppo import main as train
from zerosearch.launch import ARGUMENTS, main, named_overrides, parse, to_overrides


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


def test_overrides_pass_through_between_pairs_and_the_last_of_a_key_wins() -> None:
    config = compose_config(overrides("TOPK", "3", "trainer.seed=4", "MODEL_PATH", "/m", "trainer.seed=5")).config
    assert config.retriever["topk"] == 3
    assert config.trainer.seed == 5


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (("TOTAL_STEPS", "3", "trainer.total_training_steps=5"), "TOTAL_STEPS and trainer.total_training_steps"),
        (("trainer.total_training_steps=3", "TOTAL_STEPS", "3"), "TOTAL_STEPS and trainer.total_training_steps"),
        (("TOTAL_STEPS", "3", "trainer.total_steps=5"), "TOTAL_STEPS and trainer.total_training_steps"),
        (("TOPK", "3", "++retriever.topk=5"), "TOPK and retriever.topk"),
        (("IP", "a", "retriever.llm_ip=b"), "IP and retriever.ip"),
        (("SIMULATION_LLM", "m", "retriever.simulation_llm=n"), "SIMULATION_LLM and retriever.simulation_llm"),
        (("DATA_PATH", "/d", "data.train_files=[x.parquet]"), "DATA_PATH and data.train_files"),
    ],
)
def test_an_argument_and_an_override_of_its_key_are_refused(words: tuple[str, ...], names: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"{names} are the same setting: give one of them")):
        overrides(*words)


def test_validation_files_beside_the_data_path_may_be_replaced() -> None:
    config = compose_config(overrides("DATA_PATH", "/d", "data.val_files=[x.parquet]")).config
    assert (config.data.train_files, config.data.val_files) == (("/d/train.parquet",), ("x.parquet",))


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


DOCUMENTED = (
    "NUM_GPUS_PER_NODE 4 MODEL_PATH Qwen2.5-3B-Instruct DATA_PATH ZeroSearch_dataset TOTAL_STEPS 203 IP localhost "
    "SEARCH_MODE {mode} SIMULATION_LLM {llm} START_THRESHOLD 0 END_THRESHOLD 0.5 SEARCH_ENGINE google "
    "MAX_TURNS 5 TOPK 5"
)
LINES = [
    DOCUMENTED.format(mode="simulate_prompt", llm="Qwen2.5-14B-Instruct").split(),
    DOCUMENTED.format(mode="simulate_sft", llm="Simulation_LLM_google_14B").split(),
]


@pytest.mark.parametrize("algorithm", ["grpo", "ppo", "reinforce"])
@pytest.mark.parametrize("line", LINES, ids=["simulate_prompt", "simulate_sft"])
def test_documented_command_lines_are_taken_as_they_stand(
    algorithm: str, line: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SER_API_KEY", raising=False)
    assert main(algorithm, [*line, "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "nothing was started" in out
    config = compose_config(named_overrides(parse(line), algorithm)).config
    assert config.algorithm.adv_estimator == {"grpo": "grpo", "ppo": "gae", "reinforce": "reinforce"}[algorithm]
    assert (config.trainer.n_gpus_per_node, config.trainer.nnodes, config.trainer.total_training_steps) == (4, 1, 203)
    assert config.data.train_files == ("ZeroSearch_dataset/train.parquet",)
    assert config.data.val_files == ("ZeroSearch_dataset/test.parquet",)
    asked = {key: config.retriever[key] for key in ("ip", "search_mode", "simulation_llm", "search_engine")}
    assert asked == {"ip": "localhost", "search_mode": line[11], "simulation_llm": line[13], "search_engine": "google"}
    numbers = [config.retriever[key] for key in ("start_threshold", "end_threshold", "max_turns", "topk")]
    assert numbers == [0, 0.5, 5, 5]


@pytest.mark.parametrize("algorithm", ["grpo", "ppo", "reinforce"])
def test_what_a_command_line_leaves_open_is_the_documented_value(algorithm: str) -> None:
    config = compose_config(to_overrides(parse(["MODEL_PATH", "/m", "DATA_PATH", "/d"]), algorithm)).config
    rollout, actor = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor
    tokens = (config.data.max_prompt_length, rollout.max_turn_length, rollout.max_observation_length)
    assert (*tokens, config.data.max_response_length) == (2048, 500, 2048, 4096)
    assert (config.data.train_batch_size, rollout.n, rollout.temperature) == (64, 5, 1.0)
    assert (actor.optim.lr, config.critic.optim.lr) == (1e-6, 1e-5)
    assert (config.algorithm.gamma, config.algorithm.lam) == (1.0, 1.0)
    assert (actor.use_kl_loss, actor.kl_loss_type, actor.kl_loss_coef) == (True, "low_var_kl", 0.001)
    assert config.retriever["reward_metric"] == "f1"


def test_defaults_in_the_help_are_those_of_the_configuration() -> None:
    given = [word for key, a in ARGUMENTS.items() if a.default for word in (key, a.default)]
    own = ["MODEL_PATH", "/m", "DATA_PATH", "/d"]
    assert compose_config(overrides(*own, *given)).plain == compose_config(overrides(*own)).plain


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("model_path", "/m"), "did you mean MODEL_PATH?"),
        (("--model-path", "/m"), "did you mean MODEL_PATH?"),
        (("MODEL_PATH=/m",), "write MODEL_PATH /m, without an equals sign"),
        (("THRESHOLD", "0.5"), "did you mean END_THRESHOLD?"),
        (("GPUS", "4"), "did you mean NUM_GPUS_PER_NODE?"),
        (("trainer.seed", "3"), "an override is written trainer.seed=VALUE"),
        (("MODEL_PATH", ""), "MODEL_PATH: it is empty"),
        (("DATA_PATH", "a.parquet,,b.parquet"), "DATA_PATH: it is empty"),
        (("IP", "host:99999"), "IP: "),
        (("IP", "ftp://host"), "IP: server address 'ftp://host': the scheme must be http or https"),
        (("NUM_GPUS_PER_NODE", "-1"), "NUM_GPUS_PER_NODE: -1 is out of range"),
        (("NUM_GPUS_PER_NODE", "1.5"), "is not an integer"),
        (("START_THRESHOLD", "nan"), "START_THRESHOLD: nan is out of range"),
        (("SEARCH_ENGINE", "gogle"), "did you mean google?"),
        (("SEARCH_MODE", "simulate"), "is none of simulate_prompt, simulate_sft, google, wiki"),
        (("TOTAL_STEPS", "--dry-run"), "TOTAL_STEPS has no value"),
    ],
)
def test_wrong_arguments_are_errors_that_name_the_nearest_valid_key(
    words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main("ppo", words) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert "Traceback" not in captured.err


def test_falling_noise_is_taken_and_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main("grpo", ["MODEL_PATH", "/m", "START_THRESHOLD", "0.5", "END_THRESHOLD", "0.1", "--dry-run"]) == 0
    assert "note: START_THRESHOLD 0.5 is above END_THRESHOLD 0.1" in capsys.readouterr().out


def test_a_policy_of_ones_own_is_searched_with_a_server_on_this_machine_unless_another_is_named() -> None:
    def ip(*words: str) -> str:
        return compose_config(overrides("MODEL_PATH", "/m", *words)).config.retriever["ip"]

    assert ip() == ip("+preset=original") == "localhost"
    assert ip("retriever.ip=10.0.0.1") == "10.0.0.1"
    assert ip("retriever.embedded_model=/s") == ip("SEARCH_MODE", "google") == ip("+preset=quickstart") == ""


def test_the_wiki_retriever_is_at_ip_or_beside_the_simulation_server() -> None:
    def address(*words: str) -> str:
        return compose_config(overrides("MODEL_PATH", "/m", *words)).config.retriever["wiki"]["address"]

    assert address("SEARCH_MODE", "wiki", "IP", "10.0.0.1:7000") == "10.0.0.1:7000"
    assert address("SEARCH_ENGINE", "wiki", "IP", "10.0.0.1:7000,http://b/v1") == "10.0.0.1,b"
    assert address("SEARCH_ENGINE", "wiki") == "localhost"
    assert address("SEARCH_ENGINE", "wiki", "retriever.wiki.address=c") == "c"
    assert address("SEARCH_ENGINE", "google") == ""


@pytest.mark.parametrize(
    ("words", "address"),
    [
        (("retriever.search_mode=wiki", "IP", "10.0.0.1:7000"), "10.0.0.1:7000"),
        (("retriever.search_engine=wiki", "IP", "10.0.0.1:7000"), "10.0.0.1"),
        (("retriever.search_mode=wiki", "retriever.ip='10.0.0.1:7000'"), "10.0.0.1:7000"),
        (("SEARCH_ENGINE", "wiki", "retriever.llm_ip=10.0.0.1"), "10.0.0.1"),
        (("retriever.search_engine=wiki", "retriever.search_engine=none", "IP", "10.0.0.1"), ""),
        (("retriever.search_mode=wiki",), "localhost"),
    ],
)
def test_the_wiki_retriever_is_found_whether_it_is_named_by_argument_or_override(
    words: tuple[str, ...], address: str
) -> None:
    own = ("MODEL_PATH", "/m", "DATA_PATH", "/d")
    assert compose_config(overrides(*own, *words)).config.retriever["wiki"]["address"] == address


def test_own_model_and_data_by_overrides_are_no_quickstart() -> None:
    assert "+preset=quickstart" not in overrides("actor_rollout_ref.model.path=/m", "data.train_files=[a.parquet]")
    assert overrides("+preset=quickstart").count("+preset=quickstart") == 1


@pytest.mark.parametrize("algorithm", ["grpo", "ppo", "reinforce"])
def test_every_script_hands_its_algorithm_to_the_launcher(algorithm: str) -> None:
    lines = (Path(__file__).parents[2] / f"train_{algorithm}.sh").read_text().splitlines()
    assert lines[-1] == f'launch {algorithm} "$@"'


@pytest.mark.parametrize("flag", [(), ("--dry-run",)])
@pytest.mark.parametrize("key", ["retriever.api_key", "retriever.google.api_key"])
@pytest.mark.parametrize("value", ["sk-s3cret", "53637265"])
def test_a_literal_key_is_neither_shown_nor_saved(
    flag: tuple[str, ...], key: str, value: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main("grpo", [f"{key}={value}", f"trainer.default_local_dir={tmp_path}", *flag]) == 2
    captured = capsys.readouterr()
    assert f"{key}: a key given here would be saved and shown" in captured.err
    assert value not in captured.out + captured.err
    assert not list(tmp_path.iterdir())


def test_help_of_the_trainer_does_not_show_a_literal_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert train(["+preset=quickstart", "retriever.api_key=sk-s3cret", "--help"]) == 2
    captured = capsys.readouterr()
    assert "sk-s3cret" not in captured.out + captured.err
    assert train(["+preset=quickstart", "--help"]) == 0
    assert "usage: python -m verl.trainer.main_ppo" in capsys.readouterr().out
