from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from ray.exceptions import ActorDiedError

from verl.protocol import DataProto, DataProtoFuture
from verl.single_controller.ray import (
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    create_colocated_worker_cls,
    create_colocated_worker_cls_fused,
)

StartGroup = Callable[..., RayWorkerGroup]


def rows(n: int, **meta: Any) -> DataProto:
    return DataProto.from_dict({"x": torch.arange(n), "response_mask": torch.ones(n, 2)}, meta_info=meta)


def test_workers_know_rank_and_meeting_point(quartet: RayWorkerGroup) -> None:
    environments = quartet.environment()
    assert [e["RANK"] for e in environments] == ["0", "1", "2", "3"]
    assert [e["LOCAL_RANK"] for e in environments] == ["0", "1", "2", "3"]
    assert {e["WORLD_SIZE"] for e in environments} == {e["LOCAL_WORLD_SIZE"] for e in environments} == {"4"}
    meeting_points = {(e["MASTER_ADDR"], e["MASTER_PORT"]) for e in environments}
    assert meeting_points == {(quartet.master_address, str(quartet.master_port))}
    assert len(quartet.workers) == quartet.world_size == 4


def test_each_mode_deals_and_joins(pair: RayWorkerGroup) -> None:
    assert pair.one_to_all(3, scale=2) == [(0, 6), (1, 6)]
    assert pair.one_to_all([1, 2]) == [(0, [1, 2]), (1, [1, 2])]
    assert pair.all_to_all(["a", "b"]) == [(0, "a"), (1, "b")]
    assert pair.all_to_all("ab") == [(0, "ab"), (1, "ab")]
    assert pair.given_to_rank_zero("x") == (0, "x")
    assert pair.dp_compute([1, 2]) == [10, 21]
    assert pair.count(rows(4)) == [2, 2]
    joined = pair.add_rank(rows(4))
    assert joined.batch["out"].tolist() == [0, 1, 102, 103]
    assert joined.meta_info["metrics"] == {"n": [2, 2]}
    assert pair.execute_func_rank_zero(divmod, 7, 2) == (3, 1)
    kept = pair.execute_with_func_generator(lambda worker, data: data[: worker.rank], rows(4))
    assert kept.batch["x"].tolist() == [2]


def test_rank_zero_execution_gets_one_argument_not_a_list(pair: RayWorkerGroup) -> None:
    before = pair.run_on_rank_zero(step=0)
    assert pair.run_on_rank_zero(5) == before + 5
    assert pair.execute_rank_zero_sync("one_to_all", 2, scale=3) == (0, 6)
    assert ray.get(pair.execute_rank_zero("one_to_all", [7, 8])) == (0, [7, 8])


def test_calling_by_name(pair: RayWorkerGroup) -> None:
    assert pair.execute_all_sync("one_to_all", [1, 2], scale=[10, 100]) == [(0, 10), (1, 200)]
    assert ray.get(pair.execute_all("one_to_all", 1)) == [(0, 1), (1, 1)]
    assert ray.get(pair.rank_async()) == [0, 1]


def test_direct_methods_are_called_on_the_workers(pair: RayWorkerGroup) -> None:
    with pytest.raises(NotImplementedError, match="on the workers themselves"):
        pair.direct()
    assert ray.get(pair.workers[1].direct.remote()) == 1
    with pytest.raises(AttributeError, match="has no method 'nonsense'; its workers registered"):
        pair.nonsense()


def test_wrong_arguments_are_named(pair: RayWorkerGroup) -> None:
    with pytest.raises(ValueError, match=r"argument 0 must be a list .* for each of 2 ranks, got 3 elements"):
        pair.dp_compute([1, 2, 3])
    with pytest.raises(ValueError, match="data must be a DataProto or DataProtoFuture to be split by rows, got int"):
        pair.count(data=4)


def test_custom_dispatch(pair: RayWorkerGroup) -> None:
    assert pair.reversed_total([1, 2]) == 2 + 1 * 10


def test_mesh_deals_by_dp_rank_and_collects_once(quartet: RayWorkerGroup) -> None:
    assert quartet.nd(rows(4)).batch["out"].tolist() == [100, 101, 302, 303]
    assert quartet.nd(rows(4), offset=rows(4)).batch["out"].tolist() == [100, 102, 304, 306]
    assert quartet.nd_ragged(rows(3)).batch["rows"].tolist() == [2, 2, 1]
    with pytest.raises(ValueError, match=r"'nowhere' is not registered; there are \['model'\]"):
        quartet.nd_unknown(rows(4))


def test_rows_that_do_not_divide(pair: RayWorkerGroup) -> None:
    with pytest.raises(ValueError, match="argument 0 has 5 rows, which do not divide among 2 data parallel ranks"):
        pair.nd(rows(5))
    ragged = pair.nd_ragged(rows(1))
    assert (ragged.batch["out"].tolist(), ragged.batch["rows"].tolist()) == ([0], [1])
    repeated = pair.nd_repeat(rows(5))
    assert (repeated.batch["out"].tolist(), repeated.batch["rows"].tolist()) == ([0, 1, 2, 3, 4], [3, 3, 3, 3, 3])
    assert len(pair.nd_ragged(rows(0))) == 0


