"""Configuration of what workers run: models, optimizers, rollouts. Key names are verl's.

Token counts are per trajectory unless a name says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field

from verl.utils.config import ReadableAsMapping

PositiveInt = Annotated[int, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]


@dataclass(frozen=True)
class ModelConfig(ReadableAsMapping):
    path: str = ""
    trust_remote_code: bool = False
    enable_gradient_checkpointing: bool = False


@dataclass(frozen=True)
class OptimConfig(ReadableAsMapping):
    """AdamW. Warm-up over N steps reaches the full rate at step N; the rate of step 1 is never 0."""

    lr: NonNegativeFloat = 1e-6
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: NonNegativeFloat = 0.01
    lr_warmup_steps: NonNegativeInt = 0
    warmup_style: Literal["constant", "cosine"] = "constant"
    min_lr_ratio: Fraction = 0.0


@dataclass(frozen=True)
class FSDPConfig(ReadableAsMapping):
    """Masters are always float32; ``param_dtype`` is the compute type, ``reduce_dtype`` that of gradient reduction."""

    param_dtype: Literal["float32", "bfloat16"] = "float32"
    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    reshard_after_forward: bool = True


@dataclass(frozen=True)
class ActorConfig(ReadableAsMapping):
    """``ppo_mini_batch_size`` counts prompts per update (times rollout.n trajectories); null: the whole batch.
    ``shuffle`` deals the prompts anew to the updates of each of the ``ppo_epochs`` passes."""

    strategy: Literal["fsdp2"] = "fsdp2"
    ppo_mini_batch_size: PositiveInt | None = None
    ppo_epochs: PositiveInt = 1
    shuffle: bool = False
    ppo_max_token_len_per_gpu: PositiveInt = 16384
    clip_ratio: PositiveFloat = 0.2
    clip_ratio_low: PositiveFloat | None = None
    clip_ratio_high: PositiveFloat | None = None
    clip_ratio_c: Annotated[float, Field(gt=1)] = 3.0
    loss_agg_mode: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"] = "token-mean"
    policy_loss: str = "vanilla"
    entropy_coeff: float = 0.0
    use_kl_loss: bool = True
    kl_loss_coef: NonNegativeFloat = 0.001
    kl_loss_type: Literal["k2", "k3", "low_var_kl", "k1+"] = "low_var_kl"
    rollout_is_threshold: Annotated[float, Field(ge=1)] | None = 2.0
    grad_clip: PositiveFloat = 1.0
    max_nonfinite_updates: PositiveInt = 3
    optim: OptimConfig = field(default_factory=OptimConfig)
    fsdp_config: FSDPConfig = field(default_factory=FSDPConfig)

    @property
    def clip_range(self) -> tuple[float, float]:
        return self.clip_ratio_low or self.clip_ratio, self.clip_ratio_high or self.clip_ratio


@dataclass(frozen=True)
class CriticConfig(ReadableAsMapping):
    """The value model; its head starts at zero. An empty ``model.path`` takes the policy's, and with it its
    ``trust_remote_code``; gradient checkpointing is then on where either model section says so.

    ``ppo_mini_batch_size`` counts prompts per update, as the actor's; null: the whole batch.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    ppo_mini_batch_size: PositiveInt | None = None
    ppo_epochs: PositiveInt = 1
    shuffle: bool = False
    ppo_max_token_len_per_gpu: PositiveInt = 16384
    cliprange_value: PositiveFloat = 0.5
    loss_agg_mode: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"] = "token-mean"
    grad_clip: PositiveFloat = 1.0
    max_nonfinite_updates: PositiveInt = 3
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=1e-5))
    fsdp_config: FSDPConfig = field(default_factory=FSDPConfig)


@dataclass(frozen=True)
class RefConfig(ReadableAsMapping):
    log_prob_max_token_len_per_gpu: PositiveInt = 32768


@dataclass(frozen=True)
class ValKwargsConfig(ReadableAsMapping):
    """Decoding of validation. ``do_sample`` false is greedy."""

    do_sample: bool = True
    temperature: PositiveFloat = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    n: PositiveInt = 1


@dataclass(frozen=True)
class RolloutConfig(ReadableAsMapping):
    """``n`` trajectories per prompt; ``max_num_seqs`` decode rows of one engine; ``max_in_flight``
    trajectories running at once per engine (null: twice the rows)."""

    name: Literal["torch"] = "torch"
    n: PositiveInt = 5
    temperature: PositiveFloat = 1.0
    max_turn_length: PositiveInt = 500
    max_observation_length: PositiveInt = 2048
    max_num_seqs: PositiveInt = 128
    max_in_flight: PositiveInt | None = None
    dtype: Literal["float32", "bfloat16"] = "float32"
    num_threads: NonNegativeInt = 1
    weight_bucket_megabytes: PositiveInt = 256
    max_failed_share: Fraction = 0.1
    trajectory_timeout: PositiveFloat = 600.0
    val_kwargs: ValKwargsConfig = field(default_factory=ValKwargsConfig)


@dataclass(frozen=True)
class ActorRolloutRefConfig(ReadableAsMapping):
    model: ModelConfig = field(default_factory=ModelConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    ref: RefConfig = field(default_factory=RefConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)


@dataclass(frozen=True)
class CustomRewardConfig(ReadableAsMapping):
    """A user's reward: a Python file and the name of a function with verl's ``compute_score`` arguments."""

    path: str | None = None
    name: str = "compute_score"
    timeout: PositiveFloat = 30.0
