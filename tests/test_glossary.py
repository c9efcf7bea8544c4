"""The documentation defines every metric that a run logs."""

from __future__ import annotations

from pathlib import Path

from tests.glossary import documented_names, undocumented

PPO_KEYS = Path(__file__).parent / "ppo_metric_keys.txt"
"""Keys of the rows of PPO runs on the quickstart, with KL in the loss and in the reward, and of all alarms."""


def test_every_metric_of_a_ppo_run_is_documented() -> None:
    keys = PPO_KEYS.read_text().split()
    assert len(keys) == 230
    assert undocumented(keys) == []


def test_a_metric_that_no_table_names_is_found() -> None:
    unknown = [
        "alarm/no_such",
        "alarm/search_no_such",
        "critic/no_such",
        "search/searches_hops_two",
        "search/survival",
        "steps",
        "val/noise_0/no_such",
        "val/no_such",
    ]
    known = ["alarm/search_lost", "search/searches_hops_12", "score/f1", "val/noise_0/score/f1", "timing_s/rollout"]
    known += ["val/google/n", "val/validation/source/openai/gsm8k/reward/low95"]
    assert undocumented([*unknown, *known]) == unknown


def test_shortened_cells_are_written_out() -> None:
    names = documented_names()
    for name in ("reward/max", "training/rollout_probs_diff_max", "val/{mode}/reward/high95", "alarm/entropy_high"):
        assert name in names
    assert len(names) == len(set(names))
