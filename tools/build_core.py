"""Compile the planner's inner loops into `src/weft/_core`; `weft/core.py` says which, and uses them from then on.

    python tools/build_core.py

Needs mypy, setuptools and a C compiler. Without a core, Weft gives the same results in more time.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "src"))

from weft import core  # noqa: E402

SETTINGS = """\
[mypy]
python_version = 3.11
follow_imports = silent
ignore_missing_imports = True
explicit_package_bases = True
cache_dir = /dev/null

[mypy-torch.*]
follow_imports = skip
"""


def build(folder: Path) -> None:
    """Compile all modules of the core into a folder; those of an earlier core are replaced."""
    from mypyc.build import mypycify
    from setuptools import setup

    with tempfile.TemporaryDirectory() as made:
        work = Path(made)
        (work / "mypy.ini").write_text(SETTINGS)
        os.chdir(ROOT / "src")
        sources = [str(core.source_of(module).relative_to(ROOT / "src")) for module in core.MODULES]
        extensions = mypycify(
            [f"--config-file={work / 'mypy.ini'}", *sources],
            opt_level="3",
            debug_level="0",
            group_name=core.GROUP,
            target_dir=str(work),
        )
        arguments = ["--quiet", "build_ext", "--build-lib", str(work / "lib"), "--build-temp", str(work / "objects")]
        setup(name=core.GROUP, ext_modules=extensions, script_args=arguments)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for module in (core.SHARED, *core.MODULES):
            shutil.copyfile(core.binary_of(module.replace(".", "/"), work / "lib"), core.binary_of(module, folder))


def main() -> None:
    """Run from the command line."""
    if shutil.which("cc") is None:
        sys.exit("no C compiler is installed (cc): Weft runs without a core, with the same results")
    digest = core.digest_of_sources()  # first: a file that changes meanwhile makes the core out of date
    build(core.FOLDER)
    core.DIGEST.write_text(digest)
    print(f"wrote {core.FOLDER}: {len(core.MODULES)} modules are compiled")


if __name__ == "__main__":
    main()
