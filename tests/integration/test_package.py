"""The wheel and the sdist: complete, of the version that the package states, and usable without the checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from weft.version import VERSION

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the sdist."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(folder)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.slow
@pytest.mark.xdist_group("package")
def test_a_wheel_installed_elsewhere_optimizes_a_model_of_the_zoo(built: Path, tmp_path: Path):
    (wheel,) = built.glob("*.whl")
    assert wheel.name.startswith(f"weft-{VERSION}-")
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(tmp_path)]
    subprocess.run([*install, "--disable-pip-version-check", str(wheel)], check=True, timeout=120)
    command = [sys.executable, "-m", "weft", "optimize", "zoo:llama-debug/fsdp?layers=1&ranks=2", "--cluster", "h100-8"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "all_gather" in done.stdout


@pytest.mark.slow
@pytest.mark.xdist_group("package")
def test_the_sdist_holds_every_tracked_file_that_tests_and_docs_read(built: Path):
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    tracked = subprocess.run(["git", "ls-files"], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    if tracked.returncode:
        pytest.skip("not a git checkout: nothing to compare the sdist with")
    unneeded = (".github/", ".gitattributes", ".gitignore")
    missing = {name for name in tracked.stdout.split("\n") if name and not name.startswith(unneeded)} - held
    assert missing == set()
