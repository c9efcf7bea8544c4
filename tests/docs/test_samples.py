"""The pages' Python samples run as they stand, and what the pages list is what there is."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import verl.protocol
import verl.single_controller.ray
from verl.protocol import DataProto, DataProtoFuture
from verl.single_controller.base.decorator import Dispatch, register

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCED = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Sample:
    """A fenced block; ``line`` lines of the page stand before it."""

    page: Path
    line: int
    code: str

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line + 1}"


def samples_of(page: Path) -> Iterator[Sample]:
    text = page.read_text()
    for match in FENCED.finditer(text):
        yield Sample(page, text.count("\n", 0, match.start(1)), match[1])


SAMPLES = [sample for page in PAGES for sample in samples_of(page)]


@pytest.mark.parametrize("sample", SAMPLES, ids=str)
def test_sample_runs(
    sample: Sample, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a script would: in a namespace called ``__main__``, whose classes Ray sends to its workers by value."""
    if "ray.init(" in sample.code:
        request.getfixturevalue("ray_session")
    monkeypatch.chdir(tmp_path)
    # The blank lines make tracebacks point into the page.
    exec(compile("\n" * sample.line + sample.code, str(sample.page), "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("sample", SAMPLES, ids=str)
def test_sample_is_short_and_asserts(sample: Sample) -> None:
    assert len(sample.code.splitlines()) <= 40
    assert re.search(r"^\s*assert ", sample.code, re.MULTILINE)


def code_words(page: str) -> set[str]:
    """Every identifier that stands in code on a page."""
    spans = re.findall(r"`([^`\n]+)`", (ROOT / "docs" / page).read_text())
    return set(re.findall(r"\w+", " ".join(spans)))


def public_methods(cls: type) -> set[str]:
    return {name for name, _ in inspect.getmembers(cls, inspect.isroutine) if not name.startswith("_")}


def test_data_proto_page_names_everything_public() -> None:
    public = public_methods(DataProto) | public_methods(DataProtoFuture) | set(verl.protocol.__all__)
    assert public - code_words("data_proto.md") == set()


def test_single_controller_page_names_everything_public() -> None:
    modes = {name for name in Dispatch.__annotations__ if name.isupper()}
    public = modes | set(verl.single_controller.ray.__all__) | set(inspect.signature(register).parameters)
    assert public - code_words("single_controller.md") == set()


def test_pages_are_linked_from_the_readme() -> None:
    readme = (ROOT / "README.md").read_text()
    assert [page.name for page in PAGES[1:] if f"docs/{page.name}" not in readme] == []


def test_links_between_pages_lead_somewhere() -> None:
    broken = [
        f"{page.name}: {target}"
        for page in PAGES
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())
        if not (page.parent / target).exists()
    ]
    assert broken == []
