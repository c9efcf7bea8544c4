"""The trainer's end of the weight stream: named tensors, in buckets, to every rollout engine.

Invariant: the stream is read to its end whatever happens to a receiver, because every rank takes
part in making it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from verl.workers.rollout.engine import InfrastructureError, NamedTensor

SYNC_TIMEOUT = 600.0
"""Seconds a receiver may take for one call; opening a version waits for its requests in flight."""


def send_weights(
    weights: Iterable[NamedTensor],
    receivers: Sequence[ActorHandle],
    version: int,
    bucket_bytes: int,
    timeout: float = SYNC_TIMEOUT,
) -> None:
    """Streams ``weights`` as version ``version`` to actors that have the methods of ``WeightReceiver``.

    A bucket holds up to ``bucket_bytes`` (one larger tensor stands alone) and is stored once for all
    receivers; the next is sent when every receiver has taken it. Raises InfrastructureError, after
    the end of the stream, if a receiver failed or took longer than ``timeout`` seconds.
    """
    calls = _Calls(receivers, timeout)
    calls.start("begin_weights", version)
    for bucket in buckets(weights, bucket_bytes):
        calls.start("load_weights", bucket)
    calls.start("end_weights", version)
    calls.wait()
    if calls.error is not None:
        raise InfrastructureError(f"weights version {version}: {calls.description}") from calls.error


def buckets(weights: Iterable[NamedTensor], bucket_bytes: int) -> Iterator[list[NamedTensor]]:
    """Consecutive tensors of together at most ``bucket_bytes``, on CPU."""
    bucket: list[NamedTensor] = []
    size = 0
    for name, tensor in weights:
        if bucket and size + tensor.nbytes > bucket_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor.cpu()))
        size += tensor.nbytes
    if bucket:
        yield bucket


class _Calls:
    """The same call to all receivers, one at a time; after the first error nothing is called any more."""

    def __init__(self, receivers: Sequence[ActorHandle], timeout: float) -> None:
        self.error: RayError | None = None
        self.description = ""
        self._receivers = receivers
        self._timeout = timeout
        self._method = ""
        self._pending: list[ray.ObjectRef] = []

    def start(self, method: str, argument: Any) -> None:
        self.wait()
        if self.error is None and self._receivers:
            shared = ray.put(argument)
            self._method = method
            self._pending = [getattr(receiver, method).remote(shared) for receiver in self._receivers]

    def wait(self) -> None:
        for position, ref in enumerate(self._pending):
            try:
                ray.get(ref, timeout=self._timeout)
            except RayError as error:
                self.error = error
                self.description = f"receiver {position} failed in {self._method}: {error}"
        self._pending = []
