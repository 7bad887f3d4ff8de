"""Bounds of programs small enough to see why nothing can be shorter."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import Any

import pytest

from weft.bounds import lower_bound as bounds
from weft.bounds.checker import check
from weft.bounds.lower_bound import NO_MERGING, lower_bound
from weft.bounds.problem import BoundError, MergingAssumption
from weft.errors import VerificationError
from weft.simulation.program import OpKind, Program, Queue
from weft.simulation.simulator import simulate


def program(text: str, links: tuple[int, ...] = (0, 1), **fields: Any) -> Program:
    """A program from lines such as `a: compute 5 x y`, `g: launch 10/3 on 0 a`, `w: wait g`; 3 is g's latency."""
    names: list[str] = []
    rows: list[tuple[OpKind, int, int, int, list[str]]] = []
    for line in text.strip().splitlines():
        name, kind, *words = line.replace(":", "").split()
        names.append(name)
        if kind == "compute":
            rows.append((OpKind.COMPUTE, int(words[0]), 0, -1, words[1:]))
        elif kind == "launch":
            duration, _, latency = words[0].partition("/")
            rows.append((OpKind.LAUNCH, int(duration), int(latency or 0), int(words[2]), words[3:]))
        else:
            rows.append((OpKind.WAIT if kind == "wait" else OpKind.NOTHING, 0, 0, -1, words))
    needs = [tuple(names.index(word) for word in words) for *_, words in rows]
    is_merging = "/" in text
    return Program(
        names=tuple(names),
        kinds=tuple(kind for kind, *_ in rows),
        duration_ns=tuple(duration for _, duration, *_ in rows),
        preds=tuple(needs),
        queue=tuple(queue for _, _, _, queue, _ in rows),
        waits_for=tuple(need if row[0] is OpKind.WAIT else () for need, row in zip(needs, rows, strict=True)),
        queues=tuple(Queue(f"g{number}", link) for number, link in enumerate(links)),
        links=tuple(f"link{link}" for link in sorted(set(links))),
        drains=(False,) * len(rows),
        latency_ns=tuple(latency for _, _, latency, _, _ in rows) if is_merging else (),
        **fields,
    )


def test_a_bound_that_its_certificate_does_not_prove_is_never_returned(monkeypatch: pytest.MonkeyPatch):
    """Whatever finds bounds may be wrong: each goes through the independent checker before anybody calls it proved."""
    work = program("a: compute 5\nb: compute 3 a")
    found = bounds.candidates

    def too_high(*given: Any) -> list[bounds.Candidate]:
        return [replace(candidate, value=candidate.value + 1) for candidate in found(*given)]

    monkeypatch.setattr(bounds, "candidates", too_high)
    with pytest.raises(VerificationError, match="the certificate claims 9 ns and proves 8 ns"):
        lower_bound(work)


def test_compute_takes_its_time():
    bound = lower_bound(program("a: compute 5\nb: compute 7"))
    assert (bound.bound_ns, bound.name) == (12, "compute")


def test_a_path_takes_its_collectives_too():
    given = program("a: compute 5\ng: launch 10 on 0 a\nw: wait g\nb: compute 7 w")
    bound = lower_bound(given)
    assert (bound.bound_ns, bound.name) == (22, "critical path")
    assert simulate(given).step_ns == 22


def test_what_comes_behind_a_launch_does_not_wait_for_its_end():
    given = program("g: launch 10 on 0\nb: compute 7 g")
    assert lower_bound(given).bound_ns == simulate(given).step_ns == 10


def test_queues_that_share_a_link_take_turns():
    given = program("g: launch 10 on 0\nh: launch 9 on 1", links=(0, 0))
    bound = lower_bound(given)
    assert (bound.bound_ns, bound.name) == (19, "communication: link0")
    assert lower_bound(replace(given, queues=(Queue("g0", 0), Queue("g1", 1)), links=("a", "b"))).bound_ns == 10


