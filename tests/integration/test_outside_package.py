"""A pass of another package: installed by pip, found by its entry point, used by name like any other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

OUTSIDE = Path(__file__).parents[1] / "outside" / "weft-outside"
LISTING = """group('dp', size=2)

def graph(x: f32[4, 4], p: f32[2, 4]):
    a: f32[4, 4] = relu(x)
    b: f32[4, 4] = relu(a)
    ag: f32[4, 4] = all_gather(p, 2, 'dp')
    w: f32[4, 4] = wait(ag)
    r: f32[4, 4] = add(b, w)
    return [r]
"""
REMOVED = """group('dp', size=2)

def graph(x: f32[4, 4], p: f32[2, 4]):
    a: f32[4, 4] = relu(x)
    ag: f32[4, 4] = all_gather(p, 2, 'dp')
    w: f32[4, 4] = wait(ag)
    r: f32[4, 4] = add(a, w)
    return [r]
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that pip has installed the package into."""
    folder = tmp_path_factory.mktemp("installed")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run(
        [*command, "--disable-pip-version-check", "--target", folder, OUTSIDE],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder


def run(folder: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """The command line of Weft, in a process that finds what is in the folder."""
    command = [sys.executable, "-c", "from weft.cli.main import main; main()", *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(folder)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.slow
def test_an_installed_package_adds_a_pass(installed: Path, tmp_path: Path):
    listed = run(installed, "passes")
    assert listed.returncode == 0, listed.stderr
    lines = {line.split()[0]: line.split(maxsplit=1)[1] for line in listed.stdout.splitlines()}
    assert lines["remove-repeated-activations"] == "Remove an activation of what is activated already."
    assert "sink-waits" in lines

    (described,) = json.loads(run(installed, "passes", "remove-repeated-activations", "--json").stdout).values()
    assert described["numerics"] == "exact"
    assert [option["name"] for option in described["options"]] == ["activation"]

    source, after, plan = tmp_path / "graph.txt", tmp_path / "after.txt", tmp_path / "plan.json"
    source.write_text(LISTING)
    spec = "remove-repeated-activations{activation=abs},remove-repeated-activations"
    done = run(
        installed, "optimize", source, "--pipeline", spec, "--verify", "equivalence", "-o", after, "--plan", plan
    )
    assert done.returncode == 0, done.stderr
    assert after.read_text() == REMOVED
    steps = [step["spec"] for step in json.loads(plan.read_text())["steps"]]
    assert steps == spec.split(",")

    wrong = run(installed, "optimize", source, "--pipeline", "remove-repeated-activations{activation=tanh}")
    assert wrong.returncode == 2
    assert wrong.stderr.startswith("remove-repeated-activations: activation is 'tanh', expected ")


@pytest.mark.slow
def test_without_the_package_there_is_no_such_pass(tmp_path: Path):
    done = run(tmp_path, "passes", "remove-repeated-activations")
    assert done.returncode == 2
    assert done.stderr.startswith("passes: no pass is called 'remove-repeated-activations'\n")


@pytest.mark.slow
def test_a_broken_package_is_named_and_takes_no_other_pass_with_it(installed: Path, tmp_path: Path):
    broken = tmp_path / "broken"
    info = broken / "weft_broken-0.1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: weft-broken\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text("[weft.passes]\nremove-everything = weft_broken:RemoveEverything\n")
    (broken / "weft_broken.py").write_text("raise RuntimeError('made for another version')\n")
    both = Path(f"{broken}{os.pathsep}{installed}")
    message = (
        "passes: weft-broken 0.1 offers 'remove-everything' (weft_broken:RemoveEverything), "
        "but it cannot be loaded: RuntimeError: made for another version\nfix or uninstall weft-broken 0.1\n"
    )
    listed = run(both, "passes")
    assert (listed.returncode, listed.stderr) == (0, message)
    names = [line.split()[0] for line in listed.stdout.splitlines()]
    assert {"sink-waits", "remove-repeated-activations"} <= {*names}
    assert "remove-everything" not in names

    source = tmp_path / "graph.txt"
    source.write_text(LISTING)
    asked = run(both, "optimize", source, "--pipeline", "sink-waits,remove-everything")
    assert (asked.returncode, asked.stdout, asked.stderr) == (2, "", message)
    done = run(both, "optimize", source, "--pipeline", "remove-repeated-activations")
    assert (done.returncode, done.stdout) == (0, REMOVED)
