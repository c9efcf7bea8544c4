"""The configuration of a run as frozen dataclasses; ``configs/ppo_trainer.yaml`` holds the same defaults.

Key names are verl's. Token counts are per trajectory unless a name says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from verl.utils.config import ReadableAsMapping
from verl.workers.config import (
    ActorConfig,
    ActorRolloutRefConfig,
    CriticConfig,
    CustomRewardConfig,
    Fraction,
    FSDPConfig,
    ModelConfig,
    NonNegativeFloat,
    NonNegativeInt,
    OptimConfig,
    PositiveFloat,
    PositiveInt,
    RefConfig,
    RolloutConfig,
    ValKwargsConfig,
)

__all__ = [
    "ActorConfig",
    "ActorRolloutRefConfig",
    "AlarmConfig",
    "AlgorithmConfig",
    "CriticConfig",
    "CustomRewardConfig",
    "DataConfig",
    "EnvironmentConfig",
    "FSDPConfig",
    "ModelConfig",
    "OptimConfig",
    "PPOTrainerConfig",
    "RefConfig",
    "RolloutConfig",
    "TrainerConfig",
    "ValKwargsConfig",
]


def _listed(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


Files = Annotated[tuple[str, ...], BeforeValidator(_listed)]
"""One path or a list of paths."""


@dataclass(frozen=True)
class DataConfig(ReadableAsMapping):
    """Where rows come from. ``train_batch_size`` counts prompts per step; -1 samples mean all rows.

    ``invalid_rows`` and ``duplicate_rows`` say what happens to rows that cannot be used and to rows that
    repeat an earlier one's prompt and gold answers.
    """

    train_files: Files = ()
    val_files: Files = ()
    prompt_key: str = "prompt"
    question_key: str = "question"
    prompt_template: str = "search"
    chat_template: str = "auto"
    max_prompt_length: PositiveInt = 2048
    max_response_length: PositiveInt = 4096
    train_batch_size: PositiveInt = 64
    train_max_samples: int = -1
    val_max_samples: int = -1
    filter_overlong_prompts: bool = True
    invalid_rows: Literal["refuse", "filter"] = "refuse"
    duplicate_rows: Literal["keep", "drop", "refuse"] = "keep"
    shuffle: bool = True


@dataclass(frozen=True)
class StatusPolicyConfig(ReadableAsMapping):
    answered: Literal["train", "mask"] = "train"
    turns_exhausted: Literal["train", "mask"] = "train"
    truncated: Literal["train", "mask"] = "train"


@dataclass(frozen=True)
class KLControlConfig(ReadableAsMapping):
    """The coefficient of the KL penalty in the reward: ``fixed``, or ``adaptive`` towards ``target_kl`` (nats
    per trajectory) with the time constant ``horizon`` in trajectories."""

    type: Literal["fixed", "adaptive"] = "fixed"
    kl_coef: NonNegativeFloat = 0.001
    target_kl: PositiveFloat = 0.1
    horizon: PositiveInt = 10000


@dataclass(frozen=True)
class AlgorithmConfig(ReadableAsMapping):
    """``gamma`` and ``lam`` are those of GAE and of discounted returns. ``baseline`` is REINFORCE's.

    ``status_policy`` says per status whether a trajectory's tokens are trained; a masked one still
    counts in its group's statistics. Trajectories lost to the infrastructure are always dropped.
    """

    adv_estimator: str = "grpo"
    gamma: Fraction = 1.0
    lam: Fraction = 1.0
    norm_adv_by_std_in_grpo: bool = True
    baseline: Literal["leave_one_out", "batch", "none"] = "leave_one_out"
    use_kl_in_reward: bool = False
    kl_ctrl: KLControlConfig = field(default_factory=KLControlConfig)
    status_policy: StatusPolicyConfig = field(default_factory=StatusPolicyConfig)

    @property
    def needs_critic(self) -> bool:
        return self.adv_estimator == "gae"


@dataclass(frozen=True)
class EnvironmentConfig(ReadableAsMapping):
    """``path`` is the import path of an AgentLoop; its own settings stand in the section ``retriever``."""

    path: str = "zerosearch.agent_loop.SearchAgentLoop"


@dataclass(frozen=True)
class AlarmConfig(ReadableAsMapping):
    """When a run says that it may be collapsing; null switches an alarm off.

    An alarm begins after ``steps`` steps in a row beyond its bound and ends after as many within it.
    ``entropy_…`` and ``response_…`` are multiples of the first value of the run, ``kl`` and
    ``sampler_mismatch`` nats per policy token, ``nonfinite_updates`` skipped updates in one step, the
    others shares.
    """

    steps: PositiveInt = 3
    entropy_low: NonNegativeFloat | None = 0.05
    entropy_high: PositiveFloat | None = 3.0
    kl: PositiveFloat | None = 0.5
    response_short: NonNegativeFloat | None = 0.1
    response_long: PositiveFloat | None = 5.0
    truncated: Fraction | None = 0.5
    zero_variance: Fraction | None = 0.9
    sampler_mismatch: PositiveFloat | None = 0.1
    nonfinite_updates: NonNegativeFloat | None = 0.0


@dataclass(frozen=True)
class TrainerConfig(ReadableAsMapping):
    """``n_gpus_per_node`` 0 trains on CPU with ``nproc_per_node`` ranks a node. A frequency of 0 is never.

    ``critic_warmup`` steps update the critic alone. ``val_every_mode`` false runs only the first validation
    mode between the first and the last validation. ``val_only`` validates once and trains nothing.
    ``save_last`` and ``save_best`` keep the policy's last weights (also when a run fails) and those of the
    best validation; ``save_freq`` refreshes the last. ``watchdog_timeout`` seconds without progress end the run with
    the stacks of its processes, 0 being never.
    """

    n_gpus_per_node: NonNegativeInt = 0
    nproc_per_node: PositiveInt = 1
    nnodes: PositiveInt = 1
    num_threads: NonNegativeInt = 1
    total_training_steps: PositiveInt = 200
    critic_warmup: NonNegativeInt = 0
    val_before_train: bool = True
    val_every_mode: bool = True
    val_only: bool = False
    test_freq: NonNegativeInt = 0
    seed: int = 0
    project_name: str = "zerosearch"
    experiment_name: Annotated[str, Field(pattern=r"^[^/\\]+$")] = "run"
    default_local_dir: str = "runs"
    logger: tuple[Literal["console", "wandb"], ...] = ("console", "wandb")
    rollout_dump_freq: NonNegativeInt = 1
    save_last: bool = True
    save_best: bool = True
    save_freq: NonNegativeInt = 0
    object_store_megabytes: PositiveInt | None = None
    watchdog_timeout: NonNegativeFloat = 3600.0
    alarms: AlarmConfig = field(default_factory=AlarmConfig)

    @property
    def ranks_per_node(self) -> int:
        return self.n_gpus_per_node or self.nproc_per_node


@dataclass(frozen=True)
class PPOTrainerConfig(ReadableAsMapping):
    """The root. ``retriever`` stays a mapping here: the environment's ``Config`` decides what it may hold."""

    data: DataConfig = field(default_factory=DataConfig)
    actor_rollout_ref: ActorRolloutRefConfig = field(default_factory=ActorRolloutRefConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    retriever: dict[str, Any] = field(default_factory=dict)
    custom_reward_function: CustomRewardConfig = field(default_factory=CustomRewardConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)

    @property
    def needs_reference(self) -> bool:
        return self.actor_rollout_ref.actor.use_kl_loss or self.algorithm.use_kl_in_reward