def test_automatic_padding_of_plain_data_parallel_methods(pair: RayWorkerGroup) -> None:
    data = DataProto.from_dict({"x": torch.arange(3)}, auto_padding=True)
    assert pair.add_rank(data).batch["out"].tolist() == [0, 1, 102]
    assert pair.count(data) == [2, 2]
    with pytest.raises(ValueError, match="different numbers of rows cannot be padded together"):
        pair.nd_repeat(rows(3), rows(4))


def test_rows_added_for_an_update_weigh_nothing(pair: RayWorkerGroup) -> None:
    given = rows(5)
    updates = pair.nd_update(given)
    assert [update["rows"] for update in updates] == [3, 3]
    assert [update["weight"] for update in updates] == [6, 4]
    assert given.batch["response_mask"].sum() == 10
    with pytest.raises(ValueError, match=r"rows of no weight need one of the columns \['response_mask', 'loss_mask'\]"):
        pair.nd_update(given.select(["x"]))


def test_future_passes_between_groups(pair: RayWorkerGroup, quartet: RayWorkerGroup) -> None:
    future = pair.nd_async(rows(4))
    assert isinstance(future, DataProtoFuture)
    assert quartet.nd(future).batch["out"].tolist() == [200, 201, 502, 503]
    assert future.get().batch["x"].tolist() == [100, 101, 202, 203]
    chained = quartet.nd_async(pair.nd_async(rows(4)))
    assert chained.get().batch["x"].tolist() == [300, 301, 602, 603]
    with pytest.raises(ValueError, match="3 rows do not divide into 2 equal chunks"):
        pair.nd(pair.nd_ragged_async(rows(3)))


def test_a_chunk_of_a_future_fetches_only_what_it_needs(pair: RayWorkerGroup) -> None:
    future = pair.nd_ragged_async(rows(5))
    parts = [part.get() for part in future.chunk(3, ragged=True)]
    assert [part.batch["x"].tolist() for part in parts] == [[0, 1], [2, 3], [4]]
    assert [part.meta_info["metrics"]["rank"] for part in parts] == [[0], [0, 1], [1]]
    assert future.unpad(2).get().batch["x"].tolist() == [0, 1, 2]
    nested = future.unpad(1).chunk(2)[1].chunk(2)[0]
    assert nested.get().batch["x"].tolist() == [2]
    assert [len(part.get()) for part in future.chunk(7, ragged=True)] == [1, 1, 1, 1, 1, 0, 0]


def test_future_raises_the_failure_of_a_rank_it_does_not_collect_from(quartet: RayWorkerGroup, tmp_path: Path) -> None:
    future = quartet.nd_fails_where_nothing_is_collected(rows(2, go_on=tmp_path / "go_on"))
    with pytest.raises(ArithmeticError, match="rank 0 of the mesh failed"):
        future.get()
    (tmp_path / "go_on").touch()


def test_async_methods_overlap(start_group: StartGroup, async_worker: type) -> None:
    group = start_group(1, async_worker)
    waiting = group.execute_all_async("wait_for_peer_call")
    assert group.wake() == [0]
    assert ray.get(waiting) == ["woken 0"]
    assert group.double(rows(2)).batch["out"].tolist() == [0, 2]
    assert group.double_later(group.double_later(rows(2))).get().batch["x"].tolist() == [0, 4]
    assert ray.get(group.workers[0].wake.remote()) == 0


def test_groups_share_bundles(start_group: StartGroup, probe_worker: type, async_worker: type) -> None:
    pool = RayResourcePool([1], use_gpu=False, max_colocate_count=2, cpus_per_bundle=0.5)
    trainer = start_group(1, pool=pool)
    rollout = start_group(1, async_worker, pool=pool)
    assert len(pool.get_placement_groups()) == 1
    assert trainer.count(rows(2)) == [2]
    assert rollout.wake() == [0]
    assert trainer.master_port != rollout.master_port
    with pytest.raises(ValueError, match=r"asks for 0.25 CPUs and 0 GPUs of a bundle of 0.5 CPUs .* 0.5 CPUs .* taken"):
        RayWorkerGroup(pool, RayClassWithInitArgs(probe_worker))
    trainer.shutdown()
    assert rollout.wake() == [0]
    assert start_group(1, pool=pool).count(rows(2)) == [2]


