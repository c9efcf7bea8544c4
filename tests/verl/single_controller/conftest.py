"""Worker classes that run in Ray actors, and the pools they run in."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
import torch.distributed as dist

from verl.protocol import DataProto
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, Execute, make_nd_compute_dataproto_dispatch_fn, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

# Ray workers cannot import a test module: its classes travel by value.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


def reversed_ranks(worker_group: RayWorkerGroup, values: list[int]) -> tuple[tuple, dict]:
    """A dispatch function of a user's own."""
    assert len(values) == worker_group.world_size
    return (values[::-1],), {}


def wait_for(path: Path) -> None:
    """Returns when the file is there; a test that never makes it gets an error instead of a hang."""
    deadline = time.monotonic() + 120
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{path} never came")
        time.sleep(0.01)


class ProbeWorker(Worker):
    """Answers with what it was given. dp x tp mesh "model": tensor ranks are neighbours, the last collects."""

    def __init__(self, tp_size: int = 1, fail_on_rank: int | None = None) -> None:
        super().__init__()
        if self.rank == fail_on_rank:
            raise ValueError(f"no model for rank {self.rank}")
        dp_rank, tp_rank = divmod(self.rank, tp_size)
        self._register_dispatch_collect_info("model", dp_rank, is_collect=tp_rank == tp_size - 1)
        self.state = 0

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def environment(self) -> dict[str, str]:
        keys = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
        return {key: os.environ.get(key, "") for key in (*keys, "GLOO_SOCKET_IFNAME", "FLAVOUR")}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def one_to_all(self, value: Any, scale: int = 1) -> Any:
        return self.rank, value * scale

    @register()
    def all_to_all(self, value: Any) -> Any:
        return self.rank, value

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def given_to_rank_zero(self, value: Any) -> Any:
        return self.rank, value

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def run_on_rank_zero(self, step: int) -> int:
        self.state += step
        return self.state

    @register(dispatch_mode=Dispatch.DP_COMPUTE)
    def dp_compute(self, value: int) -> int:
        return value * 10 + self.rank

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def add_rank(self, data: DataProto) -> DataProto:
        return DataProto.from_dict({"out": data.batch["x"] + 100 * self.rank}, meta_info={"metrics": {"n": len(data)}})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def count(self, data: DataProto) -> int:
        return len(data)

    @register(dispatch_mode=Dispatch.DIRECT_ROLLOUT_METHOD)
    def direct(self) -> int:
        return self.rank

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("model"))
    def nd(self, data: DataProto, offset: DataProto | None = None) -> DataProto:
        x = data.batch["x"] if offset is None else data.batch["x"] + offset.batch["x"]
        return DataProto.from_dict({"out": x + 100 * self.rank})

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("model"), blocking=False)
    def nd_async(self, data: DataProto) -> DataProto:
        return DataProto.from_dict({"x": data.batch["x"] + 100 * (self.rank + 1)})

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("model", padding="ragged"))
    def nd_ragged(self, data: DataProto) -> DataProto:
        return DataProto.from_dict({"out": data.batch["x"], "rows": torch.full((len(data),), len(data))})

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("model", padding="repeat"))
    def nd_repeat(self, data: DataProto) -> DataProto:
        return DataProto.from_dict({"out": data.batch["x"], "rows": torch.full((len(data),), len(data))})

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("model", padding="zero_weight"))
    def nd_update(self, data: DataProto) -> dict[str, float]:
        return {"rows": len(data), "weight": float(data.batch["response_mask"].sum())}

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("model", padding="ragged"), blocking=False)
    def nd_ragged_async(self, data: DataProto) -> DataProto:
        return DataProto.from_dict({"x": data.batch["x"]}, meta_info={"metrics": {"rank": self.rank}})

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("model"), blocking=False)
    def nd_fails_where_nothing_is_collected(self, data: DataProto) -> DataProto:
        """The ranks that collect wait for one that fails."""
        if self.rank == 0:
            raise ArithmeticError("rank 0 of the mesh failed")
        wait_for(data.meta_info["go_on"])
        return data

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def rank_async(self) -> int:
        return self.rank

    @register(dispatch_mode={"dispatch_fn": reversed_ranks, "collect_fn": lambda _, outputs: sum(outputs)})
    def reversed_total(self, value: int) -> int:
        return value * 10**self.rank

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("nowhere"))
    def nd_unknown(self, data: DataProto) -> DataProto:
        return data

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def fail_on(self, rank: int, go_on: Path) -> int:
        if self.rank == rank:
            raise KeyError(f"lost on rank {rank}")
        wait_for(go_on)
        return self.rank

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def die_on(self, rank: int) -> int:
        if self.rank == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        raise ConnectionError("my peer went away")


