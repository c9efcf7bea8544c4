import pytest

from zerosearch.simulation.pool import ServerPool, parse_addresses


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
        with pool.lease() as url:
            picked.append(url)
    assert picked == ["a", "b", "c", "a"]
    with pool.lease() as first, pool.lease() as second, pool.lease() as third:
        assert {first, second, third} == {"a", "b", "c"}
        with pool.lease() as fourth:
            assert fourth == first
    with pool.lease(avoid="a") as one, pool.lease(avoid="b") as two:
        assert one != "a"
        assert two != "b"


def test_a_failed_lease_is_given_back() -> None:
    pool = ServerPool(["a", "b"])
    with pytest.raises(KeyError), pool.lease():
        raise KeyError
    with pool.lease() as one, pool.lease() as two:
        assert {one, two} == {"a", "b"}


def test_a_single_server_is_used_even_when_it_is_to_be_avoided() -> None:
    with ServerPool(["a"]).lease(avoid="a") as url:
        assert url == "a"
