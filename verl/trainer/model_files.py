"""What can be known of a checkpoint from its small files: where it is, its architecture, its size."""

from __future__ import annotations

import json
import math
import os
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download, try_to_load_from_cache
from huggingface_hub.constants import ENDPOINT, HF_HUB_OFFLINE
from huggingface_hub.errors import EntryNotFoundError, HFValidationError, RepositoryNotFoundError
from safetensors import SafetensorError, safe_open

from verl.utils.paths import resolve_path

HUB_SECONDS = 10.0
"""How long the hub may take to answer before a run is refused."""
_TORCH_BYTES = 2
"""Bytes of a parameter in files that are not safetensors, as most checkpoints are published."""


@dataclass(frozen=True)
class ModelFiles:
    """A checkpoint: ``directory`` holds config.json and what else lies beside it; ``config`` is its content."""

    name: str
    directory: Path
    config: Mapping[str, Any]

    @property
    def vocab_size(self) -> int | None:
        return self.config.get("vocab_size")

    @property
    def context_length(self) -> int | None:
        return self.config.get("max_position_embeddings")

    def parameters(self) -> int | None:
        """How many the checkpoint holds, read from the headers of its files; None where no weights lie there."""
        files = sorted(self.directory.glob("*.safetensors"))
        if files:
            return sum(_tensor_sizes(file) for file in files)
        size = sum(file.stat().st_size for file in self.directory.glob("pytorch_model*.bin"))
        return size // _TORCH_BYTES or None


def _tensor_sizes(file: Path) -> int:
    try:
        with safe_open(file, framework="pt") as tensors:
            return sum(math.prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} is damaged: {error}; download or write it again") from error


def find_model(path: str, key: str) -> ModelFiles:
    """The checkpoint that ``path`` names: a directory, ``pkg://…``, or org/name on the Hugging Face hub.

    Raises ValueError saying what ``key`` should be. The hub is asked only for org/name that is not
    downloaded yet, and waited for HUB_SECONDS.
    """
    directory = Path(resolve_path(path))
    if directory.is_dir():
        return _read(path, directory / "config.json", key)
    if path.startswith((".", "/", "~", "pkg://")) or path.count("/") > 1:
        raise ValueError(f"{key}: there is no directory {path!r}")
    if "/" not in path:
        raise ValueError(
            f"{key}: {path!r} is no directory here: download the checkpoint (hf download ORG/{path} --local-dir "
            f"{path}), or give the hub's name with its organisation (ORG/{path})"
        )
    return _read(path, Path(_from_hub(path, key)), key)


def _from_hub(name: str, key: str) -> str:
    """The path of a hub model's config.json in the cache; fetched when it is not there."""
    try:
        cached = try_to_load_from_cache(name, "config.json")
    except HFValidationError as error:
        raise ValueError(f"{key}: {name!r} is neither a directory nor a name on the hub: {error}") from error
    if isinstance(cached, str):
        return cached
    if HF_HUB_OFFLINE or os.environ.get("TRANSFORMERS_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        raise ValueError(
            f"{key}: {name!r} is no directory here and not in the hub's cache, and HF_HUB_OFFLINE is set: download it "
            f"where there is a network (hf download {name}), or unset HF_HUB_OFFLINE"
        )
    try:
        _reach_hub()
        return hf_hub_download(name, "config.json", etag_timeout=HUB_SECONDS)
    except RepositoryNotFoundError as error:
        raise ValueError(
            f"{key}: {name!r} is neither a directory nor a model of the hub that you may read "
            "(a gated one needs `hf auth login`)"
        ) from error
    except (EntryNotFoundError, OSError) as error:
        raise ValueError(_unreachable(key, name, error)) from error


def _reach_hub() -> None:
    """Raises OSError within HUB_SECONDS when the hub cannot be reached; its own client would try for minutes."""
    try:
        urllib.request.urlopen(ENDPOINT, timeout=HUB_SECONDS).close()
    except urllib.error.HTTPError:
        return  # any answer is an answer


def _unreachable(key: str, name: str, error: BaseException) -> str:
    first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return f"{key}: {name!r} is no directory here, and the hub did not give its config.json ({first}): download it"


def _read(name: str, file: Path, key: str) -> ModelFiles:
    if not file.is_file():
        raise ValueError(f"{key}: {name!r} holds no config.json, so it is no checkpoint in Hugging Face format")
    try:
        config = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{key}: {file} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{key}: {file} is no mapping")
    return ModelFiles(name, file.parent, config)
