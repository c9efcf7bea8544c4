"""Paths in configurations: on disk, or inside an installed package."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

_PACKAGE_PREFIX = "pkg://"


def resolve_path(path: str) -> str:
    """``pkg://package.name/relative/path`` as a path on disk; every other string unchanged.

    Raises ValueError when the package cannot be imported or does not hold the path.
    """
    if not path.startswith(_PACKAGE_PREFIX):
        return path
    package, _, relative = path.removeprefix(_PACKAGE_PREFIX).partition("/")
    try:
        found = Path(str(files(package).joinpath(relative)))
    except (ModuleNotFoundError, TypeError, ValueError) as error:
        raise ValueError(f"{path!r}: there is no package {package!r}") from error
    if not found.exists():
        raise ValueError(f"{path!r}: the package {package!r} holds no {relative!r} (looked at {found})")
    return str(found)
