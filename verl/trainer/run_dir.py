"""The directory of one run: config.yaml, metrics.jsonl, trajectories/, checkpoints/, wandb/, logs/, summary.json."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, is_dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml
from transformers import PreTrainedTokenizerBase

from verl.agent_loop.trajectory import Segment, Trajectory


class RunDirectory:
    """Made once per run; a name already taken gets a number."""

    def __init__(self, root: str, experiment: str) -> None:
        stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
        self.path = _unused(Path(root).absolute() / f"{experiment}-{stamp}")
        for name in ("trajectories", "checkpoints", "logs"):
            (self.path / name).mkdir(parents=True)

    def write_config(self, config: Mapping[str, Any], overrides: Sequence[str]) -> None:
        """The effective configuration, and above it, as a comment, the overrides it came from."""
        header = "".join(f"# {override}\n" for override in overrides)
        (self.path / "config.yaml").write_text(header + yaml.safe_dump(_plain(config), sort_keys=False))

    def write_trajectories(
        self, name: str, trajectories: Sequence[Trajectory], tokenizer: PreTrainedTokenizerBase
    ) -> None:
        lines = (json.dumps(describe(t, tokenizer), ensure_ascii=False) for t in trajectories)
        (self.path / "trajectories" / f"{name}.jsonl").write_text("\n".join(lines) + "\n")

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Written aside and renamed: a reader never sees half a file."""
        partial = self.path / "summary.json.partial"
        partial.write_text(json.dumps(_plain(summary), indent=2) + "\n")
        partial.replace(self.path / "summary.json")


def _unused(path: Path) -> Path:
    number, candidate = 1, path
    while candidate.exists():
        number += 1
        candidate = path.with_name(f"{path.name}-{number}")
    return candidate


def describe(trajectory: Trajectory, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """A trajectory as JSON: texts beside the ids they are derived from."""
    return {
        "uid": trajectory.uid,
        "sample": trajectory.sample,
        "step": trajectory.step,
        "mode": trajectory.mode,
        "status": trajectory.status.value,
        "reward": trajectory.reward,
        "scores": trajectory.reward_extra,
        "prompt": tokenizer.decode(list(trajectory.prompt_ids)),
        "prompt_ids": list(trajectory.prompt_ids),
        "segments": [_describe_segment(s, tokenizer) for s in trajectory.segments],
        "environment": _plain(trajectory.environment),
        "timings": trajectory.timings,
        "failure": trajectory.failure,
    }


def _describe_segment(segment: Segment, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    return {
        "kind": segment.kind.value,
        "text": tokenizer.decode(list(segment.token_ids)),
        "token_ids": list(segment.token_ids),
        "log_probs": [round(value, 6) for value in segment.log_probs],
        "weights_versions": [list(run) for run in segment.weights_versions],
    }


def _plain(value: Any) -> Any:
    """Nested dataclasses, enumerations, tuples and paths as what JSON and YAML hold."""
    if is_dataclass(value) and not isinstance(value, type):
        return _plain(asdict(value))
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    return value if isinstance(value, bool | int | float | type(None)) else str(value)
