"""A report on a terminal and anywhere else."""

from __future__ import annotations

import io

from rich.console import Console

import weft
from tests.unit.cli.conftest import LISTING
from weft.report.report import Report


def report() -> Report:
    return weft.optimize(weft.parse(LISTING), "h100-8", pipeline="hoist-launches,sink-waits").report


def shown(found: Report, **options: object) -> str:
    stream = io.StringIO()
    found.show(Console(file=stream, width=100, **options))  # type: ignore[arg-type]
    return stream.getvalue()


def test_a_pipe_gets_the_text_whatever_its_width():
    found = report()
    assert shown(found) == f"{found}\n"


def test_a_terminal_gets_the_summary_in_colours_and_the_same_passes_and_witnesses():
    found = report()
    text = shown(found, force_terminal=True, color_system="standard")
    assert "\x1b[32m" in text
    assert "\n".join(found.pass_lines()) in text
    assert text.rstrip().endswith("checked: structure: every invariant holds after every pass")


def test_names_reach_no_terminal_as_commands():
    hostile = weft.parse(LISTING)
    found = weft.optimize(hostile, pipeline="none").report
    text = shown(Report(found.before, found.after, (), (), (), witnesses=("a\x1b[2Jb [red]c",)))
    assert "checked: a[2Jb [red]c" in text


def test_without_a_cluster_the_sizes_are_shown():
    lines = shown(weft.optimize(weft.parse(LISTING), pipeline="none").report, force_terminal=True).splitlines()
    assert lines[:2] == ["nodes       8 -> 8", "collectives 1 -> 1"]
