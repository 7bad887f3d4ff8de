"""Certificates: the argument of a bound as plain data, which `weft.bounds.checker` recomputes.

Contract: JSON. Nodes are numbered as in `problem`: operation `i` is `i`, the collective of launch `i` is `i + n`.
Resource 0 is the compute stream, `k + 1` is link `k`.

    merging    allowed | excluded
    chains     if merging is allowed: for each queue, collectives that depend on each other, in order. No two of them
               can share a bucket
    clock      wall | work | wire: the clock of the argument (`problem`). By work and wire, the cost of overlap is added
    overlap    if the clock is work: the proof of how long some link is busy at least, with its own `heads`, `tails` and
               `claim`; else null
    heads      [node, resource, threshold]: sets of ancestors that raise the heads of nodes, in the order to check them
    tails      the same with time running backwards
    claim      kind task:     head + duration + tail of `node`; null if no operation takes time
               kind machine:  the smallest head, the total time and the smallest tail of all tasks of `resource` whose
                              heads reach `head` and whose tails reach `tail`
               kind cut:      an idle cut. Compute lies between the collectives `first` and `last` (either may be null).
                              Compute that does not depend on `first` runs after it, or a collective that ends earlier
                              on its queue comes before it: `first_drag` is the least that this costs. `last` is the
                              mirror image
               kind drag:     a drag cut. Compute whose heads reach `head`, then the collective `node` and the smallest
                              tail. Compute that ends after `node` has started drags the collectives of the link that
                              depend on it: `shares` divides its work over them, [compute, collective, time]. A
                              collective whose latency reaches `latency` may receive `ratio` thousandths of its time
                              without latency, others as much as that time. `through`: a collective before `node`, and
                              the one that late compute does not precede; what is dragged needs others of its queue. Or
                              null. If `is_last` is false, time runs backwards
               kind memory:   storages that live one after the other if the peak is within `limit_bytes`, because
                              only `count` of them fit at once; null: all storages, by bytes x lifetime
               kind again:    as `machine`, and the repeated work that a peak within `limit_bytes` forces
                              (`repeated_work`) at the moment when operation `at` first starts. `price` is in
                              nanoseconds for each MiB; `flows` are [operation, storage, nanoseconds / 2^20]: the demand
                              of an operation that runs once, and what a repeated operation passes to its inputs.
                              `shorter_ns`: values in host memory count as many bytes as are copied in that time; the
                              claim is that no step is shorter. 0: no values leave
    bound_ns   the value of the claim. The checker must find at least this much

The checker trusts no number in a certificate: sets and thresholds only tell it where to look.
"""

from __future__ import annotations

from weft.bounds.drag_cuts import NONE, DragCut
from weft.bounds.earliest_starts import Heads, arguments_for
from weft.bounds.problem import Clock, MergingAssumption, Tasks
from weft.bounds.repeated_work import ForcedRun

Certificate = dict[str, object]

FORMAT = "weft-bound-5"

Rests = tuple[Tasks, Heads, dict[int, int]]
"""One direction of time, its heads, and the levels that the heads of some nodes must reach."""


def task_claim(node: int | None) -> dict[str, object]:
    return {"kind": "task", "node": node}


def machine_claim(resource: int, head: int, tail: int) -> dict[str, object]:
    return {"kind": "machine", "resource": resource, "head": head, "tail": tail}


def cut_claim(first: int | None, first_drag: int, last: int | None, last_drag: int) -> dict[str, object]:
    return {"kind": "cut", "first": first, "first_drag": first_drag, "last": last, "last_drag": last_drag}


def drag_claim(cut: DragCut) -> dict[str, object]:
    return {
        "kind": "drag",
        "node": cut.node,
        "through": None if cut.through == NONE else cut.through,
        "is_last": cut.is_last,
        "head": cut.head,
        "ratio": cut.ratio,
        "latency": cut.latency,
        "shares": [[*share] for share in cut.shares],
    }


def memory_claim(limit_bytes: int, count: int | None) -> dict[str, object]:
    return {"kind": "memory", "limit_bytes": limit_bytes, "count": count}


def again_claim(limit_bytes: int, run: ForcedRun) -> dict[str, object]:
    """The fields that repeated work adds to the claim of a machine."""
    flows = [[*flow] for flow in run.flows]
    where = {"kind": "again", "limit_bytes": limit_bytes, "shorter_ns": run.shorter_ns, "at": run.at}
    return {**where, "price": run.price, "flows": flows}


def proof_of(claim: dict[str, object], heads: Rests, tails: Rests) -> dict[str, object]:
    """A claim, with the sets that prove its heads and tails."""
    return {"heads": sets_of(*heads), "tails": sets_of(*tails), "claim": claim}


def certificate_of(
    bound_ns: int,
    merging: MergingAssumption,
    chains: list[list[int]],
    clock: Clock,
    proof: dict[str, object],
    overlap: dict[str, object] | None = None,
) -> Certificate:
    """A proof, with the assumptions about merging and overlap that it makes."""
    named = {"format": FORMAT, "bound_ns": bound_ns, "merging": merging.value, "chains": chains}
    return named | {"clock": clock.value, "overlap": overlap} | proof


def sets_of(tasks: Tasks, heads: Heads, levels: dict[int, int]) -> list[list[int]]:
    """The sets that prove these levels, as plain data."""
    sets = arguments_for(tasks, heads, levels)
    return [[argument.node, argument.resource, argument.threshold] for argument in sets]
