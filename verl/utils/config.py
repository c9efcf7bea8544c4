"""Frozen dataclasses as configuration: built once from a mapping, validated, read like mappings."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields, is_dataclass
from typing import Annotated, Any, TypeVar

from pydantic import BeforeValidator, ConfigDict, TypeAdapter, ValidationError
from pydantic_core import PydanticCustomError

T = TypeVar("T")

_SECRET = "secret"
_UNTOLD = ("missing", "dataclass_type", _SECRET)
"""Errors whose input is not repeated: a secret, or what stands where a section with one belongs."""

STRICT = ConfigDict(extra="forbid")
"""For ``__pydantic_config__`` of every configuration dataclass: unknown keys are errors."""


class ReadableAsMapping:
    """Lets ``cfg["key"]`` and ``cfg.get("key")`` work beside ``cfg.key``: estimators written for verl read so."""

    __pydantic_config__ = STRICT

    def __getitem__(self, key: str) -> Any:
        if key not in self.keys():
            raise KeyError(key)
        return self.__dict__[key]

    def __contains__(self, key: object) -> bool:
        return key in self.keys()

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def get(self, key: str, default: Any = None) -> Any:
        return self[key] if key in self else default

    def keys(self) -> list[str]:
        assert is_dataclass(self)
        return [field.name for field in fields(self)]


def build_config(cls: type[T], values: Mapping[str, Any], section: str = "") -> T:
    """``values`` as an instance of the dataclass ``cls``. Raises ValueError listing every wrong key at once."""
    try:
        return TypeAdapter(cls).validate_python(dict(values))
    except ValidationError as error:
        lines = [f"  {_key(section, item['loc'])}: {_message(item)}" for item in error.errors()]
        raise ValueError("the configuration has errors:\n" + "\n".join(lines)) from error


def _key(section: str, location: tuple[int | str, ...]) -> str:
    return ".".join([section, *map(str, location)] if section else map(str, location)) or "(top level)"


def _message(item: Any) -> str:
    if item["type"] == "unexpected_keyword_argument":
        return "unknown key"
    message = str(item["msg"]).removeprefix("Value error, ")
    return message if item["type"] in _UNTOLD else f"{message} (got {item['input']!r})"


LITERAL_SECRET = "a key given here would be saved and shown: put it into an environment variable and give env:NAME"


def is_secret_reference(value: object) -> bool:
    """Whether ``value`` is nothing, or names the environment variable of a secret: ``env:NAME``."""
    return isinstance(value, str) and re.fullmatch(r"(env:\w+)?", value) is not None


def _as_reference(value: object) -> object:
    if not is_secret_reference(value):
        raise PydanticCustomError(_SECRET, LITERAL_SECRET)
    return value


SecretReference = Annotated[str, BeforeValidator(_as_reference)]
"""Nothing, or ``env:NAME``: a secret stands in the environment, never in a configuration. What was given
instead is not repeated."""


def to_plain(config: Any) -> dict[str, Any]:
    """A configuration as nested plain values, for YAML and W&B."""
    return asdict(config)
