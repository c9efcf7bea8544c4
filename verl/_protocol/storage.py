"""A batch in one file, read back without executing anything.

The file is a NumPy ``.npz`` archive: ``manifest`` is JSON, every tensor and array an entry that it
refers to by number. Python values are JSON, tagged where JSON has no such type. Nothing is pickled.
"""

from __future__ import annotations

import json
import math
import os
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from verl._protocol.base import DataProtoColumns
from verl._protocol.serialization import deserialize_single_tensor, serialize_single_tensor

FORMAT = "verl.DataProto/1"
_SCALARS = (type(None), bool, int, float, str)
_DAMAGE = (
    ArithmeticError,
    AttributeError,
    EOFError,
    LookupError,
    MemoryError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
    zipfile.BadZipFile,
    zlib.error,
)
"""What NumPy, zipfile, json and torch raise for bytes that are not what they should be."""


def save(
    filepath: str | Path, batch: TensorDict | None, columns: dict[str, np.ndarray], meta_info: dict[str, Any]
) -> None:
    """Writes the file, or leaves what was there. Raises ValueError naming a value that is no plain data."""
    writer = _Writer()
    manifest = {
        "format": FORMAT,
        "batch": writer.encode(batch, "batch"),
        "non_tensor_batch": writer.encode(columns, "non_tensor_batch"),
        "meta_info": writer.encode(meta_info, "meta_info"),
    }
    text = json.dumps(manifest).encode()
    path = Path(filepath)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            entries: dict[str, Any] = {"manifest": np.frombuffer(text, dtype=np.uint8), **writer.arrays}
            np.savez(file, allow_pickle=False, **entries)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def load(filepath: str | Path) -> tuple[TensorDict | None, dict[str, np.ndarray], dict[str, Any]]:
    """Batch, columns and meta_info. Raises ValueError naming a file that is none of ours or is damaged."""
    with Path(filepath).open("rb") as file:
        try:
            return _read(file)
        except _DAMAGE as error:
            raise ValueError(f"{filepath} is no readable DataProto file: {error}") from error


def _read(file: IO[bytes]) -> tuple[TensorDict | None, dict[str, np.ndarray], dict[str, Any]]:
    with np.load(file, allow_pickle=False) as archive:
        _refuse_compressed(archive.zip)
        manifest = json.loads(archive["manifest"].tobytes())
        if manifest["format"] != FORMAT:
            raise ValueError(f"its format is {manifest['format']!r}, this library reads {FORMAT!r}")
        reader = _Reader(archive)
        batch, columns, meta = (reader.decode(manifest[key]) for key in ("batch", "non_tensor_batch", "meta_info"))
    if not isinstance(batch, TensorDict | None) or not isinstance(columns, dict) or not isinstance(meta, dict):
        raise ValueError("its manifest does not hold a batch, columns and facts")
    DataProtoColumns(batch, columns, meta).check_consistency()
    return batch, columns, meta


def _refuse_compressed(archive: zipfile.ZipFile) -> None:
    """A small compressed entry may fill the memory; ``save`` writes none."""
    compressed = [entry.filename for entry in archive.infolist() if entry.compress_type != zipfile.ZIP_STORED]
    if compressed:
        raise ValueError(f"its entries {compressed[:3]} are compressed")


