"""The names of this package under the module path by which scripts of verl import them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ray

from verl.single_controller.base import WorkerGroup
from verl.single_controller.base.dispatch import CollectFn, Dealt, DispatchFn
from verl.single_controller.base.worker_group import unpadded
from verl.single_controller.ray.actor import RayClassWithInitArgs
from verl.single_controller.ray.colocation import create_colocated_worker_cls, create_colocated_worker_cls_fused
from verl.single_controller.ray.resource_pool import (
    RayResourcePool,
    ResourcePoolManager,
    SubRayResourcePool,
    merge_resource_pool,
    split_resource_pool,
)
from verl.single_controller.ray.worker_group import RayWorkerGroup

__all__ = [
    "RayClassWithInitArgs",
    "RayResourcePool",
    "RayWorkerGroup",
    "ResourcePoolManager",
    "SubRayResourcePool",
    "create_colocated_worker_cls",
    "create_colocated_worker_cls_fused",
    "func_generator",
    "merge_resource_pool",
    "split_resource_pool",
]


def func_generator(
    self: WorkerGroup,
    method_name: str,
    dispatch_fn: DispatchFn,
    collect_fn: CollectFn,
    execute_fn: Callable[..., Any],
    blocking: bool,
) -> Callable[..., Any]:
    """A function that calls ``method_name`` through group ``self``: dispatch, execute, collect.

    ``execute_fn(method_name, *args, **kwargs)`` returns references; ``blocking`` waits for them.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        dealt, named = dispatch_fn(self, *args, **kwargs)
        output = execute_fn(method_name, *dealt, **named)
        output = collect_fn(self, ray.get(output) if blocking else output)
        return unpadded(output, dealt.pad_size) if isinstance(dealt, Dealt) and dealt.pad_size else output

    return call
