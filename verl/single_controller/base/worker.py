"""Worker: the base of what runs in a worker group's processes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from verl.single_controller.base.decorator import Dispatch, Execute, register, register_overrides
from verl.single_controller.base.network import address_towards, free_port
from verl.utils.stack_dump import DumpTarget, dump_on_signal


class Worker:
    """One rank of a worker group; by itself, rank 0 of 1.

    The place in the group comes from the environment variables that torch.distributed reads too.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        register_overrides(cls)

    @classmethod
    def env_keys(cls) -> list[str]:
        """The environment variables that tell a worker its place."""
        keys = ["WORLD_SIZE", "RANK", "LOCAL_WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"]
        return [*keys, "CUDA_VISIBLE_DEVICES"]

    def __init__(self, cuda_visible_devices: str | None = None) -> None:
        """``cuda_visible_devices`` replaces CUDA_VISIBLE_DEVICES of this process; None leaves it."""
        if cuda_visible_devices is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = cuda_visible_devices
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

    def query_collect_info(self, mesh_name: str) -> bool:
        """Whether this rank's output is collected in a mesh. Raises ValueError naming the known meshes."""
        return self._of_mesh(mesh_name)[1]

    def get_dispatch_collect(self) -> dict[str, dict[str, int] | dict[str, bool]]:
        """What this worker registered of all its meshes, in the form that ``set_dispatch_collect`` takes."""
        return {"dispatch_dp_rank": dict(self._dispatch_dp_ranks), "collect_dp_rank": dict(self._collects)}

    def set_dispatch_collect(
        self, mesh_name: str, dispatch_dp_rank: dict[str, int], collect_dp_rank: dict[str, bool]
    ) -> None:
        """Registers mesh ``mesh_name`` as another worker, wrapped by this one, registered it.

        Raises ValueError where the mesh has been registered here before or the other does not know it.
        """
        if mesh_name not in dispatch_dp_rank or mesh_name not in collect_dp_rank:
            raise ValueError(f"mesh {mesh_name!r} is not registered; there are {sorted(dispatch_dp_rank)}")
        self._register_dispatch_collect_info(mesh_name, dispatch_dp_rank[mesh_name], collect_dp_rank[mesh_name])

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def _query_dispatch_info(self, mesh_name: str) -> int:
        """This rank's dp rank in a mesh. Raises ValueError naming the known meshes."""
        return self._of_mesh(mesh_name)[0]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def _query_collect_info(self, mesh_name: str) -> bool:
        """Whether this rank's output is collected in a mesh. Raises ValueError naming the known meshes."""
        return self._of_mesh(mesh_name)[1]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def _query_mesh(self, mesh_name: str) -> tuple[int, bool]:
        """This rank's (dp rank, whether it collects) in a mesh. Raises ValueError naming the known meshes."""
        return self._of_mesh(mesh_name)

    def _of_mesh(self, mesh_name: str) -> tuple[int, bool]:
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
