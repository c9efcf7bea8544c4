from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import ray
import torch
from ray.exceptions import ActorDiedError

from verl.protocol import DataProto
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

StartGroup = Callable[..., RayWorkerGroup]


def rows(n: int, **meta: Any) -> DataProto:
    return DataProto.from_dict({"x": torch.arange(n), "response_mask": torch.ones(n, 2)}, meta_info=meta)


def test_workers_know_rank_and_meeting_point(start_group: StartGroup) -> None:
    group = start_group(3)
    environments = group.environment()
    assert [e["RANK"] for e in environments] == ["0", "1", "2"]
    assert [e["LOCAL_RANK"] for e in environments] == ["0", "1", "2"]
    assert {e["WORLD_SIZE"] for e in environments} == {e["LOCAL_WORLD_SIZE"] for e in environments} == {"3"}
    assert {(e["MASTER_ADDR"], e["MASTER_PORT"]) for e in environments} == {
        (group.master_address, str(group.master_port))
    }
    assert len(group.workers) == group.world_size == 3


def test_each_mode_deals_and_joins(start_group: StartGroup) -> None:
    group = start_group(2)
    assert group.one_to_all(3, scale=2) == [(0, 6), (1, 6)]
    assert group.one_to_all([1, 2]) == [(0, [1, 2]), (1, [1, 2])]
    assert group.all_to_all(["a", "b"]) == [(0, "a"), (1, "b")]
    assert group.all_to_all("ab") == [(0, "ab"), (1, "ab")]
    assert group.given_to_rank_zero("x") == (0, "x")
    assert [group.run_on_rank_zero(), group.run_on_rank_zero()] == [1, 2]
    assert group.dp_compute([1, 2]) == [10, 21]
    assert group.count(rows(4)) == [2, 2]
    joined = group.add_rank(rows(4))
    assert joined.batch["out"].tolist() == [0, 1, 102, 103]
    assert joined.meta_info["metrics"] == {"n": [2, 2]}
    assert group.execute_func_rank_zero(divmod, 7, 2) == (3, 1)
    assert group.execute_with_func_generator(lambda worker, data: data[: worker.rank], rows(4)).batch["x"].tolist() == [
        2
    ]
    with pytest.raises(NotImplementedError, match="on the workers themselves"):
        group.direct()
    assert ray.get(group.workers[1].direct.remote()) == 1


def test_mesh_deals_by_dp_rank_and_collects_once(start_group: StartGroup) -> None:
    group = start_group(4, tp_size=2)
    assert group.nd(rows(4)).batch["out"].tolist() == [100, 101, 302, 303]
    assert group.nd(rows(4), offset=rows(4)).batch["out"].tolist() == [100, 102, 304, 306]
    assert group.nd_ragged(rows(3)).batch["rows"].tolist() == [2, 2, 1]
    with pytest.raises(ValueError, match=r"'nowhere' is not registered; there are \['model'\]"):
        group.nd_unknown(rows(4))


def test_rows_that_do_not_divide(start_group: StartGroup) -> None:
    group = start_group(4)
    with pytest.raises(ValueError, match="argument 0 has 5 rows, which do not divide among 4 data parallel ranks"):
        group.nd(rows(5))
    ragged = group.nd_ragged(rows(2))
    assert (ragged.batch["out"].tolist(), ragged.batch["rows"].tolist()) == ([0, 1], [1, 1])
    repeated = group.nd_repeat(rows(5))
    assert (repeated.batch["out"].tolist(), repeated.batch["rows"].tolist()) == ([0, 1, 2, 3, 4], [2, 2, 2, 2, 2])


def test_rows_added_for_an_update_weigh_nothing(start_group: StartGroup) -> None:
    given = rows(5)
    updates = start_group(4).nd_update(given)
    assert [update["rows"] for update in updates] == [2, 2, 2, 2]
    assert [update["weight"] for update in updates] == [4, 4, 2, 0]
    assert given.batch["response_mask"].sum() == 10


def test_future_passes_between_groups(start_group: StartGroup) -> None:
    first, second = start_group(2), start_group(4, tp_size=2)
    future = first.nd_async(rows(4))
    assert second.nd(future).batch["out"].tolist() == [200, 201, 502, 503]
    assert future.get().batch["x"].tolist() == [100, 101, 202, 203]


