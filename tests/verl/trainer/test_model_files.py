from __future__ import annotations

from pathlib import Path

import pytest

from tests.verl.trainer.conftest import PARAMETERS
from verl.trainer import model_files
from verl.trainer.model_files import find_model


def refusal(path: str) -> str:
    with pytest.raises(ValueError, match=r"^KEY: ") as error:
        find_model(path, "KEY")
    return str(error.value)


def test_a_checkpoint_is_counted_by_the_headers_of_its_files(checkpoint: Path) -> None:
    model = find_model(str(checkpoint), "KEY")
    assert (model.parameters(), model.vocab_size, model.context_length) == (PARAMETERS, 30, 8192)


def test_other_weight_files_are_counted_by_size_and_none_not_at_all(checkpoint: Path) -> None:
    for file in checkpoint.glob("*.safetensors"):
        file.unlink()
    assert find_model(str(checkpoint), "KEY").parameters() is None
    (checkpoint / "pytorch_model.bin").write_bytes(bytes(200))
    assert find_model(str(checkpoint), "KEY").parameters() == 100


def test_a_damaged_weight_file_is_named(checkpoint: Path) -> None:
    (checkpoint / "model-1.safetensors").write_bytes(b"short")
    with pytest.raises(ValueError, match=r"model-1\.safetensors is damaged"):
        find_model(str(checkpoint), "KEY").parameters()


def test_what_is_no_checkpoint_is_told_apart(tmp_path: Path) -> None:
    assert "there is no directory '/nowhere/model'" in refusal("/nowhere/model")
    assert "holds no config.json" in refusal(str(tmp_path))
    assert "give the hub's name with its organisation (ORG/Qwen2.5-3B-Instruct)" in refusal("Qwen2.5-3B-Instruct")
    assert "neither a directory nor a name on the hub" in refusal("bad name!/x")
    (tmp_path / "config.json").write_text("{")
    assert "config.json cannot be read" in refusal(str(tmp_path))


def test_an_offline_hub_is_never_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_files, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(model_files, "ENDPOINT", "http://127.0.0.1:9")
    assert "HF_HUB_OFFLINE is set: download it" in refusal("org/model-that-is-not-here")


def test_a_hub_that_does_not_answer_is_an_error_not_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_files, "HF_HUB_OFFLINE", False)
    monkeypatch.delenv("TRANSFORMERS_OFFLINE", raising=False)
    monkeypatch.setattr(model_files, "ENDPOINT", "http://127.0.0.1:9")
    message = refusal("org/model-that-is-not-here")
    assert "the hub did not give its config.json" in message
    assert "refused" in message
