"""Loading what a configuration names by import path or by file."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any


def load_by_path(dotted: str) -> Any:
    """``package.module.Name`` as an object. Raises ValueError naming the part that does not exist."""
    module_name, _, name = dotted.rpartition(".")
    if not module_name:
        raise ValueError(f"{dotted!r} is not an import path like package.module.Name")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ValueError(f"{dotted!r}: cannot import {module_name!r} ({error})") from error
    if name not in vars(module):
        raise ValueError(f"{dotted!r}: module {module_name!r} has no {name!r}")
    return vars(module)[name]


def load_from_file(path: str, name: str) -> Any:
    """The object ``name`` of the Python file ``path``. Raises ValueError when either is missing."""
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"{path!r} is not a file")
    spec = importlib.util.spec_from_file_location(f"custom_{file.stem}", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if name not in vars(module):
        raise ValueError(f"{path!r} defines no {name!r}")
    return vars(module)[name]
