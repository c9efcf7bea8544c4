"""Shared fixtures: one Ray for the whole run, tiny models made from seeds."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run the tests marked slow")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if "slow" in item.keywords and not config.getoption("--slow"):
            item.add_marker(pytest.mark.skip(reason="needs --slow"))
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    import ray

    os.environ["RAY_memory_monitor_refresh_ms"] = "0"  # noqa: SIM112  Ray reads exactly this name
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH", "")]))
    ray.init(
        num_cpus=16,
        include_dashboard=False,
        object_store_memory=256 << 20,
        runtime_env={"env_vars": {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}},
    )
    yield
    ray.shutdown()
