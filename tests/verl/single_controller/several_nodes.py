"""Run by test_several_nodes.py in a process of its own, because it needs another Ray cluster than the other tests.

Two nodes of two CPUs. Pools are sized so that no two of their parts fit on one node.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from unittest import mock

import ray
import torch
import torch.distributed as dist
from ray.cluster_utils import Cluster
from ray.exceptions import ActorDiedError, ActorUnavailableError
from torch.distributed.device_mesh import init_device_mesh

from verl.protocol import DataProto
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from verl.single_controller.ray import (
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    create_colocated_worker_cls_fused,
    merge_resource_pool,
    split_resource_pool,
)

NAMESPACE = "several"


class Place(Worker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def where(self) -> tuple[str, int, int, int, tuple[str, str]]:
        node = ray.get_runtime_context().get_node_id()
        return node, self.rank, self.local_rank, self.local_world_size, self.get_master_addr_port()

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def add_one_later(self, data: DataProto) -> DataProto:
        return DataProto.from_dict({"x": data.batch["x"] + 1})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def node_of_neighbour(self, name: str) -> str:
        neighbour = self.get_fused_worker_by_name(name)
        assert isinstance(neighbour, Place)
        return neighbour.where()[0]


class Meshed(Place):
    """Data x pipeline x sequence x tensor parallel ranks 2 x 2 x 1 x 2 of a torch DeviceMesh over both nodes."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def meet(self) -> float:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (2, 2, 1, 2), mesh_dim_names=("dp", "pp", "sp", "tp"))
        local = {name: mesh.get_local_rank(name) for name in ("dp", "pp", "sp", "tp")}
        collects = (local["pp"], local["sp"], local["tp"]) == (1, 0, 0)
        self._register_dispatch_collect_info("train", local["dp"], collects)
        total = torch.tensor(float(self.rank))
        dist.all_reduce(total)
        return float(total)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("train", padding="repeat"))
    def log_probs(self, data: DataProto) -> DataProto:
        return DataProto.from_dict({"x": data.batch["x"], "rank": torch.full((len(data),), self.rank)})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def reduce_without(self, rank: int) -> None:
        if self.rank == rank:
            os._exit(7)
        dist.all_reduce(torch.ones(1))


def pool_of(*counts: int, cpus: float, **options: object) -> RayResourcePool:
    return RayResourcePool(list(counts), use_gpu=False, max_colocate_count=1, cpus_per_bundle=cpus, **options)


def message_of(error: type[Exception], call: Callable[[], object]) -> str:
    """What the error says, and its notes."""
    try:
        call()
    except error as raised:
        return "\n".join([str(raised), *getattr(raised, "__notes__", [])])
    raise AssertionError(f"no {error.__name__}")


def nodes_of(pool: RayResourcePool, strategy: str = "STRICT_PACK") -> list[str]:
    slots = pool.claim("nobody", pool.share, strategy)
    pool.release("nobody")
    return [slot.node_id for slot in slots]


def check_refusals() -> None:
    message = message_of(ValueError, pool_of(3, 2, cpus=1).get_placement_groups)
    assert "asks for 5 CPUs and 0 GPUs (5 x 1 CPUs and 0 GPUs); the Ray cluster has 4 CPUs" in message, message
    message = message_of(ValueError, pool_of(3, cpus=1).get_placement_groups)
    assert "asks for 3 CPUs and 0 GPUs on one node (3 x 1 CPUs and 0 GPUs); the Ray cluster's nodes have" in message
    message = message_of(ValueError, pool_of(1, cpus=1, accelerator_type="A9").get_placement_groups)
    assert "asks for nodes with 'A9', which none of 3 nodes has" in message, message
    holder = pool_of(1, cpus=1.5)
    holder.claim("holder", holder.share, "STRICT_PACK")
    message = message_of(TimeoutError, pool_of(1, 1, cpus=1.5, timeout_s=1).get_placement_groups)
    assert "asks for 3 CPUs and 0 GPUs; of the cluster's 4 CPUs and 0 GPUs only" in message, message
    holder.release("holder")


def check_placement() -> None:
    first, second = dict.fromkeys(nodes_of(pool_of(4, 4, cpus=0.5)))
    assert nodes_of(pool_of(2, 2, cpus=0.9)) == [first, first, second, second]
    alone, *together = nodes_of(pool_of(1, 3, cpus=0.6))
    assert together == [together[0]] * 3 != [alone] * 3
    *together, alone = nodes_of(pool_of(3, 1, cpus=0.6))
    assert together == [together[0]] * 3 != [alone] * 3
    loose = nodes_of(pool_of(5, cpus=0.5), "PACK")
    assert loose == sorted(loose) and set(loose) == {first, second}, loose
    (marked,) = [node["NodeID"] for node in ray.nodes() if "marked" in node["Resources"]]
    assert nodes_of(pool_of(2, cpus=0.5, accelerator_type="marked")) == [marked, marked]
    one, two = split_resource_pool(pool_of(1, 1, cpus=1.5), 1)
    ours, others = one.claim("a", one.share, "STRICT_PACK"), two.claim("b", two.share, "STRICT_PACK")
    assert [ours[0].node_id, others[0].node_id] == [first, second]
    one.release("a")
    two.release("b")
    merged = merge_resource_pool(pool_of(1, cpus=1.5), pool_of(1, cpus=1.5))
    assert set(nodes_of(merged)) == {first, second}


