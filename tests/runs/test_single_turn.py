"""Rows in the form of GSM8K, trained on through the real entry point: no search, no zerosearch code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.runs.script import ROOT

OVERRIDES = (
    "environment=single_turn",
    "actor_rollout_ref.model.path=pkg://zerosearch.quickstart/assets/policy",
    "data.max_prompt_length=96",
    "data.max_response_length=24",
    "data.train_batch_size=2",
    "actor_rollout_ref.rollout.n=2",
    "trainer.total_training_steps=2",
    "trainer.logger=[console]",
    "trainer.object_store_megabytes=128",
)


def train(folder: Path, *overrides: str) -> tuple[subprocess.CompletedProcess[str], list[dict[str, float]]]:
    rows = [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": f"what is {number} + 1"}],
            "reward_model": {"style": "rule", "ground_truth": str(number + 1)},
            "extra_info": {"index": number},
        }
        for number in range(4)
    ]
    file = folder / "train.parquet"
    pq.write_table(pa.Table.from_pylist(rows), file)
    own = [f"data.train_files={file}", f"data.val_files={file}", f"trainer.default_local_dir={folder / 'runs'}"]
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *OVERRIDES, *own, *overrides]
    done = subprocess.run(command, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    (metrics,) = (folder / "runs").glob("*/metrics.jsonl")
    return done, [json.loads(line) for line in metrics.read_text().splitlines()]


def test_gsm8k_rows_train_under_the_rule(tmp_path: Path) -> None:
    done, metrics = train(tmp_path)
    assert [row["step"] for row in metrics] == [0, 1, 2, 2]
    assert metrics[1]["score/answer_found"] == 0.0, "a policy that has never seen the mark"
    assert metrics[1]["reward/mean"] == 0.0
    assert "ended" in done.stdout
    assert not any(name.startswith("search/") for row in metrics for name in row)


@pytest.mark.slow
def test_a_users_reward_file_scores_rows_of_any_source(tmp_path: Path) -> None:
    reward = tmp_path / "reward.py"
    reward.write_text(
        "async def mine(data_source, solution_str, ground_truth, extra_info):\n"
        "    return {'score': 1.0 + extra_info['index'], 'words': len(solution_str.split())}\n"
    )
    _, metrics = train(tmp_path, f"custom_reward_function.path={reward}", "custom_reward_function.name=mine")
    assert metrics[0]["val/validation/reward/mean"] == 2.5
    assert metrics[1]["score/words"] >= 0
