"""The quickstart, shortened: it learns, repeats itself, reports completely and leaves nothing behind."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from tests.glossary import undocumented
from tests.runs.script import SHORT, Finished, Start

Twins = tuple[Finished, Finished]
TIMED = ("timing_s/", "perf/")


def test_run_completes_and_learns_to_search(twin_runs: Twins) -> None:
    run = twin_runs[0]
    assert run.code == 0, run.output
    summary = run.summary
    assert summary["exit_reason"] == "completed"
    assert summary["steps"] == 5
    assert summary["held_out_n"] == 120
    assert summary["held_out_f1_after"] - summary["held_out_f1_before"] > 0.15
    assert summary["held_out_gain_low95"] > 0.05
    assert summary["query_sensitivity"] > 0.9


def test_same_seed_writes_the_same_metrics_apart_from_times(twin_runs: Twins) -> None:
    def untimed(run: Finished) -> list[dict[str, object]]:
        return [{k: v for k, v in row.items() if not k.startswith(TIMED)} for row in run.metrics]

    first, second = (untimed(run) for run in twin_runs)
    assert first == second
    assert [row["step"] for row in first] == [0, 1, 2, 3, 4, 5, 5]


def test_summary_has_every_promised_key(twin_runs: Twins) -> None:
    promised = [
        "held_out_f1_before",
        "held_out_f1_after",
        "held_out_f1_after_end_noise",
        "held_out_em_before",
        "held_out_em_after",
        "held_out_n",
        "held_out_gain_low95",
        "query_sensitivity",
        "steps",
        "seconds_setup",
        "seconds_training",
        "seconds_total",
        "seconds_by_phase",
        "failures",
        "alarms",
        "exit_reason",
    ]
    assert set(promised) <= set(twin_runs[0].summary)
    assert twin_runs[0].summary["failures"] == {}
    assert twin_runs[0].summary["alarms"] == []


def test_every_metric_of_a_run_is_documented(twin_runs: Twins) -> None:
    assert undocumented(sorted({name for row in twin_runs[0].metrics for name in row})) == []


def test_run_directory_is_complete(twin_runs: Twins) -> None:
    directory = twin_runs[0].directory
    assert directory is not None
    config = yaml.safe_load((directory / "config.yaml").read_text())
    assert config["trainer"]["total_training_steps"] == 5
    assert list((directory / "wandb").glob("offline-run-*/*.wandb"))
    assert (directory / "logs").is_dir()
    lines = (directory / "trajectories" / "step_000003.jsonl").read_text().splitlines()
    assert len(lines) == 96
    record = json.loads(lines[0])
    assert record["segments"][0]["kind"] == "policy"
    assert all(run[0] == 2 for run in record["segments"][0]["weights_versions"]), "step 3 samples with update 2"


def test_trained_ids_are_the_dumped_ids_and_text_derives_from_them(twin_runs: Twins) -> None:
    directory = twin_runs[0].directory
    assert directory is not None
    tokenizer = AutoTokenizer.from_pretrained(directory / "checkpoints" / "last")
    for line in (directory / "trajectories" / "step_000005.jsonl").read_text().splitlines()[:8]:
        for segment in json.loads(line)["segments"]:
            assert tokenizer.decode(segment["token_ids"]) == segment["text"]


def test_exported_policy_reloads_tied_and_carries_the_stop_strings(twin_runs: Twins) -> None:
    directory = twin_runs[0].directory
    assert directory is not None
    last = directory / "checkpoints" / "last"
    model = AutoModelForCausalLM.from_pretrained(last)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert GenerationConfig.from_pretrained(last).stop_strings == ["</search>", "</answer>"]


def test_no_process_is_left_after_success(twin_runs: Twins) -> None:
    assert [run.processes_left for run in twin_runs] == [[], []]


def test_ctrl_c_ends_the_run_with_a_summary_and_no_process_left(start: Start) -> None:
    script = start("TOTAL_STEPS", "1000", "trainer.val_before_train=false")
    script.wait_for("step   1/1000")
    script.send(signal.SIGINT)
    run = script.finish(120)
    assert run.code == 130, run.output
    assert run.summary["exit_reason"] == "interrupted"
    assert run.summary["steps"] >= 1
    assert run.processes_left == []


def test_dead_simulation_server_is_refused_before_models_load(start: Start) -> None:
    run = start("IP", "127.0.0.1:9", "retriever.embedded_model=''", "retriever.deadline=2").finish(120)
    assert run.code == 2, run.output
    assert "the simulation server does not answer (http://127.0.0.1:9/v1" in run.output
    assert run.directory is None
    assert run.processes_left == []


def test_missing_inputs_are_listed_together_before_anything_starts(start: Start) -> None:
    run = start("MODEL_PATH", "/no/model", "DATA_PATH", "/no/data").finish(120)
    assert run.code == 2
    for expected in ("there is no directory '/no/model'", "'/no/data/train.parquet' does not exist"):
        assert expected in run.output
    assert run.directory is None


@pytest.mark.slow
def test_two_ranks_learn_as_one(start: Start, twin_runs: Twins) -> None:
    run = start(*SHORT, "trainer.nproc_per_node=2").finish()
    assert run.code == 0, run.output
    one = twin_runs[0].metrics[1]
    two = run.metrics[1]
    assert two["reward/mean"] == one["reward/mean"]
    assert two["actor/grad_norm"] == pytest.approx(one["actor/grad_norm"], rel=1e-4)
    assert run.summary["held_out_f1_after"] - run.summary["held_out_f1_before"] > 0.15


@pytest.mark.slow
def test_a_termination_request_ends_a_run_as_ctrl_c_does(start: Start) -> None:
    script = start("TOTAL_STEPS", "1000", "trainer.val_before_train=false")
    script.wait_for("step   1/1000")
    script.send(signal.SIGTERM)
    run = script.finish(120)
    assert run.code == 130, run.output
    assert run.processes_left == []


@pytest.mark.slow
def test_a_simulation_server_that_dies_for_good_stops_the_run_with_a_typed_error(start: Start) -> None:
    """Killed servers are never trained on as wrong answers: the run pauses, then ends with one error. The server
    is killed as often as it is restarted."""
    script = start("TOTAL_STEPS", "1000", "trainer.val_before_train=false", "retriever.outage_deadline=20")
    script.wait_for("step   1/1000")
    while "restarted 3 times and stays down" not in script.log.read_text():
        assert script.process.poll() is None, script.log.read_text()
        for server in script.pids_of("zerosearch.simulation.server"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(server, signal.SIGKILL)
    run = script.finish(180)
    assert run.code == 1, run.output
    assert run.output.count("paused: http://127.0.0.1:") == 1, run.output
    assert run.summary["exit_reason"].startswith("ServerOutageError: http://127.0.0.1:")
    assert "given up after 20 s" in run.summary["exit_reason"]
    assert [row["step"] for row in run.metrics] == list(range(1, run.summary["steps"] + 1))
    assert run.processes_left == []


@pytest.mark.slow
def test_installed_wheel_brings_its_configuration(tmp_path: Path) -> None:
    """A non-editable install in an environment that sees only the dependencies, run from elsewhere."""
    root = Path(__file__).parent.parent.parent
    source = tmp_path / "source"
    source.mkdir()
    for name in ("verl", "zerosearch", "configs"):
        shutil.copytree(root / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.py", "pyproject.toml", "README.md"):
        shutil.copy(root / name, source)
    environment = tmp_path / "env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    packages = next((environment / "lib").glob("python3*")) / "site-packages"
    (packages / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"])
    python = str(environment / "bin" / "python")
    install = [python, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", str(source)]
    subprocess.run(install, check=True, cwd=tmp_path)
    ask = [python, "-I", "-m", "verl.trainer.main_ppo", "+preset=quickstart", "--dry-run"]
    done = subprocess.run(ask, check=True, cwd=tmp_path, capture_output=True, text=True)
    assert "the first prompt" in done.stdout
    where = [python, "-I", "-c", "import verl; print(verl.__file__)"]
    assert str(packages) in subprocess.run(where, check=True, capture_output=True, text=True).stdout
