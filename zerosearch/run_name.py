"""The name of a run: what tells it from others, as a file name."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from verl.trainer.aliases import rewrite_overrides
from verl.trainer.config import PPOTrainerConfig

LONGEST = 100
"""Characters; a run's directory adds a time, and stays below 120."""
_LONGEST_PART = 40
"""Characters of what a checkpoint is called: one long name leaves room for what else there is to tell."""

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

    A quickstart's name holds what was changed of it. Names longer than `LONGEST` end in a hash of the whole.
    """
    others = _changes(overrides, told=() if quickstart else _TOLD)
    parts = [f"quickstart-{algorithm}"] if quickstart else _description(config, algorithm)
    return _cut("_".join([*parts, *others]), LONGEST)


def _cut(text: str, longest: int) -> str:
    """At most ``longest`` characters, of which the last eight are a hash of the whole where it is longer."""
    if len(text) <= longest:
        return text
    return f"{text[: longest - 9].rstrip('_.-')}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def _description(config: PPOTrainerConfig, algorithm: str) -> list[str]:
    parts = [
        algorithm,
        _checkpoint(config.actor_rollout_ref.model.path),
        _data_names(config.data.train_files),
        _validation_data(config.data.train_files, config.data.val_files),
        *(_search(config.retriever) if "search_mode" in config.retriever else ()),
        f"steps{config.trainer.total_training_steps}",
    ]
    return [_safe(part) for part in parts if _safe(part)]


def _search(retriever: Mapping[str, Any]) -> list[str]:
    engine = retriever["search_engine"]
    return [
        retriever["search_mode"],
        _checkpoint(retriever["simulation_llm"] or retriever["embedded_model"]),
        f"noise{retriever['start_threshold']:g}-{retriever['end_threshold']:g}",
        "" if engine == "none" else f"val-{engine}",
        f"turns{retriever['max_turns']}",
        f"topk{retriever['topk']}",
    ]


def _validation_data(train_files: Sequence[str], val_files: Sequence[str]) -> str:
    """Nothing where it is what lies beside the training data."""
    train = [Path(file) for file in train_files]
    beside = [path.with_name(f"test{path.suffix}") for path in train if path.stem == "train"]
    if [Path(file) for file in val_files] == beside:
        return ""
    return f"valdata-{_data_names(val_files) or 'none'}"


def _data_names(files: Sequence[str]) -> str:
    return "+".join(dict.fromkeys(map(_data_name, files)))


def _data_name(file: str) -> str:
    """A data set's directory where the file is called train or test, else the file."""
    path = Path(file)
    return path.parent.name if path.stem in ("train", "test") and path.parent.name else path.stem


def _checkpoint(path: str) -> str:
    """A checkpoint's directory; of one that a run wrote, the run's as well: each run has a best and a last."""
    parts = [part for part in path.split("/") if part]
    if len(parts) >= 3 and parts[-2] == "checkpoints":
        return f"{_cut(parts[-3], _LONGEST_PART)}-{parts[-1]}"
    return _cut(_base(path), _LONGEST_PART)


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
    short = _checkpoint(value.strip("'\"")) if "/" in value else value
    return short if re.fullmatch(r"[0-9.e+-]+", short) else f"-{short}"


def _safe(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.+-]+", "-", text).strip("-.")
