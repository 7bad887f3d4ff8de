"""The commands of each page run, and print what the page shows; those that are not run here say why, or name a test."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.docs.commands import ELSEWHERE, cut, elsewhere, filled, unquoted
from tests.docs.pages import REPOSITORY, Block, all_blocks, blocks, differs, name_of, paths, spoken
from tests.docs.setting import prepared, say
from tests.tiers import quick_only
from weft.cli.main import app

PAGES = [name for name in map(name_of, paths()) if any(b.kind == "commands" and not b.not_run for b in blocks(name))]
SPOKEN = [(name_of(path), command) for path in paths() for command in spoken(path.read_text())]
"""What sentences name: the page, and the command."""


def weft_commands(page: str) -> list[str]:
    """The commands of a page's blocks that are Weft's own and are run, but for advice, which plans many models."""
    run_here = [block for block in blocks(page) if block.kind == "commands" and not block.not_run]
    commands = [c for block in run_here for c in block.commands if c.startswith("weft ") and elsewhere(c) is None]
    return [command for command in commands if not command.startswith("weft advise ")]


def is_whole(command: str) -> bool:
    """Whether a command of a sentence could be typed: it says on what, and leaves nothing open."""
    words = command.split()[2:]
    return bool(words) and not words[0].startswith("-") and "..." not in command and elsewhere(command) is None


@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", quick_only(PAGES, "README.md"))
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


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", [page for page in PAGES if any(weft_commands(page))])
def test_the_commands_of_a_page_run_in_a_shell_with_models_of_full_size(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with prepared(tmp_path, monkeypatch):
        say(tmp_path / "run-17")
    (tmp_path / "page.sh").write_text("\n".join(["set -ex", *map(filled, weft_commands(page)), ""]))
    given = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(["bash", "page.sh"], cwd=tmp_path, env=given, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-5000:]


@pytest.mark.timeout(240)
def test_the_commands_that_sentences_name_run_where_they_are_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    named = {command: page for page, command in SPOKEN if command.startswith("weft ")}
    whole = [command for command in named if is_whole(command)]
    assert {"weft explain SOURCE", "weft agree after.txt --ranks 64"} <= {*whole}
    wrong: list[str] = []
    with prepared(tmp_path, monkeypatch):
        for command in whole:
            status, told = run(command, tmp_path)
            wrong += [f"{named[command]}: {command}: exit status {status}: {told}"] if status else []
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("command", sorted({c for _, c in SPOKEN if c.startswith("weft ") and not is_whole(c)}))
def test_what_sentences_name_in_part_is_there(command: str):
    words = command.removeprefix("weft ").split()
    done = CliRunner(env={"COLUMNS": "200", "TERM": "dumb"}).invoke(app, [words[0], "--help"])
    assert done.exit_code == 0, f"{command}: {done.output}"
    assert [word for word in words if word.startswith("-") and not re.search(rf"{word}\b", done.output)] == []


@pytest.mark.parametrize("command", sorted({c for _, c in SPOKEN if c.startswith("python ")}))
def test_programs_that_sentences_name_are_there_with_their_options(command: str):
    _, script, *words = command.split()
    if script == "-m":
        script = words.pop(0).replace(".", "/") + ".py"
    text = (REPOSITORY / script).read_text()
    assert [word for word in words if word.startswith("-") and f'"{word}"' not in text] == []


def test_commands_that_run_elsewhere_are_run_there():
    commands = [*(c for block in all_blocks("commands") for c in block.commands), *(c for _, c in SPOKEN)]
    for pattern, test in ELSEWHERE.items():
        assert any(re.fullmatch(pattern, command) for command in commands), f"no page has {pattern}"
        assert (REPOSITORY / test).is_file(), test


def test_every_target_of_make_that_a_page_names_exists():
    commands = [*(c for block in all_blocks("commands") for c in block.commands), *(c for _, c in SPOKEN)]
    named = {
        word
        for command in commands
        if command.startswith("make ")
        for word in shlex.split(command)[1:]
        if "=" not in word
    }
    assert {"demo", "test", "docs"} <= named
    for target in sorted(named):
        command = ["make", "--no-print-directory", "--dry-run", target]
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        assert target != "demo" or done.stdout.rstrip().endswith("/weft demo"), done.stdout


def test_what_is_not_run_says_why(capsys: pytest.CaptureFixture[str]):
    left_out = [block for block in all_blocks() if block.not_run]
    blocks_run = [block for block in all_blocks("commands") if not block.not_run]
    others = {c: test for block in blocks_run for c in block.commands if (test := elsewhere(c))}
    with capsys.disabled():
        for block in left_out:
            print(f"\n{block}: not run: {block.not_run}", end="")
        for command, test in others.items():
            print(f"\n{command}: run by {test}", end="")
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
