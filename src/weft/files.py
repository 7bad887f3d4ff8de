"""Files that Weft writes: whole or not at all.

Contract: a file is written beside its place and takes it when it is complete, so nobody reads half of one, and an error
(a full disk, an interrupt) leaves what was there. Pipes and devices, which cannot be replaced, are written directly.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO


@contextmanager
def whole_file(path: str | Path) -> Generator[IO[bytes]]:
    """The file to write into; it is at `path` once the block ends. Raises an OSError where that cannot be."""
    try:
        place = Path(os.path.realpath(path))  # a link stays a link
    except ValueError as error:  # a NUL
        raise OSError(None, str(error)) from None
    if place.exists() and not place.is_file():
        with place.open("wb") as file:
            yield file
        return
    draft = place.with_name(f".weft-{os.getpid()}-{threading.get_ident()}.part")
    try:
        with draft.open("wb") as file:
            yield file
        if place.exists():
            shutil.copymode(place, draft)
        os.replace(draft, place)
    except BaseException:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
        raise


def write_whole(path: str | Path, text: str) -> None:
    """Write a text. Half characters, which no file can hold, become question marks. Raises an OSError."""
    with whole_file(path) as file:
        file.write(text.encode(errors="replace"))