def check_mesh() -> None:
    group = RayWorkerGroup(pool_of(4, 4, cpus=0.5), RayClassWithInitArgs(Meshed))
    places = group.where()
    nodes = [place[0] for place in places]
    assert nodes == [nodes[0]] * 4 + [nodes[4]] * 4 and nodes[0] != nodes[4], nodes
    assert [place[1:4] for place in places] == [(rank, rank % 4, 4) for rank in range(8)], places
    assert {place[4] for place in places} == {(group.master_address, str(group.master_port))}
    assert [name[-3:] for name in group.worker_names] == [f"{node}:{local}" for node in (0, 1) for local in range(4)]
    assert group.meet() == [28.0] * 8
    with mock.patch.object(ray, "put", wraps=ray.put) as put:
        output = group.log_probs(DataProto.from_dict({"x": torch.arange(3)}))
    assert output.batch["x"].tolist() == [0, 1, 2]
    assert output.batch["rank"].tolist() == [2, 2, 6]
    assert sum(isinstance(call.args[0], DataProto) for call in put.call_args_list) == 2, put.call_args_list
    message = message_of(ActorDiedError, lambda: group.reduce_without(5))
    assert "raised by reduce_without on rank 5 of 8" in message, message
    group.shutdown()


def check_chain_fused_and_attached(address: str) -> None:
    """Futures go through two classes of one process to workers that another driver finds too, on two nodes."""
    pair = {name: RayClassWithInitArgs(Place) for name in ("writer", "judge")}
    fused = RayWorkerGroup(pool_of(1, 1, cpus=1.2), create_colocated_worker_cls_fused(pair))
    fused.fuse(["writer", "judge"])
    nodes = [place[0] for place in fused.writer.where()]
    assert fused.judge.node_of_neighbour("writer") == nodes and len(set(nodes)) == 2
    lasting = RayWorkerGroup(pool_of(1, 1, cpus=0.5, detached=True), RayClassWithInitArgs(Place), detached=True)
    data = DataProto.from_dict({"x": torch.arange(4)})
    chained = lasting.add_one_later(fused.judge.add_one_later(fused.writer.add_one_later(data)))
    assert chained.get().batch["x"].tolist() == [3, 4, 5, 6]
    command = [sys.executable, __file__, address, *lasting.worker_names]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "found [0, 1]" in done.stdout, done.stdout + done.stderr
    assert [place[1] for place in lasting.where()] == [0, 1]
    fused.shutdown()
    lasting.shutdown()


def attach(address: str, names: list[str]) -> None:
    """Another driver calls the workers and goes."""
    ray.init(address=address, namespace=NAMESPACE, log_to_driver=False)
    group = RayWorkerGroup.from_detached(worker_names=names, ray_cls_with_init=RayClassWithInitArgs(Place))
    print("found", [place[1] for place in group.where()])
    group.shutdown()


def check_killed_node(cluster: Cluster, nodes: dict[str, object]) -> None:
    """The processes of a node outlive its raylet by a moment; then every call says whose worker is gone."""
    group = RayWorkerGroup(pool_of(1, 1, cpus=1.2), RayClassWithInitArgs(Place))
    cluster.remove_node(nodes[group.where()[1][0]], allow_graceful=False)
    notes: list[str] = []
    deadline = time.monotonic() + 60
    while not notes and time.monotonic() < deadline:
        try:
            group.where()
        except (ActorDiedError, ActorUnavailableError) as error:
            notes = error.__notes__
    assert any("on rank 1 of 2" in note for note in notes), notes


def main() -> None:
    memory = 80 << 20
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "object_store_memory": memory})
    marks: list[dict[str, float]] = [{}, {"marked": 1}]
    added = [cluster.add_node(num_cpus=2, resources=mark, object_store_memory=memory) for mark in marks]
    ray.init(address=cluster.address, namespace=NAMESPACE)
    try:
        check_refusals()
        check_placement()
        check_mesh()
        check_chain_fused_and_attached(cluster.address)
        check_killed_node(cluster, {node.node_id: node for node in added})
    finally:
        ray.shutdown()
        cluster.shutdown()
    print("all well")


if __name__ == "__main__":
    if sys.argv[1:]:
        attach(sys.argv[1], sys.argv[2:])
    else:
        main()
