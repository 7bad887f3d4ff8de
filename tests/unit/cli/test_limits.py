"""`--memory-limit` and `--effort`: sizes as text, what is refused, and what the demo takes."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

from weft.cli.usage import UsageError, parse_size, with_units

Weft = Callable[..., Result]


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("1", 1),
        ("1024B", 1024),
        ("20GiB", 20 << 30),
        ("20gib", 20 << 30),
        ("20 GB", 20 * 10**9),
        ("1.5KiB", 1536),
        ("2.001kB", 2001),
        ("1.0001KiB", 1024),
        ("9.31GiB", 9996536381),
        ("3TiB", 3 << 40),
        ("1PB", 10**15),
    ],
)
def test_a_size_has_a_unit_or_is_in_bytes(text: str, num_bytes: int):
    assert parse_size(text, "--memory-limit") == num_bytes


@pytest.mark.parametrize("text", ["", "GiB", "1 G", "-1", "1e9", "inf", "٣GiB", "1,5GiB", "0x10", "1GiB2"])
def test_what_is_no_size_is_refused(text: str):
    with pytest.raises(UsageError) as caught:
        parse_size(text, "--memory-limit")
    do = "write 24GiB, 24GB or a number of bytes"
    assert str(caught.value) == f"--memory-limit: {text!r} is not a size\n{do}"


@pytest.mark.parametrize("text", ["0", "0GiB", "1.5", "1.5B", "0.0001KiB"])
def test_a_size_is_a_whole_number_of_bytes(text: str):
    with pytest.raises(UsageError, match=f"--memory-limit: '{text}' is not a whole number of bytes above 0"):
        parse_size(text, "--memory-limit")


@pytest.mark.parametrize("num_bytes", [1024, 1025, 9_996_536_382, 10**16, (1 << 30) - 1])
def test_a_limit_that_is_told_with_a_unit_is_enough(num_bytes: int):
    told = with_units(f"allow {num_bytes} bytes")
    found = re.fullmatch(rf"allow {num_bytes} bytes \((.+)\)", told)
    assert found
    assert num_bytes <= parse_size(found[1], "--memory-limit") < num_bytes * 1.011


def test_few_bytes_need_no_unit():
    assert with_units("allow 288 bytes") == "allow 288 bytes"


@pytest.mark.parametrize("command", ["optimize", "explain"])
def test_a_limit_that_nothing_meets_ends_with_1_and_the_number_that_would_fit(
    weft: Weft, listing: Path, tmp_path: Path, command: str
):
    out = tmp_path / "out.txt"
    done = weft(command, listing, "--cluster", "h100-8", "--memory-limit", "100B", "-o", out)
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr.startswith(
        "decide-memory: found no order that fits in 100 bytes; the smallest peak found is 288, with a step of "
    )
    assert done.stderr.endswith("\nallow 288 bytes\n")
    assert not out.exists()
    assert weft(command, listing, "--cluster", "h100-8", "--memory-limit", "288B", "-o", out).exit_code == 0


def test_a_limit_needs_a_pass_that_keeps_it(weft: Weft, listing: Path):
    done = weft("optimize", listing, "--memory-limit", "1GiB", "--pipeline", "sink-waits")
    assert done.exit_code == 2
    assert done.stderr.startswith("pipeline: no pass of 'sink-waits' keeps a memory limit\n")


def test_the_effort_is_one_of_three(weft: Weft, listing: Path):
    assert weft("explain", listing, "--effort", "fast").exit_code == 0
    assert weft("optimize", listing, "--effort", "best").exit_code == 0
    assert weft("optimize", listing, "--effort", "more").exit_code == 2


def test_the_demo_keeps_to_a_limit(weft: Weft, tmp_path: Path):
    done = weft("demo", "--layers", 1, "--output", tmp_path, "--effort", "fast", "--memory-limit", "1MiB")
    assert done.exit_code == 1
    assert "found no order that fits in 1048576 bytes (1 MiB); the smallest peak found is" in done.stderr
    assert re.search(r"\nallow [0-9]+ bytes \([0-9.]+ GiB\)\n", done.stderr)
    assert not (tmp_path / "report.html").exists()
