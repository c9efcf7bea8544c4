"""How much of a training step is neither generation, search, log-probabilities nor update.

Run as ``python scripts/benchmarks/quickstart.py [--json PATH] [--steps N] [key=value …]``. It trains the
quickstart through its ordinary command and reads ``metrics.jsonl``: a step reaches from the end of the
one before to its own, logging included; what counts as covered is the union of the times in which a
trajectory was running, and the seconds the training workers computed. Dispatch, collation, weight sync
and logging are the rest. The first step is left out: it compiles and fills caches.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from targets import Target, report

ROOT = Path(__file__).parents[2]
GOAL = 0.15


def run_quickstart(directory: str, steps: int, overrides: list[str]) -> list[dict[str, float]]:
    """Metrics of the training steps. Raises CalledProcessError when the run fails."""
    command = [sys.executable, "-m", "zerosearch.launch", "grpo", "TOTAL_STEPS", str(steps)]
    quiet = ["trainer.val_before_train=false", "data.val_files=[]", f"trainer.default_local_dir={directory}"]
    subprocess.run([*command, *quiet, *overrides], check=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
    (metrics,) = Path(directory).glob("*/metrics.jsonl")
    return [json.loads(line) for line in metrics.read_text().splitlines()]


def overhead_share(rows: list[dict[str, float]]) -> float:
    """Uncovered seconds of all steps by their seconds."""
    seconds = sum(row["timing_s/step"] for row in rows)
    return sum(row["perf/overhead_share"] * row["timing_s/step"] for row in rows) / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        rows = run_quickstart(directory, arguments.steps, arguments.overrides)[1:]
    share = overhead_share(rows)
    print(f"seconds per step: {sum(row['timing_s/step'] for row in rows) / len(rows):.2f}")
    report([Target("step_overhead_share", share, GOAL, at_most=True)], arguments.json)


if __name__ == "__main__":
    main()
