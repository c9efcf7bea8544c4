"""Who may import whom: the rule that keeps verl free of search and the layers in order."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

LAYERS = {
    "verl.protocol": 0,
    "verl.models": 1,
    "verl.single_controller": 1,
    "verl.workers": 2,
    "verl.agent_loop": 2,
    "verl.trainer": 3,
    "zerosearch": 4,
}


def layer(module: str) -> int | None:
    matches = [name for name in LAYERS if module == name or module.startswith(name + ".")]
    return LAYERS[max(matches, key=len)] if matches else None


def imports_of(path: Path) -> list[str]:
    found: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            found.append(node.module or "")
    return found


def sources() -> list[Path]:
    return sorted([*(ROOT / "verl").rglob("*.py"), *(ROOT / "zerosearch").rglob("*.py")])


@pytest.mark.parametrize("path", sources(), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_down_the_layers(path: Path) -> None:
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    own = layer(module)
    if own is None:
        own = 0 if module.startswith("verl.utils") else 3
    above = [name for name in imports_of(path) if (other := layer(name)) is not None and other > max(own, 0)]
    if module.startswith("verl.utils"):
        above = [name for name in above if layer(name) is not None and layer(name) >= 3]
    assert not above, f"{module} imports {above}"


def test_verl_never_imports_zerosearch() -> None:
    offenders = [
        p for p in (ROOT / "verl").rglob("*.py") if any(n.split(".")[0] == "zerosearch" for n in imports_of(p))
    ]
    assert offenders == []
