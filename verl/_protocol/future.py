"""DataProtoFuture: data that another worker group is still computing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import ray

from verl._protocol.columns import even_sizes
from verl._protocol.data import DataProto
from verl._protocol.waiting import gather


@dataclass(frozen=True)
class _Chunk:
    """Takes one of ``chunks`` parts."""

    chunks: int
    ragged: bool
    position: int

    def of(self, start: int, end: int) -> tuple[int, int]:
        rows = end - start
        if rows % self.chunks and not self.ragged:
            raise ValueError(f"{rows} rows do not divide into {self.chunks} equal chunks")
        sizes = even_sizes(rows, self.chunks)
        start += sum(sizes[: self.position])
        return start, start + sizes[self.position]


@dataclass(frozen=True)
class _Unpad:
    """Leaves out the last rows."""

    pad_size: int

    def of(self, start: int, end: int) -> tuple[int, int]:
        if self.pad_size > end - start:
            raise ValueError(f"cannot remove {self.pad_size} of {end - start} rows")
        return start, end - self.pad_size


@dataclass(eq=False)
class DataProtoFuture:
    """References to the workers' outputs and what to do with them once they are there.

    The driver hands it to the next worker group without fetching; a worker method registered with
    ``materialize_futures`` gets the data. ``collect_fn`` joins the outputs; ``dispatch_fn``, where
    there is one, is applied to the whole; then this consumer's rows are cut out.

    ``row_counts`` are references to the number of rows in each output, or empty. With them, and
    the outputs joined in order, ``get`` fetches only the outputs that hold its rows. ``watched``
    are references that become errors when any worker of the producing group fails: ``get`` raises
    that failure instead of waiting for a worker that hangs because of it.
    """

    collect_fn: Callable[[list[Any]], Any]
    futures: list[ray.ObjectRef]
    dispatch_fn: Callable[[Any], Any] | None = None
    row_counts: tuple[ray.ObjectRef, ...] = ()
    watched: tuple[ray.ObjectRef, ...] = ()
    cuts: tuple[_Chunk | _Unpad, ...] = ()

    @staticmethod
    def concat(data: Sequence[ray.ObjectRef]) -> DataProtoFuture:
        """The concatenation of what the references will hold, in order."""
        return DataProtoFuture(DataProto.concat, list(data))

    def chunk(self, chunks: int, ragged: bool = False) -> list[DataProtoFuture]:
        """One future for each of ``chunks`` consecutive parts, see :meth:`DataProto.chunk`."""
        if chunks < 1:
            raise ValueError(f"cannot split a future into {chunks} chunks")
        return [replace(self, cuts=(*self.cuts, _Chunk(chunks, ragged, position))) for position in range(chunks)]

    def unpad(self, pad_size: int) -> DataProtoFuture:
        """The same data without its last ``pad_size`` rows."""
        return replace(self, cuts=(*self.cuts, _Unpad(pad_size)))

    def get(self) -> Any:
        """Waits for the outputs; raises what their workers raised.

        Of a part, ``meta_info`` is that of the outputs it comes from.
        """
        counts = gather([*self.row_counts, *self.watched])[: len(self.row_counts)]
        if self.cuts and counts and None not in counts and self.dispatch_fn is None:
            return self._fetch_rows(counts)
        whole = self.collect_fn(gather(self.futures))
        whole = whole if self.dispatch_fn is None else self.dispatch_fn(whole)
        return whole[slice(*self._cut(len(whole)))] if self.cuts else whole

    def _cut(self, rows: int) -> tuple[int, int]:
        start, end = 0, rows
        for cut in self.cuts:
            start, end = cut.of(start, end)
        return start, end

    def _fetch_rows(self, counts: list[int]) -> DataProto:
        start, end = self._cut(sum(counts))
        ends = list(accumulate(counts))
        begins = [last - count for last, count in zip(ends, counts, strict=True)]
        needed = [i for i in range(len(counts)) if begins[i] < end and ends[i] > start] or [0]
        parts = gather([self.futures[i] for i in needed])
        offset = begins[needed[0]]
        return DataProto.concat(parts)[max(start - offset, 0) : max(end - offset, 0)]
