"""How arguments are dealt to the ranks of a worker group and how their outputs are joined.

A dispatch function takes (worker group, *args, **kwargs) and returns (args, kwargs) in which every
value is a list with one element per rank, or, for all-to-all, whatever the caller gave. A collect
function takes (worker group, outputs in rank order). Equal list elements are sent once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import ray
import torch

from verl.protocol import DataProto, DataProtoConfig, DataProtoFuture, pad_dataproto_to_divisor

if TYPE_CHECKING:
    from verl.single_controller.base.worker_group import WorkerGroup

DispatchFn = Callable[..., tuple[Any, dict[str, Any]]]
CollectFn = Callable[..., Any]
Padding = Literal["repeat", "zero_weight", "ragged"]

WEIGHT_KEYS = ("response_mask", "loss_mask")
"""Tensor columns by which a row weighs in a loss; 0 everywhere takes the row out of it."""


class Dealt(tuple[Any, ...]):
    """Positional arguments as lists with one element per rank; so are the keyword arguments beside them.

    The last ``pad_size`` rows were added and must leave the output.
    """

    pad_size: int = 0


def dispatch_one_to_all(worker_group: WorkerGroup, *args: Any, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
    """Every rank gets the same arguments."""
    n = worker_group.world_size
    return Dealt([arg] * n for arg in args), {key: [value] * n for key, value in kwargs.items()}


def dispatch_all_to_all(worker_group: WorkerGroup, *args: Any, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
    """The caller has already dealt the arguments: lists with one element per rank."""
    return args, kwargs


def collect_all_to_all(worker_group: WorkerGroup, output: Any) -> Any:
    """The outputs as they are."""
    return output


def dispatch_rank_zero(worker_group: WorkerGroup, *args: Any, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
    """Only rank 0 gets the arguments, the other ranks None in their place."""
    rest = [None] * (worker_group.world_size - 1)
    return Dealt([arg, *rest] for arg in args), {key: [value, *rest] for key, value in kwargs.items()}


def collect_rank_zero(worker_group: WorkerGroup, output: Any) -> Any:
    """Rank 0's output."""
    return output[0] if isinstance(output, list) else output


