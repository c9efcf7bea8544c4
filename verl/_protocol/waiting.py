"""Waiting for workers so that the first cause of a failure is what is raised."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, Protocol
from weakref import WeakSet

import ray
import torch.distributed as dist
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

_BROKEN_PEER = re.compile(r"gloo|nccl|connection (closed|reset)", re.IGNORECASE)
GRACE_S = 2.0
"""How long a failed worker's peers may take to show whether one of them died."""


class FailureWatch(Protocol):
    """Learns by itself, every ``every_n_seconds``, of failures that nobody waits for."""

    every_n_seconds: float

    def raise_failure(self) -> None:
        """Raises what it has learnt of, if anything."""


WATCHES: WeakSet[FailureWatch] = WeakSet()
"""Whoever waits in this process raises their failures."""


def gather(refs: Sequence[ray.ObjectRef], describe: Callable[[int], str] | None = None) -> list[Any]:
    """The values of all references.

    Does not wait for the others when one fails. A worker's death is raised in preference to the
    errors that it causes in its peers, and what a worker raised in preference to its peers' broken
    connections; otherwise the error that came first. The error carries a
    note that says whose it is, ``describe(position)``. Failures that WATCHES learn of meanwhile
    are raised too, whosever they are.
    """
    try:
        return _get_watched(list(refs)) if WATCHES else ray.get(list(refs))
    except RayError as raised:
        failures = _first_causes(refs)
        if not failures:
            raise
        position, error = next(iter(failures.items()))
        if describe is not None:
            error.add_note(describe(position))
        raise error from raised.__cause__


def _get_watched(refs: list[ray.ObjectRef]) -> list[Any]:
    while True:
        watches = list(WATCHES)
        for watch in watches:
            watch.raise_failure()
        try:
            return ray.get(refs, timeout=min((watch.every_n_seconds for watch in watches), default=None))
        except GetTimeoutError as raised:
            if isinstance(raised, RayTaskError):  # a worker's own timeout
                raise


def _first_causes(refs: Sequence[ray.ObjectRef]) -> dict[int, RayError]:
    first = _failures(refs, 0)
    if _deaths(first):
        return _deaths(first)
    later = _failures(refs, GRACE_S)
    return _deaths(later) or _own(first) or _own(later) or first or later


def _deaths(failures: dict[int, RayError]) -> dict[int, RayError]:
    return {position: error for position, error in failures.items() if isinstance(error, RayActorError)}


def _own(failures: dict[int, RayError]) -> dict[int, RayError]:
    """Those that are not the loss of a peer: Gloo and NCCL tell of that by these types and words."""
    return {position: error for position, error in failures.items() if not _is_broken_connection(error)}


def _is_broken_connection(error: RayError) -> bool:
    cause = error.cause if isinstance(error, RayTaskError) else error
    if isinstance(cause, ConnectionError | dist.DistError):
        return True
    return isinstance(cause, RuntimeError) and _BROKEN_PEER.search(str(cause)) is not None


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
