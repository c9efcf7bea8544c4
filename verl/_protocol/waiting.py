"""Waiting for workers so that the first cause of a failure is what is raised."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError

GRACE_S = 2.0
"""How long a failed worker's peers may take to show whether one of them died."""


def gather(refs: Sequence[ray.ObjectRef], describe: Callable[[int], str] | None = None) -> list[Any]:
    """The values of all references.

    Does not wait for the others when one fails. A worker's death is raised in preference to the
    errors that it causes in its peers; otherwise the error that came first. The error carries a
    note that says whose it is, ``describe(position)``.
    """
    try:
        return ray.get(list(refs))
    except RayError as raised:
        failures = _first_causes(refs)
        if not failures:
            raise
        position, error = next(iter(failures.items()))
        if describe is not None:
            error.add_note(describe(position))
        raise error from raised.__cause__


def _first_causes(refs: Sequence[ray.ObjectRef]) -> dict[int, RayError]:
    first = _failures(refs, 0)
    if _deaths(first):
        return _deaths(first)
    later = _failures(refs, GRACE_S)
    return _deaths(later) or first or later


def _deaths(failures: dict[int, RayError]) -> dict[int, RayError]:
    return {position: error for position, error in failures.items() if isinstance(error, RayActorError)}


def _failures(refs: Sequence[ray.ObjectRef], timeout_s: float) -> dict[int, RayError]:
    """The errors among the references that are there after ``timeout_s``, by position."""
    done, _ = ray.wait(list(dict.fromkeys(refs)), num_returns=len(set(refs)), timeout=timeout_s, fetch_local=False)
    ready = set(done)
    failures: dict[int, RayError] = {}
    for position, ref in enumerate(refs):
        if ref in ready:
            try:
                ray.get(ref)
            except RayError as error:
                failures[position] = error
    return failures
