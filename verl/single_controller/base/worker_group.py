"""ResourcePool, ClassWithInitArgs and WorkerGroup: what does not depend on Ray."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from verl.protocol import DataProto, DataProtoFuture, unpad_dataproto
from verl.single_controller.base.decorator import Execute, Registration, registered_methods
from verl.single_controller.base.dispatch import Dealt, DispatchMesh, join_outputs


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

    def __init__(self, group: WorkerGroup, name: str, function: Callable[..., Any], registration: Registration) -> None:
        self.__name__ = name
        self.__doc__ = function.__doc__
        self.is_coroutine = inspect.iscoroutinefunction(function)
        self._group = group
        self._rank_zero = registration.execute_mode == Execute.RANK_ZERO
        self._blocking = registration.blocking
        self._dispatch_fn, self._collect_fn = registration.dispatch_fns()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        dealt, named = self._dispatch_fn(self._group, *args, **kwargs)
        if self._rank_zero:
            output = self._collect_fn(self._group, self._on_rank_zero(dealt, named))
        elif self._blocking:
            output = self._collect_fn(self._group, self._group.execute_all_sync(self.__name__, *dealt, **named))
        else:
            output = self._collect_started(*self._group.start_counted(self, dealt, named))
        return unpadded(output, dealt.pad_size) if isinstance(dealt, Dealt) and dealt.pad_size else output

    def _on_rank_zero(self, dealt: Any, named: dict[str, Any]) -> Any:
        if isinstance(dealt, Dealt):
            dealt, named = [arg[0] for arg in dealt], {key: value[0] for key, value in named.items()}
        run = self._group.execute_rank_zero_sync if self._blocking else self._group.execute_rank_zero_async
        return run(self.__name__, *dealt, **named)

    def _collect_started(self, outputs: list[Any], row_counts: list[Any]) -> Any:
        """What the collect function makes of references; a future of joined rows learns their numbers."""
        result = self._collect_fn(self._group, outputs)
        if not isinstance(result, DataProtoFuture) or not row_counts:
            return result
        count_of = dict(zip(outputs, row_counts, strict=True))
        joined = result.collect_fn in (join_outputs, DataProto.concat)
        counts = [count_of[ref] for ref in result.futures if joined and ref in count_of]
        complete = tuple(counts) if len(counts) == len(result.futures) else ()
        return replace(result, row_counts=complete, watched=tuple(row_counts))


def unpadded(output: Any, pad_size: int) -> Any:
    """The output without its last ``pad_size`` rows, where it has rows."""
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
    def execute_all_sync(self, method_name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Runs a method on every rank; the outputs in rank order.

        Where every argument is a list with one element per rank, each rank gets its element;
        otherwise all get the arguments as they are.
        """

    @abstractmethod
    def execute_rank_zero_sync(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        """Runs a method on rank 0, with the arguments as they are."""

    @abstractmethod
    def execute_rank_zero_async(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        """Starts it there; a reference to the output."""

    @abstractmethod
    def start_worker_aliveness_check(self, every_n_seconds: float = 1) -> None:
        """From now on, finds out every ``every_n_seconds`` whether a worker died that nobody is calling.

        The error is raised by this group's next call, and by whoever waits for another group meanwhile.
        """

    @abstractmethod
    def start_counted(self, method: GroupMethod, args: Any, kwargs: dict[str, Any]) -> tuple[list[Any], list[Any]]:
        """Starts a method on every rank: references to the outputs and to their numbers of rows.

        The latter are None for what is no DataProto; the list is empty where workers do not count.
        """

    def _bind_worker_method(self, user_defined_cls: type) -> list[str]:
        """Makes the class's registered methods the group's; their names.

        Raises ValueError for a name that the group itself needs.
        """
        found = registered_methods(user_defined_cls)
        taken = sorted(name for name in found if name in dir(self))
        if taken:
            raise ValueError(f"{user_defined_cls.__name__} registers {taken}, which are the worker group's own names")
        for name, registration in found.items():
            self._methods[name] = GroupMethod(self, name, inspect.getattr_static(user_defined_cls, name), registration)
        return list(found)

    def dispatch_mesh(self, mesh_name: str) -> DispatchMesh:
        """The mesh as the workers registered it, asked once. Raises what the workers raise for an unknown one."""
        if mesh_name not in self._meshes:
            answers = self.execute_all_sync("_query_mesh", mesh_name)
            dp_ranks, collects = zip(*answers, strict=True)
            self._meshes[mesh_name] = DispatchMesh.from_ranks(mesh_name, list(dp_ranks), list(collects))
        return self._meshes[mesh_name]