def test_async_methods_overlap(start_group: StartGroup, async_worker: type) -> None:
    group = start_group(2, async_worker)
    waiting = group.execute_all_async("wait_for_peer_call")
    assert group.wake() == [0, 1]
    assert ray.get(waiting) == ["woken 0", "woken 1"]
    assert group.double(rows(2)).batch["out"].tolist() == [0, 2]
    assert ray.get(group.workers[1].wake.remote()) == 1


def test_groups_share_bundles(start_group: StartGroup, probe_worker: type, async_worker: type) -> None:
    pool = RayResourcePool([2], use_gpu=False, max_colocate_count=2, cpus_per_bundle=0.5)
    trainer = start_group(2, pool=pool)
    rollout = start_group(2, async_worker, pool=pool)
    assert len(pool.get_placement_groups()) == 1
    assert trainer.count(rows(2)) == [1, 1]
    assert rollout.wake() == [0, 1]
    assert trainer.master_port != rollout.master_port
    with pytest.raises(ValueError, match=r"asks for 0.25 CPUs and 0 GPUs of a bundle of 0.5 CPUs .* 0.5 CPUs .* taken"):
        RayWorkerGroup(pool, RayClassWithInitArgs(probe_worker))
    trainer.shutdown()
    assert rollout.wake() == [0, 1]
    assert start_group(2, pool=pool).count(rows(2)) == [1, 1]


def test_options_reach_the_actors(start_group: StartGroup, probe_worker: type) -> None:
    class_with_args = RayClassWithInitArgs(ray.remote(num_cpus=0.125)(probe_worker))
    class_with_args.update_options({"runtime_env": {"env_vars": {"FLAVOUR": "mint"}}})
    group = start_group(1, class_with_args)
    assert group.environment()[0]["FLAVOUR"] == "mint"
    assert class_with_args.options(group.resource_pool.share)["num_cpus"] == 0.125


def test_asking_for_more_than_exists_is_refused_at_once(ray_session: None, probe_worker: type) -> None:
    with pytest.raises(ValueError, match=r"asks for 99 CPUs and 0 GPUs .* the Ray cluster has 8 CPUs and 0 GPUs"):
        RayWorkerGroup(RayResourcePool([99], use_gpu=False), RayClassWithInitArgs(probe_worker))
    with pytest.raises(ValueError, match=r"asks for 2 CPUs and 2 GPUs .* the Ray cluster has 8 CPUs and 0 GPUs"):
        RayWorkerGroup(RayResourcePool([2]), RayClassWithInitArgs(probe_worker))
    held = RayResourcePool([1], use_gpu=False)
    held.claim("holder", held.share, "STRICT_PACK")
    with pytest.raises(TimeoutError, match="asks for 8 CPUs and 0 GPUs; of the cluster's 8 CPUs"):
        RayResourcePool([8], use_gpu=False, timeout_s=0.2).get_placement_groups()
    held.release("holder")


def test_constructor_error_surfaces(start_group: StartGroup) -> None:
    group = start_group(2, fail_on_rank=1)
    with pytest.raises(ActorDiedError, match="no model for rank 1") as caught:
        group.wait_ready()
    assert "rank 1 of 2" in caught.value.__notes__[0]


def test_worker_exception_surfaces_without_waiting_for_its_peers(start_group: StartGroup) -> None:
    group = start_group(2)
    with pytest.raises(KeyError, match="lost on rank 1") as caught:
        group.fail_on(1, wait_s=30)
    assert "raised by fail_on on rank 1 of 2" in caught.value.__notes__[0]


def test_death_is_raised_before_the_errors_it_causes(start_group: StartGroup) -> None:
    with pytest.raises(ActorDiedError):
        start_group(2).die_on(1, wait_s=0.0)


def test_killed_worker_surfaces_its_death(start_group: StartGroup) -> None:
    group = start_group(2)
    group.wait_ready()
    ray.kill(group.workers[1])
    with pytest.raises(ActorDiedError) as caught:
        group.environment()
    assert "rank 1 of 2" in caught.value.__notes__[0]
