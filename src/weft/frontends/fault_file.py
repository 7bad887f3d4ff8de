"""The file that a user can attach to a report of a fault: the graph, the options and the versions, without any data."""

from __future__ import annotations

import hashlib
import platform
import re
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch

from weft.files import write_whole
from weft.frontends.options import Options
from weft.version import VERSION

_CONSTANT = re.compile(r"^(tensor\('[^']*', [^\[]*\[[^\]]*\](?:\([^)]*\))?).*$", re.MULTILINE)
"""A declaration of a constant up to its type; the values follow."""


def write_fault(listing: Callable[[], str], options: Options, error_text: str, folder: Path | None) -> Path:
    """Write the file and return its path; ranks with the same fault in the same graph write the same file."""
    try:
        graph = _CONSTANT.sub(r"\1)", listing())
    except Exception as error:  # the graph itself may be the cause
        graph = f"the graph cannot be listed: {type(error).__name__}"
    versions = f"weft {VERSION}, torch {torch.__version__}, python {platform.python_version()}"
    settings = "\n".join(f"{name} = {value!r}" for name, value in sorted(asdict(options).items()))
    text = "\n\n".join([versions, settings, error_text, graph]) + "\n"
    name = f"weft-fault-{hashlib.sha256((graph + settings).encode(errors='replace')).hexdigest()[:12]}.txt"
    home = folder if folder is not None else Path(tempfile.gettempdir()) / "weft-faults"
    home.mkdir(parents=True, exist_ok=True)
    write_whole(home / name, text)
    return home / name
