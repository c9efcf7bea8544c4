"""Workers and arguments that stretch the rules."""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import ray
import torch

from verl.protocol import DataProto
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, Execute, register, registered_methods
from verl.single_controller.ray import (
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    create_colocated_worker_cls,
)

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

StartGroup = Callable[..., RayWorkerGroup]


class UnpicklableError(RuntimeError):
    def __init__(self) -> None:
        super().__init__("holds a lock")
        self.lock = threading.Lock()


def twice(function: Callable[..., Any]) -> Callable[..., Any]:
    """A user's own decorator."""

    @functools.wraps(function)
    def inner(*args: Any, **kwargs: Any) -> Any:
        return [function(*args, **kwargs)] * 2

    return inner


def failing_dispatch(worker_group: RayWorkerGroup, *args: Any) -> tuple[tuple, dict]:
    raise LookupError(f"cannot deal to {worker_group.world_size}")


def failing_collect(worker_group: RayWorkerGroup, outputs: list) -> None:
    raise LookupError(f"cannot join {len(outputs)}")


def gone_dispatch(worker_group: RayWorkerGroup, value: Any) -> tuple[tuple, dict]:
    return ([value] * worker_group.world_size,), {}


def as_given(worker_group: RayWorkerGroup, outputs: list) -> list:
    return outputs


class OddWorker(Worker):
    counter = 0

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def raises_unpicklable(self) -> None:
        raise UnpicklableError

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def returns_unpicklable(self) -> Any:
        return threading.Lock()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def nothing(self) -> None:
        return None

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def nothing_for_rows(self, data: DataProto) -> None:
        return None

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def mixed(self, data: DataProto) -> Any:
        return data if self.rank == 0 else {"rank": self.rank}

    @register(dispatch_mode=Dispatch.DIRECT_ROLLOUT_METHOD)
    def stream(self, n: int) -> Iterator[int]:
        for value in range(n + self.rank):  # noqa: UP028  Ray sends to the generator
            yield value

    @register(dispatch_mode={"dispatch_fn": failing_dispatch, "collect_fn": as_given})
    def never_sent(self, value: Any) -> Any:
        return value

    @register(dispatch_mode={"dispatch_fn": gone_dispatch, "collect_fn": failing_collect})
    def never_joined(self, value: Any) -> Any:
        self.counter += 1
        return value

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def count(self) -> int:
        return self.counter

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def total(self, *args: Any, **kwargs: Any) -> float:
        return float(sum(np.asarray(value).sum() for value in (*args, *kwargs.values())))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    @twice
    def own_decorator_below(self, value: int) -> int:
        return value + self.rank

    @twice
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def own_decorator_above(self, value: int) -> int:
        return value + self.rank

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    @register(dispatch_mode=Dispatch.DP_COMPUTE)
    def registered_twice(self, value: Any) -> Any:
        return value

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def overridden(self, value: int) -> str:
        return f"base {value}"

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def specialised(self, value: int) -> str:
        return f"base {value}"

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def default_and_keyword(self, a: int, b: int = 2, *, c: int = 3) -> tuple[int, int, int]:
        return a, b, c


class OverridingWorker(OddWorker):
    def overridden(self, value: int) -> str:
        return f"derived of {super().overridden(value)}"

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def specialised(self, value: int) -> str:
        return f"derived {value}"


@pytest.fixture(scope="module")
def odd(ray_session: None) -> Iterator[RayWorkerGroup]:
    pool = RayResourcePool([2], use_gpu=False, max_colocate_count=2, cpus_per_bundle=0.25)
    group = RayWorkerGroup(pool, RayClassWithInitArgs(OverridingWorker))
    yield group
    group.shutdown()


def test_exceptions_and_outputs_that_cannot_be_pickled_are_told(odd: RayWorkerGroup) -> None:
    with pytest.raises(Exception, match="holds a lock") as caught:
        odd.raises_unpicklable()
    assert "raised by raises_unpicklable on rank" in caught.value.__notes__[0]
    with pytest.raises(Exception, match=r"cannot pickle '_thread.lock' object"):
        odd.returns_unpicklable()
    assert odd.count() == [0, 0]


def test_outputs_of_any_type_come_back(odd: RayWorkerGroup) -> None:
    data = DataProto.from_dict({"x": torch.arange(4)})
    assert odd.nothing() == [None, None]
    assert odd.nothing_for_rows(data) == [None, None]
    first, second = odd.mixed(data)
    assert (first.batch["x"].tolist(), second) == ([0, 1], {"rank": 1})
    assert odd.default_and_keyword(1, c=5) == [(1, 2, 5)] * 2
    with pytest.raises(TypeError, match="unexpected keyword argument 'd'"):
        odd.default_and_keyword(1, d=5)


