from pathlib import Path

import pytest

import verl
from verl.utils.paths import resolve_path


def test_package_path_is_the_file_on_disk() -> None:
    expected = Path(verl.__file__).parent / "utils" / "paths.py"
    assert resolve_path("pkg://verl.utils/paths.py") == str(expected)
    assert resolve_path("pkg://verl/utils/paths.py") == str(expected)


def test_package_root() -> None:
    assert resolve_path("pkg://verl.utils") == str(Path(verl.__file__).parent / "utils")


@pytest.mark.parametrize("path", ["", "models/policy", "/abs/x", "Qwen/Qwen2.5-3B", "~/x"])
def test_other_strings_are_unchanged(path: str) -> None:
    assert resolve_path(path) == path


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("pkg://no_such_package/x", "no package 'no_such_package'"),
        ("pkg:///x", "no package ''"),
        ("pkg://verl.utils/none.txt", "holds no 'none.txt'"),
    ],
)
def test_wrong_package_paths_say_what_is_wrong(path: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        resolve_path(path)
