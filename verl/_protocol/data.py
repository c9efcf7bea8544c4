"""DataProto: rows of tensors, rows of anything else, and facts about the whole batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
import torch
from tensordict import TensorDict
from torch.utils.data import DataLoader

from verl._protocol import storage
from verl._protocol.base import DataProtoColumns, DataProtoConfig, DataProtoItem, has_columns
from verl._protocol.columns import (
    RowIndex,
    concat_columns,
    even_sizes,
    merge_meta_info,
    refuse_different_keys,
    row_index,
)
from verl._protocol.conversion import describe, pack_tensordict, unfold_columns, unpack_tensordict

ProtoT = TypeVar("ProtoT", bound="DataProto")


@dataclass(eq=False)
class DataProto(DataProtoColumns):
    """What flows between driver and workers.

    ``batch``: TensorDict with batch size (rows,), or None. ``non_tensor_batch``: NumPy arrays with
    ``rows`` in the first dimension, object dtype or numeric. ``meta_info``: facts about the batch.
    """

    def __getitem__(self, item: int | np.integer | slice | RowIndex) -> Any:
        """An integer gives a DataProtoItem; a slice, list, array, tensor or mask a DataProto."""
        if isinstance(item, slice):
            return self.slice(item.start, item.stop, item.step)
        if isinstance(item, int | np.integer) and not isinstance(item, bool):
            return self._item(int(item))
        if isinstance(item, list | tuple | np.ndarray | torch.Tensor):
            return self.select_idxs(item)
        raise TypeError(f"rows are selected by int, slice, list, array or tensor, not {type(item).__name__}")

    def _item(self, row: int) -> DataProtoItem:
        if not -len(self) <= row < len(self):
            raise IndexError(f"row {row} of {len(self)} rows")
        values = {key: column[row] for key, column in self.non_tensor_batch.items()}
        return DataProtoItem(None if self.batch is None else self.batch[row], values, dict(self.meta_info))

    def slice(self, start: int | None = None, end: int | None = None, step: int | None = None) -> Self:
        """Rows ``start:end:step``; a view."""
        rows = slice(start, end, step)
        batch = None if self.batch is None else self.batch[rows]
        return self._with(batch, {key: column[rows] for key, column in self.non_tensor_batch.items()})

    def select_idxs(self, idxs: RowIndex) -> Self:
        """The rows numbered, or masked, by ``idxs``; a copy."""
        index = row_index(idxs, len(self))
        rows = index.cpu().numpy()
        batch = None if self.batch is None else self.batch[index.to(self.batch.device or index.device)]
        return self._with(batch, {key: column[rows] for key, column in self.non_tensor_batch.items()})

    def reorder(self, indices: RowIndex) -> None:
        """Puts the rows in the order of ``indices``, in place."""
        new = self.select_idxs(indices)
        self.batch, self.non_tensor_batch = new.batch, new.non_tensor_batch

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> Self:
        """Every row ``repeat_times`` times: a a b b with ``interleave``, otherwise a b a b."""
        if repeat_times < 0:
            raise ValueError(f"rows cannot be repeated {repeat_times} times")
        rows = torch.arange(len(self))
        return self.select_idxs(rows.repeat_interleave(repeat_times) if interleave else rows.repeat(repeat_times))

    def sample_level_repeat(self, repeat_times: Sequence[int] | np.ndarray | torch.Tensor) -> Self:
        """Row i ``repeat_times[i]`` times, next to each other."""
        counts = torch.as_tensor(repeat_times) if len(repeat_times) else torch.zeros(0, dtype=torch.int64)
        odd = counts.is_floating_point() or counts.ndim != 1 or len(counts) != len(self) or bool((counts < 0).any())
        if odd:
            raise ValueError(f"need one whole count >= 0 for each of {len(self)} rows, got {repeat_times}")
        return self.select_idxs(torch.arange(len(self)).repeat_interleave(counts))

    def chunk(self, chunks: int, ragged: bool = False) -> list[Self]:
        """``chunks`` consecutive parts of equal size.

        With ``ragged``, or automatic padding on, sizes may differ by one (and be 0). Raises
        ValueError with both numbers where rows do not divide otherwise.
        """
        if chunks < 1:
            raise ValueError(f"cannot split {len(self)} rows into {chunks} chunks")
        if len(self) % chunks and not (ragged or self.is_padding_enabled()):
            raise ValueError(f"{len(self)} rows do not divide into {chunks} equal chunks")
        ends = np.cumsum(even_sizes(len(self), chunks)).tolist()
        return [self.slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]

    def split(self, split_size: int) -> list[Self]:
        """Consecutive parts of ``split_size`` rows, the last as small as it comes."""
        if split_size < 1:
            raise ValueError(f"a part has at least one row, got split_size {split_size}")
        return [self.slice(start, start + split_size) for start in range(0, len(self), split_size)]

    @staticmethod
    def concat(data: Sequence[ProtoT]) -> ProtoT:
        """Protos one below the other. Equal facts are kept once, ``metrics`` gathered by name.

        Raises ValueError for an empty list, for keys that only some have (protos without any row
        and column aside) and for facts that differ.
        """
        if not data:
            raise ValueError("nothing to concatenate")
        meta = merge_meta_info([part.meta_info for part in data])
        parts = [part for part in data if has_columns(part)] or list(data[:1])
        refuse_different_keys("batch", [part._batch_keys() for part in parts])
        batches = [part.batch for part in parts if part.batch is not None]
        new = parts[0]._with(
            TensorDict.cat(batches, dim=0) if batches else None, concat_columns([p.non_tensor_batch for p in parts])
        )
        new.meta_info = meta
        return new

    def make_iterator(
        self,
        mini_batch_size: int,
        epochs: int,
        seed: int | None = None,
        dataloader_kwargs: dict[str, Any] | None = None,
    ) -> Iterator[Self]:
        """Mini-batches over ``epochs``, each with this proto's meta_info.

        ``dataloader_kwargs`` go to torch's DataLoader (``{"shuffle": True}``); ``seed`` makes its
        order repeatable. Raises ValueError where rows do not divide by ``mini_batch_size``.
        """
        if mini_batch_size < 1 or len(self) % mini_batch_size:
            raise ValueError(f"{len(self)} rows do not divide into mini-batches of {mini_batch_size}")
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        if not len(self):
            return iter(())
        rows: Any = range(len(self))
        options = dataloader_kwargs or {}
        loader = DataLoader(rows, batch_size=mini_batch_size, collate_fn=list, generator=generator, **options)
        return (self.select_idxs(numbers) for _ in range(epochs) for numbers in loader)

    def is_padding_enabled(self) -> bool:
        """Whether workers may be given padded rows of this proto."""
        return DataProtoConfig.auto_padding or bool(self.meta_info.get(DataProtoConfig.auto_padding_key, False))

    def padding(self, padding_size: int, padding_candidate: str = "") -> None:
        """Appends ``padding_size`` copies of the last row (``"first"``: of the first), in place.

        Raises ValueError where there is no row to copy.
        """
        if padding_candidate not in ("", "first", "last"):
            raise ValueError(f"rows are padded by 'first' or 'last', not {padding_candidate!r}")
        if padding_size < 0 or (padding_size and not len(self)):
            raise ValueError(f"cannot append {padding_size} copies of one of {len(self)} rows")
        if padding_size:
            row = 0 if padding_candidate == "first" else len(self) - 1
            self.reorder([*range(len(self)), *[row] * padding_size])

    def to(self, device: torch.device | str) -> Self:
        """Moves the tensors, in place, and returns self."""
        self.batch = None if self.batch is None else self.batch.to(device)
        return self

    def unfold_column_chunks(self, n_split: int, split_keys: Sequence[str] | None = None) -> Self:
        """Each row becomes ``n_split`` rows: (rows, m, …) to (rows * n_split, m / n_split, …) for the
        columns in ``split_keys``; the others are repeated. Raises ValueError where m does not divide.
        """
        new = self.repeat(n_split)
        chosen = set(split_keys or ())
        self._require([k for k in chosen if k not in self.non_tensor_batch], None, None)
        tensors = {} if self.batch is None else unfold_columns(self.batch, n_split, chosen)
        new.non_tensor_batch.update(unfold_columns(self.non_tensor_batch, n_split, chosen))
        if new.batch is not None:
            new.batch.update(tensors)
        return new

    # Other forms

    def to_tensordict(self) -> TensorDict:
        """One TensorDict: object columns as NonTensorStack, meta_info as NonTensorData.

        Raises ValueError naming keys that are used twice.
        """
        return pack_tensordict(self.batch, self.non_tensor_batch, self.meta_info, len(self))

    @classmethod
    def from_tensordict(
        cls, tensor_dict: TensorDict, meta_info: Mapping[str, Any] | None = None, num_batch_dims: int = 1
    ) -> Self:
        """The inverse; ``meta_info`` is added to what the TensorDict holds."""
        tensors, columns, facts = unpack_tensordict(tensor_dict)
        return cls.from_dict(tensors, columns, facts | dict(meta_info or {}), num_batch_dims)

    def save_to_disk(self, filepath: str | Path) -> None:
        """Writes one file, atomically. Raises ValueError naming a value that is no plain data."""
        storage.save(filepath, self.batch, self.non_tensor_batch, self.meta_info)

    @classmethod
    def load_from_disk(cls, filepath: str | Path) -> Self:
        """Reads such a file, without executing anything in it. Tensors are on the CPU.

        Raises ValueError for a file that is none or is damaged.
        """
        return cls(*storage.load(filepath))

    def size_in_bytes(self) -> tuple[int, int]:
        """Bytes of the tensors and of the arrays (of object arrays: of the references)."""
        tensors = 0 if self.batch is None else self.batch.bytes()
        return tensors, sum(column.nbytes for column in self.non_tensor_batch.values())

    def print_size(self, prefix: str = "") -> None:
        """Prints how much memory the columns take."""
        tensors, arrays = (size / 2**30 for size in self.size_in_bytes())
        print(f"{prefix}{' ' if prefix else ''}batch: {tensors:.6f} GiB, non_tensor_batch: {arrays:.6f} GiB")

    def get_data_info(self) -> str:
        """Every column's shape and dtype and every fact's type, one a line."""
        return "\n".join(describe(self.batch, self.non_tensor_batch, self.meta_info))
