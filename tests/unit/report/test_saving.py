"""Files of a report that cannot be written."""

from __future__ import annotations

from pathlib import Path

import pytest

import weft
from weft.errors import ReportError

LISTING = "def graph(x: f32[4, 4]):\n    a: f32[4, 4] = mm(x, x)\n    return [a]\n"


@pytest.mark.parametrize("save", ["save_html", "save_trace"])
def test_a_file_is_not_saved_where_there_is_no_folder(save: str, tmp_path: Path):
    path = tmp_path / "missing" / "report"
    report = weft.optimize(weft.parse(LISTING), "h100-8", pipeline="none").report
    with pytest.raises(ReportError) as error:
        getattr(report, save)(path)
    assert str(error.value) == (
        f"{path}: it cannot be written: No such file or directory\ncreate the folder {path.parent} first"
    )
