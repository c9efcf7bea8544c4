from contextlib import ExitStack

import pytest

from zerosearch.simulation.pool import ServerOutageError, ServerPool, parse_addresses


@pytest.mark.parametrize(
    ("addresses", "expected"),
    [
        ("localhost", ["http://localhost:6001/v1"]),
        ("10.0.0.7", ["http://10.0.0.7:6001/v1"]),
        ("node-1.cluster:8000", ["http://node-1.cluster:8000/v1"]),
        ("http://node1", ["http://node1:6001/v1"]),
        ("https://node1:443/api/v2/", ["https://node1:443/api/v2"]),
        ("http://node1:8000/", ["http://node1:8000/v1"]),
        ("node1:8000/openai/v1", ["http://node1:8000/openai/v1"]),
        ("[::1]:7000", ["http://[::1]:7000/v1"]),
        ("[::1]", ["http://[::1]:6001/v1"]),
        ("::1", ["http://[::1]:6001/v1"]),
        ("a, b:1 ,http://c:2/v1,", ["http://a:6001/v1", "http://b:1/v1", "http://c:2/v1"]),
        ("a,http://a:6001/v1,a:6001", ["http://a:6001/v1"]),
    ],
)
def test_addresses(addresses: str, expected: list[str]) -> None:
    assert list(parse_addresses(addresses)) == expected


@pytest.mark.parametrize(
    ("addresses", "words"),
    [
        ("", "no server address"),
        (" , ", "no server address"),
        ("a:port", "'a:port': 'port' is not a port"),
        ("a:", "'a:': '' is not a port"),
        ("a:0", "'0' is not a port"),
        ("ok,b:70000", "'b:70000': '70000' is not a port"),
        ("ftp://a", "'ftp://a': the scheme must be http or https"),
        ("http://:80", "'' is not a host name"),
        ("two words", "'two words' is not a host name"),
        ("http://user:secret@a", "only scheme, host, port and path"),
        ("http://a/v1?key=1", "only scheme, host, port and path"),
    ],
)
def test_wrong_addresses_name_the_item(addresses: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_addresses(addresses)


def test_the_least_busy_server_is_next_and_equals_take_turns() -> None:
    pool = ServerPool(["a", "b", "c"])
    picked = []
    for _ in range(4):
        with pool.lease() as lease:
            picked.append(lease.url)
    assert picked == ["a", "b", "c", "a"]
    with pool.lease() as first, pool.lease() as second, pool.lease() as third:
        assert {first.url, second.url, third.url} == {"a", "b", "c"}
        with pool.lease() as fourth:
            assert fourth.url == first.url
    with pool.lease(avoid="a") as one, pool.lease(avoid="b") as two:
        assert one.url != "a"
        assert two.url != "b"


def test_a_failed_lease_is_given_back() -> None:
    pool = ServerPool(["a", "b"])
    with pytest.raises(KeyError), pool.lease():
        raise KeyError
    with pool.lease() as one, pool.lease() as two:
        assert {one.url, two.url} == {"a", "b"}


def test_a_single_server_is_used_even_when_it_is_to_be_avoided() -> None:
    with ServerPool(["a"]).lease(avoid="a") as lease:
        assert lease.url == "a"


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def fail(pool: ServerPool, url: str, times: int = 4) -> None:
    for _ in range(times):
        pool.failed(url, f"{url}: refused")


def test_four_failures_in_a_row_leave_one_probe_at_a_time_until_one_is_answered() -> None:
    clock = Clock()
    pool = ServerPool(["a"], 60, clock)
    fail(pool, "a", 3)
    assert pool.pause is None
    pool.succeeded("a")
    fail(pool, "a", 3)
    assert pool.admits
    fail(pool, "a", 1)
    assert not pool.admits
    clock.now += 0.25
    with pool.lease() as lease:
        assert lease.probe
        assert not pool.admits
        pool.failed("a", "a: refused")
    assert not pool.admits
    clock.now += 0.25
    with pool.lease():
        pool.succeeded("a")
    assert pool.admits
    assert (pool.pause, pool.paused_seconds(0)) == (None, 0.5)


def test_errors_that_overtake_the_answers_are_no_outage_until_they_outnumber_what_still_waits() -> None:
    pool = ServerPool(["a"])
    with ExitStack() as waiting:
        for _ in range(20):
            waiting.enter_context(pool.lease())
        fail(pool, "a", 19)
        assert pool.admits
        assert pool.pause is None
        fail(pool, "a", 1)
        assert not pool.admits
        assert pool.pause is not None


def test_probes_grow_rarer_and_a_cancelled_one_is_free_again() -> None:
    clock = Clock()
    pool = ServerPool(["a"], 60, clock)
    fail(pool, "a")
    for wait in (0.25, 0.25, 0.5, 1.0, 2.0, 4.0, 4.0):
        clock.now += wait - 0.01
        assert not pool.admits
        clock.now += 0.01
        with pool.lease() as lease:
            assert lease.probe


def test_other_servers_carry_on_and_a_pause_needs_all_down() -> None:
    clock = Clock()
    pool = ServerPool(["a", "b"], 60, clock)
    fail(pool, "a")
    for _ in range(3):
        with pool.lease() as lease:
            assert lease.url == "b"
    assert pool.pause is None
    clock.now += 10
    fail(pool, "b")
    assert pool.pause is not None
    assert "a, b do not answer since" in pool.pause
    clock.now += 5
    pool.succeeded("b")
    clock.now += 7
    assert [pool.paused_seconds(since) for since in (0, 112.0, 116.0)] == [5, 3, 0]


def test_the_outage_deadline_counts_from_the_first_failure() -> None:
    clock = Clock()
    pool = ServerPool(["a"], 60, clock)
    fail(pool, "a", 1)
    clock.now += 50
    fail(pool, "a", 3)
    pool.check()
    assert pool.outage_left == 10
    clock.now += 10
    with pytest.raises(ServerOutageError, match=r"^a does not answer since .*a: refused.*given up after 60 s"):
        pool.check()
