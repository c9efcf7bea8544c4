"""DataProtoFuture: data that another worker group is still computing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import ray

from verl._protocol.data import DataProto
from verl._protocol.functions import unpad_dataproto


@dataclass(eq=False)
class DataProtoFuture:
    """References to the workers' outputs and what to do with them once they are there.

    The driver hands it to the next worker group without fetching; a worker method registered with
    ``materialize_futures`` gets the data. ``collect_fn`` joins the outputs, ``dispatch_fn``, where
    there is one, takes this consumer's part of the whole.
    """

    collect_fn: Callable[[list[Any]], Any]
    futures: list[ray.ObjectRef]
    dispatch_fn: Callable[[Any], Any] | None = None

    @staticmethod
    def concat(data: Sequence[ray.ObjectRef]) -> DataProtoFuture:
        """The concatenation of what the references will hold, in order."""
        return DataProtoFuture(DataProto.concat, list(data))

    def chunk(self, chunks: int, ragged: bool = False) -> list[DataProtoFuture]:
        """One future for each of ``chunks`` consecutive parts, see :meth:`DataProto.chunk`."""
        parts = [partial(_take_chunk, self.dispatch_fn, chunks, ragged, position) for position in range(chunks)]
        return [DataProtoFuture(self.collect_fn, self.futures, part) for part in parts]

    def unpad(self, pad_size: int) -> DataProtoFuture:
        """The same data without its last ``pad_size`` rows."""
        return DataProtoFuture(partial(_collect_unpadded, self.collect_fn, pad_size), self.futures, self.dispatch_fn)

    def get(self) -> Any:
        """Waits for the outputs; raises what their workers raised."""
        whole = self.collect_fn(ray.get(self.futures))
        return whole if self.dispatch_fn is None else self.dispatch_fn(whole)


def _take_chunk(
    dispatch_fn: Callable[[Any], Any] | None, chunks: int, ragged: bool, position: int, whole: Any
) -> DataProto:
    part = whole if dispatch_fn is None else dispatch_fn(whole)
    return part.chunk(chunks, ragged=ragged)[position]


def _collect_unpadded(collect_fn: Callable[[list[Any]], Any], pad_size: int, outputs: list[Any]) -> DataProto:
    return unpad_dataproto(collect_fn(outputs), pad_size)
