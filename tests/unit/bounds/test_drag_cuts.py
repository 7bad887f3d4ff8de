"""Drag cuts of programs small enough to see why nothing can be shorter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.unit.simulation.programs import compute, launch, program, wait
from weft.bounds.checker import check
from weft.bounds.lower_bound import Bound, lower_bound
from weft.bounds.problem import MergingAssumption
from weft.errors import VerificationError
from weft.simulation.program import Program
from weft.simulation.simulator import simulate


def backward(g_ns: int = 12, h_ns: int = 12, **fields: int) -> Program:
    """Two gradients with a reduction each, then the longest compute and the last reduction; 80 of compute in all."""
    return program(
        compute("x", 10),
        compute("a", 10, "x"),
        launch("g", g_ns, needs="a"),
        compute("b", 10, "x"),
        launch("h", h_ns, needs="b"),
        compute("y", 50, "x"),
        launch("last", 20, needs="y"),
        **fields,  # type: ignore[arg-type]
    )


def in_order(given: Program, names: str) -> int:
    return simulate(given, [given.names.index(name) for name in names.split()]).step_ns


def proved(given: Program, merging: MergingAssumption | None = None) -> Bound:
    bound = lower_bound(given, merging)
    assert check(given, bound.certificate) == bound.bound_ns
    return bound


def test_gradients_that_drag_more_than_they_take_hide_no_reduction():
    """Holding back `a` saves 10 before the last reduction and puts 12 behind it. So all 80 are before its 20."""
    given = backward()
    bound = proved(given)
    assert (bound.bound_ns, bound.name) == (80 + 20, "drag cut")
    assert in_order(given, "x a g b h y last") == 100
    others = {value for name, value in bound.candidates.items() if name != "drag cut"}
    assert max(others) == 10 + 50 + 20 + 12  # the idle cut counts one of those that are dragged
    assert bound.rests_on == "compute must run before last; compute after it would delay other collectives"


def test_a_gradient_that_drags_less_is_held_back():
    """`a` saves 10 and drags 6."""
    given = backward(g_ns=6)
    assert proved(given).bound_ns == 80 + 20 - (10 - 6) == in_order(given, "x b h y last a g")


def test_work_is_divided_over_all_that_depends_on_it():
    """`a` has two reductions of 6: more than its 10 together, less each."""
    given = program(
        compute("x", 10),
        compute("a", 10, "x"),
        launch("g", 6, needs="a"),
        launch("h", 6, needs="a"),
        compute("y", 50, "x"),
        launch("last", 20, needs="y"),
    )
    assert proved(given).bound_ns == 70 + 20 == in_order(given, "x a g h y last")


def test_what_drags_nothing_hides_the_last_reduction():
    given = program(compute("x", 10), compute("a", 15, "x"), compute("y", 50, "x"), launch("last", 20, needs="y"))
    assert proved(given).bound_ns == 60 + 20 == in_order(given, "x y last a")


def test_a_reduction_on_another_link_is_not_dragged():
    given = backward()
    apart = replace(given, queue=(-1, -1, 1, -1, 1, -1, 0), queues=(*given.queues, replace(given.queues[0], link=1)))
    apart = replace(apart, links=("a", "b"))
    assert proved(apart).bound_ns == 80 + 12 == in_order(apart, "x a g y last b h")


def test_the_same_holds_of_the_first_gathers():
    """The mirror image: compute that starts before the first gather has ended has gathers of its own before it."""
    given = program(
        launch("first", 20),
        launch("g", 12),
        launch("h", 12),
        wait("first"),
        compute("y", 50, "wait_first"),
        wait("g"),
        compute("a", 10, "wait_g"),
        wait("h"),
        compute("b", 10, "wait_h"),
        compute("x", 10, "y a b"),
    )
    bound = proved(given)
    assert (bound.bound_ns, bound.name) == (20 + 80, "drag cut") == (simulate(given).step_ns, "drag cut")
    assert bound.rests_on == "compute must run after first; compute before it would need other collectives first"


def test_merging_saves_all_but_one_latency_of_what_is_dragged():
    """In a bucket `g` and `h` add 9 each: 10 - 9 is saved by each, and the bucket's own latency takes 3 or 1."""
    given = replace(backward(), latency_ns=(0, 0, 3, 0, 3, 0, 3))
    assert proved(given).bound_ns == 80 + 20 == in_order(given, "x a g b h y last")
    short = replace(backward(10, 10), latency_ns=(0, 0, 1, 0, 1, 0, 1))
    assert 80 + 20 - 2 * (10 - 9) <= proved(short).bound_ns <= 80 + 20 - 2 * (10 - 9) + 1
    assert proved(given, MergingAssumption.EXCLUDED).bound_ns == 80 + 20


def layers(num: int, work_ns: int, reduction_ns: int, latency_ns: int) -> Program:
    """Gradients with a reduction each, then a long compute and a last reduction of 60; 100 of compute and more."""
    gradients = [(compute(f"a{i}", work_ns, "x"), launch(f"g{i}", reduction_ns, needs=f"a{i}")) for i in range(num)]
    rows = [row for pair in gradients for row in pair]
    given = program(compute("x", 10), *rows, compute("y", 90, "x"), launch("last", 60, needs="y"))
    return replace(given, latency_ns=tuple(latency_ns if name[0] in "gl" else 0 for name in given.names))


def test_a_bucket_of_what_is_dragged_has_a_latency_too():
    """Each gradient that is held back saves 12 and drags 10, but each bucket after `last` takes 30 more.

    Ten gradients save 20 together, less than the latency of one bucket.
    """
    given = layers(10, 12, 40, 30)
    bound = proved(given)
    assert (bound.bound_ns, bound.name) == (100 + 10 * 12 + 60, "drag cut")
    claim: Any = bound.certificate["claim"]
    assert claim["ratio"] > 1000
    assert proved(layers(10, 12, 10, 0)).bound_ns == 100 + 10 * 12 + 60 - 10 * 2


