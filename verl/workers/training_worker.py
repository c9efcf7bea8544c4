"""One process per rank that trains actor and critic and scores with them and the reference."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from ray.actor import ActorHandle
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from verl import DataProto
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from verl.single_controller.base.dispatch import collect_rank_zero
from verl.utils.paths import resolve_path
from verl.workers.config import ActorConfig, CriticConfig, ModelConfig, RefConfig, RolloutConfig
from verl.workers.engine.fsdp import FSDPEngine, TrainableFSDPEngine
from verl.workers.engine.hf_export import save_hf_checkpoint
from verl.workers.engine.logprob import TokenLogProbs
from verl.workers.engine.loss import PolicyBatchLoss, ValueBatchLoss
from verl.workers.engine.optimizer import learning_rate
from verl.workers.engine.rows import pad_scores, rows_from_batch
from verl.workers.engine.scorer import LossT
from verl.workers.engine.sharding import DTYPES
from verl.workers.engine.value import TokenValues
from verl.workers.rollout.engine import NamedTensor
from verl.workers.rollout.weight_sync import send_weights

MESH = "actor"
SCORE_DISPATCH = make_nd_compute_dataproto_dispatch_fn(mesh_name=MESH, padding="ragged")
UPDATE_DISPATCH: dict[str, Callable] = {**SCORE_DISPATCH, "collect_fn": collect_rank_zero}


@dataclass(frozen=True)
class TrainingWorkerConfig:
    """Everything a training worker is made from.

    ``model_path`` is where the checkpoint lies on every node. ``loss`` is the actor's. ``critic`` and
    ``critic_loss`` are given together; without them there is no critic. ``device`` is ``cpu`` or ``cuda``;
    ``num_threads`` 0 leaves torch's choice. The actor is first updated in the step after ``critic_warmup``,
    from which its learning-rate schedule counts. Batches whose update was skipped are written below ``run_dir``.
    """

    model_path: str
    model: ModelConfig
    actor: ActorConfig
    ref: RefConfig
    rollout: RolloutConfig
    loss: PolicyBatchLoss
    needs_reference: bool
    total_training_steps: int
    num_threads: int
    device: str
    run_dir: str
    critic: CriticConfig | None = None
    critic_loss: ValueBatchLoss | None = None
    critic_warmup: int = 0

    def __post_init__(self) -> None:
        assert (self.critic is None) == (self.critic_loss is None)


def critic_model(config: TrainingWorkerConfig) -> ModelConfig:
    """The critic's model section, with a path on this node; where it names no model, with what it takes from the
    policy's (see :class:`CriticConfig`)."""
    assert config.critic is not None
    model = config.critic.model
    if not model.path:
        checkpointing = model.enable_gradient_checkpointing or config.model.enable_gradient_checkpointing
        return replace(config.model, path=config.model_path, enable_gradient_checkpointing=checkpointing)
    return replace(model, path=resolve_path(model.path))


