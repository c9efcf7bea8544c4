from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from verl.trainer.compose import compose_config
from verl.trainer.config import PPOTrainerConfig
from verl.trainer.resources import (
    GIB,
    Findings,
    Machine,
    Sizes,
    check_disk,
    check_machine,
    cluster_problem,
    training_bytes,
)

MACHINE = Machine(gpus=2, gpu_bytes=80 * GIB, cores=4, memory_bytes=64 * GIB)
BILLION = 10**9


def config(*overrides: str) -> PPOTrainerConfig:
    return compose_config(list(overrides)).config


def machine_findings(machine: Machine, parameters: int | None, *overrides: str) -> Findings:
    findings = Findings()
    check_machine(config(*overrides), machine, Sizes(parameters), findings)
    return findings


def test_more_gpus_than_exist_are_refused_with_both_numbers_and_what_hides_the_rest() -> None:
    hidden = dataclasses.replace(MACHINE, gpus=1, visible_devices="0")
    (problem,) = machine_findings(hidden, None, "trainer.n_gpus_per_node=4").problems
    assert "asks for 4 GPUs, 1 (CUDA_VISIBLE_DEVICES=0) are present" in problem
    (problem,) = machine_findings(MACHINE, None, "trainer.n_gpus_per_node=2", "trainer.nnodes=2").problems
    assert "asks for 4 GPUs, 2 are present" in problem
    assert "RAY_ADDRESS" in problem
    assert machine_findings(MACHINE, None, "trainer.n_gpus_per_node=2").problems == []


def test_a_cluster_with_less_than_is_asked_is_refused_with_both_numbers() -> None:
    trainer = config("trainer.n_gpus_per_node=4", "trainer.nnodes=2").trainer
    assert "asks for 8 GPUs (4 on each of 2 nodes), the Ray cluster has 6" in cluster_problem(trainer, {"GPU": 6.0})
    assert cluster_problem(trainer, {"GPU": 8.0, "CPU": 1.0}) == ""
    assert "asks for 3 CPUs" in cluster_problem(config("trainer.nproc_per_node=3").trainer, {"CPU": 2.0})


def test_more_ranks_than_cores_are_a_warning() -> None:
    findings = machine_findings(MACHINE, None, "trainer.nproc_per_node=8")
    assert findings.problems == []
    assert "asks for 8 CPU ranks on 4 cores" in findings.warnings[0]


def test_memory_is_masters_moments_gradients_reference_and_the_engines_copy() -> None:
    one = Sizes(100, 100)
    assert training_bytes(config("actor_rollout_ref.actor.use_kl_loss=false"), one) == 100 * (16 + 4)
    assert training_bytes(config(), one) == 100 * (16 + 4 + 4)
    assert training_bytes(config("algorithm=ppo"), one) == 100 * (32 + 4 + 4)
    sharded = config("trainer.n_gpus_per_node=4", "actor_rollout_ref.rollout.dtype=bfloat16")
    assert training_bytes(sharded, one) == 100 * (16 + 4) // 4 + 100 * 2


def test_a_reference_takes_its_compute_type_and_a_critic_its_own_size() -> None:
    half = config("actor_rollout_ref.actor.fsdp_config.param_dtype=bfloat16")
    assert training_bytes(half, Sizes(100)) == 100 * (16 + 2 + 4)
    assert training_bytes(config("algorithm=ppo"), Sizes(100, 30)) == 100 * (16 + 4 + 4) + 30 * 16
    assert training_bytes(config(), Sizes(100, 30)) == 100 * (16 + 4 + 4)


def test_weights_that_cannot_fit_are_a_problem_and_a_tight_fit_a_warning() -> None:
    assert "at least 67.1 GiB of this machine, which has 64.0 GiB" in machine_findings(MACHINE, 3 * BILLION).problems[0]
    tight = machine_findings(MACHINE, 24 * BILLION // 10)
    assert tight.problems == []
    assert "activations and caches come on top" in tight.warnings[0]
    on_gpus = machine_findings(MACHINE, 7 * BILLION, "trainer.n_gpus_per_node=2")
    assert "of each GPU, which has 80.0 GiB" in on_gpus.problems[0]
    assert machine_findings(MACHINE, BILLION, "trainer.n_gpus_per_node=2") == Findings()


def test_disk_holds_the_kept_checkpoints_and_the_one_being_written(tmp_path: Path) -> None:
    def look(free: int, *overrides: str) -> Findings:
        findings = Findings()
        asked = config(f"trainer.default_local_dir={tmp_path}/runs", "trainer.rollout_dump_freq=0", *overrides)
        check_disk(asked, BILLION, findings, free)
        return findings

    twelve = 12 * BILLION
    assert look(twelve) == Findings()
    assert "2 kept checkpoints and one being written take 11.2 GiB" in look(twelve - 1).problems[0]
    assert look(8 * BILLION, "trainer.save_best=false") == Findings()
    assert look(0, "trainer.save_best=false", "trainer.save_last=false") == Findings()
    assert (
        "1 kept checkpoints"
        in look(0, "trainer.save_best=false", "trainer.save_last=false", "trainer.save_freq=5").problems[0]
    )
    assert look(0, "trainer.val_only=true") == Findings()
    assert look(0, "trainer.val_only=true", "trainer.rollout_dump_freq=1") == Findings()
    assert "trajectories" in look(twelve, "trainer.rollout_dump_freq=1").warnings[0]


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    findings = Findings()
    check_disk(config(f"trainer.default_local_dir={tmp_path}/file/runs"), None, findings)
    assert "is not a writable directory" in findings.problems[0]


def test_this_machine_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    machine = Machine.here()
    assert machine.cores >= 1
    assert machine.memory_bytes > 1 << 28
    assert machine.visible_devices == "3"
