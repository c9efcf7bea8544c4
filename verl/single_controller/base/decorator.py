"""``register`` says of a worker's method how a worker group calls it."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from verl.protocol import DataProtoFuture
from verl.single_controller.base import dispatch as deal
from verl.single_controller.base.dispatch import (
    CollectFn,
    DispatchFn,
    Padding,
    collect_all_to_all,
    collect_dp_compute,
    collect_dp_compute_data_proto,
    dispatch_all_to_all,
    dispatch_dp_compute,
    dispatch_dp_compute_data_proto,
    dispatch_dp_compute_data_proto_with_func,
    dispatch_one_to_all,
)
from verl.single_controller.base.nd_compute import (
    collect_lazy_compute_data_proto,
    collect_nd_compute,
    collect_nd_compute_dataproto,
    dispatch_lazy_compute_data_proto,
    dispatch_nd_compute,
    dispatch_nd_compute_dataproto,
)

__all__ = [
    "MAGIC_ATTR",
    "Dispatch",
    "Execute",
    "collect_all_to_all",
    "collect_dp_compute",
    "collect_dp_compute_data_proto",
    "collect_lazy_compute_data_proto",
    "collect_nd_compute",
    "collect_nd_compute_dataproto",
    "dispatch_all_to_all",
    "dispatch_dp_compute",
    "dispatch_dp_compute_data_proto",
    "dispatch_dp_compute_data_proto_with_func",
    "dispatch_lazy_compute_data_proto",
    "dispatch_nd_compute",
    "dispatch_nd_compute_dataproto",
    "dispatch_one_to_all",
    "get_predefined_dispatch_fn",
    "get_predefined_execute_fn",
    "make_nd_compute_dataproto_dispatch_fn",
    "register",
    "register_dispatch_mode",
    "update_dispatch_mode",
]

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])
MAGIC_ATTR = "__verl_registration__"


@dataclass(frozen=True)
class Dispatch:
    """Names a way of dealing arguments and joining outputs; more are added by ``register_dispatch_mode``."""

    name: str

    RANK_ZERO: ClassVar[Dispatch]
    ONE_TO_ALL: ClassVar[Dispatch]
    ALL_TO_ALL: ClassVar[Dispatch]
    DP_COMPUTE: ClassVar[Dispatch]
    DP_COMPUTE_PROTO: ClassVar[Dispatch]
    DP_COMPUTE_PROTO_WITH_FUNC: ClassVar[Dispatch]
    DP_COMPUTE_METRIC: ClassVar[Dispatch]
    DIRECT_ROLLOUT_METHOD: ClassVar[Dispatch]

    def __class_getitem__(cls, name: str) -> Dispatch:
        """The mode of that name. Raises KeyError."""
        return {mode.name: mode for mode in _DISPATCH_MODES}[name]


@dataclass(frozen=True)
class Execute:
    """Which ranks run the method."""

    name: str

    ALL: ClassVar[Execute]
    RANK_ZERO: ClassVar[Execute]


Execute.ALL = Execute("ALL")
Execute.RANK_ZERO = Execute("RANK_ZERO")

DispatchFns = dict[str, Callable[..., Any]]
_DISPATCH_MODES: dict[Dispatch, tuple[DispatchFn, CollectFn]] = {}


def register_dispatch_mode(dispatch_mode_name: str, dispatch_fn: DispatchFn, collect_fn: CollectFn) -> None:
    """Adds ``Dispatch.<NAME>``. Raises ValueError where the name is taken."""
    mode = Dispatch(dispatch_mode_name.upper())
    if mode in _DISPATCH_MODES:
        raise ValueError(f"dispatch mode {mode.name} exists already; update_dispatch_mode changes it")
    _DISPATCH_MODES[mode] = dispatch_fn, collect_fn
    setattr(Dispatch, mode.name, mode)


def update_dispatch_mode(dispatch_mode: Dispatch, dispatch_fn: DispatchFn, collect_fn: CollectFn) -> None:
    """Replaces a mode's functions for worker groups made from now on."""
    get_predefined_dispatch_fn(dispatch_mode)
    _DISPATCH_MODES[dispatch_mode] = dispatch_fn, collect_fn