class TrainingWorker(Worker):
    """Actor and, where asked for, frozen reference and critic on one rank of an FSDP mesh.

    All methods are collective: they are called on every rank of the group. Batches are those of the
    trainer (see :func:`rows_from_batch`); ranks may get different numbers of rows, or none.
    """

    def __init__(self, config: TrainingWorkerConfig) -> None:
        super().__init__()
        self.config = config
        self._last_step = 0

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Joins the process group and loads the models. Raises ValueError for a checkpoint that cannot be trained."""
        config = self.config
        if config.num_threads:
            torch.set_num_threads(config.num_threads)
        self._join_process_group()
        mesh = init_device_mesh(config.device, (self.world_size,), mesh_dim_names=("fsdp",))
        self._build_engines(mesh, Path(config.run_dir) / "nonfinite")
        self._register_dispatch_collect_info(MESH, dp_rank=self.rank, is_collect=True)

    def _build_engines(self, mesh: DeviceMesh, dumps: Path) -> None:
        config = self.config
        model = replace(config.model, path=config.model_path)
        log_probs = partial(TokenLogProbs, temperature=config.rollout.temperature)
        self.actor = TrainableFSDPEngine(model, config.actor, mesh, log_probs, dumps / "actor")
        self.reference: FSDPEngine[PolicyBatchLoss] | None = None
        if config.needs_reference:
            max_tokens = config.ref.log_prob_max_token_len_per_gpu
            self.reference = FSDPEngine(model, config.actor.fsdp_config, mesh, log_probs, max_tokens)
        self.critic: TrainableFSDPEngine[ValueBatchLoss] | None = None
        if config.critic is not None:
            self.critic = TrainableFSDPEngine(critic_model(config), config.critic, mesh, TokenValues, dumps / "critic")

    def _join_process_group(self) -> None:
        address, port = self.get_master_addr_port()
        backend = "cpu:gloo"
        if self.config.device == "cuda":
            torch.cuda.set_device(self.local_rank % torch.cuda.device_count())
            backend = "cpu:gloo,cuda:nccl"
        dist.init_process_group(
            backend, init_method=f"tcp://{address}:{port}", rank=self.rank, world_size=self.world_size
        )

    @register(dispatch_mode=SCORE_DISPATCH)
    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        """``ref_log_prob`` (B, R) float32. Raises ValueError if the worker has no reference."""
        if self.reference is None:
            raise ValueError("there is no reference model: the worker was configured without one (needs_reference)")
        begin = time.perf_counter()
        log_probs, _ = _score(self.reference, data)
        return DataProto.from_dict({"ref_log_prob": log_probs}, meta_info=_timed("reference", begin))

    @register(dispatch_mode=SCORE_DISPATCH)
    def compute_log_prob(self, data: DataProto) -> DataProto:
        """The actor's ``old_log_probs`` and ``entropys``, each (B, R) float32, at the sampling temperature."""
        begin = time.perf_counter()
        log_probs, entropys = _score(self.actor, data)
        scores = {"old_log_probs": log_probs, "entropys": entropys}
        return DataProto.from_dict(scores, meta_info=_timed("old_log_prob", begin))

    @register(dispatch_mode=SCORE_DISPATCH)
    def compute_values(self, data: DataProto) -> DataProto:
        """The critic's ``values`` (B, R) float32, 0 on untrained tokens. Raises ValueError without a critic."""
        begin = time.perf_counter()
        critic, _ = self._trained_critic()
        (values,) = _score(critic, data)
        return DataProto.from_dict({"values": values}, meta_info=_timed("values", begin))

    @register(dispatch_mode=UPDATE_DISPATCH)
    def update_actor(self, data: DataProto) -> DataProto:
        """One optimizer step on the rows of all ranks.

        ``meta_info["global_steps"]`` is the training step, counted from 1; the learning rate follows from
        it, the first step after ``critic_warmup`` being the schedule's first. A batch without
        ``old_log_probs`` is attributed to the policy as it is, which is right for a step's only update and
        refused for a further one (ValueError).

        Returns ``meta_info["metrics"]``: the loss's metrics and ``actor/loss``, ``actor/grad_norm``,
        ``actor/lr``, ``actor/tokens``, ``actor/nonfinite_updates``, over all ranks.
        """
        begin = time.perf_counter()
        step, tensors = self._training_step(data), _tensors(data)
        fields = [*self.config.loss.fields, *(key for key in ("old_log_probs",) if key in tensors)]
        if step == self._last_step and "old_log_probs" not in tensors:
            raise ValueError(f"a second update in step {step} needs old_log_probs in the batch")
        self._last_step = step
        warmup = self.config.critic_warmup
        rate = learning_rate(self.config.actor.optim, step - warmup, self.config.total_training_steps - warmup)
        metrics = self.actor.train_batch(rows_from_batch(tensors, fields), self.config.loss, rate)
        return _updated("actor", metrics, begin)

    @register(dispatch_mode=UPDATE_DISPATCH)
    def update_critic(self, data: DataProto) -> DataProto:
        """One optimizer step of the critic on the rows of all ranks.

        ``meta_info["global_steps"]`` is that of :meth:`update_actor`. The batch carries what the critic's
        loss reads; several updates in a step all use the ``values`` it was collected with. Raises
        ValueError without a critic.

        Returns ``meta_info["metrics"]``: the loss's metrics and ``critic/loss``, ``critic/grad_norm``,
        ``critic/lr``, ``critic/tokens``, ``critic/nonfinite_updates``, over all ranks.
        """
        begin = time.perf_counter()
        critic, loss = self._trained_critic()
        rate = learning_rate(critic.config.optim, self._training_step(data), self.config.total_training_steps)
        metrics = critic.train_batch(rows_from_batch(_tensors(data), loss.fields), loss, rate)
        return _updated("critic", metrics, begin)

    def _trained_critic(self) -> tuple[TrainableFSDPEngine[ValueBatchLoss], ValueBatchLoss]:
        if self.critic is None or self.config.critic_loss is None:
            raise ValueError("there is no critic: the worker was configured without one")
        return self.critic, self.config.critic_loss

    def _training_step(self, data: DataProto) -> int:
        if "global_steps" not in data.meta_info:
            raise ValueError("meta_info needs global_steps, the number of the training step")
        return int(data.meta_info["global_steps"])

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def send_weights(self, receivers: Sequence[ActorHandle], version: int) -> None:
        """Streams the actor's weights, in the rollout's type, to rollout engines.

        ``receivers`` are actors with the methods of ``WeightReceiver``. Raises InfrastructureError on
        rank 0 if one of them failed.
        """
        dtype = DTYPES[self.config.rollout.dtype]
        weights = ((name, tensor.to(dtype)) for name, tensor in self.actor.full_tensors())
        if self.rank == 0:
            with _whole_stream(weights):
                send_weights(weights, receivers, version, self.config.rollout.weight_bucket_megabytes << 20)
        else:
            _exhaust(weights)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_hf(self, path: str, stop_strings: Sequence[str] = ()) -> None:
        """Writes the actor as a Hugging Face checkpoint; rank 0 writes. See :func:`save_hf_checkpoint`."""
        weights = self.actor.full_tensors()
        try:
            if self.rank == 0:
                trust_remote_code = self.config.model.trust_remote_code
                with _whole_stream(weights):
                    save_hf_checkpoint(weights, self.config.model_path, Path(path), stop_strings, trust_remote_code)
            else:
                _exhaust(weights)
        finally:
            dist.barrier()


