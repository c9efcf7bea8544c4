"""A pytest plugin: puts the fault named by the environment variable MUTATION back, for the whole session."""

from __future__ import annotations

import os

import hypothesis
import pytest

from tests.mutations.catalogue import MUTATIONS

VARIABLE = "MUTATION"


def pytest_configure(config: pytest.Config) -> None:
    """Examples are always the same, and none is kept: what a fault makes fail is no failure of the code."""
    hypothesis.settings.register_profile("mutation", database=None, derandomize=True)
    hypothesis.settings.load_profile("mutation")
    name = os.environ.get(VARIABLE)
    if name:
        patch = pytest.MonkeyPatch()
        config.add_cleanup(patch.undo)
        MUTATIONS[name].apply(patch)
