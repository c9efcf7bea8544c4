"""From override strings to the validated configuration of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

import verl
from verl.trainer.aliases import rewrite_overrides
from verl.trainer.config import PPOTrainerConfig
from verl.utils.config import build_config


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
        raise ValueError(f"the overrides cannot be composed: {_first_cause(error)}") from error
    assert isinstance(plain, dict)
    return Composed(build_config(PPOTrainerConfig, {str(k): v for k, v in plain.items()}), plain, tuple(overrides))


def _first_cause(error: BaseException) -> str:
    """Hydra's outer message says only that merging failed; the innermost one names the key."""
    messages = [str(error).strip()]
    while error.__cause__ is not None:
        error = error.__cause__
        messages.append(str(error).strip())
    return " — ".join(dict.fromkeys(line.splitlines()[0] for line in messages if line))
