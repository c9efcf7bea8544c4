"""Run by test_several_nodes.py in a process of its own, because it needs another Ray cluster than the other tests."""

from __future__ import annotations

import time

import ray
from ray.cluster_utils import Cluster
from ray.exceptions import ActorDiedError, ActorUnavailableError

from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup


class Place(Worker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def where(self) -> tuple[str, int, int, int, tuple[str, str]]:
        node = ray.get_runtime_context().get_node_id()
        return node, self.rank, self.local_rank, self.local_world_size, self.get_master_addr_port()


def refusal(pool: RayResourcePool) -> str:
    try:
        pool.get_placement_groups()
    except ValueError as error:
        return str(error)
    return "not refused"


def check_placement(group: RayWorkerGroup) -> None:
    places = group.where()
    nodes = [place[0] for place in places]
    assert nodes[0] == nodes[1] != nodes[2] == nodes[3], nodes
    assert [place[1:4] for place in places] == [(0, 0, 2), (1, 1, 2), (2, 0, 2), (3, 1, 2)], places
    assert {place[4] for place in places} == {(group.master_address, str(group.master_port))}
    assert [name[-3:] for name in group.worker_names] == ["0:0", "0:1", "1:0", "1:1"], group.worker_names


def check_killed_node(group: RayWorkerGroup, cluster: Cluster, nodes: dict[str, object]) -> None:
    """The processes of a node outlive its raylet by a moment; then every call says whose worker is gone."""
    cluster.remove_node(nodes[group.where()[2][0]], allow_graceful=False)
    notes: list[str] = []
    deadline = time.monotonic() + 60
    while not notes and time.monotonic() < deadline:
        try:
            group.where()
        except (ActorDiedError, ActorUnavailableError) as error:
            notes = error.__notes__
    assert any(f"on rank {rank} of 4" in note for note in notes for rank in (2, 3)), notes


def main() -> None:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "object_store_memory": 80 << 20})
    added = [cluster.add_node(num_cpus=2, object_store_memory=80 << 20) for _ in range(2)]
    ray.init(address=cluster.address)
    try:
        assert "asks for 5 CPUs and 0 GPUs" in refusal(RayResourcePool([3, 2], use_gpu=False))
        message = refusal(RayResourcePool([3], use_gpu=False))
        assert "asks for 3 CPUs and 0 GPUs on one node" in message, message
        pool = RayResourcePool([2, 2], use_gpu=False, max_colocate_count=1)
        group = RayWorkerGroup(pool, RayClassWithInitArgs(Place))
        check_placement(group)
        check_killed_node(group, cluster, {node.node_id: node for node in added})
    finally:
        ray.shutdown()
        cluster.shutdown()
    print("all well")


if __name__ == "__main__":
    main()