def _timed(name: str, begin: float) -> dict[str, dict[str, float]]:
    """meta_info with the seconds this worker computed: less than its caller waited, by dispatch and transfer."""
    return {"metrics": {f"perf/{name}_seconds": time.perf_counter() - begin}}


def _updated(model: str, metrics: Mapping[str, float], begin: float) -> DataProto:
    """An update's metrics, those without a section in the section of its ``model``."""
    named = {name if "/" in name else f"{model}/{name}": value for name, value in metrics.items()}
    return DataProto(meta_info={"metrics": named | _timed(f"update_{model}", begin)["metrics"]})


def _score(engine: FSDPEngine[LossT], data: DataProto) -> list[torch.Tensor]:
    """The engine's scores per token, each (B, R)."""
    tensors = _tensors(data)
    rows = engine.score(rows_from_batch(tensors))
    width = tensors["responses"].shape[1]
    return [pad_scores([row[k] for row in rows], width) for k in range(engine.scorer.scores_per_token)]


def _tensors(data: DataProto) -> dict[str, torch.Tensor]:
    assert data.batch is not None
    return data.batch.to_dict()


@contextmanager
def _whole_stream(weights: Iterator[NamedTensor]) -> Iterator[None]:
    """All ranks take part in making every tensor: the stream is read to its end before an error leaves."""
    try:
        yield
    finally:
        _exhaust(weights)


def _exhaust(weights: Iterator[NamedTensor]) -> None:
    for _ in weights:
        pass
