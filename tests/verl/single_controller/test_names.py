"""The names and argument orders that scripts written for verl 0.9.1 use."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import pytest

from verl.single_controller.base import ClassWithInitArgs, ResourcePool, Worker, WorkerGroup
from verl.single_controller.base import decorator as d
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup, ResourcePoolManager
from verl.single_controller.ray.base import func_generator, merge_resource_pool, split_resource_pool

MODES = ["RANK_ZERO", "ONE_TO_ALL", "ALL_TO_ALL", "DP_COMPUTE", "DP_COMPUTE_PROTO", "DP_COMPUTE_PROTO_WITH_FUNC"]
MODES += ["DP_COMPUTE_METRIC", "DIRECT_ROLLOUT_METHOD"]

RAY_NAMES = "RayClassWithInitArgs RayResourcePool SubRayResourcePool RayWorkerGroup ResourcePoolManager "
RAY_NAMES += "create_colocated_worker_cls create_colocated_worker_cls_fused"

NAMES = {
    "verl.single_controller": "Worker WorkerGroup ClassWithInitArgs ResourcePool",
    "verl.single_controller.base": "Worker WorkerGroup ClassWithInitArgs ResourcePool",
    "verl.single_controller.base.worker": "Worker",
    "verl.single_controller.base.worker_group": "WorkerGroup ClassWithInitArgs ResourcePool",
    "verl.single_controller.ray": RAY_NAMES + " split_resource_pool merge_resource_pool",
    "verl.single_controller.ray.base": RAY_NAMES + " split_resource_pool merge_resource_pool func_generator",
}


@pytest.mark.parametrize("module", NAMES)
def test_modules_offer_their_names(module: str) -> None:
    offered = importlib.import_module(module)
    assert [name for name in NAMES[module].split() if name not in dir(offered)] == []


POSITIONAL: list[tuple[Callable[..., Any], str]] = [
    (d.register, "dispatch_mode execute_mode blocking materialize_futures"),
    (d.register_dispatch_mode, "dispatch_mode_name dispatch_fn collect_fn"),
    (d.update_dispatch_mode, "dispatch_mode dispatch_fn collect_fn"),
    (d.get_predefined_dispatch_fn, "dispatch_mode"),
    (d.get_predefined_execute_fn, "execute_mode"),
    (d.make_nd_compute_dataproto_dispatch_fn, "mesh_name"),
    (d.dispatch_one_to_all, "worker_group"),
    (d.dispatch_all_to_all, "worker_group"),
    (d.dispatch_dp_compute, "worker_group"),
    (d.dispatch_dp_compute_data_proto, "worker_group"),
    (d.dispatch_dp_compute_data_proto_with_func, "worker_group"),
    (d.dispatch_nd_compute, "dp_rank_mapping dp_size worker_group"),
    (d.dispatch_nd_compute_dataproto, "dp_rank_mapping dp_size worker_group"),
    (d.dispatch_lazy_compute_data_proto, "mesh_name worker_group"),
    (d.collect_all_to_all, "worker_group output"),
    (d.collect_dp_compute, "worker_group output"),
    (d.collect_dp_compute_data_proto, "worker_group output"),
    (d.collect_nd_compute, "collect_mask worker_group output"),
    (d.collect_nd_compute_dataproto, "collect_mask worker_group output"),
    (d.collect_lazy_compute_data_proto, "mesh_name worker_group"),
    (ResourcePool, "process_on_nodes max_colocate_count"),
    (ClassWithInitArgs, "cls"),
    (RayClassWithInitArgs, "cls"),
    (Worker, "cuda_visible_devices"),
    (Worker._register_dispatch_collect_info, "self mesh_name dp_rank is_collect"),
    (Worker.set_dispatch_collect, "self mesh_name dispatch_dp_rank collect_dp_rank"),
    (Worker.execute_with_func_generator, "self func"),
    (Worker.execute_func_rank_zero, "self func"),
    (WorkerGroup.start_worker_aliveness_check, "self every_n_seconds"),
    (RayResourcePool, "process_on_nodes use_gpu name_prefix max_colocate_count detached accelerator_type"),
    (RayResourcePool.get_placement_groups, "self strategy name device_name"),
    (ResourcePoolManager, "resource_pool_spec mapping max_colocate_count"),
    (split_resource_pool, "resource_pool split_size"),
    (merge_resource_pool, "rp1 rp2"),
    (
        RayWorkerGroup,
        "resource_pool ray_cls_with_init bin_pack name_prefix detached worker_names worker_handles "
        "ray_wait_register_center_timeout",
    ),
    (RayWorkerGroup.from_detached, "name_prefix worker_names worker_handles ray_cls_with_init"),
    (RayWorkerGroup.spawn, "self prefix_set"),
    (RayWorkerGroup.spawn_fused, "self prefix_set"),
    (RayWorkerGroup.fuse, "self prefix_set"),
    *(
        (getattr(RayWorkerGroup, f"execute_{which}{how}"), "self method_name")
        for which in ("all", "rank_zero")
        for how in ("", "_sync", "_async")
    ),
    (func_generator, "self method_name dispatch_fn collect_fn execute_fn blocking"),
]


@pytest.mark.parametrize(("function", "names"), POSITIONAL, ids=lambda value: getattr(value, "__qualname__", ""))
def test_arguments_keep_their_names_and_order(function: Callable[..., Any], names: str) -> None:
    parameters = inspect.signature(function).parameters.values()
    named = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert named[: len(names.split())] == names.split()


def test_defaults_of_register() -> None:
    registration = d.register()(Worker.get_master_addr_port).__dict__[d.MAGIC_ATTR]
    assert registration == d.Registration(d.Dispatch.ALL_TO_ALL, d.Execute.ALL, True, True)


@pytest.mark.parametrize("name", MODES)
def test_dispatch_has_the_mode(name: str) -> None:
    mode = getattr(d.Dispatch, name)
    assert (mode.name, d.Dispatch[name]) == (name, mode)
    assert set(d.get_predefined_dispatch_fn(mode)) == {"dispatch_fn", "collect_fn"}


def test_execute_modes_name_the_groups_methods() -> None:
    assert d.get_predefined_execute_fn(d.Execute.ALL) == {"execute_fn_name": "execute_all"}
    assert d.get_predefined_execute_fn(d.Execute.RANK_ZERO) == {"execute_fn_name": "execute_rank_zero"}
    with pytest.raises(ValueError, match=r"must be Execute.ALL or Execute.RANK_ZERO, got 'ALL'"):
        d.get_predefined_execute_fn("ALL")  # type: ignore[arg-type]


def test_the_place_of_a_worker_has_names() -> None:
    assert {"WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"} <= set(Worker.env_keys())


def test_cuda_visible_devices_may_be_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert Worker().get_cuda_visible_devices() == "0"
    assert Worker("3").get_cuda_visible_devices() == "3"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert Worker().get_cuda_visible_devices() == "not set"


def test_a_wrapping_worker_takes_over_a_mesh() -> None:
    inner, outer = Worker(), Worker()
    inner._register_dispatch_collect_info("actor", dp_rank=3, is_collect=True)
    outer.set_dispatch_collect("actor", **inner.get_dispatch_collect())
    assert outer.query_collect_info("actor") is True
    assert (outer._query_dispatch_info("actor"), outer._query_collect_info("actor")) == (3, True)
    assert outer._query_mesh("actor") == (3, True)
    with pytest.raises(ValueError, match="mesh 'actor' is registered already"):
        outer.set_dispatch_collect("actor", **inner.get_dispatch_collect())
    with pytest.raises(ValueError, match=r"mesh 'critic' is not registered; there are \['actor'\]"):
        outer.set_dispatch_collect("critic", **inner.get_dispatch_collect())
    with pytest.raises(ValueError, match=r"mesh 'critic' is not registered; there are \['actor'\]"):
        outer.query_collect_info("critic")
