"""The script that checks torch's private names can tell a name that is there from one that is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import check_torch


@pytest.mark.parametrize(
    ("name", "there"),
    [("torch._C._get_schema", True), ("torch.fx.node.Node", True), ("torch._C._no_such_name", False)],
)
def test_names_are_looked_up(name: str, there: bool) -> None:
    assert check_torch.look_up(name) is there


def test_imports_and_attributes_are_found_with_their_guards(tmp_path: Path) -> None:
    file = tmp_path / "compat.py"
    file.write_text(
        "from torch._ops import OpOverload\n"
        "try:\n    from torch._gone import Thing\nexcept ImportError:\n    Thing = None\n"
        "def f():\n    return torch._C._get_schema('a', '')\n"
        "def g():\n    from torch import _guards as home\n    return home.CompileContext\n"
    )
    found = set(check_torch.names_in(file))
    assert ("torch._ops.OpOverload", 1, False) in found
    assert ("torch._gone.Thing", 3, True) in found
    assert ("torch._C._get_schema", 7, False) in found
    assert ("torch._guards.CompileContext", 10, False) in found


def test_every_name_that_weft_uses_is_in_this_torch() -> None:
    assert [f for f in check_torch.check_names() if f.needed and f.found == "missing"] == []
    assert [f for f in check_torch.check_settings() if f.needed and f.found == "missing"] == []
    assert [f for f in check_torch.check_operators() if f.needed and f.found == "missing"] == []
