"""An ordinary Hugging Face checkpoint out of a stream of named tensors."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, GenerationConfig
from transformers.utils import cached_file

from verl.workers.rollout.engine import NamedTensor

SHARD_BYTES = 5 << 30
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)


def save_hf_checkpoint(
    weights: Iterable[NamedTensor],
    source: str,
    target: Path,
    stop_strings: Sequence[str] = (),
    trust_remote_code: bool = False,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Writes ``weights`` with the configuration and tokenizer of the checkpoint ``source`` to the directory ``target``.

    Tied weights come once in the stream and stay tied. ``stop_strings`` go to the generation
    configuration. ``target`` appears complete or not at all, and replaces what was there.
    """
    unfinished = target.with_name(target.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    _write_weights(weights, unfinished, shard_bytes)
    _write_configs(source, unfinished, stop_strings, trust_remote_code)
    _copy_tokenizer(source, unfinished)
    shutil.rmtree(target, ignore_errors=True)
    os.replace(unfinished, target)


def _write_weights(weights: Iterable[NamedTensor], directory: Path, shard_bytes: int) -> None:
    written: list[tuple[Path, list[str]]] = []
    total = 0
    for number, shard in enumerate(_shards(weights, shard_bytes)):
        path = directory / f"shard-{number}"
        save_file(shard, path, metadata={"format": "pt"})
        written.append((path, list(shard)))
        total += sum(tensor.nbytes for tensor in shard.values())
    if len(written) == 1:
        written[0][0].rename(directory / "model.safetensors")
        return
    weight_map = {}
    for number, (path, names) in enumerate(written, 1):
        final = f"model-{number:05d}-of-{len(written):05d}.safetensors"
        path.rename(directory / final)
        weight_map.update(dict.fromkeys(names, final))
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def _shards(weights: Iterable[NamedTensor], shard_bytes: int) -> Iterator[dict[str, torch.Tensor]]:
    shard: dict[str, torch.Tensor] = {}
    size = 0
    for name, tensor in weights:
        if shard and size + tensor.nbytes > shard_bytes:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor.cpu().contiguous()
        size += tensor.nbytes
    if shard:
        yield shard


def _write_configs(source: str, directory: Path, stop_strings: Sequence[str], trust_remote_code: bool) -> None:
    config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
    config.dtype = torch.float32
    config.save_pretrained(directory)
    if (_checkpoint_directory(source) / "generation_config.json").is_file():
        generation = GenerationConfig.from_pretrained(source)
    else:
        generation = GenerationConfig.from_model_config(config)
    if stop_strings:
        generation.stop_strings = list(stop_strings)
    generation.save_pretrained(directory)


def _copy_tokenizer(source: str, directory: Path) -> None:
    for name in TOKENIZER_FILES:
        path = _checkpoint_directory(source) / name
        if path.is_file():
            shutil.copyfile(path, directory / name)


def _checkpoint_directory(source: str) -> Path:
    """Where the files of a directory or hub name lie on this machine."""
    config = cached_file(source, "config.json")
    assert config is not None
    return Path(config).parent
