"""ResourcePool, ClassWithInitArgs and WorkerGroup: what does not depend on Ray."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from verl.protocol import DataProto, DataProtoFuture, unpad_dataproto
from verl.single_controller.base.decorator import Execute, Registration, registered_methods
from verl.single_controller.base.dispatch import DispatchMesh, PaddedArgs


class ResourcePool:
    """Numbers of processes by node."""

    def __init__(self, process_on_nodes: Sequence[int] | None = None, max_colocate_count: int = 10) -> None:
        self._store = list(process_on_nodes or [])
        if any(count < 1 for count in self._store):
            raise ValueError(f"every node of a pool runs at least one process, got {self._store}")
        if max_colocate_count < 1:
            raise ValueError(f"max_colocate_count must be at least 1, got {max_colocate_count}")
        self.max_colocate_count = max_colocate_count

    def add_node(self, process_count: int) -> None:
        """One more node."""
        if process_count < 1:
            raise ValueError(f"a node runs at least one process, got {process_count}")
        self._store.append(process_count)

    @property
    def store(self) -> list[int]:
        return list(self._store)

    @property
    def world_size(self) -> int:
        return sum(self._store)

    def local_world_size_list(self) -> list[int]:
        """For each rank, the number of processes on its node."""
        return [count for count in self._store for _ in range(count)]

    def local_rank_list(self) -> list[int]:
        """For each rank, its number on its node."""
        return [local for count in self._store for local in range(count)]


class ClassWithInitArgs:
    """A class and the arguments to make it with, elsewhere."""

    def __init__(self, cls: Any, *args: Any, **kwargs: Any) -> None:
        self.cls = cls
        self.args = args
        self.kwargs = kwargs
        self.fused_worker_used = False

    def __call__(self) -> Any:
        return self.cls(*self.args, **self.kwargs)


class GroupMethod:
    """A registered method, called on the whole group: dispatch, execute, collect."""

    def __init__(self, group: WorkerGroup, name: str, registration: Registration) -> None:
        self.__name__ = name
        self._group = group
        self._rank_zero = registration.execute_mode == Execute.RANK_ZERO
        self._blocking = registration.blocking
        self._dispatch_fn, self._collect_fn = registration.dispatch_fns()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        dealt, named = self._dispatch_fn(self._group, *args, **kwargs)
        output = self._group._execute(self.__name__, dealt, named, self._rank_zero, self._blocking)
        output = self._collect_fn(self._group, output)
        return _unpadded(output, dealt.pad_size) if isinstance(dealt, PaddedArgs) and dealt.pad_size else output


def _unpadded(output: Any, pad_size: int) -> Any:
    if isinstance(output, DataProtoFuture):
        return output.unpad(pad_size)
    return unpad_dataproto(output, pad_size) if isinstance(output, DataProto) else output


class WorkerGroup(ABC):
    """Workers that are called together. Registered methods of their class are methods of the group."""

    def __init__(self, resource_pool: ResourcePool | None = None) -> None:
        self.resource_pool = resource_pool
        self._methods: dict[str, GroupMethod] = {}
        self._meshes: dict[str, DispatchMesh] = {}

    def __getattr__(self, name: str) -> GroupMethod:
        methods = self.__dict__.get("_methods", {})
        if name in methods:
            return methods[name]
        raise AttributeError(f"{type(self).__name__} has no method {name!r}; its workers registered {sorted(methods)}")

    @property
    @abstractmethod
    def world_size(self) -> int:
        """The number of ranks."""

    @abstractmethod
    def _execute(self, method_name: str, args: Any, kwargs: dict[str, Any], rank_zero: bool, blocking: bool) -> Any:
        """Calls the ranks with dealt arguments; outputs in rank order, rank 0's own with ``rank_zero``."""

    def _bind_worker_method(self, user_defined_cls: type) -> list[str]:
        """Makes the class's registered methods the group's; their names.

        Raises ValueError for a name that the group itself needs.
        """
        found = registered_methods(user_defined_cls)
        taken = sorted(name for name in found if name in dir(type(self)))
        if taken:
            raise ValueError(f"{user_defined_cls.__name__} registers {taken}, which are the worker group's own names")
        self._methods.update({name: GroupMethod(self, name, registration) for name, registration in found.items()})
        return list(found)

    def dispatch_mesh(self, mesh_name: str) -> DispatchMesh:
        """The mesh as the workers registered it, asked once. Raises what the workers raise for an unknown one."""
        if mesh_name not in self._meshes:
            answers = self._execute("_query_mesh", ([mesh_name] * self.world_size,), {}, rank_zero=False, blocking=True)
            dp_ranks, collects = zip(*answers, strict=True)
            self._meshes[mesh_name] = DispatchMesh.from_ranks(mesh_name, list(dp_ranks), list(collects))
        return self._meshes[mesh_name]
