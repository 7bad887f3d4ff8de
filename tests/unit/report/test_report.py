"""A report on a terminal and anywhere else."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import NoReturn

import pytest
from rich.console import Console

import weft
from tests.unit.cli.conftest import LISTING
from weft.graph.versions import dag_of
from weft.plan.decision import Decision, Reason
from weft.prediction.error_bars import PLAIN, StepKind, error_bars
from weft.prediction.step_kind import parallelism
from weft.report.report import HINT, Report
from weft.report.simulated import SimulatedReport


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


def decided(applied: list[Decision], declined: list[Decision]) -> list[str]:
    """What the text says behind the table of passes."""
    made = weft.optimize(weft.parse(LISTING), pipeline="none", verify="off").report
    return str(Report(made.before, made.after, (), tuple(applied), tuple(declined))).splitlines()[5:]


def test_what_is_exposed_comes_first_and_reasons_that_repeat_are_told_once():
    lines = decided(
        [Decision("remove-noops", Reason.APPLIED, f"a stands for b{i}", ()) for i in range(25)],
        [
            *(Decision("dedupe", Reason.HOLDS_MEMORY, f"g{i} stays", ()) for i in range(29)),
            Decision("dedupe", Reason.MUTATED, "h stays", ()),
            Decision("schedule", Reason.EXPOSED_BY_QUEUE, "short", (), exposed_us=1.0),
            Decision("schedule", Reason.EXPOSED_BY_DEPENDENCY, "long", (), exposed_us=2.0),
            Decision("schedule", Reason.ALREADY_DONE, "no refusal", ()),
        ],
    )
    assert lines == [
        "= schedule: long (exposed-by-dependency)",
        "= schedule: short (exposed-by-queue)",
        "- dedupe: g0 stays (holds-memory)",
        "  ... and 28 more holds-memory by dedupe",
        "- dedupe: h stays (mutated)",
        "+ remove-noops: a stands for b0",
        "  ... and 24 more applied by remove-noops",
        HINT,
    ]


def test_few_decisions_alike_are_told_each_and_need_no_hint():
    applied = [Decision("remove-noops", Reason.APPLIED, f"a stands for b{i}", ()) for i in range(3)]
    assert decided(applied, []) == [f"+ remove-noops: a stands for b{i}" for i in range(3)]


def test_of_many_that_are_exposed_the_longest_are_shown():
    exposed = [Decision("s", Reason.EXPOSED_BY_LINK, f"g{i}", (), exposed_us=float(i)) for i in range(1, 26)]
    lines = decided([], exposed)
    assert lines[:20] == [f"= s: g{i} (exposed-by-link)" for i in range(25, 5, -1)]
    assert lines[20] == "  ... and 5 more that are exposed for less time"
    assert lines[21] == HINT


def test_nothing_is_simulated_or_bounded_before_somebody_asks(monkeypatch: pytest.MonkeyPatch):
    def refuse(_: object) -> NoReturn:
        raise AssertionError

    for name in ("simulate", "lower_bound"):
        monkeypatch.setattr(f"weft.report.simulated.{name}", refuse)
    result = weft.optimize(weft.parse(LISTING), "h100-8", pipeline="hoist-launches,sink-waits")
    assert result.report.applied
    with pytest.raises(AssertionError):
        _ = result.plan


def test_edits_after_the_run_change_neither_plan_nor_report():
    first, second = (weft.parse(LISTING) for _ in range(2))
    untouched, edited = (
        weft.optimize(each, "h100-8", pipeline="hoist-launches,sink-waits") for each in (first, second)
    )
    for graph in (second.graph, edited.module.graph):
        for node in reversed(list(graph.nodes)):
            graph.erase_node(node)
    assert edited.plan == untouched.plan
    assert edited.plan.evidence is not None
    assert edited.report.summary_lines() == untouched.report.summary_lines()


@pytest.mark.slow
def test_text_page_and_json_have_the_error_bars_of_a_simulation_without_an_execution(tmp_path: Path):
    report = weft.optimize(weft.parse(LISTING), "h200-8", pipeline="none").report
    assert isinstance(report, SimulatedReport)
    report.save_html(tmp_path / "page.html")
    page, data, text = (tmp_path / "page.html").read_text(), json.loads(report.to_json()), str(report)
    parallel = parallelism([dag_of(weft.parse(LISTING).graph)])
    bars = error_bars(StepKind(report.simulated_cluster.device.name, parallel, PLAIN))
    for bar, what in zip(bars, ("step", "peak"), strict=True):
        assert bar.share is not None
        assert bar.text in text
        assert bar.text in page
        assert "simulated without an execution" in bar.basis
        assert data["simulated"][f"{what}_error"] == bar.share
        assert data["simulated"]["error_basis"][what] == bar.basis
