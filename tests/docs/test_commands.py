"""The commands of each page run, and print what the page shows; those that are not run here say why, or name a test."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.docs.commands import ELSEWHERE, cut, elsewhere, unquoted
from tests.docs.pages import REPOSITORY, Block, all_blocks, blocks, differs, name_of, paths
from tests.docs.setting import prepared, say
from weft.cli.main import app

PAGES = [name for name in map(name_of, paths()) if any(b.kind == "commands" and not b.not_run for b in blocks(name))]


@pytest.mark.timeout(240)
@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_page_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    wrong: list[str] = []
    with prepared(tmp_path, monkeypatch):
        say(tmp_path / "run-17")
        told: str | None = None
        for block in blocks(page):
            if block.kind == "output" and block.follows and told is not None:
                wrong += [f"{block}: {why}" for why in [differs(block.text, told)] if why]
            told = None
            if block.kind != "commands" or block.not_run:
                continue
            for command in block.commands:
                if elsewhere(command) is None:
                    status, told = run(command, tmp_path)
                    wrong += [f"{block}: {command}: exit status {status}: {told}"] if status else []
    assert not wrong, "\n".join(wrong)


def run(command: str, folder: Path) -> tuple[int, str]:
    """The exit status of a command on a small model, and what it prints on both streams."""
    if unquoted(command):
        return 1, f"quote it: a shell would take {unquoted(command)} for itself"
    program, *arguments = shlex.split(cut(command))
    if program != "weft":
        return 1, "no test runs it: name one in tests/docs/commands.py, or say why it is not run"
    given = [
        name for each in arguments for name in (sorted(p.name for p in folder.glob(each)) if "*" in each else [each])
    ]
    result = CliRunner().invoke(app, given)
    return result.exit_code, result.output if result.exception is None else f"{result.output}{result.exception!r}"


def test_commands_that_run_elsewhere_are_run_by_tests_that_exist():
    assert [test for test in ELSEWHERE.values() if not (REPOSITORY / test).is_file()] == []


def test_every_target_of_make_that_a_page_names_exists():
    named = {
        word
        for block in all_blocks("commands")
        for command in block.commands
        if command.startswith("make ")
        for word in shlex.split(command)[1:]
        if "=" not in word
    }
    assert {"demo", "test", "docs"} <= named
    for target in sorted(named):
        done = subprocess.run(["make", "--dry-run", target], cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr


def test_what_is_not_run_says_why(capsys: pytest.CaptureFixture[str]):
    left_out = [block for block in all_blocks() if block.not_run]
    with capsys.disabled():
        for block in left_out:
            print(f"\n{block}: not run: {block.not_run}", end="")
    assert all(len(block.not_run.split()) > 2 for block in left_out)
    assert len(left_out) <= 12, "say less, or run it"


@pytest.mark.parametrize(
    ("command", "found"),
    [("weft simulate zoo:a/b?c=1&d=2", "?&"), ("weft simulate 'zoo:a/b?c=1&d=2'", ""), ("weft x rank*.json.gz", "")],
)
def test_what_a_shell_would_take_is_found(command: str, found: str):
    assert unquoted(command) == found


def test_models_are_cut_to_one_layer():
    assert cut("weft simulate 'zoo:llama-8b/fsdp?ranks=64&layers=4' SOURCE") == (
        "weft simulate 'zoo:llama-8b/fsdp?ranks=64&layers=1' before.txt"
    )
    assert cut("weft simulate zoo:llama-8b/tp") == "weft simulate zoo:llama-8b/tp?layers=1"


def test_a_block_that_nobody_runs_is_found(tmp_path: Path):
    block = Block("page.md", 1, "commands", "weft no-such-command\nfrobnicate\n")
    assert [run(command, tmp_path)[0] for command in block.commands] == [2, 1]
