"""Context: the inputs of a pass besides the graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from weft.cost.cluster import Cluster
from weft.graph.groups import GroupTable


@dataclass(frozen=True)
class Context:
    """The inputs of a pass besides the graph."""

    groups: GroupTable = field(default_factory=GroupTable)
    cluster: Cluster | None = None
    memory_limit_bytes: int | None = None
    effort: Literal["fast", "default", "best"] = "default"
    strict: bool = False
    """Raise if the graph prevents a rewrite that a pass wanted to make."""
    withheld: Mapping[str, str] = field(default_factory=dict[str, str])
    """Groups whose launches must not be merged, each with a sentence saying why: their ranks hold different graphs."""
