"""Files that Weft writes: whole or not at all.

Contract: a file is written under a temporary name next to its path and renamed when it is complete. So no reader sees
half a file, and an error (a full disk, an interrupt) leaves the old file as it was. Pipes and
devices, which cannot be replaced, are written directly.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO


@contextmanager
def whole_file(path: str | Path) -> Generator[IO[bytes]]:
    """A file to write into; it appears at `path` when the block ends. Raises OSError if that fails."""
    try:
        place = Path(os.path.realpath(path))  # a link stays a link
    except ValueError as error:  # a NUL
        raise OSError(None, str(error)) from None
    if place.exists() and not place.is_file():
        with place.open("wb") as file:
            yield file
        return
    draft = place.with_name(f".weft-{os.urandom(8).hex()}.part")  # processes of several machines may share the folder
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
    """Write a text. Lone surrogates, which UTF-8 cannot encode, become question marks. Raises OSError if that fails."""
    with whole_file(path) as file:
        file.write(text.encode(errors="replace"))
