from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

import pytest
from pydantic import Field

from verl.utils.config import ReadableAsMapping, SecretReference, build_config


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


@dataclass(frozen=True)
class Service(ReadableAsMapping):
    key: SecretReference = ""


@dataclass(frozen=True)
class WithSecret(ReadableAsMapping):
    service: Service = field(default_factory=Service)


@pytest.mark.parametrize(
    "given", ["s3cret", 53637265, ["s3cret"], {"s3cret": 1}, "env:", "env:s3cret key", "env:s3cret\n"]
)
def test_a_secret_given_literally_is_refused_in_whatever_form_and_not_repeated(given: object) -> None:
    with pytest.raises(ValueError, match=r"root\.service\.key: a key given here would be saved and shown") as error:
        build_config(WithSecret, {"service": {"key": given}}, "root")
    assert "s3cret" not in str(error.value)
    assert "53637265" not in str(error.value)


def test_a_secret_in_place_of_its_section_is_not_repeated() -> None:
    with pytest.raises(ValueError, match=r"root\.service: ") as error:
        build_config(WithSecret, {"service": "s3cret"}, "root")
    assert "s3cret" not in str(error.value)


@pytest.mark.parametrize("reference", ["", "env:NAME"])
def test_a_reference_to_a_secret_is_kept_as_it_stands(reference: str) -> None:
    assert build_config(WithSecret, {"service": {"key": reference}}).service.key == reference
