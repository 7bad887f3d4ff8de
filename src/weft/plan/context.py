"""Context: the inputs of a pass besides the graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from weft.cost.cluster import Cluster, assumed_cluster
from weft.graph.groups import GroupTable
from weft.simulation.program import Program


@dataclass(frozen=True)
class Context:
    """The inputs of a pass besides the graph."""

    groups: GroupTable = field(default_factory=GroupTable)
    cluster: Cluster | None = None
    """As the caller gave it. Passes that only rewrite where a cluster shows a gain do nothing without one."""
    memory_limit_bytes: int | None = None
    effort: Literal["fast", "default", "best"] = "default"
    strict: bool = False
    """Raise if the graph prevents a rewrite that a pass wanted to make."""
    withheld: Mapping[str, str] = field(default_factory=dict[str, str])
    """Groups whose launches must not be merged, each with a sentence saying why: their ranks hold different graphs."""

    known_orders: list[tuple[Program, Any]] = field(default_factory=list[tuple[Program, Any]], compare=False)
    """Programs that a pass of this run leaves, each with the outcome of its search; `schedule-overlap` uses them."""

    @cached_property
    def target_cluster(self) -> Cluster:
        """The cluster that prices are for: the given one, or as many nodes of eight H100 as the groups need.

        Passes that must choose an order or a size even without a cluster ask for this one, so that all of them, and
        the check of the memory limit after them, assume the same.
        """
        return self.cluster or assumed_cluster(self.groups)
