"""Certificates: what a bound rests on, as plain data that `weft.bounds.checker` recomputes.

Contract: JSON. Nodes are numbered as in `tasks`: operation `i` is `i`, the collective of launch `i` is `i + n`;
resource 0 is the compute stream, `k + 1` is link `k`.

    merging    allowed | excluded
    chains     where merging is allowed, collectives of one queue that depend on each other, in order: none of these
               are in one bucket
    clock      wall | work | wire: by which time (`tasks`). By work and by wire what overlap costs is added
    overlap    where the clock is work, the proof of how long some link is busy at least: its `heads`, `tails` and
               `claim`; else null
    heads      [node, resource, threshold]: sets of ancestors that raise the heads of nodes, in order
    tails      the same with time running backwards
    claim      kind task:     head + duration + tail of a `node`; null: nothing takes time
               kind machine:  the least head, the work and the least tail of all tasks of a `resource` whose heads reach
                              `head` and whose tails reach `tail`
               kind cut:      compute between the collectives `first` and `last` (either may be null). Compute that does
                              not depend on `first` runs after it, or a collective that ends earlier on its queue goes
                              before it: `first_drag` is the least that this costs. `last` is its mirror image.
               kind drag:     compute whose heads reach `head`, then the collective `node` and the least tail. What ends
                              after `node` has started drags the collectives of its link that depend on it behind that:
                              `shares` divides its work over them, [compute, collective, time]. Where `is_last` is false
                              time runs backwards.
               kind memory:   storages that are held one after the other where the peak is at most `limit_bytes`: those
                              of which only `count` fit at once, or null: all of them, by their bytes
    bound_ns   the value of the claim; the checker wants no less than this

A certificate holds no number that is believed. Sets and thresholds only say where to look.
"""

from __future__ import annotations

from weft.bounds.earliest_starts import Heads, arguments_for
from weft.bounds.problem import Clock, MergingAssumption, Tasks

Certificate = dict[str, object]

FORMAT = "weft-bound-4"

Rests = tuple[Tasks, Heads, dict[int, int]]
"""One direction of time, its heads, and the levels that the heads of some nodes must reach."""


def task_claim(node: int | None) -> dict[str, object]:
    return {"kind": "task", "node": node}


def machine_claim(resource: int, head: int, tail: int) -> dict[str, object]:
    return {"kind": "machine", "resource": resource, "head": head, "tail": tail}


def cut_claim(first: int | None, first_drag: int, last: int | None, last_drag: int) -> dict[str, object]:
    return {"kind": "cut", "first": first, "first_drag": first_drag, "last": last, "last_drag": last_drag}


def drag_claim(node: int, is_last: bool, head: int, shares: list[tuple[int, int, int]]) -> dict[str, object]:
    return {"kind": "drag", "node": node, "is_last": is_last, "head": head, "shares": [[*share] for share in shares]}


def memory_claim(limit_bytes: int, count: int | None) -> dict[str, object]:
    return {"kind": "memory", "limit_bytes": limit_bytes, "count": count}


def proof_of(claim: dict[str, object], heads: Rests, tails: Rests) -> dict[str, object]:
    """A claim with the sets that its heads and tails rest on."""
    return {"heads": sets_of(*heads), "tails": sets_of(*tails), "claim": claim}


def certificate_of(
    bound_ns: int,
    merging: MergingAssumption,
    chains: list[list[int]],
    clock: Clock,
    proof: dict[str, object],
    overlap: dict[str, object] | None = None,
) -> Certificate:
    """A proof, and what it needs to know of merging and of overlap."""
    named = {"format": FORMAT, "bound_ns": bound_ns, "merging": merging.value, "chains": chains}
    return named | {"clock": clock.value, "overlap": overlap} | proof


def sets_of(tasks: Tasks, heads: Heads, levels: dict[int, int]) -> list[list[int]]:
    sets = arguments_for(tasks, heads, levels)
    return [[argument.node, argument.resource, argument.threshold] for argument in sets]
