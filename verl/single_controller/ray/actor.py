"""Turning a class into Ray actors that know their rank."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import ray
from ray.actor import ActorClass, ActorHandle
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from verl.single_controller.base import ClassWithInitArgs
from verl.single_controller.base.environment import RankEnvironment
from verl.single_controller.ray.placement import Resources, Slot


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

    def options(self, share: Resources) -> dict[str, Any]:
        """Options of the actors: the class's own, and ``share`` where it does not say how much it needs."""
        cls: Any = self.cls
        declared = cls._default_options if isinstance(cls, ActorClass) else {}  # type: ignore[attr-defined]
        options = _merged(_merged({"num_cpus": share.cpus, "num_gpus": share.gpus}, declared), self._options)
        if self._additional_resource:
            options["resources"] = options.get("resources", {}) | self._additional_resource
        return options

    def start(self, slot: Slot, environment: RankEnvironment, options: Mapping[str, Any]) -> ActorHandle:
        """One actor in a slot."""
        strategy = PlacementGroupSchedulingStrategy(
            placement_group=slot.placement_group, placement_group_bundle_index=slot.bundle_index
        )
        actor_cls: Any = ray.remote(_told_its_rank(self.user_cls))
        return actor_cls.options(**options, scheduling_strategy=strategy).remote(environment, *self.args, **self.kwargs)


def _told_its_rank(cls: type) -> type:
    """The class with the rank's environment set in its process before its own constructor runs.

    Done there and not by Ray's ``runtime_env``: an environment of its own for each rank would keep
    Ray from using the worker processes it has started already.
    """

    def __init__(self: Any, environment: RankEnvironment, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        environment.apply()
        cls.__init__(self, *args, **kwargs)  # type: ignore[misc]

    return type(cls.__name__, (cls,), {"__init__": __init__, "__doc__": inspect.getdoc(cls)})


def _merged(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    merged = {**first, **second}
    if first.get("runtime_env") and second.get("runtime_env"):
        one, two = first["runtime_env"], second["runtime_env"]
        variables = one.get("env_vars", {}) | two.get("env_vars", {})
        merged["runtime_env"] = {**one, **two} | ({"env_vars": variables} if variables else {})
    return merged