class _Writer:
    """Turns values into JSON and numbered arrays."""

    def __init__(self) -> None:
        self.arrays: dict[str, np.ndarray] = {}

    def encode(self, value: Any, where: str) -> Any:
        if type(value) in _SCALARS:
            return value
        for kind, encode in self._encoders.items():
            if isinstance(value, kind):
                return encode(self, value, where)
        raise ValueError(f"{where} holds a {type(value).__name__}, which cannot be written as plain data")

    def _store(self, array: np.ndarray) -> str:
        name = f"a{len(self.arrays)}"
        self.arrays[name] = array
        return name

    def _list(self, value: list, where: str) -> list:
        return [self.encode(element, f"{where}[{position}]") for position, element in enumerate(value)]

    def _tuple(self, value: tuple, where: str) -> dict:
        return {"tuple": self._list(list(value), where)}

    def _dict(self, value: dict, where: str) -> dict:
        return {"dict": [[self.encode(k, where), self.encode(v, f"{where}[{k!r}]")] for k, v in value.items()]}

    def _bytes(self, value: bytes, where: str) -> dict:
        return {"bytes": self._store(np.frombuffer(value, dtype=np.uint8))}

    def _scalar(self, value: np.generic, where: str) -> dict:
        return {"scalar": self._store(np.asarray(value))}

    def _array(self, value: np.ndarray, where: str) -> dict:
        if value.dtype.names is not None and value.dtype.hasobject:
            raise ValueError(f"{where} holds a structured array of objects, which cannot be written as plain data")
        if value.dtype.hasobject:
            return {"objects": [list(value.shape), self._list(list(value.ravel()), where)]}
        return {"array": self._store(value)}

    def _tensor(self, value: torch.Tensor, where: str) -> dict:
        if value.is_nested:
            return {"nested": [str(value.layout).removeprefix("torch."), self._list(list(value.unbind()), where)]}
        if value.is_meta:
            raise ValueError(f"{where} is a tensor on the meta device, which has no values to write")
        dtype, shape, data = serialize_single_tensor(value)
        return {"tensor": [dtype, list(shape), self._store(data)]}

    def _tensordict(self, value: TensorDictBase, where: str) -> dict:
        return {"tensordict": [list(value.batch_size), self._dict(dict(value.items()), where)]}

    _encoders: dict[Any, Callable[..., Any]] = {
        list: _list,
        tuple: _tuple,
        dict: _dict,
        bytes: _bytes,
        np.generic: _scalar,
        np.ndarray: _array,
        torch.Tensor: _tensor,
        TensorDictBase: _tensordict,
    }


class _Reader:
    """Turns them back."""

    def __init__(self, archive: Any) -> None:
        self._archive = archive

    def decode(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self.decode(element) for element in value]
        if not isinstance(value, dict):
            return value
        ((kind, content),) = value.items()
        return self._decoders[kind](self, content)

    def _tuple(self, content: list) -> tuple:
        return tuple(self.decode(content))

    def _dict(self, content: list) -> dict:
        return {self.decode(key): self.decode(value) for key, value in content}

    def _bytes(self, content: str) -> bytes:
        return self._archive[content].tobytes()

    def _scalar(self, content: str) -> np.generic:
        return self._archive[content][()]

    def _array(self, content: str) -> np.ndarray:
        return self._archive[content]

    def _objects(self, content: list) -> np.ndarray:
        shape, elements = content
        flat = np.empty(len(elements), dtype=object)
        for position, element in enumerate(elements):
            flat[position] = self.decode(element)
        return flat.reshape(shape)

    def _tensor(self, content: list) -> torch.Tensor:
        dtype_name, shape, name = content
        data, dtype = self._archive[name], vars(torch).get(dtype_name)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{dtype_name!r} is no torch dtype")
        if any(size < 0 for size in shape) or math.prod(shape) * dtype.itemsize != data.nbytes:
            raise ValueError(f"a {dtype_name} tensor of shape {shape} does not take {data.nbytes} bytes")
        return deserialize_single_tensor((dtype_name, tuple(shape), data))

    def _nested(self, content: list) -> torch.Tensor:
        layouts = {"strided": torch.strided, "jagged": torch.jagged}
        return torch.nested.nested_tensor(self.decode(content[1]), layout=layouts[content[0]])

    def _tensordict(self, content: list) -> TensorDict:
        return TensorDict(self.decode(content[1]), batch_size=content[0])

    _decoders: dict[str, Callable[..., Any]] = {
        "tuple": _tuple,
        "dict": _dict,
        "bytes": _bytes,
        "scalar": _scalar,
        "array": _array,
        "objects": _objects,
        "tensor": _tensor,
        "nested": _nested,
        "tensordict": _tensordict,
    }
