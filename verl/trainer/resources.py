"""What a run asks of machines, compared with what is there before anything is started."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from verl.trainer.config import PPOTrainerConfig, TrainerConfig

_BYTES_OF = {"float32": 4, "bfloat16": 2}
_MASTER_BYTES = _BYTES_OF["float32"]
_OPTIMIZER_BYTES = 12
"""Of one parameter in training, beside its float32 master: two float32 moments and a float32 gradient."""
_BYTES_PER_TOKEN = 24
"""Of a trajectory's token in its JSON record: id, log-probability, text."""
GIB = 1 << 30
_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


@dataclass
class Findings:
    """What a look at a run found: problems stop it, warnings are printed."""

    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def problem(self, text: str) -> None:
        if text not in self.problems:
            self.problems.append(text)

    def warn(self, text: str) -> None:
        if text not in self.warnings:
            self.warnings.append(text)


@dataclass(frozen=True)
class Sizes:
    """Parameters of the models, None where not known; the critic's count only where there is one."""

    policy: int | None = None
    critic: int | None = None


@dataclass(frozen=True)
class Machine:
    """What one machine offers: visible GPUs and the bytes of each, cores of this process, bytes of memory."""

    gpus: int
    gpu_bytes: int
    cores: int
    memory_bytes: int
    visible_devices: str | None = None

    @classmethod
    def here(cls) -> Machine:
        gpus = torch.cuda.device_count()
        gpu_bytes = min((torch.cuda.get_device_properties(i).total_memory for i in range(gpus)), default=0)
        cores = len(os.sched_getaffinity(0))
        return cls(gpus, gpu_bytes, cores, _memory_bytes(), os.environ.get("CUDA_VISIBLE_DEVICES"))

    @property
    def gpus_in_words(self) -> str:
        limited = "" if self.visible_devices is None else f" (CUDA_VISIBLE_DEVICES={self.visible_devices})"
        return f"{self.gpus}{limited}"


def _memory_bytes() -> int:
    """The machine's memory, or what a container's limit leaves of it."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [Path(name).read_text().strip() for name in _CGROUP_LIMITS if Path(name).is_file()]
    return min([total, *(int(limit) for limit in limits if limit.isdigit())])


def check_machine(config: PPOTrainerConfig, machine: Machine, sizes: Sizes, findings: Findings) -> None:
    """Of a run on this machine alone: a cluster's resources are compared when its Ray is joined."""
    _check_counts(config.trainer, machine, findings)
    if sizes.policy is not None and not findings.problems:
        _check_memory(config, machine, sizes, findings)


def _check_counts(trainer: TrainerConfig, machine: Machine, findings: Findings) -> None:
    asked = trainer.n_gpus_per_node * trainer.nnodes
    if asked > machine.gpus:
        cluster = ", or join a cluster with RAY_ADDRESS" if trainer.nnodes > 1 else ""
        findings.problem(
            f"NUM_GPUS_PER_NODE x NNODES (trainer.n_gpus_per_node x trainer.nnodes) asks for {asked} GPUs, "
            f"{machine.gpus_in_words} are present: lower it (0 = CPU){cluster}"
        )
    ranks = trainer.nproc_per_node * trainer.nnodes
    if not asked and ranks > machine.cores:
        findings.warn(
            f"trainer.nproc_per_node x trainer.nnodes asks for {ranks} CPU ranks on {machine.cores} cores: they will "
            "wait for each other"
        )


def training_bytes(config: PPOTrainerConfig, sizes: Sizes) -> int:
    """A lower bound of what one rank holds: its shard of masters, moments and gradients (of the critic too), of
    the reference in its compute type, and a whole copy of the weights for the rollout engine. Activations and
    caches come on top."""
    policy, critic = sizes.policy or 0, sizes.critic or 0
    trained = policy + (critic if config.algorithm.needs_critic else 0)
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    reference = policy * _BYTES_OF[actor.fsdp_config.param_dtype] if config.needs_reference else 0
    ranks = config.trainer.ranks_per_node * config.trainer.nnodes
    return (trained * (_MASTER_BYTES + _OPTIMIZER_BYTES) + reference) // ranks + policy * _BYTES_OF[rollout.dtype]


