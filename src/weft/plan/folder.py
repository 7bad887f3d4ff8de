"""A folder of plans: one file for each graph, named after the canonical digest of its listing.

Contract: a plan is found only for the graph that it was made for, whatever the names of its nodes, or for a graph with
symbolic sizes only if the names are equal, too. Ranks that record the same graph write the same file, each one
completely or not at all.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from pathlib import Path

from weft.errors import PlanError, compose
from weft.plan.plan import Plan, nodes_that_differ


class PlanFolder:
    """The plans in a folder."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def record(self, plan: Plan, identity: str) -> Path:
        """Write the plan of the graph with this identity; returns its file. The folder is created."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            what = f"the folder {self.path} cannot be created: {error.strerror or error}"
            raise PlanError(compose("plans", what, do="give a folder that can be written")) from None
        file = self._file(identity)
        plan.save(file)
        return file

    def find(self, listing: str, identity: str) -> Plan:
        """The plan for a graph; without one, the error names the nodes in which the nearest planned graph differs."""
        if not self.path.is_dir():
            what = f"{self.path} is not a folder" if self.path.exists() else f"the folder {self.path} is missing"
            raise PlanError(compose("plans", what, do="give the folder that plans were recorded in"))
        file = self._file(identity)
        if file.exists():
            return Plan.load(file)
        plans = ((each, Plan.load(each)) for each in self._files())
        file, nearest = max(plans, key=lambda found: _shared(found[1].listing, listing), default=(file, None))
        do = "record a plan for this graph: run once with the option weft.record"
        if nearest is None:
            raise PlanError(compose("plans", f"the folder {self.path} has no plans", do=do))
        where = nodes_that_differ(nearest.listing, listing) or _headers(nearest.listing, listing)
        raise PlanError(compose("plans", f"no plan is for this graph; the nearest is {file.name}", where=where, do=do))

    @property
    def digest(self) -> str:
        """A digest of all plans in the folder, for caches of compiled graphs."""
        found = hashlib.sha256()
        for file in self._files():
            found.update(f"{file.name}\n".encode() + file.read_bytes())
        return found.hexdigest()

    def _files(self) -> list[Path]:
        return sorted(self.path.glob("*.json"))

    def _file(self, identity: str) -> Path:
        return self.path / f"{identity}.json"


def _headers(expected: str, found: str) -> list[str]:
    """The declarations of two listings with the same nodes: groups, constants, inputs."""
    there, here = ([line for line in text.splitlines() if line and line[0] != " "] for text in (expected, found))
    return [f"{line} here" for line in here if line not in there] + [
        f"{line} in the plan" for line in there if line not in here
    ]


def _shared(first: str, second: str) -> int:
    """The number of lines that two listings have in common."""
    return sum((Counter(first.splitlines()) & Counter(second.splitlines())).values())
