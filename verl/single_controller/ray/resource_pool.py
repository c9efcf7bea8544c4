"""Pools of processes on a Ray cluster."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from ray.util.placement_group import PlacementGroup

from verl.single_controller.base import ResourcePool
from verl.single_controller.ray.placement import Bundles, Resources, Slot, place

RoleT = TypeVar("RoleT", bound=Hashable)


@dataclass(frozen=True)
class Place:
    """One rank's slot in a reservation."""

    bundles: Bundles
    position: int

    @property
    def slot(self) -> Slot:
        return self.bundles.slots[self.position]


class RayResourcePool(ResourcePool):
    """``process_on_nodes[i]`` processes on one node, for each i.

    Each process has a bundle of ``cpus_per_bundle`` CPUs and, with ``use_gpu``, one GPU. Up to
    ``max_colocate_count`` worker groups share the bundles: each worker gets that fraction of a
    bundle unless its class asks for its own ``num_cpus`` or ``num_gpus``. The bundles are reserved
    by the first worker group, which waits at most ``timeout_s`` seconds for them, and freed with
    the last one. ``accelerator_type``: only nodes with a custom Ray resource of that name.
    """

    def __init__(
        self,
        process_on_nodes: Sequence[int] | None = None,
        use_gpu: bool = True,
        name_prefix: str | None = None,
        max_colocate_count: int = 10,
        detached: bool = False,
        accelerator_type: str | None = None,
        cpus_per_bundle: float = 1.0,
        timeout_s: float = 120.0,
    ) -> None:
        super().__init__(process_on_nodes, max_colocate_count)
        if cpus_per_bundle <= 0:
            raise ValueError(f"cpus_per_bundle must be positive, got {cpus_per_bundle}")
        self.use_gpu = use_gpu
        self.name_prefix = name_prefix or ""
        self.detached = detached
        self.accelerator_type = accelerator_type
        self.cpus_per_bundle = cpus_per_bundle
        self.timeout_s = timeout_s
        self._reservation: Bundles | None = None

    @property
    def share(self) -> Resources:
        """What one worker of one of ``max_colocate_count`` groups gets."""
        gpus = 1.0 if self.use_gpu else 0.0
        return Resources(
            _fraction(self.cpus_per_bundle, self.max_colocate_count), _fraction(gpus, self.max_colocate_count)
        )

    def check_device(self, device_name: str) -> None:
        """Raises ValueError for a kind of device on which this pool's workers cannot run."""
        if device_name not in ("cuda", "cpu"):
            raise ValueError(f"device_name must be 'cuda' or 'cpu', got {device_name!r}")
        if device_name == "cpu" and self.use_gpu:
            raise ValueError("device_name is 'cpu' for a pool that asks for GPUs; make it with use_gpu=False")

    def get_placement_groups(
        self, strategy: str = "STRICT_PACK", name: str | None = None, device_name: str = "cuda"
    ) -> list[PlacementGroup]:
        """The placement groups, one a node; reserves them where that has not been done.

        ``device_name``: "cuda" (GPUs where the pool has ``use_gpu``) or "cpu" (a pool without).

        Raises ValueError at once when the cluster could never hold them and TimeoutError when they
        do not come free in time, both with what is asked and what is there.
        """
        self.check_device(device_name)
        places = self.places(strategy, name)
        return list({place.slot.placement_group.id: place.slot.placement_group for place in places}.values())

    def places(self, strategy: str = "STRICT_PACK", name: str | None = None) -> list[Place]:
        """Every rank's place, in rank order."""
        if self._reservation is None or self._reservation.removed:
            if not self._store:
                raise ValueError("a pool without processes cannot be placed")
            name = name or f"{self.name_prefix}verl_group_{'_'.join(map(str, self._store))}:"
            size = Resources(self.cpus_per_bundle, 1.0 if self.use_gpu else 0.0)
            lifetime = "detached" if self.detached else None
            self._reservation = place(
                self._store, size, strategy, name, lifetime, self.timeout_s, self.accelerator_type
            )
        return [Place(self._reservation, position) for position in range(self.world_size)]

    def claim(self, owner: str, share: Resources, strategy: str) -> list[Slot]:
        """Takes a share of every rank's bundle. Raises ValueError where less is left, see :meth:`places` too."""
        places = self.places(strategy)
        reservations = _reservations(places)
        try:
            for bundles in reservations:
                bundles.claim(owner, [place.position for place in places if place.bundles is bundles], share)
        except ValueError:
            for bundles in reservations:
                bundles.release(owner)
            raise
        return [place.slot for place in places]

    def release(self, owner: str) -> None:
        """Gives the shares back; bundles of which none is held any more are freed."""
        for bundles in self._current_reservations():
            bundles.release(owner)

    def _current_reservations(self) -> list[Bundles]:
        return [] if self._reservation is None else [self._reservation]


