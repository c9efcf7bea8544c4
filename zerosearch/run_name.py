"""The name of a run: what tells it from others, as a file name."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from verl.trainer.aliases import rewrite_overrides
from verl.trainer.config import PPOTrainerConfig

LONGEST = 160
"""Characters; a run's directory adds a time, and file systems allow 255."""

_TOLD = (
    "actor_rollout_ref.model.path",
    "data.train_files",
    "data.val_files",
    "retriever.search_mode",
    "retriever.simulation_llm",
    "retriever.embedded_model",
    "retriever.start_threshold",
    "retriever.end_threshold",
    "retriever.search_engine",
    "retriever.max_turns",
    "retriever.topk",
    "trainer.total_training_steps",
)
"""Keys whose effective values every name holds."""
_WHERE = (
    "algorithm",
    "retriever.ip",
    "retriever.wiki.address",
    "trainer.default_local_dir",
    "trainer.experiment_name",
    "trainer.project_name",
    "trainer.logger",
    "trainer.n_gpus_per_node",
    "trainer.nnodes",
    "trainer.nproc_per_node",
    "trainer.num_threads",
    "trainer.object_store_megabytes",
)
"""Keys that say where a run takes place or is kept, not what it is."""
_SPOKEN = ("critic", "val_kwargs", "embedded", "google", "wiki")
"""Sections named before a key that others have too."""


def experiment_name(config: PPOTrainerConfig, algorithm: str, quickstart: bool, overrides: Sequence[str]) -> str:
    """Algorithm, model, data, search and noise, then every other override; letters, digits and ``_.+-`` only.

    A quickstart's name holds what was changed of it. Longer names end in a hash of the whole.
    """
    others = _changes(overrides, told=() if quickstart else _TOLD)
    parts = [f"quickstart-{algorithm}"] if quickstart else _description(config, algorithm)
    name = "_".join([*parts, *others])
    if len(name) <= LONGEST:
        return name
    return f"{name[: LONGEST - 9]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def _description(config: PPOTrainerConfig, algorithm: str) -> list[str]:
    data = [_data_name(file) for file in config.data.train_files]
    parts = [
        algorithm,
        _base(config.actor_rollout_ref.model.path),
        "+".join(dict.fromkeys(data)),
        *(_search(config.retriever) if "search_mode" in config.retriever else ()),
        f"steps{config.trainer.total_training_steps}",
    ]
    return [_safe(part) for part in parts if _safe(part)]


def _search(retriever: Mapping[str, Any]) -> list[str]:
    engine = retriever["search_engine"]
    return [
        retriever["search_mode"],
        _base(retriever["simulation_llm"] or retriever["embedded_model"]),
        f"noise{retriever['start_threshold']:g}-{retriever['end_threshold']:g}",
        "" if engine == "none" else f"val-{engine}",
        f"turns{retriever['max_turns']}",
        f"topk{retriever['topk']}",
    ]


def _data_name(file: str) -> str:
    """A data set's directory where the file is called train, else the file."""
    path = Path(file)
    return path.parent.name if path.stem == "train" and path.parent.name else path.stem


def _base(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]


def _changes(overrides: Sequence[str], told: Sequence[str]) -> list[str]:
    """Every override that is not told otherwise, as its key's last part and its value."""
    changes: dict[str, str] = {}
    for override in rewrite_overrides(overrides):
        key, _, value = override.lstrip("+~").partition("=")
        if key in told or key in _WHERE or key.endswith("api_key") or (key, value) == ("preset", "quickstart"):
            continue
        changes[key] = value if key == "preset" else f"{_short(key)}{_value(value)}"
    return [_safe(change) for change in changes.values()]


def _short(key: str) -> str:
    *sections, last = key.split(".")
    spoken = [section for section in sections if section in _SPOKEN]
    return "-".join([*spoken, last]).replace("_", "-")


def _value(value: str) -> str:
    """Paths by their last part; what is no number keeps a hyphen before it."""
    short = _base(value.strip("'\"")) if "/" in value else value
    return short if re.fullmatch(r"[0-9.e+-]+", short) else f"-{short}"


def _safe(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.+-]+", "-", text).strip("-.")