def test_several_buckets_hide_more_than_one():
    """Gradients save 24 and drag 12, but no bucket can hide its latency of 40 under the work of a bucket after it."""
    given = layers(4, 24, 52, 40)
    assert 100 + 4 * 24 + 52 <= proved(given).bound_ns <= 100 + 4 * 24 + 60


def chained(reduction_ns: int, sum_ns: int) -> Program:
    """A gradient that is scattered on one link and summed on another, before a last one that is treated likewise."""
    given = program(
        compute("x", 10),
        compute("a", 20, "x"),
        launch("g", reduction_ns, needs="a"),
        wait("g"),
        launch("s", sum_ns, needs="wait_g"),
        compute("y", 50, "x"),
        launch("scatter", 20, needs="y"),
        wait("scatter"),
        launch("sum", 30, needs="wait_scatter"),
    )
    apart = tuple(1 if name in ("s", "sum") else queue for name, queue in zip(given.names, given.queue, strict=True))
    return replace(given, queue=apart, queues=(*given.queues, replace(given.queues[0], link=1)), links=("a", "b"))


def test_two_collectives_in_a_row_come_after_the_compute():
    """Holding back `a` hides `scatter`, but its own sum then follows `sum`, and takes longer than `a`."""
    given = chained(1, 25)
    bound = proved(given)
    assert (bound.bound_ns, bound.name) == (80 + 20 + 30, "drag cut")
    assert in_order(given, "x a g wait_g s y scatter wait_scatter sum") == 80 + 20 + 30 + 1  # `wait_g` stalls for 1
    claim: Any = bound.certificate["claim"]
    assert claim["through"] == given.names.index("scatter") + len(given.names)


def test_a_gradient_with_a_short_sum_is_held_back_until_the_first_of_two_collectives_in_a_row():
    given = chained(1, 5)
    assert proved(given).bound_ns == 80 + 20 + 30 - (20 - 5)
    assert in_order(given, "x y scatter a g wait_scatter sum wait_g s") == 80 + 20 + 30 - (20 - 5)


@pytest.mark.parametrize("change", [{"through": None}, {"node": 4 + 9}, {"through": 2 + 9}])
def test_the_checker_proves_less_of_other_collectives_in_a_row(change: dict[str, Any]):
    given = chained(1, 25)
    certificate: Any = lower_bound(given).certificate
    certificate["claim"] |= change
    with pytest.raises(VerificationError):
        check(given, certificate)


def test_what_is_dragged_slows_no_compute():
    """24 of communication beside the compute cost it 8. Dragged, each costs 12 and slows by 4 less: 8, and saves 10.

    In the time of compute `last` takes 13 and a third, and all 44 cost 14 and two thirds: a nanosecond is rounded away.
    """
    given = backward(slowdown_ppm=500_000)
    assert proved(given).bound_ns + 1 == 80 + 20 + 8 - 2 * (10 - 8) == in_order(given, "x y last a g b h")


def test_a_gap_passes_between_kernels_before_the_last_reduction():
    given = backward(gap_ns=1)
    assert proved(given).bound_ns == 80 + 3 + 20


def test_a_threshold_that_the_collective_does_not_reach_counts_as_its_head():
    """All that starts so late may be late itself; nothing says that the collective waits for any of it."""
    given = program(launch("last", 20), compute("a", 50), compute("b", 30, "a"))
    certificate: Any = lower_bound(given).certificate
    ends = {"node": 3, "through": None, "is_last": True}
    certificate["claim"] = {"kind": "drag", "head": 50, "ratio": 1000, "latency": 0, "shares": []} | ends
    assert check(given, certificate | {"bound_ns": 0}) == 20


@pytest.mark.parametrize(
    ("shares", "proves"),
    [
        ([[1, 9, 10], [3, 11, 10]], 100),
        ([[1, 9, 10]], 90),  # nothing is said of b: all of it is saved
        ([[1, 9, 4], [1, 9, 6], [3, 11, 10]], 100),
        ([], 80),
    ],
)
def test_the_checker_counts_what_is_divided(shares: list[list[int]], proves: int):
    certificate: Any = lower_bound(backward()).certificate
    certificate["claim"]["shares"] = shares
    assert check(backward(), certificate | {"bound_ns": 0}) == proves
    if proves < 100:
        with pytest.raises(VerificationError, match=f"claims 100 ns and proves {proves} ns"):
            check(backward(), certificate)


@pytest.mark.parametrize(
    "change",
    [
        {"shares": [[1, 11, 10]]},  # h does not depend on a
        {"shares": [[1, 9, 11]]},  # more than a has
        {"shares": [[1, 9, 12], [1, 9, -2]]},
        {"shares": [[5, 13, 10]]},  # y is never late
        {"shares": [[1, 9]]},
        {"shares": [[1, 2, 10]]},  # a launch takes no time: its collective does
        {"shares": None},
        {"node": 5},  # compute
        {"node": 99},
        {"head": "late"},
        {"ratio": 999},
        {"through": 9},  # the last reduction does not need g
        {"through": 5},
    ],
)
def test_a_claim_that_makes_no_sense_is_refused(change: dict[str, Any]):
    certificate: Any = lower_bound(backward()).certificate
    certificate["claim"] |= change
    with pytest.raises(VerificationError, match="this is not a certificate of this program"):
        check(backward(), certificate | {"bound_ns": 0})
