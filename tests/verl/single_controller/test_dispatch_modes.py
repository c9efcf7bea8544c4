"""Every mode with named and positional arguments, blocking or not, and modes of one's own."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import ray
import torch

from verl.protocol import DataProto, DataProtoFuture
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import (
    Dispatch,
    Execute,
    collect_all_to_all,
    collect_nd_compute,
    collect_nd_compute_dataproto,
    dispatch_nd_compute,
    dispatch_nd_compute_dataproto,
    make_nd_compute_dataproto_dispatch_fn,
    register,
    register_dispatch_mode,
    update_dispatch_mode,
)
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.single_controller.ray.base import func_generator

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

DP_RANKS, COLLECTS = [1, 1, 0], [False, True, True]


def deal_backwards(worker_group: RayWorkerGroup, values: list, *, scale: int = 1) -> tuple[tuple, dict]:
    return (values[::-1],), {"scale": [scale] * worker_group.world_size}


def deal_forwards(worker_group: RayWorkerGroup, values: list, *, scale: int = 1) -> tuple[tuple, dict]:
    return (values,), {"scale": [scale] * worker_group.world_size}


register_dispatch_mode("backwards", deal_backwards, collect_all_to_all)
register_dispatch_mode("changed", deal_backwards, collect_all_to_all)


class ModesWorker(Worker):
    """Three ranks; ranks 0 and 1 share dp rank 1, of which rank 1 collects."""

    def __init__(self) -> None:
        super().__init__()
        self._register_dispatch_collect_info("m", DP_RANKS[self.rank], COLLECTS[self.rank])

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def one_to_all(self, a: int, b: int) -> tuple[int, int, int]:
        return self.rank, a, b

    @register(dispatch_mode=Dispatch.ALL_TO_ALL, blocking=False)
    def all_to_all(self, a: Any, b: Any) -> tuple[int, Any, Any]:
        return self.rank, a, b

    @register(dispatch_mode=Dispatch.RANK_ZERO, blocking=False)
    def rank_zero(self, a: int, b: int) -> tuple[int, int, int]:
        return self.rank, a, b

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, execute_mode=Execute.RANK_ZERO, blocking=False)
    def on_rank_zero(self, a: int, b: int) -> tuple[int, int, int]:
        return self.rank, a, b

    @register(dispatch_mode=Dispatch.DP_COMPUTE, blocking=False)
    def dp_compute(self, a: int, b: int) -> tuple[int, int, int]:
        return self.rank, a, b

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def proto(self, data: DataProto, other: DataProto) -> DataProto:
        return DataProto.from_dict({"x": data.batch["x"] + 10 * other.batch["x"]})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC, blocking=False)
    def metric(self, data: DataProto, other: DataProto) -> int:
        return int((data.batch["x"] + other.batch["x"]).sum())

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO_WITH_FUNC, blocking=False)
    def with_func(self, function: Any, data: DataProto) -> DataProto:
        return function(self.rank, data)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def rows_and_weights(self, data: DataProto) -> tuple[list[int], list[float]]:
        return data.batch["x"].tolist(), data.batch["response_mask"].sum(dim=1).tolist()

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("m"), blocking=False)
    def nd(self, data: DataProto) -> DataProto:
        return DataProto.from_dict({"x": data.batch["x"] + 100 * self.rank})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, materialize_futures=False)
    def kind(self, value: Any, other: Any = None) -> tuple[str, str]:
        return type(value).__name__, type(other).__name__

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, materialize_futures=False)
    def fetched_later(self, value: Any) -> list[int]:
        return value.get().batch["x"].tolist()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def fetched_before(self, value: Any, other: Any = None) -> tuple[str, str]:
        return type(value).__name__, type(other).__name__

    @register(dispatch_mode=Dispatch.BACKWARDS)
    def backwards(self, value: int, scale: int) -> int:
        return value * scale

    @register(dispatch_mode=Dispatch.CHANGED)
    def changed(self, value: int, scale: int) -> int:
        return value * scale

    @register(
        dispatch_mode={
            "dispatch_fn": functools.partial(dispatch_nd_compute, DP_RANKS, 2),
            "collect_fn": functools.partial(collect_nd_compute, COLLECTS),
        }
    )
    def by_mapping(self, value: str, other: str = "") -> str:
        return f"{self.rank}{value}{other}"

    @register(
        dispatch_mode={
            "dispatch_fn": functools.partial(dispatch_nd_compute_dataproto, DP_RANKS, 2),
            "collect_fn": functools.partial(collect_nd_compute_dataproto, COLLECTS),
        }
    )
    def rows_by_mapping(self, data: DataProto) -> DataProto:
        return DataProto.from_dict({"x": data.batch["x"] + 100 * self.rank})


def rows(n: int, **options: Any) -> DataProto:
    return DataProto.from_dict({"x": torch.arange(n), "response_mask": torch.ones(n, 2)}, **options)


@pytest.fixture(scope="module")
def trio(ray_session: None) -> Iterator[RayWorkerGroup]:
    pool = RayResourcePool([3], use_gpu=False, max_colocate_count=2, cpus_per_bundle=0.25)
    group = RayWorkerGroup(pool, RayClassWithInitArgs(ModesWorker), worker_env={"FLAVOUR": "mint"}, device_name="cpu")
    yield group
    group.shutdown()


def test_not_blocking_with_named_arguments(trio: RayWorkerGroup) -> None:
    assert ray.get(trio.one_to_all(1, b=2)) == [(0, 1, 2), (1, 1, 2), (2, 1, 2)]
    assert ray.get(trio.all_to_all([1, 2, 3], b=[4, 5, 6])) == [(0, 1, 4), (1, 2, 5), (2, 3, 6)]
    assert ray.get(trio.all_to_all([1, 2, 3], b="x")) == [(rank, [1, 2, 3], "x") for rank in range(3)]
    assert ray.get(trio.rank_zero(1, b=2)) == (0, 1, 2)
    assert ray.get(trio.on_rank_zero(a=1, b=2)) == (0, 1, 2)
    assert ray.get(trio.dp_compute(a=[1, 2, 3], b=(4, 5, 6))) == [(0, 1, 4), (1, 2, 5), (2, 3, 6)]
    assert ray.get(trio.metric(rows(6), other=rows(6))) == [2, 10, 18]


def test_not_blocking_modes_that_join_rows_give_futures(trio: RayWorkerGroup) -> None:
    proto = trio.proto(rows(3), other=rows(3))
    with_func = trio.with_func(lambda rank, data: data[:rank], data=rows(6))
    mesh = trio.nd(data=rows(4))
    assert {type(future) for future in (proto, with_func, mesh)} == {DataProtoFuture}
    assert proto.get().batch["x"].tolist() == [0, 11, 22]
    assert with_func.get().batch["x"].tolist() == [2, 4, 5]
    assert mesh.get().batch["x"].tolist() == [200, 201, 102, 103]
    assert trio.nd(mesh).get().batch["x"].tolist() == [400, 401, 202, 203]
    with pytest.raises(ValueError, match="the first argument must be a function"):
        trio.with_func(rows(3), rows(3))


def test_automatic_padding_of_a_future_of_rows(trio: RayWorkerGroup) -> None:
    padded = trio.proto(rows(4, auto_padding=True), rows(4, auto_padding=True))
    assert padded.get().batch["x"].tolist() == [0, 11, 22, 33]


def test_rows_added_to_metrics_weigh_nothing(trio: RayWorkerGroup) -> None:
    dealt = trio.rows_and_weights(rows(4, auto_padding=True))
    assert dealt == [([0, 1], [2, 2]), ([2, 3], [2, 2]), ([0, 1], [0, 0])]


def test_futures_are_materialised_unless_the_method_declines(trio: RayWorkerGroup) -> None:
    future = trio.nd(rows(4))
    assert trio.fetched_before(future, other=future) == [("DataProto", "DataProto")] * 3
    assert trio.kind(future, other=future) == [("DataProtoFuture", "DataProtoFuture")] * 3
    assert trio.fetched_later(future) == [[200, 201, 102, 103]] * 3


def test_modes_of_ones_own_have_names_and_change_for_later_groups(trio: RayWorkerGroup) -> None:
    assert trio.backwards([1, 2, 3], scale=10) == [30, 20, 10]
    assert trio.changed([1, 2, 3]) == [3, 2, 1]
    update_dispatch_mode(Dispatch.CHANGED, deal_forwards, collect_all_to_all)
    assert trio.changed([1, 2, 3]) == [3, 2, 1]
    later = RayWorkerGroup.from_detached(
        worker_handles=trio.workers, ray_cls_with_init=RayClassWithInitArgs(ModesWorker)
    )
    assert later.changed([1, 2, 3]) == [1, 2, 3]


def test_a_mapping_of_ranks_that_the_caller_knows(trio: RayWorkerGroup) -> None:
    assert trio.by_mapping(["a", "b"], other=["x", "y"]) == ["1by", "2ax"]
    assert trio.rows_by_mapping(rows(4)).batch["x"].tolist() == [102, 103, 200, 201]
    with pytest.raises(ValueError, match=r"1 rows would have to be added .* not for \[1, 1, 0\]"):
        trio.rows_by_mapping(rows(3, auto_padding=True))
    dealt, _ = dispatch_nd_compute_dataproto([0, 1, 1], 2, trio, rows(3, auto_padding=True))
    assert [part.batch["x"].tolist() for part in dealt[0]] == [[0, 1], [2, 0], [2, 0]]
    assert dealt.pad_size == 1
    with pytest.raises(ValueError, match=r"argument 0 must be a list .* for each of 2 data parallel ranks, got 3 elem"):
        trio.by_mapping([1, 2, 3])
    with pytest.raises(ValueError, match="dp_rank_mapping has 1 elements for 3 ranks"):
        dispatch_nd_compute([0], 1, trio, [1])
    with pytest.raises(ValueError, match="collect_mask has 2 elements for 3 ranks"):
        collect_nd_compute([True, False], trio, [1, 2, 3])


def test_a_function_of_ones_own_that_calls_a_group(trio: RayWorkerGroup) -> None:
    forwards = func_generator(trio, "backwards", deal_forwards, collect_all_to_all, trio.execute_all, True)
    assert forwards([1, 2, 3], scale=10) == [10, 20, 30]
    later = func_generator(trio, "backwards", deal_forwards, collect_all_to_all, trio.execute_all, False)
    assert ray.get(later([1, 2, 3], scale=10)) == [10, 20, 30]


def test_the_groups_environment_reaches_its_workers(trio: RayWorkerGroup) -> None:
    assert trio.execute_func_rank_zero(os.getenv, "FLAVOUR") == "mint"
    with pytest.raises(ValueError, match="device_name is 'cpu' for a pool that asks for GPUs"):
        RayWorkerGroup(RayResourcePool([1]), RayClassWithInitArgs(ModesWorker), device_name="cpu")
    with pytest.raises(ValueError, match="device_name must be 'cuda' or 'cpu', got 'npu'"):
        RayResourcePool([1]).get_placement_groups(device_name="npu")