def test_generators_are_called_on_the_workers_only(odd: RayWorkerGroup) -> None:
    assert [ray.get(value) for value in odd.workers[1].stream.remote(2)] == [0, 1, 2]
    with pytest.raises(NotImplementedError):
        odd.stream(2)
    with pytest.raises(ValueError, match=r"OddWorker.stream yields: return a list"):
        register()(inspect.unwrap(OddWorker.stream))


def test_functions_of_a_dispatch_dictionary_may_raise(odd: RayWorkerGroup) -> None:
    before = odd.count()
    with pytest.raises(LookupError, match="cannot deal to 2"):
        odd.never_sent(1)
    with pytest.raises(LookupError, match="cannot join 2"):
        odd.never_joined(1)
    assert odd.count() == [value + 1 for value in before]


def test_large_arguments_of_every_kind(odd: RayWorkerGroup) -> None:
    large = np.ones(2 << 20)
    expected = 3.0 * large.size
    assert odd.total(large, torch.from_numpy(large), again=large) == [expected, expected]


def test_decorators_stack(odd: RayWorkerGroup) -> None:
    assert odd.own_decorator_below(1) == [[1, 1], [2, 2]]
    assert odd.own_decorator_above(1) == [[1, 1], [2, 2]]
    assert odd.registered_twice("x") == ["x", "x"]


def test_static_and_class_methods_are_refused() -> None:
    class Static(Worker):
        @staticmethod
        @register()
        def static() -> None: ...

        @classmethod
        @register()
        def of_class(cls) -> None: ...

    with pytest.raises(ValueError, match=r"Static registers \['of_class', 'static'\]; a registered method takes self"):
        registered_methods(Static)
    with pytest.raises(ValueError, match="a function that takes self, got <staticmethod"):
        register()(staticmethod(print))


def test_an_override_keeps_the_registration_of_what_it_overrides(odd: RayWorkerGroup) -> None:
    assert odd.overridden(1) == ["derived of base 1"] * 2
    assert odd.specialised(1) == ["derived 1"] * 2
    assert registered_methods(OverridingWorker)["overridden"] == registered_methods(OddWorker)["overridden"]


def test_a_mixin_in_front_of_a_worker_keeps_its_registrations() -> None:
    class Mixin:
        def overridden(self, value: int) -> str:
            return f"mixed {value}"

    class Mixed(Mixin, OddWorker): ...

    assert registered_methods(Mixed)["overridden"].dispatch_mode == Dispatch.ONE_TO_ALL
    assert Mixed().overridden(2) == "mixed 2"
    assert "overridden" not in registered_methods(Mixin)


def test_a_class_made_by_ray_remote(start_group: StartGroup) -> None:
    group = start_group(1, RayClassWithInitArgs(ray.remote(OddWorker)))
    assert group.overridden(value=3) == ["base 3"]


class HiddenWorker(Worker):
    @register()
    def wg_dict(self) -> None: ...


class PairedWorker(Worker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def b_c(self) -> str:
        return "b_c"

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def c(self) -> str:
        return "c"

    @staticmethod
    def help_out() -> None: ...


def test_methods_that_an_attribute_of_the_group_would_hide_are_refused() -> None:
    with pytest.raises(ValueError, match=r"HiddenWorker registers \['wg_dict'\], which are the worker group's own"):
        RayWorkerGroup(RayResourcePool([1], use_gpu=False), RayClassWithInitArgs(HiddenWorker))


def test_names_of_colocated_classes_must_not_collide(start_group: StartGroup) -> None:
    one = RayClassWithInitArgs(PairedWorker)
    with pytest.raises(ValueError, match=r"'a_b_c' would be a method of two of the classes \['a', 'a_b'\]"):
        create_colocated_worker_cls({"a": one, "a_b": one})
    group = start_group(1, create_colocated_worker_cls({"a": one, "shutdown": one}))
    assert group.spawn(["a"])["a"].b_c() == group.spawn_fused(["a"])["a"].b_c() == ["b_c"]
    with pytest.raises(ValueError, match=r"called \['shutdown'\], which are the worker group's own names"):
        group.fuse(["a", "shutdown"])
    group.fuse(["a"])
    group.fuse(["a"])
    assert group.a.c() == ["c"]


def test_a_pool_is_used_again_after_a_group_that_ended_or_never_started(start_group: StartGroup) -> None:
    pool = RayResourcePool([1], use_gpu=False, max_colocate_count=1, cpus_per_bundle=0.25)
    first = RayWorkerGroup(pool, RayClassWithInitArgs(PairedWorker), name_prefix="again")
    assert first.c() == ["c"]
    other = RayResourcePool([1], use_gpu=False, max_colocate_count=1, cpus_per_bundle=0.25)
    with pytest.raises(ValueError, match="againPairedWorker_0:0"):
        RayWorkerGroup(other, RayClassWithInitArgs(PairedWorker), name_prefix="again")
    assert start_group(1, PairedWorker, pool=other).c() == ["c"]
    first.shutdown()
    first.shutdown()
    assert start_group(1, PairedWorker, pool=pool).c() == ["c"]