class AsyncWorker(Worker):
    """An asyncio actor: calls overlap."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting = asyncio.Event()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def wait_for_peer_call(self) -> str:
        await asyncio.wait_for(self.waiting.wait(), 30)
        return f"woken {self.rank}"

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def wake(self) -> int:
        self.waiting.set()
        return self.rank

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    async def double(self, data: DataProto) -> DataProto:
        await asyncio.sleep(0)
        return DataProto.from_dict({"out": data.batch["x"] * 2})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    async def double_later(self, data: DataProto) -> DataProto:
        await asyncio.sleep(0)
        return DataProto.from_dict({"x": data.batch["x"] * 2})


class ShadowingWorker(Worker):
    """Registers a name that the group needs."""

    @register()
    def spawn(self) -> None: ...


class PlusWorker(Worker):
    """Adds, with what its neighbour in the process knows."""

    def __init__(self, amount: int) -> None:
        super().__init__()
        self.amount = amount

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def add(self, data: DataProto) -> DataProto:
        return DataProto.from_dict({"x": data.batch["x"] + self.amount})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def process_and_neighbour(self, name: str) -> tuple[int, int]:
        neighbour = self.get_fused_worker_by_name(name)
        assert isinstance(neighbour, PlusWorker)
        return os.getpid(), neighbour.amount

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def sum_of_ranks(self) -> int:
        """The ranks meet at the group's master address by Gloo."""
        address, port = self.get_master_addr_port()
        dist.init_process_group("gloo", f"tcp://{address}:{port}", rank=self.rank, world_size=self.world_size)
        total = torch.tensor(self.rank + 1)
        dist.all_reduce(total)
        dist.destroy_process_group()
        return int(total)


@pytest.fixture
def shadowing_worker() -> type[ShadowingWorker]:
    return ShadowingWorker


StartGroup = Callable[..., RayWorkerGroup]


def small_pool(n: int) -> RayResourcePool:
    return RayResourcePool([n], use_gpu=False, max_colocate_count=2, cpus_per_bundle=0.25)


@pytest.fixture
def start_group(ray_session: None) -> Iterator[StartGroup]:
    """Starts a group in a pool of its own, or in a given one; all end with the test."""
    groups: list[RayWorkerGroup] = []

    def start(
        n: int, cls: Any = ProbeWorker, *args: Any, pool: RayResourcePool | None = None, **kwargs: Any
    ) -> RayWorkerGroup:
        class_with_args = cls if isinstance(cls, RayClassWithInitArgs) else RayClassWithInitArgs(cls, *args, **kwargs)
        group = RayWorkerGroup(pool or small_pool(n), class_with_args)
        groups.append(group)
        return group

    yield start
    for group in groups:
        group.shutdown()


@pytest.fixture(scope="session")
def pair(ray_session: None) -> Iterator[RayWorkerGroup]:
    """Two ProbeWorkers, for tests that leave them as they were."""
    group = RayWorkerGroup(small_pool(2), RayClassWithInitArgs(ProbeWorker), name_prefix="pair")
    yield group
    group.shutdown()


@pytest.fixture(scope="session")
def quartet(ray_session: None) -> Iterator[RayWorkerGroup]:
    """Four ProbeWorkers in a mesh of two data parallel by two tensor parallel ranks."""
    group = RayWorkerGroup(small_pool(4), RayClassWithInitArgs(ProbeWorker, tp_size=2))
    yield group
    group.shutdown()


@pytest.fixture
def probe_worker() -> type[ProbeWorker]:
    return ProbeWorker


@pytest.fixture
def async_worker() -> type[AsyncWorker]:
    return AsyncWorker


@pytest.fixture
def plus_worker() -> type[PlusWorker]:
    return PlusWorker
