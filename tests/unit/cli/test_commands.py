"""The commands: what goes where, and how they end."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

from tests.unit.cli.conftest import LISTING, OPTIMIZED
from weft.cli.main import one_line_each
from weft.cli.usage import progress, progress_bar, write
from weft.plan.plan import Plan
from weft.version import VERSION

Weft = Callable[..., Result]


# Help.


@pytest.mark.parametrize("command", [[], ["demo"], ["optimize"], ["explain"], ["verify"], ["sweep"], ["passes"]])
def test_help_answers_without_torch(command: list[str]):
    code = (
        "import sys\nfrom typer.testing import CliRunner\nfrom weft.cli.main import app\n"
        f"done = CliRunner().invoke(app, {[*command, '--help']!r})\n"
        "print(done.exit_code, 'Usage:' in done.stdout, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "0 True False\n"


def test_help_leaves_the_wrapping_of_paragraphs_to_the_terminal():
    docstring = "A summary.\n\n    A paragraph of\n    two lines.\n\n    Another one.\n    "
    assert one_line_each(docstring) == "A summary.\n\nA paragraph of two lines.\n\nAnother one."


def test_the_version_is_printed(weft: Weft):
    done = weft("--version")
    assert (done.exit_code, done.stdout) == (0, f"weft {VERSION}\n")


def test_without_a_command_help_is_shown(weft: Weft):
    done = weft()
    assert done.exit_code == 2
    assert "Usage:" in done.output


# optimize


def test_optimize_writes_the_listing_to_stdout_and_the_report_to_stderr(weft: Weft, listing: Path):
    done = weft("optimize", listing, "--pipeline", "hoist-launches,sink-waits")
    assert done.exit_code == 0
    assert done.stdout == OPTIMIZED
    assert done.stderr.splitlines()[0] == "nodes       8 -> 8"
    assert "+ sink-waits: moved w down to its first use, r" in done.stderr.splitlines()


def test_optimize_writes_the_listing_and_the_plan_to_files(weft: Weft, listing: Path, tmp_path: Path):
    out, plan = tmp_path / "out.txt", tmp_path / "plan.json"
    done = weft("optimize", listing, "--pipeline", "hoist-launches,sink-waits", "-o", out, "--plan", plan)
    assert (done.exit_code, done.stdout) == (0, "")
    assert out.read_text() == OPTIMIZED
    assert [step.spec for step in Plan.load(plan).steps] == ["hoist-launches", "sink-waits"]


def test_optimize_as_json_holds_the_report_and_the_listing(weft: Weft, listing: Path, tmp_path: Path):
    arguments = ("optimize", listing, "--pipeline", "hoist-launches,sink-waits", "--json", "--cluster", "h100-8")
    done = weft(*arguments)
    data = json.loads(done.stdout)
    assert (done.exit_code, done.stderr) == (0, "")
    assert data["listing"] == OPTIMIZED
    assert data["report"]["cluster"] == "h100-1x8"
    data = json.loads(weft(*arguments, "-o", tmp_path / "out.txt").stdout)
    assert list(data) == ["report"]
    assert (tmp_path / "out.txt").read_text() == OPTIMIZED


def test_optimize_calls_the_witness_asked_for(weft: Weft, listing: Path):
    assert "checked: values: bitwise equal on 2 virtual ranks" in weft("optimize", listing, "--verify", "values").stderr
    assert "checked:" not in weft("optimize", listing, "--verify", "off").stderr


def test_a_refusal_under_strict_ends_with_1_and_writes_nothing(weft: Weft, tmp_path: Path):
    source, out = tmp_path / "graph.txt", tmp_path / "out.txt"
    source.write_text(LISTING.replace("    return", "    n: f32[4, 4] = rand_like(x)\n    return"))
    done = weft("optimize", source, "--pipeline", "remove-dead-code", "--strict", "-o", out)
    assert done.exit_code == 1
    assert done.stderr == (
        "remove-dead-code: n is unused and stays: it draws random numbers\nleave strict off to accept this\n"
    )
    assert not out.exists()


@pytest.mark.parametrize("command", ["optimize", "explain"])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--pipeline", "sink-wates"], "pipeline: no pass is called 'sink-wates'\ndid you mean 'sink-waits'?\n"),
        (
            ["--cluster", "h10-8"],
            "cluster: no cluster is called 'h10-8'\ndid you mean 'h100-8'?\n"
            "presets: a100-8x8, b200-8x8, ethernet-h100-8x8, gloo-1x4, h100-500w-8x8, h100-efa-8x8, h100-8x8, "
            "h200-8x8, h800-8x8, loopback-1x4, mi300x-8x8, "
            "pcie-h100-1x8, with any number of nodes\n",
        ),
        (
            ["-o", "missing/out.txt"],
            "missing/out.txt: its folder does not exist\ngive a file in a folder that exists\n",
        ),
        (["-o", "/"], "/: it is a folder\ngive a file in a folder that exists\n"),
    ],
)
def test_options_that_name_nothing_end_with_2(
    weft: Weft, listing: Path, command: str, options: list[str], message: str
):
    done = weft(command, listing, *options)
    assert (done.exit_code, done.stdout, done.stderr) == (2, "", message)


def test_a_witness_that_does_not_exist_ends_with_2(weft: Weft, listing: Path):
    done = weft("optimize", listing, "--verify", "hope")
    assert done.exit_code == 2
    assert "'hope' is not one of" in done.stderr


def test_a_file_that_cannot_be_written_ends_with_2(weft: Weft, listing: Path):
    done = weft("optimize", listing, "-o", "/proc/weft")
    assert done.exit_code == 2
    assert done.stderr.startswith("/proc/weft: it cannot be written: ")


# explain


def test_explain_tells_what_became_of_every_collective(weft: Weft, listing: Path):
    done = weft("explain", listing, "--pipeline", "hoist-launches,sink-waits")
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "ag: all-gather of p (64 B) over dp (2 ranks)",
        "  + hoist-launches: moved ag up to just after p",
        "  + sink-waits: moved w down to its first use, r",
        "",
        "reason   collectives  decisions",
        "applied  1            2",
    ]


def test_explain_as_json_is_data(weft: Weft, listing: Path, tmp_path: Path):
    out, plan = tmp_path / "out.json", tmp_path / "plan.json"
    done = weft("explain", listing, "--json", "-o", out, "--plan", plan)
    assert (done.exit_code, done.stdout) == (0, "")
    assert [record["name"] for record in json.loads(out.read_text())["collectives"]] == ["ag"]
    assert Plan.load(plan).steps


# passes and demo


def test_passes_lists_them_and_explains_one(weft: Weft):
    assert "sink-waits" in [line.split()[0] for line in weft("passes").stdout.splitlines()]
    assert weft("passes", "sink-waits").stdout.startswith("sink-waits\n==========\n")
    assert list(json.loads(weft("passes", "sink-waits", "--json").stdout)) == ["sink-waits"]


def test_passes_lists_stages_and_presets_and_what_they_are_made_of(weft: Weft):
    lines = weft("passes").stdout.splitlines()
    assert "Stage: simplify-arithmetic" in next(line for line in lines if line.startswith("algebra "))
    presets = dict(line.split(maxsplit=1) for line in lines)
    assert presets["ddp"] == "Preset: clean,algebra,communication,axes,copy,plan"
    assert lines[-1].split(maxsplit=1) == ["auto", "Preset: chosen by the collectives of the graph"]
    assert [line.split()[0] for line in weft("passes", "communication").stdout.splitlines()] == [
        "remove-single-rank-collectives",
        "dedupe-collectives",
    ]
    assert weft("passes", "none").stdout == ""
    assert list(json.loads(weft("passes", "algebra", "--json").stdout)) == ["simplify-arithmetic"]


def test_an_unknown_pass_ends_with_2(weft: Weft):
    done = weft("passes", "sink-wates")
    assert (done.exit_code, done.stderr) == (2, "passes: no pass is called 'sink-wates'\ndid you mean 'sink-waits'?\n")


def test_the_demo_checks_and_draws_what_it_shows(weft: Weft, tmp_path: Path):
    done = weft("demo", "--json", "--layers", 1, "--output", tmp_path / "out")
    assert done.exit_code == 0
    found = json.loads(done.stdout)
    assert "equal on 4 virtual ranks" in found["values"]
    assert any(witness.startswith("equivalence: proved equal") for witness in found["report"]["witnesses"])
    simulated = found["report"]["simulated"]
    assert simulated["after"]["step_us"] < simulated["before"]["step_us"]
    assert simulated["after"]["lower_bound_us"] <= simulated["after"]["step_us"]
    assert (tmp_path / "out" / "report.html").read_text().startswith("<!doctype html>")
    assert json.loads((tmp_path / "out" / "trace.json").read_text())["traceEvents"]


@pytest.mark.slow
def test_the_demo_is_told_in_words(weft: Weft, tmp_path: Path):
    shown = weft("demo", "--layers", 1, "--output", tmp_path).stdout
    for part in (
        "llama-8b, 1 layer, FSDP on 64 ranks",
        "step ",
        "bound ",
        "exposed: ",
        "proved equal",
        'backend="weft"',
    ):
        assert part in shown


# The terminal.


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_shown_to_a_terminal_only(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TERM", "xterm")
    watched, piped = Terminal(), io.StringIO()
    for stream in (watched, piped):
        monkeypatch.setattr(sys, "stderr", stream)
        with progress("reading [bold]x\x07.txt"):
            pass
    assert "reading [bold]x.txt" in watched.getvalue()
    assert piped.getvalue() == ""


def test_a_bar_counts_what_is_done_for_a_terminal_only(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TERM", "xterm")
    watched, piped = Terminal(), io.StringIO()
    for stream in (watched, piped):
        monkeypatch.setattr(sys, "stderr", stream)
        with progress_bar("begins") as told:
            told("[bold]x\x07", 1, 3)
            told("[bold]x\x07", 2, 3)
    assert "[bold]x " in watched.getvalue()
    assert "2/3" in watched.getvalue()
    assert piped.getvalue() == ""


def test_an_artifact_is_stripped_for_a_terminal_only(monkeypatch: pytest.MonkeyPatch):
    watched, piped = Terminal(), io.StringIO()
    for stream in (watched, piped):
        monkeypatch.setattr(sys, "stdout", stream)
        write("a\x1b[2Jb\n", None)
    assert watched.getvalue() == "a[2Jb\n"
    assert piped.getvalue() == "a\x1b[2Jb\n"