def get_predefined_dispatch_fn(dispatch_mode: Dispatch) -> DispatchFns:
    """A mode's ``dispatch_fn`` and ``collect_fn``. Raises ValueError for an unknown mode."""
    if dispatch_mode not in _DISPATCH_MODES:
        raise ValueError(f"unknown dispatch mode {dispatch_mode}; there are {[mode.name for mode in _DISPATCH_MODES]}")
    dispatch_fn, collect_fn = _DISPATCH_MODES[dispatch_mode]
    return {"dispatch_fn": dispatch_fn, "collect_fn": collect_fn}


def get_predefined_execute_fn(execute_mode: Execute) -> dict[str, str]:
    """The name of the worker group's method that an execute mode calls. Raises ValueError for an unknown mode."""
    names = {Execute.ALL: "execute_all", Execute.RANK_ZERO: "execute_rank_zero"}
    if execute_mode not in names:
        raise ValueError(f"execute_mode must be Execute.ALL or Execute.RANK_ZERO, got {execute_mode!r}")
    return {"execute_fn_name": names[execute_mode]}


for _name, _dispatch_fn, _collect_fn in (
    ("RANK_ZERO", deal.dispatch_rank_zero, deal.collect_rank_zero),
    ("ONE_TO_ALL", deal.dispatch_one_to_all, deal.collect_all_to_all),
    ("ALL_TO_ALL", deal.dispatch_all_to_all, deal.collect_all_to_all),
    ("DP_COMPUTE", deal.dispatch_dp_compute, deal.collect_dp_compute),
    ("DP_COMPUTE_PROTO", deal.dispatch_dp_compute_data_proto, deal.collect_dp_compute_data_proto),
    ("DP_COMPUTE_PROTO_WITH_FUNC", deal.dispatch_dp_compute_data_proto_with_func, deal.collect_dp_compute_data_proto),
    ("DP_COMPUTE_METRIC", deal.dispatch_dp_compute_data_proto, deal.collect_dp_compute),
    ("DIRECT_ROLLOUT_METHOD", deal.refuse_direct_call, deal.collect_all_to_all),
):
    register_dispatch_mode(_name, _dispatch_fn, _collect_fn)


def make_nd_compute_dataproto_dispatch_fn(mesh_name: str, padding: Padding | None = None) -> DispatchFns:
    """Dispatch over the data parallel ranks of a mesh that the workers registered under ``mesh_name``.

    ``padding`` says what to do where rows do not divide by the dp size:

    - ``"repeat"``: rows are repeated and taken out of the output again. For methods that change
      nothing (log-probabilities, values, generation).
    - ``"zero_weight"``: the same with ``response_mask`` and ``loss_mask`` of the added rows 0, so
      that they add nothing to a loss.
    - ``"ragged"``: parts differ by one row, and may have none. Nothing is added.
    - None: ValueError, unless automatic padding is on; then ``zero_weight``, and ``repeat`` for
      data without masks.

    Futures, whose number of rows is not known yet, are split raggedly wherever padding is allowed.
    """
    dispatch_fn, collect_fn = deal.nd_compute_fns(mesh_name, padding)
    return {"dispatch_fn": dispatch_fn, "collect_fn": collect_fn}


@dataclass(frozen=True)
class Registration:
    """How a worker group calls a method."""

    dispatch_mode: Dispatch | Mapping[str, Callable[..., Any]]
    execute_mode: Execute
    blocking: bool
    materialize_futures: bool

    def __call__(self, function: FunctionT) -> FunctionT:
        """The function, registered like this."""
        if not inspect.isfunction(function):
            raise ValueError(f"a registered method is a function that takes self, got {function!r}")
        if _yields(function) and self.dispatch_mode != Dispatch.DIRECT_ROLLOUT_METHOD:
            raise ValueError(f"{function.__qualname__} yields: return a list, or register it as DIRECT_ROLLOUT_METHOD")
        wrapped = _materializing(function) if self.materialize_futures else _passing(function)
        wrapped.__dict__[MAGIC_ATTR] = self
        return wrapped

    def dispatch_fns(self) -> tuple[DispatchFn, CollectFn]:
        fns = self.dispatch_mode
        if isinstance(fns, Dispatch):
            fns = get_predefined_dispatch_fn(fns)
        return fns["dispatch_fn"], fns["collect_fn"]


