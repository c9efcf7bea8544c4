"""A tiny checkpoint directory and data files beside it, from which a run could start."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

WORDS = ["<unk>", "<end>", "<pad>", *"abcdefghijklmnopqrstuvwxyz"]
PARAMETERS = 30 * 4 + 7
Rows = Sequence[dict[str, Any]]


def write_rows(path: Path, rows: Rows) -> str:
    pq.write_table(pa.Table.from_pylist(list(rows)), path)
    return str(path)


def rows_of(questions: str) -> Rows:
    return [{"question": letter, "golden_answers": ["x"]} for letter in questions]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """config.json, a tokenizer of letters with a chat template, and PARAMETERS float32 numbers in two files."""
    directory = tmp_path / "model"
    directory.mkdir()
    core = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, unk_token="<unk>", eos_token="<end>", pad_token="<pad>", model_type="qwen2"
    )
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }} {{ m.content }} <end> {% endfor %}"
    tokenizer.save_pretrained(directory)
    write_config(directory)
    save_file({"a": torch.zeros(30, 4)}, directory / "model-1.safetensors")
    save_file({"b": torch.zeros(7)}, directory / "model-2.safetensors")
    return directory


def write_config(directory: Path, **changes: Any) -> None:
    config = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": 30}
    (directory / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 8192} | changes))


@pytest.fixture
def startable(checkpoint: Path, tmp_path: Path) -> list[str]:
    """Overrides of a run that could start."""
    train, val = (
        write_rows(tmp_path / "train.parquet", rows_of("abcd")),
        write_rows(tmp_path / "v.parquet", rows_of("e")),
    )
    return [
        f"actor_rollout_ref.model.path={checkpoint}",
        f"data.train_files=[{train}]",
        f"data.val_files=[{val}]",
        "data.train_batch_size=2",
        f"trainer.default_local_dir={tmp_path}/runs",
        "environment.path=tests.verl.trainer.plain_environment.PlainEnvironment",
    ]
