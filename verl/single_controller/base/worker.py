"""Worker: the base of what runs in a worker group's processes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from verl.single_controller.base.decorator import Dispatch, Execute, register
from verl.single_controller.base.network import address_towards, free_port
from verl.utils.stack_dump import DumpTarget, dump_on_signal


class Worker:
    """One rank of a worker group; by itself, rank 0 of 1.

    The place in the group comes from the environment variables that torch.distributed reads too.
    """

    def __init__(self) -> None:
        self._rank = int(os.environ.get("RANK", "0"))
        self._world_size = int(os.environ.get("WORLD_SIZE", "1"))
        self._local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self._local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self._dispatch_dp_ranks: dict[str, int] = {}
        self._collects: dict[str, bool] = {}
        self.fused_worker_dict: dict[str, Worker] = {}

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def world_size(self) -> int:
        return self._world_size

    @property
    def local_rank(self) -> int:
        """This rank's number among the group's ranks on its node."""
        return self._local_rank

    @property
    def local_world_size(self) -> int:
        return self._local_world_size

    def get_fused_worker_by_name(self, worker_name: str) -> Worker | None:
        """Another worker fused into this process."""
        return self.fused_worker_dict.get(worker_name)

    def get_master_addr_port(self) -> tuple[str, str]:
        """Address and port at which this group's ranks meet (rank 0's node, a port free at the start)."""
        return os.environ.get("MASTER_ADDR", "127.0.0.1"), os.environ.setdefault("MASTER_PORT", str(free_port()))

    def get_available_master_addr_port(self) -> tuple[str, str]:
        """This node's address, as the group's other nodes reach it, and a port free now: for further process groups."""
        return address_towards(os.environ.get("MASTER_ADDR", "127.0.0.1")), str(free_port())

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def dump_stacks_on_signal(self, directory: str) -> DumpTarget:
        """From now on SIGUSR1 makes this process write its stacks to ``stacks-{class}-{rank}.txt`` there."""
        import ray

        path = Path(directory) / f"stacks-{type(self).__name__}-{self._rank}.txt"
        return dump_on_signal(path, ray.get_runtime_context().get_node_id())

    def get_cuda_visible_devices(self) -> str:
        """CUDA_VISIBLE_DEVICES, "not set" where it is not."""
        return os.environ.get("CUDA_VISIBLE_DEVICES", "not set")

    def _register_dispatch_collect_info(self, mesh_name: str, dp_rank: int, is_collect: bool) -> None:
        """Says which rows this rank gets in mesh ``mesh_name`` and whether its output is the one collected.

        Raises ValueError where the mesh has been registered before.
        """
        if mesh_name in self._dispatch_dp_ranks:
            raise ValueError(f"mesh {mesh_name!r} is registered already")
        self._dispatch_dp_ranks[mesh_name] = dp_rank
        self._collects[mesh_name] = is_collect

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def _query_mesh(self, mesh_name: str) -> tuple[int, bool]:
        """This rank's (dp rank, whether it collects) in a mesh. Raises ValueError naming the known meshes."""
        if mesh_name not in self._dispatch_dp_ranks:
            raise ValueError(f"mesh {mesh_name!r} is not registered; there are {sorted(self._dispatch_dp_ranks)}")
        return self._dispatch_dp_ranks[mesh_name], self._collects[mesh_name]

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO_WITH_FUNC)
    def execute_with_func_generator(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """``func(worker, *args)`` on this rank's rows."""
        return func(self, *args, **kwargs)

    @register(dispatch_mode=Dispatch.ALL_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def execute_func_rank_zero(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """``func(*args)`` in rank 0's process."""
        return func(*args, **kwargs)