def _check_memory(config: PPOTrainerConfig, machine: Machine, sizes: Sizes, findings: Findings) -> None:
    trainer = config.trainer
    per_rank = training_bytes(config, sizes)
    on_gpu = trainer.n_gpus_per_node > 0
    present = machine.gpu_bytes if on_gpu else machine.memory_bytes
    asked = per_rank if on_gpu else per_rank * trainer.ranks_per_node * trainer.nnodes
    what = "each GPU" if on_gpu else "this machine"
    critic = f" and a critic of {(sizes.critic or 0) / 1e9:.2f}" if config.algorithm.needs_critic else ""
    numbers = (
        f"weights, gradients and optimizer state of {(sizes.policy or 0) / 1e9:.2f} billion parameters{critic} take "
        f"at least "
        f"{asked / GIB:.1f} GiB of {what}, which has {present / GIB:.1f} GiB"
    )
    if asked > present:
        findings.problem(f"{numbers}: take a smaller model or more GPUs (NUM_GPUS_PER_NODE)")
    elif asked > 0.8 * present:
        findings.warn(f"{numbers}; activations and caches come on top")


def cluster_problem(trainer: TrainerConfig, resources: Mapping[str, float]) -> str:
    """What a joined Ray cluster lacks, with both numbers; empty where it has enough. ``resources`` are Ray's."""
    kind, per_node = ("GPU", trainer.n_gpus_per_node) if trainer.n_gpus_per_node else ("CPU", trainer.nproc_per_node)
    asked, present = per_node * trainer.nnodes, resources.get(kind, 0)
    if asked <= present:
        return ""
    key = "NUM_GPUS_PER_NODE" if kind == "GPU" else "trainer.nproc_per_node"
    return (
        f"the run asks for {asked} {kind}s ({per_node} on each of {trainer.nnodes} nodes), the Ray cluster has "
        f"{present:g}: lower {key} or NNODES, or add nodes"
    )


def check_disk(config: PPOTrainerConfig, parameters: int | None, findings: Findings, free: int | None = None) -> None:
    """Room for the checkpoints that are kept, one more while it is written, and the trajectories.

    ``parameters`` are the policy's. Validation alone keeps nothing.
    """
    root = Path(config.trainer.default_local_dir).absolute()
    free = _free_bytes(root, findings) if free is None else free
    if free is None:
        return
    kept = _kept_checkpoints(config.trainer)
    checkpoints = (parameters or 0) * _MASTER_BYTES * (kept + 1) if kept else 0
    if checkpoints > free:
        findings.problem(
            f"trainer.default_local_dir: {kept} kept checkpoints and one being written take "
            f"{checkpoints / GIB:.1f} GiB, {free / GIB:.1f} GiB are free at {root}: make room, name another place, "
            "or keep fewer (trainer.save_best, save_last, save_freq)"
        )
    elif checkpoints + _record_bytes(config) > free:
        findings.warn(
            f"checkpoints ({checkpoints / GIB:.1f} GiB) and, at their longest, trajectories "
            f"({_record_bytes(config) / GIB:.1f} GiB) may fill the {free / GIB:.1f} GiB free at {root}: raise "
            "trainer.rollout_dump_freq, or set it to 0"
        )


def _kept_checkpoints(trainer: TrainerConfig) -> int:
    if trainer.val_only:
        return 0
    last = trainer.save_last or 0 < trainer.save_freq <= trainer.total_training_steps
    return last + trainer.save_best


def _record_bytes(config: PPOTrainerConfig) -> int:
    trainer, data = config.trainer, config.data
    if not trainer.rollout_dump_freq or trainer.val_only:
        return 0
    tokens = data.max_prompt_length + data.max_response_length
    trajectories = data.train_batch_size * config.actor_rollout_ref.rollout.n
    return trainer.total_training_steps // trainer.rollout_dump_freq * trajectories * tokens * _BYTES_PER_TOKEN


def _free_bytes(root: Path, findings: Findings) -> int | None:
    existing = next(path for path in (root, *root.parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        findings.problem(f"trainer.default_local_dir: {root} cannot be made, {existing} is not a writable directory")
        return None
    return shutil.disk_usage(existing).free
