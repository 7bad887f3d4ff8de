"""Policies: which members a bucket should take. Whether it may is asked of the engine, whatever the policy.

By size: a bucket closes at a cap, which may differ by the number of the bucket. By module: buckets for each module
that a pattern matches. Explicit: the user pins launches to a bucket, or forbids some. By role: parameters or gradients
only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from torch.fx import Node

from weft.bucketing.eligibility import Key
from weft.cost.cluster import Cluster
from weft.graph.groups import GroupTable
from weft.graph.roles import Role

SHARE = 0.9
"""Of its bandwidth that a collective of a whole bucket should reach."""


@dataclass(frozen=True)
class Policy:
    """What buckets should hold."""

    cap: Callable[[Key, int], int]
    """Bytes of the bucket of this number among those of its key."""
    may_overshoot: bool = False
    """Whether a bucket closes once it holds its cap, instead of before it would hold more."""
    role: Role | None = None
    """Take only collectives that carry this."""
    modules: tuple[str, ...] = ()
    """Patterns: what belongs to one module that matches shares buckets with nothing else. Empty: all may."""
    pinned: tuple[tuple[str, ...], ...] = ()
    """Launches that make a bucket whatever its size."""
    forbidden: frozenset[str] = frozenset()
    """Launches that stay as they are."""
    withheld: Mapping[str, str] = field(default_factory=dict[str, str])
    """Groups, by canonical name, whose launches stay as they are, and why: other ranks would not merge the same."""
    prefetch: int = 0
    """Launch a bucket as many buckets earlier."""
    defer: int = 1
    """Wait for a bucket that is launched late when as many others have been launched behind it."""

    def module_of(self, node: Node) -> str | None:
        """The name of the outermost module that matches, of those that the node belongs to; None where none does."""
        for path in module_paths(node) if self.modules else ():
            if any(fnmatchcase(path, pattern) for pattern in self.modules):
                return path
        return None


def module_paths(node: Node) -> list[str]:
    """The modules that a node, or else the first of its inputs that has some, belongs to, outermost first."""
    stack: Mapping[str, Any] | None = node.meta.get("nn_module_stack")
    while not stack and node.all_input_nodes:
        node = node.all_input_nodes[0]
        stack = node.meta.get("nn_module_stack")
    return [str(entry[0]) for entry in stack.values()] if stack else []


def cap_from(
    caps: tuple[int, ...], cluster: Cluster, groups: GroupTable, first: int | None = None
) -> Callable[[Key, int], int]:
    """The caps of the first, second, ... bucket, the last one for all further ones; empty: from the cluster."""
    if caps:
        return lambda _, number: caps[min(number, len(caps) - 1)]
    known: dict[Key, int] = {}

    def saturating(key: Key, number: int) -> int:
        if number == 0 and first is not None:
            return first
        if key not in known:
            group = groups.group(key.group)
            known[key] = cluster.saturating_bytes(key.kind, group, SHARE)
        return known[key]

    return saturating
