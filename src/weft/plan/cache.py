"""The plan cache: plans of earlier runs, in memory and in a folder, each under the key of its graph and options.

Contract: a key covers everything that planning depends on, so a plan from the cache is the one that a new search would
find, and ranks agree whether they hit or miss. A file is written completely or not at all, without locks, so processes
may share the folder. A file holds its key and a digest of its contents; Weft refuses a file that does not match them.
"""

from __future__ import annotations

import hashlib
import logging
import os
from contextlib import suppress
from pathlib import Path

from weft.errors import PlanError, compose
from weft.files import whole_file
from weft.plan.plan import Plan

log = logging.getLogger("weft")

VARIABLE = "WEFT_PLAN_CACHE"
"""Environment variable: the folder of the cache; `0` switches the cache off."""
MOST_KEPT = 16
"""Number of plans kept in memory. A plan of a step with ten thousand nodes takes a few MiB."""
MOST_FILES = 256
"""Number of plans kept in a folder. Writing another one removes those that were used the longest ago."""
SUFFIX = ".plan"

_kept: dict[str, Plan] = {}


class PlanCache:
    """The plans of earlier runs."""

    def __init__(self, folder: str | Path | None = None) -> None:
        """A cache in a folder; None: as the environment says, otherwise in the user's folder of caches."""
        self.folder = Path(folder) if folder is not None else _default_folder()

    def find(self, key: str) -> Plan | None:
        """The plan under a key, or None. Raises `PlanError` for a file that cannot be trusted."""
        if key in _kept:
            return _kept[key]
        file = self._file(key)
        try:
            data = file.read_bytes()
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise _refused(file, f"it cannot be read: {error}") from None
        plan = _unpack(file, key, data)
        with suppress(OSError):
            os.utime(file)
        _remember(key, plan)
        return plan

    def keep(self, key: str, plan: Plan) -> None:
        """Remember a plan. A folder that cannot be written only costs the next process its hit."""
        _remember(key, plan)
        contents = plan.to_bytes()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._make_room()
            with whole_file(self._file(key)) as file:
                file.write(f"{key} {hashlib.sha256(contents).hexdigest()}\n".encode() + contents)
        except (OSError, ValueError) as error:  # a NUL in the path
            log.info("weft: a plan is not kept in %s: %s", self.folder, error)

    def _file(self, key: str) -> Path:
        return self.folder / f"{key}{SUFFIX}"

    def _make_room(self) -> None:
        """Remove the plans that were used the longest ago, so that one more fits."""
        files = [entry for entry in os.scandir(self.folder) if entry.name.endswith(SUFFIX)]
        if len(files) < MOST_FILES:
            return
        ages: list[tuple[int, str]] = []
        for entry in files:
            with suppress(OSError):  # another process removed it
                ages.append((entry.stat().st_mtime_ns, entry.path))
        for _, path in sorted(ages)[: len(files) - MOST_FILES + 1]:
            Path(path).unlink(missing_ok=True)


def is_switched_off() -> bool:
    """Whether the environment switches the cache off."""
    return os.environ.get(VARIABLE) == "0"


def forget_all() -> None:
    """Forget the plans in memory, as a new process would."""
    _kept.clear()


def _remember(key: str, plan: Plan) -> None:
    _kept.pop(key, None)
    _kept[key] = plan
    for oldest in list(_kept)[:-MOST_KEPT]:
        _kept.pop(oldest, None)


def _default_folder() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(os.environ.get(VARIABLE) or os.path.join(home, "weft", "plans"))


def _unpack(file: Path, key: str, data: bytes) -> Plan:
    head, _, contents = data.partition(b"\n")
    of, _, sealed = head.partition(b" ")
    if of != key.encode():
        raise _refused(file, "it is for another graph, cluster or option")
    if sealed != hashlib.sha256(contents).hexdigest().encode():
        raise _refused(file, "its contents do not match their digest")
    try:
        return Plan.from_bytes(contents)
    except ValueError as error:
        raise _refused(file, f"it is not a valid plan: {error}") from None


def _refused(file: Path, why: str) -> PlanError:
    return PlanError(compose("plan cache", f"{file.name} is refused: {why}", do=f"delete it in {file.parent}"))