def test_classes_share_a_process(start_group: StartGroup, plus_worker: type) -> None:
    classes = {"one": RayClassWithInitArgs(plus_worker, 1), "ten": RayClassWithInitArgs(plus_worker, amount=10)}
    group = start_group(2, create_colocated_worker_cls_fused(classes))
    spawned = group.spawn({"one", "ten"})
    assert spawned["ten"].add(spawned["one"].add(rows(2))).batch["x"].tolist() == [11, 12]
    assert spawned["one"].master_port == spawned["ten"].master_port == group.master_port
    assert spawned["one"].sum_of_ranks() == [3, 3]
    group.fuse(["one", "ten"])
    one, ten = group.one.process_and_neighbour("ten"), group.wg_dict["ten"].process_and_neighbour("one")
    assert [pid for pid, _ in one] == [pid for pid, _ in ten]
    assert ([amount for _, amount in one], [amount for _, amount in ten]) == ([10, 10], [1, 1])
    with pytest.raises(ValueError, match=r"no class 'two' in this process; there are \['one', 'ten'\]"):
        group.spawn(["two"])


def test_classes_that_cannot_share_a_process(plus_worker: type) -> None:
    with pytest.raises(ValueError, match=r"are Workers; \['text'\] given"):
        create_colocated_worker_cls({"text": RayClassWithInitArgs(str)})
    one, two = RayClassWithInitArgs(plus_worker, 1), RayClassWithInitArgs(plus_worker, 2)
    one.update_options({"num_cpus": 1})
    two.update_options({"num_cpus": 2})
    with pytest.raises(ValueError, match=r"ask for different \['num_cpus'\]"):
        create_colocated_worker_cls({"one": one, "two": two})


def test_attaching_to_running_workers(pair: RayWorkerGroup, probe_worker: type) -> None:
    class_with_args = RayClassWithInitArgs(probe_worker)
    by_name = RayWorkerGroup.from_detached(worker_names=pair.worker_names, ray_cls_with_init=class_with_args)
    assert by_name.one_to_all(1) == [(0, 1), (1, 1)]
    assert by_name.master_port == pair.master_port
    by_handle = RayWorkerGroup.from_detached(worker_handles=pair.workers[1:], ray_cls_with_init=class_with_args)
    assert by_handle.one_to_all(1) == [(1, 1)]
    by_name.shutdown()
    assert pair.count(rows(2)) == [1, 1]
    with pytest.raises(ValueError, match="nobody"):
        RayWorkerGroup.from_detached(worker_names=["nobody"], ray_cls_with_init=class_with_args)


def test_options_reach_the_actors(start_group: StartGroup, probe_worker: type) -> None:
    class_with_args = RayClassWithInitArgs(ray.remote(num_cpus=0.125)(probe_worker))
    class_with_args.update_options({"runtime_env": {"env_vars": {"FLAVOUR": "mint"}}})
    class_with_args.update_options({"runtime_env": {"env_vars": {"OMP_NUM_THREADS": "2"}}})
    group = start_group(1, class_with_args)
    environment = group.environment()[0]
    assert (environment["FLAVOUR"], environment["OMP_NUM_THREADS"]) == ("mint", "2")
    assert class_with_args.options(group.resource_pool.share)["num_cpus"] == 0.125


def test_constructor_error_surfaces(start_group: StartGroup) -> None:
    group = start_group(1, fail_on_rank=0)
    with pytest.raises(ActorDiedError, match="no model for rank 0") as caught:
        group.wait_ready()
    assert "raised by __init__ on rank 0 of 1" in caught.value.__notes__[0]


def test_worker_exception_surfaces_without_waiting_for_its_peers(pair: RayWorkerGroup, tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="lost on rank 1") as caught:
        pair.fail_on(1, tmp_path / "go_on")
    assert "raised by fail_on on rank 1 of 2 (pairProbeWorker_0:1)" in caught.value.__notes__[0]
    (tmp_path / "go_on").touch()
    assert pair.count(rows(2)) == [1, 1]


def test_killed_worker_surfaces_before_the_errors_it_causes_and_shutdown_leaves_no_process(
    start_group: StartGroup,
) -> None:
    group = start_group(2)
    pid = group.execute_func_rank_zero(os.getpid)
    with pytest.raises(ActorDiedError) as caught:
        group.die_on(1)
    assert "raised by die_on on rank 1 of 2" in caught.value.__notes__[0]
    with pytest.raises(ActorDiedError) as caught:
        group.environment()
    assert "raised by environment on rank 1 of 2" in caught.value.__notes__[0]
    (placement_group,) = group.resource_pool.get_placement_groups()
    group.shutdown()
    assert ray.util.placement_group_table(placement_group)["state"] == "REMOVED"
    with pytest.raises(ActorDiedError):
        ray.get(group.workers[0].direct.remote())
    deadline = time.monotonic() + 60
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{pid}").exists()


def test_methods_that_would_hide_the_groups_own_are_refused(shadowing_worker: type) -> None:
    pool = RayResourcePool([1], use_gpu=False)
    with pytest.raises(ValueError, match=r"registers \['spawn'\], which are the worker group's own names"):
        RayWorkerGroup(pool, RayClassWithInitArgs(shadowing_worker))
    assert pool._reservation is None
