"""Dispatch and collect functions for a mapping of ranks to data parallel ranks that the caller knows.

With ``functools.partial`` over their first arguments they make a dispatch dictionary. Where the
workers know the mapping, :func:`make_nd_compute_dataproto_dispatch_fn` asks them for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from verl.single_controller.base.dispatch import (
    Dealt,
    collect_over_mesh,
    dispatch_over_mesh,
    join_outputs,
    named_arguments,
    split_rows,
)

if TYPE_CHECKING:
    from verl.single_controller.base.worker_group import WorkerGroup


def dispatch_nd_compute(
    dp_rank_mapping: Sequence[int], dp_size: int, worker_group: WorkerGroup, *args: Any, **kwargs: Any
) -> tuple[Any, dict[str, Any]]:
    """Every argument is a list with one element for each of ``dp_size`` data parallel ranks.

    Rank r gets element ``dp_rank_mapping[r]``. Raises ValueError naming what has another length.
    """
    _check_length("dp_rank_mapping", dp_rank_mapping, worker_group.world_size)
    for name, value in named_arguments(args, kwargs):
        if not isinstance(value, list | tuple) or len(value) != dp_size:
            given = f"{len(value)} elements" if isinstance(value, list | tuple) else type(value).__name__
            raise ValueError(
                f"{name} must be a list with one element for each of {dp_size} data parallel ranks, got {given}"
            )
    dealt = Dealt([value[dp_rank] for dp_rank in dp_rank_mapping] for value in args)
    return dealt, {key: [value[dp_rank] for dp_rank in dp_rank_mapping] for key, value in kwargs.items()}


def collect_nd_compute(collect_mask: Sequence[bool], worker_group: WorkerGroup, output: list[Any]) -> list[Any]:
    """The outputs of the ranks whose ``collect_mask`` is true, in rank order."""
    _check_length("collect_mask", collect_mask, worker_group.world_size)
    return [value for value, collects in zip(output, collect_mask, strict=True) if collects]


def dispatch_nd_compute_dataproto(
    dp_rank_mapping: Sequence[int], dp_size: int, worker_group: WorkerGroup, *args: Any, **kwargs: Any
) -> tuple[Any, dict[str, Any]]:
    """The rows of every DataProto (or future) are split over ``dp_size`` data parallel ranks.

    Raises ValueError for rows that need padding where dp ranks do not rise with the ranks: the
    added rows could not be found in outputs that are joined in rank order.
    """
    split, named = split_rows(dp_size, args, kwargs, None)
    if split.pad_size and list(dp_rank_mapping) != sorted(dp_rank_mapping):
        raise ValueError(
            f"{split.pad_size} rows would have to be added for {dp_size} data parallel ranks, which only works where "
            f"they rise with the ranks, not for {list(dp_rank_mapping)}; use make_nd_compute_dataproto_dispatch_fn"
        )
    dealt, kwargs = dispatch_nd_compute(dp_rank_mapping, dp_size, worker_group, *split, **named)
    dealt.pad_size = split.pad_size
    return dealt, kwargs


def collect_nd_compute_dataproto(collect_mask: Sequence[bool], worker_group: WorkerGroup, output: list[Any]) -> Any:
    """The concatenation, in rank order, of the outputs of the ranks whose ``collect_mask`` is true."""
    return join_outputs(collect_nd_compute(collect_mask, worker_group, output))


def dispatch_lazy_compute_data_proto(
    mesh_name: str, worker_group: WorkerGroup, *args: Any, **kwargs: Any
) -> tuple[Any, dict[str, Any]]:
    """Rows are split as the workers registered the mesh; they are asked at the first call."""
    return dispatch_over_mesh(mesh_name, None, worker_group, *args, **kwargs)


def collect_lazy_compute_data_proto(mesh_name: str, worker_group: WorkerGroup, output: list[Any]) -> Any:
    """The concatenation, in dp order, of the outputs of the ranks that collect in the mesh."""
    return collect_over_mesh(mesh_name, worker_group, output)


def _check_length(name: str, values: Sequence[Any], world_size: int) -> None:
    if len(values) != world_size:
        raise ValueError(f"{name} has {len(values)} elements for {world_size} ranks")
