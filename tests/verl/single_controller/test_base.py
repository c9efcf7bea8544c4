from __future__ import annotations

import socket

import pytest

from verl.single_controller.base import ClassWithInitArgs, ResourcePool, Worker
from verl.single_controller.base.decorator import (
    Dispatch,
    Execute,
    get_predefined_dispatch_fn,
    register,
    register_dispatch_mode,
    registered_methods,
    update_dispatch_mode,
)
from verl.single_controller.base.dispatch import DispatchMesh, collect_all_to_all, dispatch_one_to_all
from verl.single_controller.base.environment import RankEnvironment
from verl.single_controller.base.network import address_towards, free_port, interface_of


def test_mesh_collects_each_dp_rank_once() -> None:
    mesh = DispatchMesh.from_ranks("m", [1, 1, 0, 0], [False, True, True, False])
    assert (mesh.dp_size, mesh.dp_ranks, mesh.collecting_ranks) == (2, (1, 1, 0, 0), (2, 1))


@pytest.mark.parametrize(
    ("dp_ranks", "collects"),
    [([0, 1], [True, False]), ([0, 0], [True, True]), ([0, 2], [True, True]), ([-1, 0], [False, True])],
)
def test_impossible_meshes_are_refused(dp_ranks: list[int], collects: list[bool]) -> None:
    with pytest.raises(ValueError, match="mesh 'm': each dp rank must be collected from one rank"):
        DispatchMesh.from_ranks("m", dp_ranks, collects)


def test_modes_can_be_added_and_changed() -> None:
    register_dispatch_mode("everyone", dispatch_one_to_all, collect_all_to_all)
    mode = Dispatch["EVERYONE"]
    assert get_predefined_dispatch_fn(mode)["dispatch_fn"] is dispatch_one_to_all
    update_dispatch_mode(mode, collect_all_to_all, collect_all_to_all)
    assert get_predefined_dispatch_fn(mode)["dispatch_fn"] is collect_all_to_all
    with pytest.raises(ValueError, match="EVERYONE exists already"):
        register_dispatch_mode("EVERYONE", dispatch_one_to_all, collect_all_to_all)
    with pytest.raises(ValueError, match="unknown dispatch mode"):
        update_dispatch_mode(Dispatch("NOBODY"), dispatch_one_to_all, collect_all_to_all)
    with pytest.raises(KeyError):
        Dispatch["NOBODY"]


def test_register_checks_its_arguments() -> None:
    with pytest.raises(ValueError, match=r"a dispatch dictionary needs \['collect_fn'\]"):
        register(dispatch_mode={"dispatch_fn": dispatch_one_to_all})
    with pytest.raises(ValueError, match="must be a Dispatch or a dictionary, got 'ONE_TO_ALL'"):
        register(dispatch_mode="ONE_TO_ALL")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"must be Execute.ALL or Execute.RANK_ZERO"):
        register(execute_mode="ALL")  # type: ignore[arg-type]


def test_registered_methods_are_inherited_and_overridden() -> None:
    class First(Worker):
        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def a(self) -> None: ...

        @register()
        def b(self) -> None: ...

    class Second(First):
        @register(execute_mode=Execute.RANK_ZERO)
        def b(self) -> None: ...

    found = registered_methods(Second)
    assert found["a"].dispatch_mode == Dispatch.ONE_TO_ALL
    assert found["b"].execute_mode == Execute.RANK_ZERO
    assert "rank" not in found


def test_worker_alone_is_rank_zero_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR"):
        monkeypatch.delenv(key, raising=False)
    monkeypatch.setenv("MASTER_PORT", "1234")
    worker = Worker()
    assert (worker.rank, worker.world_size, worker.local_rank) == (0, 1, 0)
    assert worker.get_master_addr_port() == ("127.0.0.1", "1234")
    assert worker.get_available_master_addr_port()[0] == "127.0.0.1"
    worker._register_dispatch_collect_info("m", dp_rank=0, is_collect=True)
    with pytest.raises(ValueError, match="mesh 'm' is registered already"):
        worker._register_dispatch_collect_info("m", dp_rank=0, is_collect=True)


def test_gloo_is_told_the_interface_only_where_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    place = RankEnvironment(1, 4, 1, 2, "127.0.0.1", 99)
    loopback = interface_of("127.0.0.1")
    assert loopback is not None
    for resolved, expected in (("127.0.0.1", None), ("10.0.0.1", loopback)):
        monkeypatch.setattr(socket, "gethostbyname", lambda _, address=resolved: address)
        environ: dict[str, str] = {}
        place.apply(environ)
        assert environ.pop("GLOO_SOCKET_IFNAME", None) == expected
        assert environ == {
            "RANK": "1",
            "WORLD_SIZE": "4",
            "LOCAL_RANK": "1",
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "99",
        }
    chosen = {"GLOO_SOCKET_IFNAME": "eth7"}
    place.apply(chosen)
    assert chosen["GLOO_SOCKET_IFNAME"] == "eth7"


def test_network() -> None:
    assert address_towards("127.0.0.1") == "127.0.0.1"
    assert interface_of("203.0.113.77") is None
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", free_port()))


def test_pool_and_class() -> None:
    pool = ResourcePool([2, 1])
    pool.add_node(1)
    assert (pool.world_size, pool.store) == (4, [2, 1, 1])
    assert (pool.local_rank_list(), pool.local_world_size_list()) == ([0, 1, 0, 0], [2, 2, 1, 1])
    assert ClassWithInitArgs(dict, [(1, 2)], three=3)() == {1: 2, "three": 3}
    with pytest.raises(ValueError, match="at least one process"):
        pool.add_node(0)
