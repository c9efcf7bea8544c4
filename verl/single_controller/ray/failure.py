"""Waiting for workers so that the first cause of a failure is what is raised."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

GRACE_S = 2.0
"""How long a failed rank's peers may take to show whether one of them died."""


def gather(refs: Sequence[ray.ObjectRef], describe: Callable[[int], str]) -> list[Any]:
    """The values of all references.

    Does not wait for the others when one fails. A worker's death is raised in preference to the
    errors that it causes in its peers; otherwise the error that came first. The error carries a
    note that says whose it is (``describe(position)``).
    """
    try:
        return ray.get(list(refs))
    except (RayTaskError, RayActorError):
        position, error = _first_cause(refs)
        error.add_note(describe(position))
        raise error from error.__cause__


def _first_cause(refs: Sequence[ray.ObjectRef]) -> tuple[int, Exception]:
    first = _failures(refs, 0)
    everything = first if _deaths(first) else _failures(refs, GRACE_S)
    failures = _deaths(everything) or first or everything
    return next(iter(failures.items()))


def _deaths(failures: dict[int, Exception]) -> dict[int, Exception]:
    return {position: error for position, error in failures.items() if isinstance(error, RayActorError)}


def _failures(refs: Sequence[ray.ObjectRef], timeout_s: float) -> dict[int, Exception]:
    """The errors among the references that are there after ``timeout_s``, by position."""
    done, _ = ray.wait(list(refs), num_returns=len(refs), timeout=timeout_s, fetch_local=False)
    ready = set(done)
    failures: dict[int, Exception] = {}
    for position, ref in enumerate(refs):
        if ref in ready:
            try:
                ray.get(ref)
            except (RayError, RayTaskError) as error:
                failures[position] = error
    return failures
