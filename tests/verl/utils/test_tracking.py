from __future__ import annotations

import json
from pathlib import Path

import pytest

from verl.utils.tracking import Tracking


def test_jsonl_is_always_written_and_stays_parseable(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tracking = Tracking("p", "e", ["console"], {}, tmp_path)
    tracking.log({"b": 1.5, "a": float("nan")}, step=3, line="step 3 | fine")
    tracking.finish()
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 3, "a": "nan", "b": 1.5}
    assert capsys.readouterr().out == "step 3 | fine\n"


def test_wandb_without_a_key_runs_offline_and_says_so_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    tracking = Tracking("p", "e", "wandb", {"lr": 1}, tmp_path)
    tracking.log({"a": 1.0}, step=1)
    tracking.finish()
    assert capfd.readouterr().out.count("offline") == 1
    assert list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))


def test_unknown_backend_is_named() -> None:
    with pytest.raises(ValueError, match="mlflow"):
        Tracking("p", "e", ["mlflow"])
