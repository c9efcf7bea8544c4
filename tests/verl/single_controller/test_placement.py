from __future__ import annotations

import pytest

from verl.single_controller.ray import (
    RayResourcePool,
    ResourcePoolManager,
    merge_resource_pool,
    split_resource_pool,
)
from verl.single_controller.ray.placement import Resources

pytestmark = pytest.mark.usefixtures("ray_session")


def cpu_pool(*counts: int, **options: float) -> RayResourcePool:
    return RayResourcePool(list(counts), use_gpu=False, **options)


def test_asking_for_more_than_exists_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match=r"asks for 99 CPUs and 0 GPUs .* the Ray cluster has 16 CPUs and 0 GPUs"):
        cpu_pool(99).get_placement_groups()
    with pytest.raises(ValueError, match=r"asks for 2 CPUs and 2 GPUs .* the Ray cluster has 16 CPUs and 0 GPUs"):
        RayResourcePool([2]).get_placement_groups()


def test_asking_for_what_others_hold_ends_in_time() -> None:
    held = cpu_pool(1)
    held.claim("holder", held.share, "STRICT_PACK")
    with pytest.raises(TimeoutError, match="asks for 16 CPUs and 0 GPUs; of the cluster's 16 CPUs"):
        cpu_pool(16, timeout_s=1).get_placement_groups()
    held.release("holder")


def test_shares_round_down_so_that_all_fit() -> None:
    pool = cpu_pool(1, max_colocate_count=3)
    assert pool.share == Resources(0.3333, 0)
    for owner in ("a", "b", "c"):
        pool.claim(owner, pool.share, "STRICT_PACK")
    with pytest.raises(ValueError, match=r"of which 0.9999 CPUs and 0 GPUs are taken"):
        pool.claim("d", pool.share, "STRICT_PACK")
    for owner in ("a", "b", "c"):
        pool.release(owner)


def test_bundles_are_freed_with_the_last_share_and_reserved_again() -> None:
    pool = cpu_pool(1, max_colocate_count=2)
    slot = pool.claim("a", pool.share, "STRICT_PACK")[0]
    assert pool.claim("b", pool.share, "STRICT_PACK")[0] == slot
    pool.release("a")
    assert pool.claim("c", pool.share, "STRICT_PACK")[0] == slot
    pool.release("b")
    pool.release("c")
    assert pool.claim("d", pool.share, "STRICT_PACK")[0] != slot
    pool.release("d")


def test_a_refused_claim_leaves_nothing_reserved() -> None:
    pool = cpu_pool(1)
    with pytest.raises(ValueError, match="asks for 2 CPUs"):
        pool.claim("a", Resources(2, 0), "STRICT_PACK")
    everything = cpu_pool(16, timeout_s=20)
    everything.claim("b", Resources(1, 0), "STRICT_PACK")
    everything.release("b")


def test_pools_of_equal_size_do_not_collide() -> None:
    first, second = cpu_pool(2, cpus_per_bundle=0.1), cpu_pool(2, cpus_per_bundle=0.1)
    assert set(first.claim("a", first.share, "STRICT_PACK")).isdisjoint(second.claim("b", first.share, "STRICT_PACK"))
    first.release("a")
    second.release("b")


def test_split_pools_are_parts_of_one_reservation() -> None:
    pool = cpu_pool(3, cpus_per_bundle=0.1)
    first, rest = split_resource_pool(pool, [1, 2])
    slots = pool.claim("whole", Resources(0.04, 0), "STRICT_PACK")
    assert first.claim("first", Resources(0.06, 0), "STRICT_PACK") == slots[:1]
    assert rest.claim("rest", Resources(0.06, 0), "STRICT_PACK") == slots[1:]
    with pytest.raises(ValueError, match=r"of which 0.1 CPUs"):
        rest.claim("more", Resources(0.01, 0), "STRICT_PACK")
    assert (first.world_size, rest.world_size, rest.start_bundle_index) == (1, 2, 1)
    for part, owner in ((pool, "whole"), (first, "first"), (rest, "rest")):
        part.release(owner)
    assert [part.world_size for part in split_resource_pool(pool, 1)] == [1, 1, 1]
    with pytest.raises(ValueError, match="a pool of 3 processes does not split into 2"):
        split_resource_pool(pool, 2)
    with pytest.raises(ValueError, match=r"does not split into \[1, 1\]"):
        split_resource_pool(pool, [1, 1])


def test_merged_pools_keep_both_reservations() -> None:
    first, second = cpu_pool(1, cpus_per_bundle=0.1), cpu_pool(2, cpus_per_bundle=0.1)
    merged = merge_resource_pool(first, second)
    slots = merged.claim("both", Resources(0.1, 0), "STRICT_PACK")
    assert (merged.world_size, len(slots), len(merged.get_placement_groups())) == (3, 3, 2)
    with pytest.raises(ValueError, match="are taken"):
        second.claim("second", Resources(0.1, 0), "STRICT_PACK")
    merged.release("both")
    with pytest.raises(ValueError, match=r"'cpus_per_bundle': \(0.1, 1.0\)"):
        merge_resource_pool(first, cpu_pool(1))


def test_manager_maps_roles_to_pools() -> None:
    manager = ResourcePoolManager({"global": [2], "reward": [1]}, {"actor": "global"}, use_gpu=False)
    manager.create_resource_pool()
    assert manager.get_resource_pool("actor").store == [2]
    assert manager.get_n_gpus() == 3
    with pytest.raises(ValueError, match="role critic has no pool"):
        manager.get_resource_pool("critic")
    with pytest.raises(ValueError, match=r"mapped to pools \['nowhere'\]"):
        ResourcePoolManager({"global": [1]}, {"actor": "nowhere"})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"process_on_nodes": [0]}, "at least one process"),
        ({"process_on_nodes": [1], "max_colocate_count": 0}, "max_colocate_count must be at least 1"),
        ({"process_on_nodes": [1], "cpus_per_bundle": 0}, "cpus_per_bundle must be positive"),
    ],
)
def test_wrong_sizes_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RayResourcePool(**options)
