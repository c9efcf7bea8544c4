"""Where metrics go: always a local JSONL file; the console and W&B as configured. The driver alone logs."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO


class Tracking:
    """verl's ``Tracking``: ``log(data, step)`` to every backend.

    ``default_backend`` names any of ``console`` and ``wandb``; with a ``directory``, each call also
    appends one line to ``metrics.jsonl`` in it. W&B runs offline, said once, when no key is known.
    """

    def __init__(
        self,
        project_name: str,
        experiment_name: str,
        default_backend: str | Sequence[str] = ("console",),
        config: Mapping[str, Any] | None = None,
        directory: Path | None = None,
    ) -> None:
        backends = {default_backend} if isinstance(default_backend, str) else set(default_backend)
        unknown = backends - {"console", "wandb"}
        if unknown:
            raise ValueError(f"unknown tracking backends {sorted(unknown)}; known: console, wandb")
        self._console = "console" in backends
        self._file: TextIO | None = (directory / "metrics.jsonl").open("a") if directory else None
        self._wandb = _start_wandb(project_name, experiment_name, config, directory) if "wandb" in backends else None

    def log(self, data: Mapping[str, float], step: int, line: str | None = None) -> None:
        """``line`` is what a person reads on the console; without one the console prints every metric."""
        if self._file is not None:
            self._file.write(json.dumps({"step": step, **{k: _plain(v) for k, v in sorted(data.items())}}) + "\n")
            self._file.flush()
        if self._wandb is not None:
            self._wandb.log(dict(data), step=step)
        if self._console:
            print(line if line is not None else _all_metrics(data, step), flush=True)

    def finish(self, exit_code: int = 0) -> None:
        if self._wandb is not None:
            self._wandb.finish(exit_code=exit_code)
            self._wandb = None
        if self._file is not None:
            self._file.close()
            self._file = None


def _plain(value: float) -> float | str:
    """JSON knows no NaN and no infinity: they become strings, so that every line stays parseable."""
    return value if math.isfinite(value) else str(value)


def _all_metrics(data: Mapping[str, float], step: int) -> str:
    return f"step {step} | " + " | ".join(f"{name} {value:.4g}" for name, value in sorted(data.items()))


def _start_wandb(project: str, experiment: str, config: Mapping[str, Any] | None, directory: Path | None) -> Any:
    import wandb

    offline = _offline(wandb)
    if offline:
        print("W&B: no API key found, so this run is kept offline (wandb sync uploads it later)", flush=True)
    return wandb.init(
        project=project,
        name=experiment,
        config=dict(config or {}),
        dir=str(directory) if directory else None,
        mode="offline" if offline else None,
        settings=wandb.Settings(silent=True, console="off", x_disable_stats=True),
    )


def _offline(wandb: Any) -> bool:
    """True when nothing says otherwise and no key is known to W&B (environment or netrc)."""
    return "WANDB_MODE" not in os.environ and not wandb.login(prompt=False)
