"""Files that commands write: never one that is read, whole or not at all, and a full disk is a message."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

import weft as package
from tests.unit.cli.conftest import LISTING
from weft.files import whole_file, write_whole
from weft.frontends import archive

Weft = Callable[..., Result]


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    """A cluster in a file."""
    source = next(iter(sorted(Path(package.__file__).parent.rglob("*.toml"))))
    path = tmp_path / "mine.toml"
    path.write_bytes(source.read_bytes())
    return path


# What is read is not overwritten.


@pytest.mark.parametrize("option", ["-o", "--plan", "--html", "--trace"])
@pytest.mark.parametrize("which", ["source", "cluster"])
def test_an_output_does_not_overwrite_an_input(weft: Weft, listing: Path, cluster: Path, option: str, which: str):
    path = listing if which == "source" else cluster
    before = path.read_bytes()
    done = weft("optimize", listing, "--cluster", cluster, option, path)
    assert done.stderr == f"{path}: it is an input, and would be overwritten\ngive another file\n"
    assert (done.exit_code, path.read_bytes()) == (2, before)


@pytest.mark.parametrize("how", ["symbolic link", "hard link", "other name", "line of a log"])
def test_no_other_name_of_an_input_is_overwritten(weft: Weft, listing: Path, tmp_path: Path, how: str):
    other, source = tmp_path / "other", str(listing)
    if how == "symbolic link":
        other.symlink_to(listing)
    elif how == "hard link":
        os.link(listing, other)
    elif how == "other name":
        (tmp_path / "folder").mkdir()
        other = tmp_path / "folder" / ".." / listing.name
    else:
        other, source = listing, f"{listing}:7"
    done = weft("simulate", source, "-o", other)
    assert done.exit_code == 2
    assert "it is an input, and would be overwritten" in done.stderr
    assert listing.read_text() == LISTING


def test_every_command_that_writes_refuses_what_it_reads(weft: Weft, listing: Path, cluster: Path):
    for command in (
        ("explain", listing, "-o", listing),
        ("simulate", listing, "--cluster", cluster, "-o", cluster),
        ("sweep", listing, "--cluster", cluster, "-o", cluster),
        ("sweep", "--merge", listing, "-o", listing),
        ("calibrate", listing, "-o", listing),
    ):
        done = weft(*command)
        assert (done.exit_code, "it is an input, and would be overwritten" in done.stderr) == (2, True), command
    assert listing.read_text() == LISTING


# Whole or not at all.


def test_a_file_is_replaced_only_when_it_is_complete(tmp_path: Path):
    path = tmp_path / "out"
    path.write_text("old")
    writing = whole_file(path)
    writing.__enter__().write(b"half")
    assert path.read_text() == "old"
    interrupt = KeyboardInterrupt()
    assert not writing.__exit__(KeyboardInterrupt, interrupt, None)
    assert path.read_text() == "old"
    write_whole(path, "new")
    assert path.read_text() == "new"
    assert [each.name for each in tmp_path.iterdir()] == ["out"]


def test_a_link_stays_a_link_and_a_mode_stays_a_mode(tmp_path: Path):
    path, link = tmp_path / "out", tmp_path / "link"
    path.write_text("old")
    path.chmod(0o640)
    link.symlink_to(path)
    write_whole(link, "new")
    assert link.is_symlink()
    assert (path.read_text(), path.stat().st_mode & 0o777) == ("new", 0o640)


def test_a_device_is_written_directly(weft: Weft, listing: Path):
    assert weft("optimize", listing, "-o", "/dev/null", "--plan", "/dev/null").exit_code == 0
    assert Path("/dev/null").is_char_device()


# A full disk.


@pytest.mark.parametrize("option", ["-o", "--plan", "--html", "--trace"])
def test_a_full_disk_is_a_message_and_ends_with_1(weft: Weft, listing: Path, option: str):
    done = weft("optimize", listing, "--cluster", "h100-8", option, "/dev/full")
    assert done.stderr.startswith("/dev/full: it cannot be written: No space left on device\n")
    assert done.exit_code == 1


def test_a_disk_that_fills_up_leaves_what_was_there(
    weft: Weft, listing: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / "plan.json"
    path.write_text("old")
    monkeypatch.setattr("weft.files.os.replace", fail)
    assert weft("optimize", listing, "--plan", path).exit_code == 1
    with pytest.raises(package.WeftError, match="it cannot be written: No space left on device"):
        archive.save(package.parse(LISTING), path)
    assert path.read_text() == "old"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["graph.txt", "plan.json"]


@pytest.mark.slow
def test_a_stdout_that_is_full_is_a_message_and_ends_with_1(listing: Path):
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "weft", "optimize", str(listing)], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith("weft: ")
    assert "No space left on device" in done.stderr
    assert done.returncode == 1


# Names and groups.


@pytest.mark.parametrize("option", ["-o", "--plan"])
def test_a_nul_in_a_path_is_a_message(weft: Weft, listing: Path, option: str):
    done = weft("optimize", listing, option, "a\0b")
    assert done.exit_code in (1, 2)
    assert "null byte" in done.stderr


def test_a_nul_in_the_name_of_an_input_is_a_message(weft: Weft, listing: Path):
    for arguments in ((listing, "--cluster", "a\0.toml"), ("a\0b",), ("a\0b:7",)):
        assert weft("optimize", *arguments).exit_code in (1, 2)


@pytest.mark.parametrize("ranks", [[[0, 0], [1, 2]], [[0, 1], [1, 2]], [[0, -1]], [["0", "1"]]])
def test_ranks_that_are_named_twice_or_do_not_exist_are_refused(ranks: Any):
    with pytest.raises(package.WeftError, match=r"group 'dp' holds (rank . twice|.* not a rank)"):
        package.optimize(package.parse(LISTING), groups={"dp": ranks})


def test_a_listing_that_names_a_rank_twice_is_refused():
    with pytest.raises(package.WeftError, match="holds a rank twice"):
        package.parse(LISTING.replace("size=2", "ranks=[[0, 0], [1, 2]]"))


def test_a_listing_of_a_model_keeps_its_tokens(weft: Weft, tmp_path: Path):
    source, listing, after = "zoo:llama-debug/fsdp?layers=1&ranks=2&part=step", tmp_path / "a.txt", tmp_path / "b.txt"
    assert weft("optimize", source, "--pipeline", "none", "-o", listing).exit_code == 0
    assert weft("optimize", listing, "--pipeline", "clean", "-o", after).exit_code == 0
    cluster = ("--cluster", "h100-8", "--json")
    captured = json.loads(weft("predict", source, *cluster).stdout)
    for path in (listing, after):
        found = json.loads(weft("predict", path, *cluster).stdout)
        assert found["tokens_per_step"] == captured["tokens_per_step"] == 64
        assert found["tokens_per_second_per_gpu"] > 0
    assert json.loads(weft("predict", listing, *cluster).stdout)["mfu"] == pytest.approx(captured["mfu"])
    (cell,) = weft("sweep", listing, *cluster, "--pipeline", "none").stdout.splitlines()
    assert json.loads(cell)["after"]["tokens_per_second"] > 0
