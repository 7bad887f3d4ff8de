"""What the tests of the command line share: a command run in this process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from weft.cli.main import app

LISTING = """group('dp', size=2)

def graph(x: f32[4, 4], p: f32[2, 4]):
    a: f32[4, 4] = mm(x, x)
    ag: f32[4, 4] = all_gather(p, 2, 'dp')
    w: f32[4, 4] = wait(ag)
    b: f32[4, 4] = relu(a)
    r: f32[4, 4] = add(b, w)
    return [r]
"""
OPTIMIZED = """group('dp', size=2)

def graph(x: f32[4, 4], p: f32[2, 4]):
    ag: f32[4, 4] = all_gather(p, 2, 'dp')
    a: f32[4, 4] = mm(x, x)
    b: f32[4, 4] = relu(a)
    w: f32[4, 4] = wait(ag)
    r: f32[4, 4] = add(b, w)
    return [r]
"""


@pytest.fixture
def weft() -> Callable[..., Result]:
    """`weft("optimize", path)`: exit_code, stdout and stderr; anything but an error of Weft is raised."""
    return lambda *arguments: CliRunner().invoke(app, [*map(str, arguments)], catch_exceptions=False)


@pytest.fixture
def listing(tmp_path: Path) -> Path:
    path = tmp_path / "graph.txt"
    path.write_text(LISTING)
    return path
