from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.verl.trainer.conftest import rows_of, write_config, write_rows
from verl.trainer.compose import compose_config
from verl.trainer.ppo.core_algos import register_adv_est
from verl.trainer.preflight import preflight, refuse, run_plan
from verl.trainer.resources import GIB, Machine
from verl.trainer.setup import Inputs

MACHINE = Machine(gpus=0, gpu_bytes=0, cores=2, memory_bytes=8 * GIB)


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def start(overrides: list[str], *more: str) -> Inputs:
    return preflight(compose_config([*overrides, *more]).config, MACHINE)


def refusal(overrides: list[str], *more: str) -> str:
    with pytest.raises(ValueError, match="this run cannot start") as error:
        start(overrides, *more)
    return str(error.value)


def test_a_run_that_can_start_shows_its_first_prompt_with_ids_and_what_the_environment_announces(
    startable: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    inputs = start(startable, "trainer.test_freq=50")
    out = capsys.readouterr().out
    assert "the first prompt (6 tokens):\nuser a <end> \nits ids: [23, 21, 7, 20, 3, 1]" in out
    assert "note: 5 validations of 1 rows" in out
    assert len(inputs.train_set) == 4
    assert inputs.eos_token_ids == {1}


def test_all_problems_stand_in_one_list_each_with_its_fix(startable: list[str], checkpoint: Path) -> None:
    write_config(checkpoint, architectures=["GPT2LMHeadModel"], vocab_size=10, max_position_embeddings=1024)
    message = refusal(
        startable,
        "trainer.n_gpus_per_node=4",
        "trainer.total_training_steps=7",
        "data.train_batch_size=9",
        "actor_rollout_ref.actor.ppo_mini_batch_size=16",
        "actor_rollout_ref.rollout.n=1",
        "actor_rollout_ref.rollout.max_turn_length=5000",
        "custom_reward_function.path=/nowhere.py",
    )
    for words in (
        "cannot train the architecture ['GPT2LMHeadModel']; supported: LlamaForCausalLM",
        "rollout.max_turn_length (5000) exceeds data.max_response_length (4096)",
        "data.max_prompt_length + data.max_response_length is 6144, the model's context",
        "actor_rollout_ref.rollout.n is 1: grpo compares",
        "ppo_mini_batch_size is 16 prompts, data.train_batch_size only 9: lower it",
        "custom_reward_function.path: '/nowhere.py' is not a file",
        "asks for 4 GPUs, 0 are present: lower it (0 = CPU)",
        "has ids up to 28, the model's vocabulary has 10 entries",
        "data.train_batch_size is 9, but there are only 4 usable rows: lower it",
        "the plan has seven steps: take another number",
    ):
        assert words in message
    assert message.count("\n  - ") == 10


def test_missing_paths_are_named_with_what_lies_there_instead(startable: list[str], tmp_path: Path) -> None:
    message = refusal(
        startable, "actor_rollout_ref.model.path=Qwen2.5-3B-Instruct", f"data.train_files=[{tmp_path}/tain.parquet]"
    )
    assert "'Qwen2.5-3B-Instruct' is no directory here: download the checkpoint" in message
    assert f"data file '{tmp_path}/tain.parquet' does not exist; '{tmp_path}' holds train.parquet, v.parquet" in message
    nothing = refusal(startable, "actor_rollout_ref.model.path=''", "data.train_files=[]")
    assert "give MODEL_PATH" in nothing
    assert "give DATA_PATH" in nothing


def test_a_file_without_prompt_or_question_is_refused_once_with_its_columns(
    startable: list[str], tmp_path: Path
) -> None:
    file = write_rows(tmp_path / "odd.parquet", [{"query": "a", "answer": "b"}] * 3)
    message = refusal(startable, f"data.train_files=[{file}]")
    assert message.count("has neither the column 'prompt' (chat messages) nor 'question'") == 1
    assert "its columns are query, answer: name yours with data.question_key" in message


def test_training_rows_among_the_validation_rows_are_a_warning(
    startable: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_rows(tmp_path / "leak.parquet", rows_of("xbz"))
    start(startable, f"data.val_files=[{file}]")
    out = capsys.readouterr().out
    assert "note: 1 validation rows are also training rows" in out
    assert f"{file} row 1 is also {tmp_path}/train.parquet row 1" in out


def test_problems_of_both_data_sets_are_told_at_once(startable: list[str], tmp_path: Path) -> None:
    bad = [{"question": "", "golden_answers": ["x"]}]
    train, val = write_rows(tmp_path / "t.parquet", bad), write_rows(tmp_path / "w.parquet", bad)
    message = refusal(startable, f"data.train_files=[{train}]", f"data.val_files=[{val}]")
    assert f"{train} row 0: needs 'prompt'" in message
    assert f"{val} row 0: needs 'prompt'" in message


def test_the_environments_plan_counts_trajectories_and_validations() -> None:
    overrides = ["trainer.total_training_steps=20", "data.train_batch_size=8", "actor_rollout_ref.rollout.n=4"]

    def plan(*more: str) -> tuple[int, int, int]:
        found = run_plan(compose_config([*overrides, *more]).config, 100)
        return found.total_steps, found.trajectories_per_step, found.validations

    assert plan() == (20, 32, 2)
    assert plan("trainer.test_freq=5") == (20, 32, 5)
    assert plan("trainer.test_freq=6", "trainer.val_before_train=false") == (20, 32, 4)
    assert plan("trainer.val_only=true") == (0, 32, 1)
    assert run_plan(compose_config(overrides).config, 0).validations == 0


@pytest.mark.parametrize(
    ("overrides", "validations", "full"),
    [
        ((), 5, 5),
        (("trainer.val_every_mode=false",), 5, 2),
        (("trainer.val_every_mode=false", "trainer.val_before_train=false"), 4, 1),
        (("trainer.val_every_mode=false", "trainer.val_only=true"), 1, 1),
    ],
)
def test_the_environments_plan_tells_validations_of_every_mode_from_those_of_the_first(
    overrides: tuple[str, ...], validations: int, full: int
) -> None:
    steps = ("trainer.total_training_steps=20", "trainer.test_freq=5")
    plan = run_plan(compose_config([*steps, *overrides]).config, 100)
    assert (plan.validations, plan.full_validations) == (validations, full)
    nothing = run_plan(compose_config([*steps, *overrides]).config, 0)
    assert (nothing.validations, nothing.full_validations) == (0, 0)


def test_nothing_is_refused_without_a_problem() -> None:
    refuse([])
    with pytest.raises(ValueError, match="this run cannot start:\n  - a\n    b\n  - c"):
        refuse(["a\nb", "c"])


def test_servers_that_run_already_are_asked_with_the_other_checks(
    startable: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    message = refusal(startable, "trainer.total_training_steps=8", "data.train_batch_size=9")
    assert "no server answers: start one" in message
    assert "data.train_batch_size is 9" in message  # one list
    assert "validations of 1 rows" in capsys.readouterr().out  # asking may cost something: announced before


def test_servers_that_the_run_starts_itself_are_not_asked_yet(startable: list[str]) -> None:
    assert len(start(startable, "trainer.total_training_steps=9").train_set) == 4


def other_model(checkpoint: Path, **changes: object) -> str:
    directory = checkpoint.parent / "critic"
    directory.mkdir()
    write_config(directory, **changes)
    return f"critic.model.path={directory}"


def test_a_critic_must_read_the_policys_ids_and_contexts(startable: list[str], checkpoint: Path) -> None:
    critic = other_model(checkpoint, vocab_size=29, max_position_embeddings=1024)
    message = refusal(startable, "algorithm=ppo", critic)
    assert "critic.model.path: its vocabulary has 29 entries, the policy's 30" in message
    assert "the critic's context (max_position_embeddings) is 1024" in message
    assert message.count("\n  - ") == 2
    start(startable, critic)


def test_a_warmup_of_the_critic_leaves_steps_to_the_actor_and_needs_a_critic(startable: list[str]) -> None:
    sizes = ("trainer.total_training_steps=4", "trainer.critic_warmup=4")
    assert "leaves none of the trainer.total_training_steps (4)" in refusal(startable, "algorithm=ppo", *sizes)
    assert "but grpo has no critic" in refusal(startable, *sizes)
    start(startable, "algorithm=ppo", sizes[0], "trainer.critic_warmup=3")


def test_names_of_estimators_and_losses_are_checked_before_models_are_loaded(startable: list[str]) -> None:
    unknown = ("algorithm.adv_estimator=gone", "actor_rollout_ref.actor.policy_loss=lost")
    message = refusal(startable, *unknown)
    assert "algorithm.adv_estimator: unknown advantage estimator 'gone'; known: " in message
    assert "actor_rollout_ref.actor.policy_loss: unknown policy loss 'lost'; known: " in message


def test_an_estimator_that_takes_values_needs_a_critic(startable: list[str]) -> None:
    @register_adv_est("takes_values")
    def takes_values(token_level_rewards: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return token_level_rewards, values

    assert "takes_values takes a critic's values" in refusal(startable, "algorithm.adv_estimator=takes_values")


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("def compute_score(x): return 1.0", "missing a required argument: 'x'"),
        ("compute_score = 5", "5 is not a callable object"),
    ],
)
def test_a_reward_that_cannot_be_called_is_refused(
    startable: list[str], tmp_path: Path, source: str, said: str
) -> None:
    file = tmp_path / "reward.py"
    file.write_text(source)
    assert said in refusal(startable, f"custom_reward_function.path={file}")


def test_rewards_that_take_what_they_are_given_are_accepted(startable: list[str], tmp_path: Path) -> None:
    file = tmp_path / "reward.py"
    file.write_text(
        "async def compute_score(data_source, solution_str, ground_truth, extra_info=None, **more): return 1"
    )
    assert len(start(startable, f"custom_reward_function.path={file}").train_set) == 4
