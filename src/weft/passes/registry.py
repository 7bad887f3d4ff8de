"""Loading Weft's own passes: every module below `communication` and `rewrite` defines one."""

from __future__ import annotations

import functools
import importlib
import pkgutil

from weft.passes import communication, rewrite


@functools.cache
def load() -> None:
    """Import every pass module, which registers its pass."""
    for package in (rewrite, communication):
        for module in pkgutil.iter_modules(package.__path__):
            importlib.import_module(f"{package.__name__}.{module.name}")
