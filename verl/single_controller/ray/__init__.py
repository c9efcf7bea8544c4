"""Worker groups on Ray."""

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
    "merge_resource_pool",
    "split_resource_pool",
]
