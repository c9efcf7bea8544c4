"""A run whose worker stands still for ever is ended by its watchdog, through the real entry point."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.runs.script import MARK, ROOT, Finished
from tests.runs.test_single_turn import OVERRIDES

STUCK = (
    "environment.path=tests.runs.stuck_environment.StuckEnvironment",
    "trainer.val_before_train=false",
    "actor_rollout_ref.rollout.trajectory_timeout=4",
    "trainer.watchdog_timeout=60",
)


def run_stuck(folder: Path) -> Finished:
    rows = [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": f"what is {number} + 1"}],
            "reward_model": {"style": "rule", "ground_truth": str(number + 1)},
            "extra_info": {"index": number},
        }
        for number in range(4)
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / "train.parquet")
    own = [f"data.train_files={folder / 'train.parquet'}", f"trainer.default_local_dir={folder / 'runs'}"]
    mark = uuid.uuid4().hex
    environment = {**os.environ, MARK: mark, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *OVERRIDES, *own, *STUCK]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=400)
    directories = list((folder / "runs").glob("run-*"))
    return Finished(done.returncode, done.stdout + done.stderr, directories[0] if directories else None, mark)


@pytest.mark.slow
def test_a_stuck_worker_ends_the_run_with_the_stacks_of_all_processes(tmp_path: Path) -> None:
    run = run_stuck(tmp_path)
    assert run.code == 1, run.output
    reason = run.summary["exit_reason"]
    assert reason.startswith("WatchdogError: no progress for "), run.output
    assert "in phase 'rollout'" in reason
    assert "none from" not in reason
    assert run.directory is not None
    logs = run.directory / "logs"
    names = ["stacks-RolloutWorker-0.txt", "stacks-TrainingWorker-0.txt", "stacks-driver.txt"]
    assert sorted(path.name for path in logs.glob("stacks-*")) == names
    assert all(str(logs / name) in reason for name in names)
    assert "stand_still_for_ever" in (logs / names[0]).read_text()
    assert "run_training" in (logs / names[2]).read_text()
    assert not (run.directory / "checkpoints" / "last").exists(), "nothing is asked of workers that may be stuck"
    assert run.processes_left == []
