"""Keeps the state of the caller's process unchanged.

Contract: late imports have side effects. torch sets TORCHINDUCTOR_CACHE_DIR, rich draws from `random`, sympy adds a
warning filter. Weft undoes all of these.
"""

from __future__ import annotations

import os
import random
import sys
import warnings
from collections.abc import Generator
from contextlib import contextmanager

VARIABLES = ("TORCHINDUCTOR_CACHE_DIR",)
"""Environment variables that torch sets when its compilers are imported or asked for their cache."""


@contextmanager
def left_as_it_was() -> Generator[None]:
    """Undo the side effects of imports inside the block; also a decorator."""
    unset = [name for name in VARIABLES if name not in os.environ]
    num_modules, state, filters = len(sys.modules), random.getstate(), list(warnings.filters)
    try:
        yield
    finally:
        for name in unset:
            os.environ.pop(name, None)
        if len(sys.modules) != num_modules:
            random.setstate(state)
            if list(warnings.filters) != filters:
                warnings.filters[:] = filters  # type: ignore[index]
