from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, GenerationConfig

from verl.workers.engine.hf_export import save_hf_checkpoint


def weights_of(path: str) -> dict[str, torch.Tensor]:
    return dict(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).named_parameters())


@pytest.mark.parametrize("architecture", ["qwen2", "llama", "qwen3"])
@pytest.mark.parametrize("shard_bytes", [1 << 30, 8000])
def test_an_exported_model_reloads_equal_and_tied_stays_tied(
    checkpoint: Any, tmp_path: Path, architecture: str, shard_bytes: int
) -> None:
    source, target = checkpoint(architecture), tmp_path / "out"
    weights = {name: tensor.detach() + 1 for name, tensor in weights_of(source).items()}
    save_hf_checkpoint(iter(weights.items()), source, target, shard_bytes=shard_bytes)
    model = AutoModelForCausalLM.from_pretrained(target)
    assert {name: tensor.dtype for name, tensor in model.named_parameters()} == dict.fromkeys(weights, torch.float32)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.named_parameters())
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    assert tied == model.config.tie_word_embeddings == (architecture != "llama")
    assert not list(tmp_path.glob("*.unfinished"))
    files = {path.name for path in target.glob("*.safetensors")}
    assert files == ({"model.safetensors"} if shard_bytes > 8000 else indexed_files(target))


def indexed_files(directory: Path) -> set[str]:
    """Files named by the index, each of which holds what the index says."""
    weight_map = json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]
    for name, file in weight_map.items():
        with safe_open(directory / file, "pt") as shard:
            assert name in set(shard.keys())
    assert len(set(weight_map.values())) > 2
    return set(weight_map.values())


def test_stop_strings_and_tokenizer_files_travel(checkpoint: Any, tmp_path: Path) -> None:
    source, target = Path(checkpoint("qwen2")), tmp_path / "out"
    (source / "tokenizer_config.json").write_text("{}")
    save_hf_checkpoint(weights_of(str(source)).items(), str(source), target, ["</search>", "</answer>"])
    assert GenerationConfig.from_pretrained(target).stop_strings == ["</search>", "</answer>"]
    assert (target / "tokenizer_config.json").read_text() == "{}"
    (source / "tokenizer_config.json").unlink()


def test_a_failed_export_leaves_the_previous_one(checkpoint: Any, tmp_path: Path) -> None:
    source, target = checkpoint("qwen2"), tmp_path / "out"
    save_hf_checkpoint(weights_of(source).items(), source, target)

    def broken() -> Any:
        yield next(iter(weights_of(source).items()))
        raise ConnectionError("a rank died")

    with pytest.raises(ConnectionError):
        save_hf_checkpoint(broken(), source, target)
    assert weights_of(str(target)).keys() == weights_of(source).keys()