def register(
    dispatch_mode: Dispatch | Mapping[str, Callable[..., Any]] = Dispatch.ALL_TO_ALL,
    execute_mode: Execute = Execute.ALL,
    blocking: bool = True,
    materialize_futures: bool = True,
) -> Callable[[FunctionT], FunctionT]:
    """Makes a worker's method, ordinary or ``async def``, callable through its worker group.

    ``dispatch_mode``: a mode, or a dictionary with ``dispatch_fn`` and ``collect_fn``.
    ``blocking``: whether the group waits for the outputs; otherwise the caller gets references or
    a DataProtoFuture. ``materialize_futures``: the method gets the data in place of futures.
    A subclass of Worker that overrides the method keeps its registration, unless it registers its own.

    Raises ValueError for unknown modes, for what is no function, such as a static method, and for generators,
    except where they are called on the workers themselves.
    """
    _check_modes(dispatch_mode, execute_mode)
    return Registration(dispatch_mode, execute_mode, blocking, materialize_futures)


def registration_of(function: Any) -> Registration | None:
    """What ``register`` said of a function, None where it was not asked."""
    return vars(function).get(MAGIC_ATTR) if inspect.isfunction(function) else None


def registered_methods(cls: type) -> dict[str, Registration]:
    """The registered methods of a class, its bases' included, by name.

    Raises ValueError for registered static and class methods.
    """
    odd = sorted(name for name in dir(cls) if _is_without_self(inspect.getattr_static(cls, name)))
    if odd:
        raise ValueError(f"{cls.__name__} registers {odd}; a registered method takes self")
    found = {name: registration_of(function) for name, function in inspect.getmembers(cls, inspect.isfunction)}
    return {name: registration for name, registration in found.items() if registration is not None}


def _yields(function: Callable[..., Any]) -> bool:
    return inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)


def _is_without_self(member: Any) -> bool:
    return isinstance(member, staticmethod | classmethod) and registration_of(member.__func__) is not None


def register_overrides(cls: type) -> None:
    """Registers methods that override registered ones as what they override is."""
    for name, function in inspect.getmembers(cls, inspect.isfunction):
        if registration_of(function) is None:
            overridden = (registration_of(vars(base).get(name)) for base in cls.__mro__)
            registration = next((found for found in overridden if found is not None), None)
            if registration is not None:
                setattr(cls, name, registration(function))


def _check_modes(dispatch_mode: Any, execute_mode: Any) -> None:
    if isinstance(dispatch_mode, Mapping):
        missing = {"dispatch_fn", "collect_fn"} - set(dispatch_mode)
        if missing:
            raise ValueError(f"a dispatch dictionary needs {sorted(missing)}")
    elif not isinstance(dispatch_mode, Dispatch):
        raise ValueError(f"dispatch_mode must be a Dispatch or a dictionary, got {dispatch_mode!r}")
    get_predefined_execute_fn(execute_mode)


def _materializing(function: Callable[..., Any]) -> Any:
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def in_loop(*args: Any, **kwargs: Any) -> Any:
            # Waiting in a thread keeps the actor's event loop free.
            args, kwargs = await asyncio.to_thread(_materialize, args, kwargs)
            return await function(*args, **kwargs)

        return in_loop

    @functools.wraps(function)
    def inner(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = _materialize(args, kwargs)
        return function(*args, **kwargs)

    return inner


def _passing(function: Callable[..., Any]) -> Any:
    """A function of our own to carry the registration; the user's may be registered twice."""
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def in_loop(*args: Any, **kwargs: Any) -> Any:
            return await function(*args, **kwargs)

        return in_loop

    @functools.wraps(function)
    def inner(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return inner


def _materialize(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    data = tuple(value.get() if isinstance(value, DataProtoFuture) else value for value in args)
    return data, {key: value.get() if isinstance(value, DataProtoFuture) else value for key, value in kwargs.items()}
