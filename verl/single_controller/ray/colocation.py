"""Several worker classes in one process per rank."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import registered_methods
from verl.single_controller.ray.actor import RayClassWithInitArgs


def create_colocated_worker_cls(class_dict: Mapping[str, RayClassWithInitArgs]) -> RayClassWithInitArgs:
    """One class that holds a worker of each class.

    ``RayWorkerGroup.spawn`` gives a group for each. Each worker finds the others by
    ``get_fused_worker_by_name``. Options of the classes add up; raises ValueError naming one that
    two classes set differently, and for a class that is no Worker.
    """
    members = {name: class_with_args.user_cls for name, class_with_args in class_dict.items()}
    odd = [name for name, cls in members.items() if not issubclass(cls, Worker)]
    if odd or not members:
        raise ValueError(f"classes colocated in one process are Workers; {odd or 'none'} given")
    arguments = {name: (class_with_args.args, class_with_args.kwargs) for name, class_with_args in class_dict.items()}
    colocated = RayClassWithInitArgs(_colocated_class(members), arguments)
    for class_with_args in class_dict.values():
        declared = class_with_args.declared_options()
        _refuse_clash(colocated.declared_options(), declared)
        colocated.update_options(declared)
    colocated.members = members
    return colocated


def create_colocated_worker_cls_fused(class_dict: Mapping[str, RayClassWithInitArgs]) -> RayClassWithInitArgs:
    """The same, marked as fused: ``RayWorkerGroup.fuse`` makes the members attributes of the group."""
    fused = create_colocated_worker_cls(class_dict)
    fused.fused_worker_used = True
    return fused


def _refuse_clash(first: Mapping[str, Any], second: Mapping[str, Any]) -> None:
    clash = sorted(key for key in first.keys() & second.keys() if first[key] != second[key] and key != "runtime_env")
    if clash:
        raise ValueError(f"classes in one process ask for different {clash}")


def _colocated_class(members: Mapping[str, type]) -> type:
    def __init__(self: Any, arguments: Mapping[str, tuple[tuple[Any, ...], dict[str, Any]]]) -> None:  # noqa: N807
        self.members = {name: cls(*arguments[name][0], **arguments[name][1]) for name, cls in members.items()}
        for worker in self.members.values():
            worker.fused_worker_dict = self.members

    namespace: dict[str, Any] = {"__init__": __init__}
    for name, cls in members.items():
        for method_name in {*registered_methods(cls), *_public_methods(cls)}:
            joined = f"{name}_{method_name}"
            if joined in namespace:
                raise ValueError(f"{joined!r} would be a method of two of the classes {sorted(members)}; rename one")
            namespace[joined] = _forward(name, _function(cls, method_name))
    return type("Colocated_" + "_".join(members), (), namespace)


def _public_methods(cls: type) -> list[str]:
    names = [name for name in dir(cls) if not name.startswith("_")]
    return [name for name in names if inspect.isfunction(inspect.getattr_static(cls, name))]


def _function(cls: type, method_name: str) -> Callable[..., Any]:
    """The function behind a method."""
    return next(vars(base)[method_name] for base in cls.__mro__ if method_name in vars(base))


def _forward(member: str, function: Callable[..., Any]) -> Callable[..., Any]:
    if inspect.iscoroutinefunction(function):

        async def forward_async(self: Any, *args: Any, **kwargs: Any) -> Any:
            return await function(self.members[member], *args, **kwargs)

        return forward_async

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return function(self.members[member], *args, **kwargs)

    return forward
