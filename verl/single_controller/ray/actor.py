"""Turning a class into Ray actors that know their rank."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import ray
from ray.actor import ActorClass, ActorHandle
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from verl.protocol import DataProto
from verl.single_controller.base import ClassWithInitArgs
from verl.single_controller.base.environment import RankEnvironment
from verl.single_controller.ray.placement import Resources, Slot

WITH_ROWS, AWAITED_WITH_ROWS = "_with_rows", "_awaited_with_rows"


class RayClassWithInitArgs(ClassWithInitArgs):
    """A class, plain or made by ``ray.remote``, its arguments, and the options of its actors.

    A class with ``async def`` methods becomes an asyncio actor. Arguments are sent to every rank.
    """

    def __init__(self, cls: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(cls, *args, **kwargs)
        self._options: dict[str, Any] = {}
        self._additional_resource: dict[str, float] = {}
        self.members: dict[str, type] = {}

    @property
    def user_cls(self) -> type:
        """The class itself, as it was before ``ray.remote``."""
        cls: Any = self.cls
        return cls.__ray_actor_class__ if isinstance(cls, ActorClass) else cls  # type: ignore[attr-defined]

    def update_options(self, options: Mapping[str, Any]) -> None:
        """Adds options of ``ray.remote`` (num_cpus, num_gpus, max_concurrency, …).

        The environment variables of several ``runtime_env`` add up.
        """
        self._options = _merged(self._options, options)

    def set_additional_resource(self, additional_resource: Mapping[str, float]) -> None:
        """Custom Ray resources that each worker needs."""
        self._additional_resource = dict(additional_resource)

    def declared_options(self) -> dict[str, Any]:
        """The options given to ``ray.remote`` and to ``update_options``."""
        cls: Any = self.cls
        declared = cls._default_options if isinstance(cls, ActorClass) else {}  # type: ignore[attr-defined]
        return _merged(declared, self._options)

    def options(self, share: Resources, env_vars: Mapping[str, str] | None = None) -> dict[str, Any]:
        """The declared options, and ``share`` where they do not say how much a worker needs.

        ``env_vars`` add to those declared.
        """
        options = {"num_cpus": share.cpus, "num_gpus": share.gpus} | self.declared_options()
        if env_vars:
            options = _merged(options, {"runtime_env": {"env_vars": dict(env_vars)}})
        if self._additional_resource:
            options["resources"] = options.get("resources", {}) | self._additional_resource
        return options

    def actor_class(self) -> Any:
        """The class as a Ray actor class whose constructor takes the rank's environment first."""
        return ray.remote(_told_its_rank(self.user_cls))


def start_actor(actor_cls: Any, slot: Slot, options: Mapping[str, Any], *args: Any, **kwargs: Any) -> ActorHandle:
    """One actor in a slot."""
    strategy = PlacementGroupSchedulingStrategy(
        placement_group=slot.placement_group, placement_group_bundle_index=slot.bundle_index
    )
    return actor_cls.options(**options, scheduling_strategy=strategy).remote(*args, **kwargs)


def _told_its_rank(cls: type) -> type:
    """The class with the rank's environment set in its process before its own constructor runs.

    Done there and not by Ray's ``runtime_env``: an environment of its own for each rank would keep
    Ray from using the worker processes it has started already.
    """

    def __init__(self: Any, environment: RankEnvironment, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        environment.apply()
        cls.__init__(self, *args, **kwargs)  # type: ignore[misc]

    namespace: dict[str, Any] = {"__init__": __init__, "__doc__": inspect.getdoc(cls), WITH_ROWS: _with_rows}
    if inspect.getmembers(cls, inspect.iscoroutinefunction):
        # On its own this method would make any class an asyncio actor.
        namespace[AWAITED_WITH_ROWS] = _awaited_with_rows
    return type(cls.__name__, (cls,), namespace)


def _with_rows(self: Any, method_name: str, *args: Any, **kwargs: Any) -> tuple[Any, int | None]:
    """A method's output and how many rows it has, None for what is no DataProto."""
    output = getattr(self, method_name)(*args, **kwargs)
    return output, len(output) if isinstance(output, DataProto) else None


async def _awaited_with_rows(self: Any, method_name: str, *args: Any, **kwargs: Any) -> tuple[Any, int | None]:
    output = await getattr(self, method_name)(*args, **kwargs)
    return output, len(output) if isinstance(output, DataProto) else None


def _merged(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    merged = {**first, **second}
    if first.get("runtime_env") and second.get("runtime_env"):
        one, two = first["runtime_env"], second["runtime_env"]
        variables = one.get("env_vars", {}) | two.get("env_vars", {})
        merged["runtime_env"] = {**one, **two} | ({"env_vars": variables} if variables else {})
    return merged
