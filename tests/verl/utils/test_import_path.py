from __future__ import annotations

from pathlib import Path

import pytest

from verl.utils.import_path import load_by_path, load_from_file


def test_loads_names_and_says_what_is_missing(tmp_path: Path) -> None:
    assert load_by_path("pathlib.Path") is Path
    for wrong, part in (("Path", "import path"), ("no_such_module.X", "no_such_module"), ("pathlib.Nope", "Nope")):
        with pytest.raises(ValueError, match=part):
            load_by_path(wrong)
    file = tmp_path / "mine.py"
    file.write_text("def score(): return 4\n")
    assert load_from_file(str(file), "score")() == 4
    with pytest.raises(ValueError, match="defines no 'other'"):
        load_from_file(str(file), "other")
    with pytest.raises(ValueError, match="not a file"):
        load_from_file(str(tmp_path / "none.py"), "score")
