"""`weft optimize --html --trace`: what is drawn, and what is refused before any work."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

from tests.unit.cli.conftest import LISTING, OPTIMIZED

Weft = Callable[..., Result]


def test_the_page_and_the_trace_are_written(weft: Weft, listing: Path, tmp_path: Path):
    html, trace = tmp_path / "report.html", tmp_path / "trace.json"
    passes = ("--pipeline", "hoist-launches,sink-waits")
    done = weft("optimize", listing, *passes, "--cluster", "h100-8", "--html", html, "--trace", trace)
    assert (done.exit_code, done.stdout) == (0, OPTIMIZED)
    page = html.read_text()
    assert page.startswith("<!doctype html>")
    assert f"<title>{listing}</title>" in page
    assert "simulated on h100-1x8" in page
    events = json.loads(trace.read_text())["traceEvents"]
    assert {event["name"] for event in events if event.get("cat") == "collective"} == {"all-gather of p (64 B)"}


def test_with_a_cluster_the_report_starts_with_both_runs_in_numbers(weft: Weft, listing: Path):
    lines = weft("optimize", listing, "--cluster", "h100-8").stderr.splitlines()
    assert lines[0].split() == ["before", "after", "change"]
    assert [line.split("  ")[0] for line in lines[1:7]] == [
        "step",
        "exposed",
        "hidden",
        "bound",
        "gap",
        "peak memory",
    ]


def test_tokens_of_a_step_are_given_where_the_source_does_not_say_them(weft: Weft, listing: Path):
    def second(*options: object) -> float | None:
        done = weft("optimize", listing, "--cluster", "h100-8", "--json", *options)
        after = json.loads(done.stdout)["report"]["simulated"]["after"]
        return after["tokens_per_second"] and after["tokens_per_second"] * after["step_us"] / 1e6

    assert second() is None
    assert second("--tokens", 4096) == pytest.approx(4096)
    assert weft("optimize", listing, "--tokens", 0).exit_code == 2


@pytest.mark.parametrize("option", ["--html", "--trace"])
def test_what_is_drawn_needs_a_cluster_and_is_refused_before_the_source_is_read(
    weft: Weft, tmp_path: Path, option: str
):
    done = weft("optimize", tmp_path / "missing.txt", option, tmp_path / "out")
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr == (f"optimize: {option} needs a cluster to simulate\ngive one: --cluster h100-8x8\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("option", ["--html", "--trace"])
def test_a_folder_that_does_not_exist_is_refused_before_the_source_is_read(weft: Weft, tmp_path: Path, option: str):
    done = weft("optimize", "missing.txt", "--cluster", "h100-8", option, tmp_path / "no" / "out")
    assert done.exit_code == 2
    assert done.stderr == f"{tmp_path}/no/out: its folder does not exist\ngive a file in a folder that exists\n"


@pytest.mark.parametrize("option", ["--html", "--trace"])
def test_a_file_that_cannot_be_written_ends_with_2(weft: Weft, listing: Path, option: str):
    done = weft("optimize", listing, "--cluster", "h100-8", option, "/proc/weft")
    assert done.exit_code == 2
    assert done.stderr.startswith("/proc/weft: it cannot be written: ")


def test_one_file_for_two_artifacts_is_refused(weft: Weft, listing: Path, tmp_path: Path):
    out = tmp_path / "out"
    done = weft("optimize", listing, "--cluster", "h100-8", "--html", out, "-o", out)
    assert (done.exit_code, done.stderr) == (2, f"{out}: two outputs would be written there\ngive each its own file\n")
    assert not out.exists()


def test_the_name_of_a_source_stays_text_on_the_page(weft: Weft, tmp_path: Path):
    source = tmp_path / "<img src=x onerror=alert(1)>.txt"
    source.write_text(LISTING)
    html = tmp_path / "report.html"
    assert weft("optimize", source, "--cluster", "h100-8", "--html", html).exit_code == 0
    assert "<img" not in html.read_text()
    assert "&lt;img src=x onerror=alert(1)&gt;.txt</title>" in html.read_text()
