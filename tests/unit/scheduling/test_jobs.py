"""Programs cut into jobs, and jobs put back into an order of all operations."""

from __future__ import annotations

from tests.unit.simulation.programs import Op, compute, launch, program, view, wait
from weft.scheduling.jobs import FUSED_SPAN, NO_JOB, Emitter, Jobs, jobs_of
from weft.simulation.program import Program
from weft.simulation.simulator import check_order

OUTPUT = view("output")


def cut(*ops: Op, gap_ns: int = 0) -> Jobs:
    return jobs_of(program(*ops, OUTPUT, gap_ns=gap_ns))


def names(jobs: Jobs) -> list[str]:
    """The operations of each job."""
    return [" ".join(jobs.program.names[op] for op in members) for members in jobs.ops]


def job(jobs: Jobs, name: str) -> int:
    return jobs.job_of[jobs.program.names.index(name)]


def needed(jobs: Jobs, name: str) -> tuple[set[str], set[str]]:
    """What a job needs issued, and what it needs ended, by their first operations."""
    first = [jobs.program.names[members[0]] for members in jobs.ops]
    mine = job(jobs, name)
    return {first[p] for p in jobs.preds[mine]}, {first[p] for p in jobs.comm_preds[mine]}


def emitted(jobs: Jobs, *events: str) -> list[str]:
    """All operations where events have them: `name` is run or launched, `~name` is waited for."""
    numbers = [~job(jobs, event[1:]) if event.startswith("~") else job(jobs, event) for event in events]
    order = Emitter(jobs).order(numbers)
    check_order(jobs.program, order)
    return [jobs.program.names[op] for op in order]


# Cutting.


def test_a_kernel_or_a_launch_is_a_job_views_and_waits_are_none():
    jobs = cut(compute("a", 10), view("v", "a"), launch("g", 30, needs="v"), wait("g"), compute("b", 5, "wait_g"))
    assert names(jobs) == ["a", "g", "b"]
    assert [jobs.job_of[jobs.program.names.index(name)] for name in ("v", "wait_g", "output")] == [NO_JOB] * 3
    assert jobs.duration == (10, 30, 5)
    assert jobs.queue == (-1, 0, -1)


def test_what_views_and_waits_need_is_handed_on():
    jobs = cut(
        compute("a", 10),
        launch("g", 30, needs="a"),
        launch("h", 30, needs="a"),
        wait("g h"),
        view("v", "wait_g_h a"),
        compute("b", 5, "v"),
        compute("c", 5, "a"),
    )
    assert needed(jobs, "b") == ({"a", "g", "h"}, {"g", "h"})
    assert needed(jobs, "g") == ({"a"}, set())
    assert jobs.succs[job(jobs, "g")] == (job(jobs, "b"),)


def test_the_operations_of_a_fused_kernel_are_one_job():
    parts = compute("a", 3, kernel="k"), compute("c", 5, "a", kernel="k")
    jobs = cut(parts[0], compute("b", 4), parts[1], launch("g", 9, needs="b"))
    assert names(jobs) == ["a c", "b", "g"]
    assert jobs.duration[0] == 8


def test_a_fused_kernel_that_cannot_run_in_one_piece_is_cut():
    """Between its two operations stands a collective that one makes and the other needs."""
    jobs = cut(
        compute("a", 3, kernel="k"),
        launch("g", 9, needs="a"),
        wait("g"),
        compute("b", 4, "wait_g", kernel="k"),
    )
    assert names(jobs) == ["a", "g", "b"]


def test_operations_of_one_kernel_that_are_far_apart_are_jobs_of_their_own():
    between = [compute(f"b{k}", 1) for k in range(FUSED_SPAN)]
    near, far = [
        cut(compute("a", 3, kernel="k"), *others, compute("c", 4, kernel="k")) for others in (between[1:], between)
    ]
    assert "a c" in names(near)
    assert {"a", "c"} <= {*names(far)}


def test_kernels_that_only_follow_one_another_are_one_job():
    jobs = cut(compute("a", 3), compute("b", 4, "a"), compute("c", 5, "b"), compute("d", 6))
    assert names(jobs) == ["a b c", "d"]


def test_a_chain_is_cut_where_a_launch_or_another_kernel_needs_it():
    jobs = cut(compute("a", 3), launch("g", 9, needs="a"), compute("b", 4, "a"), compute("c", 5, "b"))
    assert names(jobs) == ["a", "g", "b c"]


def test_a_gap_passes_before_each_kernel_of_a_job():
    jobs = cut(compute("a", 3, kernel="k"), compute("b", 4, "a", kernel="k"), compute("c", 5, "b"), gap_ns=2)
    assert names(jobs) == ["a b c"]
    assert jobs.duration == (3 + 4 + 5 + 2 * 2,)


# Putting back.


def two_gathers() -> Program:
    return program(
        view("x"),
        launch("g", 30, needs="x"),
        launch("h", 30, needs="x"),
        wait("g"),
        wait("h"),
        view("v", "wait_g"),
        compute("a", 10, "v"),
        compute("b", 10, "wait_h"),
        OUTPUT,
    )


def test_views_follow_what_they_need_and_waits_stand_where_they_are_asked_for():
    jobs = jobs_of(two_gathers())
    assert emitted(jobs, "g", "~g", "h", "a", "~h", "b") == ["x", "g", "wait_g", "v", "h", "a", "wait_h", "b", "output"]
    assert emitted(jobs, "h", "g", "~h", "b", "~g", "a") == ["x", "h", "g", "wait_h", "b", "wait_g", "v", "a", "output"]


def test_a_wait_for_two_launches_stands_behind_the_second_that_is_asked_for():
    jobs = cut(launch("g", 30), launch("h", 30), wait("g h"), compute("a", 10), compute("b", 10, "wait_g_h"))
    assert emitted(jobs, "g", "h", "~g", "a", "~h", "b") == ["g", "h", "a", "wait_g_h", "b", "output"]


def test_a_second_wait_that_needs_the_first_is_there_once():
    again = Op("again", wait("g").kind, waits_for=("g",), needs=("wait_g",))
    jobs = cut(launch("g", 30), wait("g"), again, compute("a", 10, "again"))
    assert emitted(jobs, "g", "~g", "~g", "a") == ["g", "wait_g", "again", "a", "output"]
