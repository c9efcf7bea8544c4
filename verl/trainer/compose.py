"""From override strings to the validated configuration of a run."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

import verl
from verl.trainer.aliases import rewrite_overrides
from verl.trainer.config import PPOTrainerConfig
from verl.utils.config import build_config

_RESOLVERS = {
    "same": lambda first, second: first == second,
    "differ": lambda first, second: first != second,
    "whole": lambda number, factor: int(number * factor),
}
"""What YAML files may compute of other values: ``${same:a,b}``, ``${differ:a,b}``, ``${whole:number,factor}``."""
for _name, _resolver in _RESOLVERS.items():
    OmegaConf.register_new_resolver(_name, _resolver, replace=True)


@dataclass(frozen=True)
class Composed:
    """The configuration as dataclasses, as plain values, and the overrides it came from."""

    config: PPOTrainerConfig
    plain: dict[str, Any]
    overrides: tuple[str, ...]

    def to_yaml(self) -> str:
        return OmegaConf.to_yaml(OmegaConf.create(self.plain))


def config_dir() -> Path:
    """Where the YAML files lie: inside an installed package, beside it in a checkout."""
    package = Path(verl.__file__).parent
    installed = package / "configs"
    return installed if installed.is_dir() else package.parent / "configs"


def compose_config(overrides: Sequence[str], config_name: str = "ppo_trainer") -> Composed:
    """Raises ValueError naming every unknown key and every wrong value."""
    rewritten = rewrite_overrides(overrides)
    try:
        with initialize_config_dir(str(config_dir()), version_base="1.3"):
            composed = compose(config_name, overrides=rewritten)
        plain = OmegaConf.to_container(composed, resolve=True)
    except (HydraException, OmegaConfBaseException) as error:
        hint = _hints(rewritten, config_name)
        raise ValueError(f"the overrides cannot be composed: {_first_cause(error)}{hint}") from error
    assert isinstance(plain, dict)
    values = {str(key): value for key, value in plain.items()}
    return Composed(build_config(PPOTrainerConfig, values), values, tuple(overrides))


def _first_cause(error: BaseException) -> str:
    """Hydra's outer message says only that merging failed; the innermost one names the key."""
    messages = [str(error).strip()]
    while error.__cause__ is not None:
        error = error.__cause__
        messages.append(str(error).strip())
    return " — ".join(dict.fromkeys(line.splitlines()[0] for line in messages if line))


def _hints(overrides: Sequence[str], config_name: str) -> str:
    """For every override of an unknown key, the known one that looks most like it; for a group's unknown
    file, those that there are; for values that Hydra's grammar takes apart, how to quote them."""
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        known = set(_keys(compose(config_name)))
    groups = {path.name for path in config_dir().iterdir() if path.is_dir()}
    hints = (_group_hint(o) if _key(o) in groups else _key_hint(o, known) for o in overrides)
    return "".join(f"; {hint}" for hint in hints if hint)


def _key(override: str) -> str:
    return override.partition("=")[0].lstrip("+~")


def _group_hint(override: str) -> str:
    key, _, value = override.partition("=")
    files = sorted(path.stem for path in (config_dir() / _key(override)).glob("*.yaml"))
    if value not in files:
        near = difflib.get_close_matches(value, files, n=1)
        return f"{_key(override)} is one of {', '.join(files)}" + (f", did you mean {near[0]}?" if near else "")
    return f"write +preset={value}" if key == "preset" else ""


def _key_hint(override: str, known: Iterable[str]) -> str:
    key, _, value = override.partition("=")
    if "." in key and not key.startswith(("+", "~")) and key not in known:
        near = difflib.get_close_matches(key, known, n=1)
        return f"{key} is no key" + (f", did you mean {near[0]}?" if near else "")
    unquoted = value and value[0] not in "'\"[{" and any(c.isspace() or not c.isascii() for c in value)
    return f"quote the value twice: \"{key}='{value}'\"" if unquoted else ""


def _keys(config: DictConfig, prefix: str = "") -> Iterator[str]:
    for name, value in config.items():
        key = f"{prefix}{name!s}"
        yield key
        if isinstance(value, DictConfig):
            yield from _keys(value, f"{key}.")
