"""RayWorkerGroup: one driver's handle on many workers."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import ray
import torch
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from tensordict import TensorDictBase

from verl._protocol.waiting import gather
from verl.protocol import DataProto
from verl.single_controller.base import WorkerGroup
from verl.single_controller.base.environment import RankEnvironment
from verl.single_controller.base.network import free_port
from verl.single_controller.base.worker_group import GroupMethod
from verl.single_controller.ray.actor import AWAITED_WITH_ROWS, WITH_ROWS, RayClassWithInitArgs, start_actor
from verl.single_controller.ray.liveness import Watch
from verl.single_controller.ray.placement import Resources, Slot
from verl.single_controller.ray.resource_pool import RayResourcePool


class RayWorkerGroup(WorkerGroup):
    """One actor of a class in each place of a pool, in rank order; or actors that run already.

    Registered methods of the class are methods of the group. Actors start in the background:
    ``wait_ready``, or the first call, waits for them and raises what their constructors raised.
    """

    def __init__(
        self,
        resource_pool: RayResourcePool | None = None,
        ray_cls_with_init: RayClassWithInitArgs | None = None,
        bin_pack: bool = True,
        name_prefix: str | None = None,
        detached: bool = False,
        worker_names: Sequence[str] | None = None,
        worker_handles: Sequence[ActorHandle] | None = None,
        ray_wait_register_center_timeout: float | None = None,
        *,
        worker_env: Mapping[str, str] | None = None,
        device_name: str = "cuda",
    ) -> None:
        """``bin_pack``: each node's processes must be on one node. ``worker_names`` or
        ``worker_handles``: attach to these instead of starting any.
        ``ray_wait_register_center_timeout``: seconds that ``wait_ready`` waits, None for no limit.
        ``worker_env``: environment variables of the workers. ``device_name``: "cuda", or "cpu" for a
        pool without GPUs.

        Raises ValueError or TimeoutError where the pool has no room, see RayResourcePool.
        """
        super().__init__(resource_pool)
        if ray_cls_with_init is None:
            raise ValueError("a worker group needs the class of its workers")
        self.ray_cls_with_init = ray_cls_with_init
        self.name_prefix = secrets.token_hex(3) if name_prefix is None else name_prefix
        self._ready_timeout_s = ray_wait_register_center_timeout
        self._watch: Watch | None = None
        self._method_prefix = ""
        self._master: tuple[str, int] | None = None
        self._owns_workers = worker_names is None and worker_handles is None
        self.wg_dict: dict[str, RayWorkerGroup] = {}
        if not ray_cls_with_init.members:
            self._bind_worker_method(ray_cls_with_init.user_cls)
        if worker_names is None and worker_handles is None:
            if resource_pool is None:
                raise ValueError("a worker group needs a resource pool, or workers to attach to")
            resource_pool.check_device(device_name)
            self._start(resource_pool, "STRICT_PACK" if bin_pack else "PACK", detached, worker_env or {})
        else:
            self._worker_names = list(worker_names or [])
            self._workers = list(worker_handles or [ray.get_actor(name) for name in self._worker_names])

    def _start(self, pool: RayResourcePool, strategy: str, detached: bool, worker_env: Mapping[str, str]) -> None:
        cls_name = self.ray_cls_with_init.user_cls.__name__
        options = self.ray_cls_with_init.options(pool.share, worker_env)
        self._owner = f"{self.name_prefix}{cls_name}_{secrets.token_hex(3)}"
        share = Resources(float(options["num_cpus"] or 0), float(options["num_gpus"] or 0))
        slots = pool.claim(self._owner, share, strategy)
        environments = _environments(slots)
        self._master = environments[0].master_addr, environments[0].master_port
        nodes = list(dict.fromkeys(slot.node_id for slot in slots))
        self._worker_names = [
            f"{self.name_prefix}{cls_name}_{nodes.index(slot.node_id)}:{environment.local_rank}"
            for slot, environment in zip(slots, environments, strict=True)
        ]
        if detached:
            options["lifetime"] = "detached"
        actor_cls, init = self.ray_cls_with_init.actor_class(), self.ray_cls_with_init
        try:
            self._workers = [
                start_actor(actor_cls, slot, options | {"name": name}, environment, *init.args, **init.kwargs)
                for slot, environment, name in zip(slots, environments, self._worker_names, strict=True)
            ]
        except ValueError:  # a name is in use
            pool.release(self._owner)
            raise

    @classmethod
    def from_detached(
        cls,
        name_prefix: str | None = None,
        worker_names: Sequence[str] | None = None,
        worker_handles: Sequence[ActorHandle] | None = None,
        ray_cls_with_init: RayClassWithInitArgs | None = None,
    ) -> RayWorkerGroup:
        """A group of actors that run already, found by name or given. Raises ValueError for an unknown name."""
        return cls(
            ray_cls_with_init=ray_cls_with_init,
            name_prefix=name_prefix,
            worker_names=worker_names,
            worker_handles=worker_handles,
        )

    @property
    def workers(self) -> list[ActorHandle]:
        """The actors, in rank order."""
        return list(self._workers)

    @property
    def worker_names(self) -> list[str]:
        return list(self._worker_names)

    @property
    def world_size(self) -> int:
        return len(self._workers)

    @property
    def master_address(self) -> str:
        """The address at which the group's ranks meet."""
        return self._meeting_point()[0]

    @property
    def master_port(self) -> int:
        """The port at which the group's ranks meet."""
        return self._meeting_point()[1]

    def _meeting_point(self) -> tuple[str, int]:
        if self._master is None:
            address, port = self.execute_rank_zero_sync("get_master_addr_port")
            self._master = address, int(port)
        return self._master

    def wait_ready(self) -> None:
        """Waits until every worker's constructor is through; raises the first error of one.

        Raises TimeoutError naming the workers that are not, after ``ray_wait_register_center_timeout`` seconds.
        """
        refs = [worker.__ray_ready__.remote() for worker in self._workers]
        if self._ready_timeout_s is not None:
            self._refuse_late(refs, self._ready_timeout_s)
        self._gather(refs, "__init__")

    def _refuse_late(self, refs: Sequence[ray.ObjectRef], timeout_s: float) -> None:
        _, late = ray.wait(list(refs), num_returns=len(refs), timeout=timeout_s)
        if late:
            who = ", ".join(self._who(rank) for rank, ref in enumerate(refs) if ref in late)
            raise TimeoutError(f"not ready after {timeout_s:g} s: {who}")

    def start_worker_aliveness_check(self, every_n_seconds: float = 1) -> None:
        if self._watch is not None:
            self._watch.stop()
        self._watch = Watch(self._workers, every_n_seconds, self._who)

    def _raise_found(self) -> None:
        if self._watch is not None:
            self._watch.raise_failure()

    # Calling by name

    def execute_all_async(self, method_name: str, *args: Any, **kwargs: Any) -> list[ray.ObjectRef]:
        """Starts a method on every rank.

        Where every argument is a list with one element per rank, each rank gets its element;
        otherwise all get the arguments as they are.
        """
        self._raise_found()
        name = self._method_prefix + method_name
        dealt = self._deal(args, kwargs)
        return [_remote(worker, name, *of_rank) for worker, of_rank in zip(self._workers, dealt, strict=True)]

    def _deal(self, args: Sequence[Any], kwargs: dict[str, Any]) -> list[tuple[list[Any], dict[str, Any]]]:
        """Each rank's arguments; data that several ranks get is put into the object store once."""
        n = self.world_size
        values = (*args, *kwargs.values())
        if not values or not all(isinstance(value, list) and len(value) == n for value in values):
            args, kwargs = [[arg] * n for arg in args], {key: [value] * n for key, value in kwargs.items()}
        args, kwargs = [_shared(arg) for arg in args], {key: _shared(value) for key, value in kwargs.items()}
        return [([arg[rank] for arg in args], {key: value[rank] for key, value in kwargs.items()}) for rank in range(n)]

    def start_counted(self, method: GroupMethod, args: Any, kwargs: dict[str, Any]) -> tuple[list[Any], list[Any]]:
        self._raise_found()
        name = method.__name__
        if not all(WITH_ROWS in dir(worker) for worker in self._workers):
            return self.execute_all_async(name, *args, **kwargs), []
        counting = AWAITED_WITH_ROWS if method.is_coroutine else WITH_ROWS
        refs = [
            getattr(worker, counting)
            .options(num_returns=2, name=name)
            .remote(self._method_prefix + name, *of_rank, **named)
            for worker, (of_rank, named) in zip(self._workers, self._deal(args, kwargs), strict=True)
        ]
        return [output for output, _ in refs], [count for _, count in refs]

    def execute_all_sync(self, method_name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """The same, and waits for the outputs."""
        return self._gather(self.execute_all_async(method_name, *args, **kwargs), method_name)

    def execute_all(self, method_name: str, *args: Any, **kwargs: Any) -> list[ray.ObjectRef]:
        """Alias of execute_all_async."""
        return self.execute_all_async(method_name, *args, **kwargs)

    def execute_rank_zero_async(self, method_name: str, *args: Any, **kwargs: Any) -> ray.ObjectRef:
        """Starts a method on rank 0, with the arguments as they are."""
        self._raise_found()
        return _remote(self._workers[0], self._method_prefix + method_name, args, kwargs)

    def execute_rank_zero_sync(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        """The same, and waits for the output."""
        return self._gather([self.execute_rank_zero_async(method_name, *args, **kwargs)], method_name)[0]

    def execute_rank_zero(self, method_name: str, *args: Any, **kwargs: Any) -> ray.ObjectRef:
        """Alias of execute_rank_zero_async."""
        return self.execute_rank_zero_async(method_name, *args, **kwargs)

    def _gather(self, refs: Sequence[ray.ObjectRef], method_name: str) -> list[Any]:
        return gather(refs, lambda rank: f"raised by {method_name} on {self._who(rank)}")

    def _who(self, rank: int) -> str:
        name = f" ({self._worker_names[rank]})" if self._worker_names else ""
        return f"rank {rank} of {self.world_size}{name}"

    # Several classes in one process

    def spawn(self, prefix_set: Iterable[str]) -> dict[str, RayWorkerGroup]:
        """A group for each named class of a colocated worker, on the same processes."""
        return {prefix: self._member(prefix) for prefix in prefix_set}

    def spawn_fused(self, prefix_set: Iterable[str]) -> dict[str, RayWorkerGroup]:
        """Alias of spawn."""
        return self.spawn(prefix_set)

    def fuse(self, prefix_set: Iterable[str]) -> None:
        """Makes ``spawn``'s groups reachable as ``wg_dict[name]`` and as attributes of this group.

        Raises ValueError for a name of the group's own.
        """
        groups = self.spawn(prefix_set)
        taken = sorted(prefix for prefix in groups if prefix in dir(self) and prefix not in self.wg_dict)
        if taken:
            raise ValueError(
                f"classes fused into one process are called {taken}, which are the worker group's own names"
            )
        for prefix, group in groups.items():
            self.wg_dict[prefix] = group
            self.__dict__[prefix] = group

    def _member(self, name: str) -> RayWorkerGroup:
        members = self.ray_cls_with_init.members
        if name not in members:
            raise ValueError(f"no class {name!r} in this process; there are {sorted(members)}")
        member_cls = RayClassWithInitArgs(members[name])
        group = RayWorkerGroup(
            ray_cls_with_init=member_cls,
            name_prefix=self.name_prefix,
            worker_names=self._worker_names,
            worker_handles=self._workers,
        )
        group.resource_pool, group._master, group._method_prefix = self.resource_pool, self._master, f"{name}_"
        return group

    def shutdown(self) -> None:
        """Ends the actors this group started and gives its places back; the last group's frees the bundles."""
        if self._watch is not None:
            self._watch.stop()
        if not self._owns_workers:
            return
        for worker in self._workers:
            ray.kill(worker)
        assert isinstance(self.resource_pool, RayResourcePool)
        self.resource_pool.release(self._owner)
        self._owns_workers = False


def _remote(worker: ActorHandle, method_name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> ray.ObjectRef:
    return getattr(worker, method_name).remote(*args, **kwargs)


def _shared(values: list[Any]) -> list[Any]:
    """Data that several ranks get is put into the object store once."""
    counts = Counter(map(id, values))
    refs = {
        id(value): ray.put(value)
        for value in {id(value): value for value in values}.values()
        if counts[id(value)] > 1 and isinstance(value, DataProto | TensorDictBase | torch.Tensor | np.ndarray)
    }
    return [refs.get(id(value), value) for value in values]


def _environments(slots: Sequence[Slot]) -> list[RankEnvironment]:
    address, port = _rendezvous(slots[0])
    sizes = Counter(slot.node_id for slot in slots)
    seen: Counter[str] = Counter()
    environments = []
    for rank, slot in enumerate(slots):
        node = slot.node_id
        environments.append(RankEnvironment(rank, len(slots), seen[node], sizes[node], address, port))
        seen[node] += 1
    return environments


def _rendezvous(slot: Slot) -> tuple[str, int]:
    """The address of a slot's node and a port that is free there."""
    address = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}[slot.node_id]
    if slot.node_id == ray.get_runtime_context().get_node_id():
        return address, free_port()
    there = NodeAffinitySchedulingStrategy(node_id=slot.node_id, soft=False)
    ask = ray.remote(free_port).options(num_cpus=0, scheduling_strategy=there)
    return address, ray.get(ask.remote())
