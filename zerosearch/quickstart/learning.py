"""What GRPO makes of the quickstart's models, and what it makes of them without a signal."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from zerosearch.quickstart import Assets, controls
from zerosearch.quickstart.report import Measure

NOISE_FREE, END_NOISE = "noise_0", "noise_end"
UNCHANGED = 0.08
"""How far a held-out mean of 400 questions may move up by sampling alone: about three standard errors."""

CONTROLS: Mapping[str, Sequence[str]] = {
    "constant reward": (f"custom_reward_function.path={controls.__file__}", "custom_reward_function.name=constant"),
    "unrelated reward": (f"custom_reward_function.path={controls.__file__}", "custom_reward_function.name=unrelated"),
    "learning rate 0": ("actor_rollout_ref.actor.optim.lr=0",),
}


def measure_learning(assets: Assets, seed: int) -> list[Measure]:
    """Held-out scores and searches of the ordinary quickstart on these assets. Raises CalledProcessError."""
    summary = train(assets, seed)
    n, validation = int(summary["held_out_n"]), summary["validation"]
    before, after = summary["held_out_f1_before"], summary["held_out_f1_after"]
    end_gain = summary["held_out_f1_after_end_noise"] - summary["held_out_f1_before_end_noise"]
    searches = f"val/{NOISE_FREE}/search/searches_hops_"
    section = "GRPO"
    return [
        Measure(section, "held-out F1 before, noise 0", before, n),
        Measure(section, "held-out F1 after, noise 0", after, n, at_least=0.85),
        Measure(section, "gain, noise 0", after - before, n, at_least=0.40),
        Measure(section, "gain, noise 0, lower 95 % bound", summary["held_out_gain_low95"], n, at_least=0.35),
        Measure(section, "gain, end noise", end_gain, n, at_least=0.20),
        Measure(section, "searches of one-hop questions", validation[searches + "1"], n, at_most=1.5),
        Measure(section, "searches of two-hop questions", validation[searches + "2"], n, at_least=1.8),
        Measure(section, "query sensitivity of its own last queries", summary["query_sensitivity"], n),
    ]


def measure_controls(assets: Assets, seed: int) -> list[Measure]:
    """The gain at noise 0 where there is nothing to learn from. Raises CalledProcessError."""
    measures = []
    for name, overrides in CONTROLS.items():
        summary = train(assets, seed, overrides)
        gain = summary["held_out_f1_after"] - summary["held_out_f1_before"]
        measures.append(Measure("no signal", f"gain, {name}", gain, int(summary["held_out_n"]), at_most=UNCHANGED))
    return measures


def train(assets: Assets, seed: int, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The summary of a quickstart run on these assets, validated before and after only."""
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "verl.trainer.main_ppo", *_overrides(assets, seed, directory), *overrides]
        subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
        (summary,) = Path(directory).glob("*/summary.json")
        return json.loads(summary.read_text())


def _overrides(assets: Assets, seed: int, directory: str) -> list[str]:
    return [
        "+preset=quickstart",
        f"trainer.seed={seed}",
        "trainer.test_freq=0",
        "trainer.logger=[console]",
        f"trainer.default_local_dir={directory}",
        f"data.train_files={assets.train_data}",
        f"data.val_files={assets.test_data}",
        f"data.prompt_template={assets.policy_prompt}",
        f"actor_rollout_ref.model.path={assets.policy}",
        f"retriever.embedded_model={assets.simulator}",
        f"retriever.prompt_template={assets.simulation_prompt}",
    ]