class SubRayResourcePool(RayResourcePool):
    """Consecutive ranks of another pool; the bundles are that pool's."""

    def __init__(self, parent: RayResourcePool, start_bundle_index: int, subgroup_world_size: int) -> None:
        end = start_bundle_index + subgroup_world_size
        if not 0 <= start_bundle_index < end <= parent.world_size:
            raise ValueError(f"bundles {start_bundle_index}:{end} are not in a pool of {parent.world_size}")
        super().__init__([subgroup_world_size], **_settings(parent))
        self._parent = parent
        self.start_bundle_index = start_bundle_index

    def places(self, strategy: str = "STRICT_PACK", name: str | None = None) -> list[Place]:
        start = self.start_bundle_index
        return self._parent.places(strategy, name)[start : start + self.world_size]

    def _current_reservations(self) -> list[Bundles]:
        return self._parent._current_reservations()


class _MergedRayResourcePool(RayResourcePool):
    """The ranks of one pool after those of another."""

    def __init__(self, first: RayResourcePool, second: RayResourcePool) -> None:
        super().__init__(first.store + second.store, **_settings(first))
        self._parts = first, second

    def places(self, strategy: str = "STRICT_PACK", name: str | None = None) -> list[Place]:
        return [place for part in self._parts for place in part.places(strategy, name)]

    def _current_reservations(self) -> list[Bundles]:
        return [bundles for part in self._parts for bundles in part._current_reservations()]


def split_resource_pool(resource_pool: RayResourcePool, split_size: int | Sequence[int]) -> list[SubRayResourcePool]:
    """Pools of ``split_size`` consecutive ranks each, or of the sizes listed.

    Raises ValueError where the sizes do not add up to the pool.
    """
    world_size = resource_pool.world_size
    sizes = [split_size] * (world_size // max(split_size, 1)) if isinstance(split_size, int) else list(split_size)
    if sum(sizes) != world_size or any(size < 1 for size in sizes):
        raise ValueError(f"a pool of {world_size} processes does not split into {split_size}")
    starts = [sum(sizes[:position]) for position in range(len(sizes))]
    return [SubRayResourcePool(resource_pool, start, size) for start, size in zip(starts, sizes, strict=True)]


def merge_resource_pool(rp1: RayResourcePool, rp2: RayResourcePool) -> RayResourcePool:
    """A pool of both pools' ranks. Raises ValueError naming the setting in which they differ."""
    first, second = _settings(rp1), _settings(rp2)
    differing = {key: (first[key], second[key]) for key in first if first[key] != second[key] and key != "name_prefix"}
    if differing:
        raise ValueError(f"pools with different settings cannot be merged: {differing}")
    return _MergedRayResourcePool(rp1, rp2)


class ResourcePoolManager(Generic[RoleT]):
    """Pools by name, and roles mapped to them.

    ``resource_pool_spec``: processes on each node, by pool. ``mapping``: pool, by role.
    ``max_colocate_count`` and ``pool_options`` go to every pool.
    """

    def __init__(
        self,
        resource_pool_spec: Mapping[str, Sequence[int]],
        mapping: Mapping[RoleT, str],
        max_colocate_count: int = 3,
        **pool_options: object,
    ) -> None:
        unknown = sorted(set(mapping.values()) - set(resource_pool_spec))
        if unknown:
            raise ValueError(f"roles are mapped to pools {unknown}; there are {sorted(resource_pool_spec)}")
        self.resource_pool_spec = dict(resource_pool_spec)
        self.mapping = dict(mapping)
        self.max_colocate_count = max_colocate_count
        self._pool_options = pool_options
        self.resource_pool_dict: dict[str, RayResourcePool] = {}

    def create_resource_pool(self) -> None:
        """Makes the pools; their bundles are reserved by their first worker group."""
        for name, counts in self.resource_pool_spec.items():
            options: dict = {"max_colocate_count": self.max_colocate_count, "name_prefix": name}
            self.resource_pool_dict[name] = RayResourcePool(counts, **options | self._pool_options)

    def get_resource_pool(self, role: RoleT) -> RayResourcePool:
        """The pool of a role. Raises ValueError for a role without one."""
        if role not in self.mapping:
            raise ValueError(f"role {role} has no pool; the mapping has {list(self.mapping)}")
        return self.resource_pool_dict[self.mapping[role]]

    def get_n_gpus(self) -> int:
        """Processes of all pools."""
        return sum(sum(counts) for counts in self.resource_pool_spec.values())


def _settings(pool: RayResourcePool) -> dict:
    return {
        "use_gpu": pool.use_gpu,
        "name_prefix": pool.name_prefix,
        "max_colocate_count": pool.max_colocate_count,
        "detached": pool.detached,
        "accelerator_type": pool.accelerator_type,
        "cpus_per_bundle": pool.cpus_per_bundle,
        "timeout_s": pool.timeout_s,
    }


def _reservations(places: Sequence[Place]) -> list[Bundles]:
    return list({id(place.bundles): place.bundles for place in places}.values())


def _fraction(amount: float, parts: int) -> float:
    """A share that Ray can express (multiples of 0.0001), rounded down so that all of them fit."""
    return math.floor(amount / parts * 1e4 + 1e-9) / 1e4