def test_two_gathers_before_one_matmul_are_one_behind_the_other():
    given = program("g: launch 10 on 0\nh: launch 9 on 0\nv: wait g\nw: wait h\na: compute 7 v w")
    bound = lower_bound(given)
    assert (bound.bound_ns, bound.name) == (26, "heads and tails")
    assert bound.certificate["heads"] == [[4, 1, 0]]


def test_heads_rest_on_heads():
    """The first matmul starts at 19, so the second scatter starts at 24; both scatters are before the last matmul."""
    gathers = "g: launch 10 on 0\nh: launch 9 on 0\nv: wait g\nw: wait h\na: compute 5 v w"
    scatters = "r: launch 8 on 1 a\ns: launch 8 on 1 a\nx: wait r\ny: wait s\nb: compute 3 x y"
    given = program(f"{gathers}\n{scatters}")
    assert lower_bound(given).bound_ns == 10 + 9 + 5 + 8 + 8 + 3 == simulate(given).step_ns


def test_merging_saves_latencies_but_one():
    given = program("g: launch 10/4 on 0\nh: launch 9/4 on 0\nv: wait g\nw: wait h\na: compute 7 v w")
    assert lower_bound(given).bound_ns == 26 - 4
    assert lower_bound(given, MergingAssumption.EXCLUDED).bound_ns == 26


def test_a_member_of_a_bucket_takes_no_less_than_alone():
    assert lower_bound(program("g: launch 10/10 on 0\nw: wait g\na: compute 7 w")).bound_ns == 17


def test_a_bound_without_latencies_says_that_it_leaves_merging_out():
    assert NO_MERGING in lower_bound(program("g: launch 10 on 0")).leaves_out
    assert NO_MERGING not in lower_bound(program("g: launch 10/2 on 0")).leaves_out


def test_one_machine_adds_the_least_before_and_behind_its_tasks():
    """Each gradient takes 5 before its reduction; the last reduction has an update behind it, whichever it is."""
    grads = "\n".join(
        f"a{i}: compute 5\ng{i}: launch 10 on 0 a{i}\nw{i}: wait g{i}\nu{i}: compute 2 w{i}" for i in "012"
    )
    assert lower_bound(program(grads)).bound_ns == 5 + 30 + 2


def test_compute_that_has_its_own_collective_cannot_hide_the_last_one():
    """One gradient at a time: whichever comes last, its reduction is behind all compute."""
    given = program("a: compute 20\ng: launch 8 on 0 a\nb: compute 20\nh: launch 8 on 0 b")
    bound = lower_bound(given)
    assert bound.bound_ns == 48 == simulate(given).step_ns
    deeper = program("a: compute 20\ng: launch 8 on 0 a\nb: compute 20\nh: launch 3 on 0 b")
    assert lower_bound(deeper).bound_ns == 43


def test_cuts_at_both_ends_add_up():
    text = """
        p: launch 6 on 0
        q: launch 6 on 0
        v: wait p
        w: wait q
        a: compute 20 v
        b: compute 20 w
        g: launch 8 on 1 a
        h: launch 8 on 1 b
    """
    bound = lower_bound(program(text))
    assert bound.bound_ns == 6 + 40 + 8


def test_overlap_slows_compute_for_as_long_as_collectives_run_at_least():
    given = program("g: launch 12 on 0\na: compute 100", slowdown_ppm=500_000)
    assert lower_bound(given).bound_ns == 100 + 12 // 3 == simulate(given).step_ns


def test_collectives_slow_for_as_long_as_all_compute_takes_at_least():
    given = program("g: launch 100 on 0\na: compute 50", collective_slowdown_ppm=1_000_000)
    bound = lower_bound(given)
    assert bound.bound_ns == 100 + 50 // 2 == simulate(given).step_ns
    assert (bound.certificate["clock"], check(given, bound.certificate)) == ("wire", 125)
    with pytest.raises(VerificationError, match="claims 125 ns and proves 100 ns"):
        check(given, bound.certificate | {"clock": "wall"})
    with pytest.raises(VerificationError, match="unknown clock 'sun'"):
        check(given, bound.certificate | {"clock": "sun"})


