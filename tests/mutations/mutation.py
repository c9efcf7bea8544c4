"""A fault to put back, and the means to put it everywhere."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest

from verl.trainer.ppo import registry


@dataclass(frozen=True)
class Mutation:
    """``apply`` puts the fault back until the patch is undone; ``tests`` are node ids or files, at least one
    test of which must notice."""

    name: str
    fault: str
    apply: Callable[[pytest.MonkeyPatch], None]
    tests: tuple[str, ...]


def everywhere(patch: pytest.MonkeyPatch, original: Callable[..., Any], replacement: Callable[..., Any]) -> None:
    """Replaces a function under every name by which the packages' modules and registries know it."""
    places = [
        (module, name) for module in _modules() for name, value in list(vars(module).items()) if value is original
    ]
    assert places, f"{original} is nowhere to be found"
    for module, name in places:
        patch.setattr(module, name, replacement)
    for known in (registry._ADVANTAGE_ESTIMATORS, registry._POLICY_LOSSES):
        for name, entry in known._entries.items():
            if entry is original:
                patch.setitem(known._entries, name, replacement)


def _modules() -> list[ModuleType]:
    return [module for name, module in sys.modules.items() if name.partition(".")[0] in ("verl", "zerosearch")]
