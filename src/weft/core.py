"""The compiled core: the inner loops as machine code, if `make core` has built them.

Contract: the same files are the source of the core and run without it, with the same results. A core is used only if it
was built from these files as they are now, and for this interpreter; otherwise the files run as they are.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

PACKAGE = Path(__file__).parent
FOLDER = PACKAGE / "_core"
DIGEST = FOLDER / "digest"
GROUP = "weft_core"
SHARED = f"{GROUP}__mypyc"
"""The module with the code of all others."""
MODULES = (
    "weft.simulation.memory",
    "weft.simulation.simulator",
    "weft.scheduling.jobs",
    "weft.scheduling.job_tables",
    "weft.scheduling.memory_budget",
    "weft.scheduling.scheduler",
    "weft.scheduling.recipes",
    "weft.scheduling.local_moves",
    "weft.bounds.problem",
    "weft.bounds.earliest_starts",
    "weft.bounds.one_machine",
    "weft.bounds.idle_cuts",
    "weft.bounds.drag_cuts",
)


def source_of(module: str) -> Path:
    """The file of a module of the core."""
    return PACKAGE.parent.joinpath(*module.split(".")).with_suffix(".py")


def binary_of(module: str, folder: Path = FOLDER) -> Path:
    """The file of a compiled module."""
    return folder / f"{module}{EXTENSION_SUFFIXES[0]}"


def digest_of_sources() -> str:
    """The digest of the interpreter and of all files of the core."""
    found = hashlib.sha256(EXTENSION_SUFFIXES[0].encode())
    for module in MODULES:
        found.update(source_of(module).read_bytes())
    return found.hexdigest()


def is_built() -> bool:
    """Whether there is a core for the files as they are now."""
    return DIGEST.exists() and DIGEST.read_text() == digest_of_sources()


def use_if_built() -> None:
    """Let imports find the compiled modules."""
    if is_built():
        sys.meta_path.insert(0, CoreFinder())


class CoreFinder:
    """Finds the modules of the core in its folder."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The compiled module of this name; None for all other modules."""
        return spec_from_file_location(name, binary_of(name)) if name in (*MODULES, SHARED) else None