def test_a_path_through_slowed_collectives_is_longer_by_compute_beside_it():
    # g, then a behind it, then h: 40 + 20 + 40. Beside g there is room for b, which slows it.
    text = "g: launch 40 on 0\nw: wait g\na: compute 20 w\nh: launch 40 on 0 a\nb: compute 30"
    given = program(text, collective_slowdown_ppm=1_000_000)
    assert lower_bound(given).bound_ns == (40 + 20 // 2 + 40) + (20 + 30) // 2 == 115
    assert simulate(given, [0, 4, 1, 2, 3]).step_ns == 115


def test_collectives_that_depend_on_each_other_keep_their_latencies():
    chain = "g: launch 10/4 on 0\nv: wait g\na: compute 1 v\nh: launch 10/4 on 0 a\nw: wait h\nb: compute 1 w"
    given = program(f"{chain}\nx: launch 10/4 on 0\ny: launch 10/4 on 0")
    bound = lower_bound(given)
    assert bound.candidates["communication: link0"] == 4 * 6 + 2 * 4
    assert lower_bound(given, MergingAssumption.EXCLUDED).candidates["communication: link0"] == 4 * 10
    assert bound.certificate["chains"] == [[8, 11], []]
    assert check(given, bound.certificate) == bound.bound_ns


def test_a_chain_that_is_none_is_refused():
    given = program("g: launch 10/4 on 0\nh: launch 10/4 on 0\nv: wait g\nw: wait h\na: compute 7 v w")
    certificate = lower_bound(given).certificate
    for chains, why in (([[5, 6]], "6 does not depend"), ([[5], [6]], "two chains"), ([[5, 5]], "5 does not depend")):
        with pytest.raises(VerificationError, match=why):
            check(given, certificate | {"chains": chains})
    with pytest.raises(VerificationError, match="KeyError"):
        check(given, certificate | {"chains": [[4]]})


def test_overlap_costs_the_time_of_both_links_where_one_must_wait_for_the_other():
    """Gathers on one link, then all compute, then a reduction on the other: no two of these run beside each other."""
    text = "g: launch 12 on 0\na: compute 100\nw: wait g\nb: compute 7 w a\nh: launch 30 on 1 b\nc: compute 100 b"
    given = program(text, slowdown_ppm=500_000)
    bound = lower_bound(given)
    assert bound.bound_ns == 207 + (12 + 30) // 3 == simulate(given).step_ns
    overlap: Any = bound.certificate["overlap"]
    assert overlap["claim"]["kind"] == "task"
    assert check(given, bound.certificate) == bound.bound_ns
    assert check(given, bound.certificate | {"overlap": None, "bound_ns": 0}) == 207
    with pytest.raises(VerificationError, match="a memory claim needs the wall clock"):
        check(given, bound.certificate | {"overlap": overlap | {"claim": {"kind": "memory"}}})


def test_a_launch_has_a_gap_behind_it_but_its_collective_does_not_wait():
    given = program("a: compute 5\ng: launch 10 on 0 a\nb: compute 20 a\nw: wait g\nc: compute 5 w b", launch_gap_ns=3)
    assert lower_bound(given).bound_ns == 5 + 3 + 3 + 20 + 3 + 5 == simulate(given).step_ns
    alone = program("g: launch 10 on 0\nw: wait g\na: compute 5 w", launch_gap_ns=3)
    assert lower_bound(alone).bound_ns == 15 == simulate(alone).step_ns


def test_gaps_behind_launches_that_may_be_merged_are_left_out():
    given = program("g: launch 10/1 on 0\nh: launch 10/1 on 0\na: compute 50", launch_gap_ns=3)
    assert lower_bound(given, MergingAssumption.EXCLUDED).bound_ns == 3 + 3 + 50 == simulate(given).step_ns
    assert lower_bound(given).bound_ns == 3 + 50


def test_gaps_pass_between_kernels_but_not_between_parts_of_one():
    given = program("a: compute 5\nb: compute 5\nc: compute 5\nd: compute 5", launch_gap_ns=3)
    assert lower_bound(given).bound_ns == 20 + 3 * 3 == simulate(given).step_ns
    parts = replace(given, kernel=(0, 0, 2, 3))
    assert simulate(parts).step_ns == 20 + 2 * 3
    assert lower_bound(parts).bound_ns == 20 + 3  # one gap is left out: who has parts may be the last or not


# Memory.

# Three weights of 60 bytes are gathered for 10 and used for 4, beside 20 bytes that are given.
WEIGHTS = """x: nothing
g0: launch 10 on 0
w0: wait g0
a0: compute 4 w0
g1: launch 10 on 0
w1: wait g1
a1: compute 4 w1 a0
g2: launch 10 on 0
w2: wait g2
a2: compute 4 w2 a1"""
WEIGHTS_MADE: dict[str, Any] = {
    "allocates": (((0, 20),), ((1, 60),), (), (), ((2, 60),), (), (), ((3, 60),), (), ()),
    "uses": ((), (), (1,), (1,), (), (2,), (2,), (), (3,), (3,)),
    "given": frozenset({0}),
    "kept": frozenset({0}),
}


@pytest.mark.parametrize(
    ("limit", "bound_ns", "name"),
    [
        (None, 34, "heads and tails"),  # three gathers, and the compute behind the last one
        (200, 34, "heads and tails"),  # all three fit: 20 + 3 * 60
        (199, 34, "heads and tails"),  # two of three at once: 3 * 14 / 2 = 21
        (139, 42, "memory"),  # one at a time: each is held for 10 + 4, and 3 * 14 = 42
        (80, 42, "memory"),
    ],
)
def test_weights_that_do_not_fit_beside_each_other_are_held_one_after_the_other(
    limit: int | None, bound_ns: int, name: str
):
    given = program(WEIGHTS, **WEIGHTS_MADE)
    bound = lower_bound(given, memory_limit_bytes=limit)
    assert (bound.bound_ns, bound.name) == (bound_ns, name)
    assert check(given, bound.certificate) >= bound_ns
    in_turn = simulate(given)  # gather, compute, gather, ...: the best order of one weight at a time
    assert (in_turn.step_ns, in_turn.peak_bytes) == (42, 80)


def test_a_bound_of_memory_says_what_it_rests_on():
    bound = lower_bound(program(WEIGHTS, **WEIGHTS_MADE), memory_limit_bytes=100)
    assert bound.rests_on == "at most 1 of 3 storages can live at once within 100 B"


def test_small_storages_count_by_their_bytes():
    # 90 at 10 ns and 30 at 40 ns in a room of 100: (900 + 1200) / 100 = 21, below the collective's 40.
    text = "a: compute 10\ng: launch 40 on 0\nw: wait g"
    made = {"allocates": (((0, 90),), ((1, 30),), ()), "uses": ((), (), (1,))}
    assert lower_bound(program(text, **made), memory_limit_bytes=100).candidates["memory"] == 21


def test_where_collectives_may_be_merged_only_what_they_receive_is_counted_and_only_while_they_run():
    # In one bucket the path of a0, a1 and a2 behind it decides: 10 + 12. A bucket does not fit: 3 * 10, and 4 behind.
    given = program(WEIGHTS.replace("launch 10", "launch 10/9"), **WEIGHTS_MADE)
    assert lower_bound(given).bound_ns == 22
    bound = lower_bound(given, memory_limit_bytes=139)
    assert (bound.bound_ns, bound.name) == (34, "memory")
    assert check(given, bound.certificate) == 34


@pytest.mark.parametrize("limit", [79, 0, -1])
def test_a_limit_that_no_order_can_keep_to_is_refused(limit: int):
    with pytest.raises(BoundError) as refused:
        lower_bound(program(WEIGHTS, **WEIGHTS_MADE), memory_limit_bytes=limit)
    assert str(refused.value) == (
        f"bounds: no order fits into {limit} B: inputs and constants take 20 B and one storage 60 B\n"
        "give a larger memory limit"
    )


@pytest.mark.parametrize(
    "change", [{"count": 0}, {"count": -2}, {"limit_bytes": "x"}, {"count": None, "limit_bytes": 5}]
)
def test_a_claim_about_memory_that_makes_no_sense_is_refused(change: dict[str, Any]):
    given = program(WEIGHTS, **WEIGHTS_MADE)
    certificate: Any = lower_bound(given, memory_limit_bytes=100).certificate
    certificate["claim"] |= change
    with pytest.raises(VerificationError):
        check(given, certificate)


# Nothing, and nonsense.


@pytest.mark.parametrize("text", ["x: nothing", "w: nothing\nx: nothing w", "a: compute 0"])
def test_what_takes_no_time_has_no_bound(text: str):
    bound = lower_bound(program(text))
    assert bound.bound_ns == 0
    assert check(program(text), bound.certificate) == 0


def test_an_empty_program_takes_no_time():
    empty = program("")
    assert lower_bound(empty).bound_ns == check(empty, lower_bound(empty).certificate) == 0


def test_a_program_out_of_order_is_refused():
    given = replace(program("a: compute 5\nb: compute 5"), preds=((1,), ()))
    with pytest.raises(BoundError, match=r"operation 0 \(a\) needs operation 1, which comes later"):
        lower_bound(given)


def test_latencies_that_do_not_fit_are_refused():
    given = program("a: compute 5\ng: launch 10/4 on 0 a")
    with pytest.raises(BoundError, match="1 latencies for 2 operations"):
        lower_bound(replace(given, latency_ns=(4,)))
    with pytest.raises(BoundError, match=r"operation 1 \(g\) has latency 11 of 10 ns"):
        lower_bound(replace(given, latency_ns=(0, 11)))


def test_a_certificate_is_plain_data_and_checked_from_the_program_alone():
    given = program("g: launch 10 on 0\nh: launch 9 on 0\nv: wait g\nw: wait h\na: compute 7 v w")
    certificate = json.loads(json.dumps(lower_bound(given).certificate))
    assert check(given, certificate) == 26
    shorter = replace(given, duration_ns=(10, 9, 0, 0, 6))
    with pytest.raises(VerificationError, match="claims 26 ns and proves 25 ns"):
        check(shorter, certificate)


@pytest.mark.parametrize(
    "change",
    [
        {"claim": {"kind": "task", "node": 99}},
        {"claim": {"kind": "guess"}},
        {"claim": {"kind": "cut", "first": 5, "first_drag": 0, "last": 6, "last_drag": 0}},
        {"heads": [[4, 1]]},
        {"tails": None},
        {"merging": "allowed"},
        {"bound_ns": "many"},
    ],
)
def test_what_is_no_certificate_is_refused(change: dict[str, Any]):
    given = program("g: launch 10 on 0\nh: launch 9 on 0\nv: wait g\nw: wait h\na: compute 7 v w")
    with pytest.raises(VerificationError, match="check bound: this is not a certificate of this program"):
        check(given, lower_bound(given).certificate | change)


def test_a_certificate_of_another_format_is_refused_by_its_name():
    given = program("a: compute 5")
    with pytest.raises(VerificationError, match="weft-bound-4"):
        check(given, lower_bound(given).certificate | {"format": "weft-bound-4"})


# Speed.


@pytest.mark.slow
def test_bounds_take_time_that_grows_with_the_program():
    """Four times the operations take about four times as long; sixteen times would be the square."""

    def seconds(rounds: int) -> float:
        lines = [
            f"g{k}: launch 10/3 on 0\nw{k}: wait g{k}\na{k}: compute 4 w{k} {f'a{k - 1}' if k else ''}\n"
            f"s{k}: launch 7/2 on 1 a{k}"
            for k in range(rounds)
        ]
        given = program("\n".join(lines))
        began = time.perf_counter()
        lower_bound(given)
        return time.perf_counter() - began

    assert min(seconds(1600) for _ in range(2)) < 10 * max(seconds(400) for _ in range(2))
