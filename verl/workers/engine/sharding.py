"""A scorer on a device mesh: sharded with FSDP2, filled from rank 0."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from verl.models.registry import build_packed_model
from verl.workers.config import FSDPConfig, ModelConfig
from verl.workers.engine.scorer import LossT, ScorerFactory, TokenScorer

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def build_sharded(
    model: ModelConfig, fsdp: FSDPConfig, mesh: DeviceMesh, scorer_of: ScorerFactory[LossT], trainable: bool
) -> TokenScorer[LossT]:
    """The checkpoint's model with a head, one shard of every parameter on each rank of the 1-D ``mesh``.

    Trainable parameters are float32 masters, frozen ones already have the compute type. Only rank 0
    reads the checkpoint. Collective.
    """
    compute_dtype = DTYPES[fsdp.param_dtype]
    dtype = torch.float32 if trainable else compute_dtype

    def build(with_weights: bool) -> TokenScorer[LossT]:
        return scorer_of(
            build_packed_model(
                model.path, dtype, compute_dtype, mesh.device_type, with_weights, model.trust_remote_code
            )
        )

    source = build(with_weights=True) if mesh.get_rank() == 0 else None
    scorer = build(with_weights=False).train(trainable).requires_grad_(trainable)
    if trainable and model.enable_gradient_checkpointing:
        scorer.backbone.hf_model.gradient_checkpointing_enable({"use_reentrant": False})
    _shard(scorer, fsdp, mesh)
    scorer.to_empty(device=mesh.device_type)
    scorer.backbone.tie()
    fill_from_rank_zero(scorer, source, mesh)
    return scorer


def _shard(scorer: TokenScorer[LossT], fsdp: FSDPConfig, mesh: DeviceMesh) -> None:
    policy = MixedPrecisionPolicy(param_dtype=DTYPES[fsdp.param_dtype], reduce_dtype=DTYPES[fsdp.reduce_dtype])
    for layer in scorer.backbone.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=fsdp.reshard_after_forward)
    exact = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)
    for module in scorer.float32_modules():
        fully_shard(module, mesh=mesh, mp_policy=exact, reshard_after_forward=False)
    fully_shard(scorer, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    for unit in sharded_modules(scorer):
        # Losses carry global denominators: gradients add up over ranks, they are not averaged.
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)


@torch.no_grad()
def fill_from_rank_zero(model: nn.Module, source: nn.Module | None, mesh: DeviceMesh) -> None:
    """Copies parameters and buffers of rank 0's ``source`` into the sharded ``model``, one at a time. Collective.

    Buffers come along even if no checkpoint holds them: rotary frequencies are undefined after ``to_empty``.
    """
    tensors = dict([*source.named_parameters(), *source.named_buffers()]) if source else {}
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        full = tensors[name] if source else torch.empty(parameter.shape, dtype=parameter.dtype)
        shard = distribute_tensor(full.to(mesh.device_type), mesh, parameter.placements)
        parameter.to_local().copy_(shard.to_local())
    for name, buffer in model.named_buffers():
        if source:
            buffer.copy_(tensors[name])
        dist.broadcast(buffer, group_src=0, group=mesh.get_group())


def sharded_modules(scorer: nn.Module) -> Iterator[FSDPModule]:
    """Every unit of sharding, the root first."""
    return (module for module in scorer.modules() if isinstance(module, FSDPModule))


def full_tensors(scorer: TokenScorer[LossT]) -> Iterator[tuple[str, torch.Tensor]]:
    """(Hugging Face name, full tensor) of the model's parameters, tied ones once; of a critic, of its backbone's.

    Collective: all ranks iterate to the end.
    """
    reshard(scorer)
    for name, parameter in scorer.backbone.hf_model.named_parameters():
        assert isinstance(parameter, DTensor)
        with torch.no_grad():
            yield name, parameter.full_tensor()


def reshard(scorer: nn.Module) -> None:
    """Frees what a forward pass without backward leaves gathered."""
    for module in sharded_modules(scorer):
        module.reshard()
