"""Workers that die while nobody calls them, or while their peers wait for them."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import ray
import torch
import torch.distributed as dist
from ray.exceptions import ActorDiedError

from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, Execute, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

StartGroup = Callable[..., RayWorkerGroup]


def until_it_raises(call: Callable[[], object]) -> None:
    while True:
        call()


class Mortal(Worker):
    """Ranks that meet in collectives, and ways to go."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        if fails:
            raise ValueError(f"no memory for rank {self.rank}")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def pid(self) -> int:
        return os.getpid()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def pid_of_rank_zero(self) -> int:
        return os.getpid()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def meet(self) -> None:
        address, port = self.get_master_addr_port()
        dist.init_process_group("gloo", f"tcp://{address}:{port}", timedelta(seconds=90), self.world_size, self.rank)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def reduce_until_last_rank(self, way: str) -> None:
        """All ranks but the last hang in a collective that the last never joins."""
        if self.rank == self.world_size - 1:
            self._go(way)
        dist.all_reduce(torch.ones(1))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def wait_until_killed(self, started: Path) -> None:
        (started / str(self.rank)).touch()
        signal.pause()

    def _go(self, way: str) -> None:
        if way == "exit":
            os._exit(3)
        if way == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        dist.destroy_process_group()
        raise ArithmeticError("the loss is no number")


@pytest.fixture
def duo(start_group: StartGroup) -> RayWorkerGroup:
    return start_group(2, Mortal)


@pytest.mark.parametrize(("way", "cause"), [("exit", "exit"), pytest.param("kill", "died", marks=pytest.mark.slow)])
def test_a_death_surfaces_before_what_a_collective_makes_of_it(duo: RayWorkerGroup, way: str, cause: str) -> None:
    duo.meet()
    with pytest.raises(ActorDiedError, match=cause) as caught:
        duo.reduce_until_last_rank(way)
    assert "raised by reduce_until_last_rank on rank 1 of 2" in caught.value.__notes__[0]


def test_an_error_surfaces_before_what_a_collective_makes_of_it(duo: RayWorkerGroup) -> None:
    duo.meet()
    with pytest.raises(ArithmeticError, match="the loss is no number") as caught:
        duo.reduce_until_last_rank("raise")
    assert "raised by reduce_until_last_rank on rank 1 of 2" in caught.value.__notes__[0]
    assert 'raise ArithmeticError("the loss is no number")' in str(caught.value)


def test_a_death_between_calls_is_raised_by_the_next_one_even_on_another_rank(duo: RayWorkerGroup) -> None:
    duo.start_worker_aliveness_check(every_n_seconds=0.05)
    os.kill(duo.pid()[1], signal.SIGKILL)
    with pytest.raises(ActorDiedError) as caught:
        until_it_raises(duo.pid_of_rank_zero)
    assert "found by the liveness check of rank 1 of 2" in caught.value.__notes__[0]
    with pytest.raises(ActorDiedError):
        duo.execute_all_async("pid")


def test_a_death_ends_the_wait_for_another_group(start_group: StartGroup, duo: RayWorkerGroup, tmp_path: Path) -> None:
    other = start_group(1, Mortal)
    other.start_worker_aliveness_check(every_n_seconds=0.05)
    (doomed,) = other.pid()
    waiting = duo.wait_until_killed(tmp_path)
    assert len(waiting) == 2
    os.kill(doomed, signal.SIGKILL)
    with pytest.raises(ActorDiedError) as caught:
        duo.pid()
    assert "found by the liveness check of rank 0 of 1" in caught.value.__notes__[0]


@pytest.mark.slow
def test_a_busy_worker_is_asked_once_and_its_death_found(duo: RayWorkerGroup, tmp_path: Path) -> None:
    pids = duo.pid()
    duo.start_worker_aliveness_check(every_n_seconds=0.05)
    duo.wait_until_killed(tmp_path)
    while len(list(tmp_path.iterdir())) < 2:
        pass
    os.kill(pids[0], signal.SIGKILL)
    with pytest.raises(ActorDiedError) as caught:
        duo.pid()
    assert "rank 0 of 2" in caught.value.__notes__[0]


def test_a_constructor_that_failed_is_found(start_group: StartGroup) -> None:
    broken, well = start_group(1, Mortal, fails=True), start_group(1, Mortal)
    broken.start_worker_aliveness_check(every_n_seconds=0.05)
    with pytest.raises(ActorDiedError, match="no memory for rank 0") as caught:
        until_it_raises(well.pid)
    assert "found by the liveness check of rank 0 of 1" in caught.value.__notes__[0]


def test_a_check_ends_with_its_group_and_leaves_workers_of_their_own_alone(start_group: StartGroup) -> None:
    group = start_group(1, Mortal)
    with pytest.raises(ValueError, match="every_n_seconds must be positive, got 0"):
        group.start_worker_aliveness_check(0)
    group.start_worker_aliveness_check(0.05)
    group.start_worker_aliveness_check()
    assert len(group.pid()) == 1
    group.shutdown()
    assert len(start_group(1, Mortal).pid()) == 1


def test_workers_that_are_not_ready_in_time_are_named(ray_session: None, tmp_path: Path) -> None:
    pool = RayResourcePool([1], use_gpu=False, cpus_per_bundle=0.25)
    group = RayWorkerGroup(
        pool, RayClassWithInitArgs(Slow, tmp_path / "go_on"), name_prefix="slow", ray_wait_register_center_timeout=0.1
    )
    with pytest.raises(TimeoutError, match=r"not ready after 0.1 s: rank 0 of 1 \(slowSlow_0:0\)"):
        group.wait_ready()
    group.shutdown()


class Slow(Mortal):
    """Its constructor does not end."""

    def __init__(self, go_on: Path) -> None:
        super().__init__()
        signal.pause()
