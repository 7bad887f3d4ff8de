"""Mesh axes: groups of a graph that divide another group, and the time of moves over them.

Contract: an axis is a group that a launch of the graph uses; no new groups are made. Ranks of the whole group are
numbered by their place over the major axis, then by that over the minor axis.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from weft.errors import GraphError
from weft.graph.groups import Group
from weft.rewriting.draft import AnyNode

MOST_TRIPLES = 1024
"""Number of groups and pairs of axes whose relation is remembered: each collective of a graph asks again."""


@dataclass(frozen=True)
class MeshAxis:
    """A group, and a launch that uses it."""

    group: Group
    launch: AnyNode


def axes_of(whole: Group, known: Iterable[MeshAxis]) -> tuple[MeshAxis, MeshAxis] | None:
    """Two known groups that divide a group: the minor axis, then the major axis."""
    smaller = [axis for axis in known if 1 < axis.group.size < whole.size]
    pairs = ((minor, major) for minor in smaller for major in smaller)
    return next((pair for pair in pairs if are_axes(whole, pair[0].group, pair[1].group)), None)


def wholes_of(minor: Group, major: Group, known: Iterable[MeshAxis]) -> Iterator[MeshAxis]:
    """The known groups that two groups divide."""
    return (axis for axis in known if are_axes(axis.group, minor, major))


@functools.lru_cache(maxsize=MOST_TRIPLES)
def are_axes(whole: Group, minor: Group, major: Group) -> bool:
    """Whether consecutive ranks of a group make `minor`, and the ranks with one place among these make `major`."""
    if minor.size * major.size != whole.size:
        return False
    num_ranks = math.lcm(*(group.span for group in (whole, minor, major)))
    try:
        wholes, minors, majors = (set(group.partition(num_ranks)) for group in (whole, minor, major))
    except GraphError:
        return False
    size = minor.size
    return all(
        all(tuple(ranks[k : k + size]) in minors for k in range(0, whole.size, size))
        and all(tuple(ranks[k::size]) in majors for k in range(size))
        for ranks in wholes
    )