def dispatch_dp_compute(worker_group: WorkerGroup, *args: Any, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
    """Every argument is a list or tuple with one element per rank. Raises ValueError otherwise."""
    n = worker_group.world_size
    for name, value in named_arguments(args, kwargs):
        if not isinstance(value, list | tuple) or len(value) != n:
            given = f"{len(value)} elements" if isinstance(value, list | tuple) else type(value).__name__
            raise ValueError(f"{name} must be a list with one element for each of {n} ranks, got {given}")
    return Dealt(map(list, args)), {key: list(value) for key, value in kwargs.items()}


def collect_dp_compute(worker_group: WorkerGroup, output: list[Any]) -> list[Any]:
    """One output per rank, in rank order."""
    assert len(output) == worker_group.world_size
    return output


def dispatch_dp_compute_data_proto(worker_group: WorkerGroup, *args: Any, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
    """Rows are split over the ranks."""
    return split_rows(worker_group.world_size, args, kwargs, None)


def dispatch_dp_compute_data_proto_with_func(
    worker_group: WorkerGroup, *args: Any, **kwargs: Any
) -> tuple[Any, dict[str, Any]]:
    """The first argument is a function and goes to every rank, the rows of the others are split."""
    if not args or not callable(args[0]):
        raise ValueError("the first argument must be a function")
    n = worker_group.world_size
    split, named = split_rows(n, args[1:], kwargs, None)
    with_func = Dealt(([args[0]] * n, *split))
    with_func.pad_size = split.pad_size
    return with_func, named


def collect_dp_compute_data_proto(worker_group: WorkerGroup, output: list[Any]) -> Any:
    """The concatenation of every rank's DataProto."""
    assert len(output) == worker_group.world_size
    return join_outputs(output)


def refuse_direct_call(worker_group: WorkerGroup, *args: Any, **kwargs: Any) -> NoReturn:
    """Such methods are called on the actor handles, not through the group."""
    raise NotImplementedError("this method is called on the workers themselves, not through the worker group")


def dispatch_over_mesh(
    mesh_name: str, padding: Padding | None, worker_group: WorkerGroup, *args: Any, **kwargs: Any
) -> tuple[Any, dict[str, Any]]:
    """Rows are split over the data parallel ranks of a mesh; ranks with the same dp rank share theirs."""
    mesh = worker_group.dispatch_mesh(mesh_name)
    split, named = split_rows(mesh.dp_size, args, kwargs, padding)
    dealt = Dealt([chunks[dp_rank] for dp_rank in mesh.dp_ranks] for chunks in split)
    dealt.pad_size = split.pad_size
    return dealt, {key: [chunks[dp_rank] for dp_rank in mesh.dp_ranks] for key, chunks in named.items()}


def collect_over_mesh(mesh_name: str, worker_group: WorkerGroup, output: list[Any]) -> Any:
    """The concatenation, in dp order, of the outputs of the ranks that collect."""
    mesh = worker_group.dispatch_mesh(mesh_name)
    return join_outputs([output[rank] for rank in mesh.collecting_ranks])


@dataclass(frozen=True)
class DispatchMesh:
    """Which rank computes which rows. ``dp_ranks[rank]``; ``collecting_ranks[dp_rank]``."""

    dp_ranks: tuple[int, ...]
    collecting_ranks: tuple[int, ...]

    @property
    def dp_size(self) -> int:
        return len(self.collecting_ranks)

    @classmethod
    def from_ranks(cls, mesh_name: str, dp_ranks: list[int], collects: list[bool]) -> DispatchMesh:
        """Raises ValueError unless the dp ranks are 0 … n - 1 and each is collected from exactly one rank."""
        dp_size = max(dp_ranks) + 1
        collecting: list[list[int]] = [[] for _ in range(dp_size)]
        for rank, (dp_rank, collect) in enumerate(zip(dp_ranks, collects, strict=True)):
            if collect:
                collecting[dp_rank].append(rank)
        if min(dp_ranks) < 0 or any(len(ranks) != 1 for ranks in collecting):
            raise ValueError(
                f"mesh {mesh_name!r}: each dp rank must be collected from one rank; "
                f"ranks 0… have dp ranks {dp_ranks} and collect {collects}"
            )
        return cls(tuple(dp_ranks), tuple(ranks[0] for ranks in collecting))


def join_outputs(outputs: list[Any]) -> Any:
    """DataProtos concatenated; references as a DataProtoFuture of the same; anything else as the list it is."""
    if all(isinstance(output, ray.ObjectRef) for output in outputs):
        return DataProtoFuture(join_outputs, outputs)
    if all(isinstance(output, DataProto) for output in outputs):
        return DataProto.concat(outputs)
    return outputs


def split_rows(
    parts: int, args: Iterable[Any], kwargs: dict[str, Any], padding: Padding | None
) -> tuple[Dealt, dict[str, Any]]:
    """Every DataProto (or future) in ``parts`` chunks."""
    args = tuple(args)
    pads = {_pad_size(parts, name, value, padding) for name, value in named_arguments(args, kwargs)} or {0}
    if len(pads) > 1:
        raise ValueError(f"arguments with different numbers of rows cannot be padded together for {parts} ranks")
    split = Dealt(_chunks(parts, value, padding) for value in args)
    split.pad_size = pads.pop()
    return split, {key: _chunks(parts, value, padding) for key, value in kwargs.items()}


def named_arguments(args: Iterable[Any], kwargs: dict[str, Any]) -> list[tuple[str, Any]]:
    return [*((f"argument {position}", value) for position, value in enumerate(args)), *kwargs.items()]


def _pad_size(parts: int, name: str, value: Any, padding: Padding | None) -> int:
    """Rows to add. Raises ValueError for what is no DataProto and for rows that do not divide."""
    if isinstance(value, DataProtoFuture):
        return 0
    if not isinstance(value, DataProto):
        raise ValueError(
            f"{name} must be a DataProto or DataProtoFuture to be split by rows, got {type(value).__name__}"
        )
    if len(value) % parts == 0 or padding == "ragged":
        return 0
    if padding is None and not value.is_padding_enabled():
        raise ValueError(
            f"{name} has {len(value)} rows, which do not divide among {parts} data parallel ranks: "
            "pad it, switch automatic padding on, or register the method with padding='ragged'"
        )
    return -len(value) % parts


def _chunks(parts: int, value: DataProto | DataProtoFuture, padding: Padding | None) -> list[Any]:
    if isinstance(value, DataProtoFuture):
        return list(value.chunk(parts, ragged=padding is not None or DataProtoConfig.auto_padding))
    if padding == "ragged" or len(value) % parts == 0:
        return list(value.chunk(parts, ragged=True))
    padded, pad_size = pad_dataproto_to_divisor(value, parts)
    if padding != "repeat":
        _clear_weights(padded, pad_size, required=padding == "zero_weight")
    return list(padded.chunk(parts))


def _clear_weights(padded: DataProto, pad_size: int, required: bool) -> None:
    """Sets the weights of the added rows to 0, so that they add nothing to a loss."""
    batch = padded.batch
    keys = [key for key in WEIGHT_KEYS if batch is not None and key in batch.keys()]  # noqa: SIM118
    if required and not keys:
        raise ValueError(f"rows of no weight need one of the columns {list(WEIGHT_KEYS)}")
    for key in keys:
        assert batch is not None
        weights: torch.Tensor = batch[key]
        weights[len(padded) - pad_size :] = 0


def nd_compute_fns(mesh_name: str, padding: Padding | None) -> tuple[DispatchFn, CollectFn]:
    """The dispatch and collect functions of a mesh."""
    return (
        partial(dispatch_over_mesh, mesh_name, padding),
        partial(collect_over_mesh, mesh_name),
    )
