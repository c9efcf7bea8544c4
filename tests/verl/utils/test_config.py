from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

import pytest
from pydantic import Field

from verl.utils.config import ReadableAsMapping, build_config


@dataclass(frozen=True)
class Inner(ReadableAsMapping):
    size: Annotated[int, Field(gt=0)] = 1
    mode: Literal["a", "b"] = "a"


@dataclass(frozen=True)
class Outer(ReadableAsMapping):
    inner: Inner = field(default_factory=Inner)
    rates: tuple[float, ...] = (1.0,)


def test_reads_by_attribute_item_and_get() -> None:
    config = build_config(Outer, {"inner": {"size": 2}, "rates": [3]})
    assert config.inner.size == config["inner"]["size"] == config.get("inner").get("size") == 2
    assert config.rates == (3.0,)
    assert config.get("absent", 7) == 7
    assert "absent" not in config
    with pytest.raises(KeyError):
        config["absent"]


def test_every_wrong_key_is_named_at_once() -> None:
    with pytest.raises(ValueError, match="configuration") as error:
        build_config(Outer, {"inner": {"size": 0, "mode": "c", "extra": 1}, "other": 2}, "root")
    text = str(error.value)
    for expected in ("root.inner.size", "root.inner.mode", "root.inner.extra: unknown key", "root.other: unknown key"):
        assert expected in text
