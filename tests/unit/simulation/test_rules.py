"""The rules of the execution model, one by one, with the arithmetic of each timeline. Times are nanoseconds."""

from __future__ import annotations

import time

import pytest

from tests.unit.simulation.programs import Op, compute, launch, program, view, wait
from weft.errors import GraphError
from weft.simulation.program import Program
from weft.simulation.simulator import simulate
from weft.simulation.timeline import Timeline

SHARED = {"dp": "wire", "tp": "wire", "pp": "wire"}


def spans(timeline: Timeline) -> dict[str, tuple[int, int]]:
    return {span.name: (span.start_ns, span.end_ns) for span in (*timeline.compute, *timeline.collectives)}


def exposed(timeline: Timeline) -> dict[str, int]:
    return {span.name: span.exposed_ns for span in timeline.collectives}


def path(made: Program) -> list[str]:
    return [made.names[op] for op in simulate(made).critical_path]


# The compute stream.


def test_compute_runs_in_order_on_one_stream():
    found = simulate(program(compute("a", 10), compute("b", 20), view("v"), compute("c", 5)))
    assert spans(found) == {"a": (0, 10), "b": (10, 30), "c": (30, 35)}
    assert (found.step_ns, found.compute_us, found.idle_us) == (35, 0.035, 0)


def test_a_gap_passes_between_two_that_are_issued():
    # a [0, 10), gap, b [12, 22), gap, launch at 24, gap, c [26, 36)
    made = program(compute("a", 10), compute("b", 10), launch("g", 4), compute("c", 10), wait("g"), gap_ns=2)
    found = simulate(made)
    assert spans(found) == {"a": (0, 10), "b": (12, 22), "c": (26, 36), "g": (24, 28)}
    assert (found.step_ns, found.idle_us) == (36, 0.006)


def test_what_takes_no_time_is_not_issued():
    found = simulate(program(compute("a", 10), compute("fused", 0), view("v"), compute("b", 10), gap_ns=2))
    assert spans(found) == {"a": (0, 10), "b": (12, 22)}


def test_no_gap_passes_inside_a_kernel():
    # k1 and k2 are one kernel; k3 is cut off from it by b and pays a gap of its own.
    ops = [compute("k1", 5, kernel="k"), compute("k2", 5, kernel="k"), compute("b", 5), compute("k3", 5, kernel="k")]
    assert spans(simulate(program(*ops, gap_ns=2))) == {"k1": (0, 5), "k2": (5, 10), "b": (12, 17), "k3": (19, 24)}


def test_a_read_on_the_host_is_issued_even_if_it_takes_no_time():
    # a [0, 10), gap, the read at 12, and its next kernel is issued only then: gap, b [14, 24)
    found = simulate(program(compute("a", 10), view("item", drains=True), compute("b", 10), gap_ns=2))
    assert spans(found) == {"a": (0, 10), "b": (14, 24)}


# Collectives and waits.


def test_a_collective_runs_beside_compute_and_its_wait_blocks():
    # g [10, 40) beside a2 [10, 30); the wait is reached at 30 and holds b until 40
    found = simulate(program(compute("a1", 10), launch("g", 30), compute("a2", 20), wait("g"), compute("b", 5)))
    assert spans(found) == {"a1": (0, 10), "a2": (10, 30), "b": (40, 45), "g": (10, 40)}
    (span,) = found.collectives
    assert (span.launched_ns, span.waited_ns, span.hidden_ns, span.exposed_ns) == (10, 30, 20, 10)
    assert (span.hidden_by, span.alone_ns) == (("a2",), 30)
    assert (found.communication_us, found.hidden_us, found.exposed_us) == (0.03, 0.02, 0.01)


def test_a_wait_for_what_has_ended_takes_no_time():
    found = simulate(program(launch("g", 10), compute("a", 30), wait("g"), compute("b", 5)))
    assert (found.step_ns, exposed(found)) == (35, {"g": 0})


def test_a_gap_that_passes_during_a_wait_is_not_paid_again():
    # launch at 0, the wait holds until 10; b could have started at 0 + 4, so at 10
    assert spans(simulate(program(launch("g", 10), wait("g"), compute("b", 5), gap_ns=4)))["b"] == (10, 15)
    # the wait ends at 3, within the gap: b starts at 4
    assert spans(simulate(program(launch("g", 3), wait("g"), compute("b", 5), gap_ns=4)))["b"] == (4, 9)


def test_a_queue_runs_its_collectives_one_behind_the_other():
    # g2 is launched at 0 and starts when g1 ends; the stream stands still for g2 from 10 to 50
    found = simulate(program(launch("g1", 30), launch("g2", 20), compute("a", 10), wait("g2"), wait("g1")))
    assert spans(found) == {"g1": (0, 30), "g2": (30, 50), "a": (0, 10)}
    assert exposed(found) == {"g1": 0, "g2": 40}


def test_queues_with_links_of_their_own_run_at_the_same_time():
    found = simulate(program(launch("g", 30, "dp"), launch("t", 20, "tp"), wait("g"), wait("t")))
    assert spans(found) == {"g": (0, 30), "t": (0, 20)}


def test_a_wait_for_several_ends_with_the_last_and_each_is_exposed_for_its_part():
    # a until 10; t ends at 20, g at 30
    found = simulate(program(launch("g", 30, "dp"), launch("t", 20, "tp"), compute("a", 10), wait("g t")))
    assert (found.step_ns, exposed(found)) == (30, {"g": 10, "t": 10})


def test_the_step_ends_with_a_collective_that_nothing_waits_for():
    found = simulate(program(compute("a", 10), launch("g", 30), compute("b", 5)))
    assert (found.step_ns, exposed(found), found.collectives[0].waited_ns) == (40, {"g": 25}, None)


def test_a_collective_of_no_time_ends_where_it_starts():
    # nothing sits in its queue; the one behind it starts at once
    found = simulate(program(launch("g0", 0), launch("g1", 10), wait("g0"), compute("a", 4), wait("g1")))
    assert spans(found) == {"g0": (0, 0), "g1": (0, 10), "a": (0, 4)}


# Shared links.


def test_two_on_one_link_run_at_half_speed():
    # t needs 50 at half speed: [0, 100); g has 50 left then, alone: 150
    made = program(launch("g", 100, "dp"), launch("t", 50, "tp"), wait("t"), wait("g"), links=SHARED)
    assert spans(simulate(made)) == {"g": (0, 150), "t": (0, 100)}


def test_a_link_is_shared_only_while_both_run():
    # g alone until 40, 60 left; both until t is done: 40 + 2 * 20 = 80, g has 40 left: 120
    made = program(launch("g", 100, "dp"), compute("a", 40), launch("t", 20, "tp"), wait("g t"), links=SHARED)
    assert spans(simulate(made)) == {"g": (0, 120), "t": (40, 80), "a": (0, 40)}


def test_what_waits_in_its_queue_takes_no_share_of_the_link():
    # g1 and t share until 40: both done; g2 runs alone
    made = program(launch("g1", 20, "dp"), launch("g2", 20, "dp"), launch("t", 20, "tp"), wait("g2 t"), links=SHARED)
    assert spans(simulate(made)) == {"g1": (0, 40), "t": (0, 40), "g2": (40, 60)}


def test_only_ends_are_rounded_up_and_nothing_that_is_left():
    # From 1 three share: g and t have 9.5 left, so they end at 1 + 28.5 = 29.5, rounded up to 30. By then p has done
    # 29 / 3, and 1 / 3 is left: 30.33, rounded up to 31.
    ops = [launch("g", 10, "dp"), launch("t", 10, "tp"), compute("a", 1), launch("p", 10, "pp"), wait("g t p")]
    assert spans(simulate(program(*ops, links=SHARED))) == {"g": (0, 30), "t": (0, 30), "p": (1, 31), "a": (0, 1)}


@pytest.mark.parametrize(("first_ns", "step_ns"), [(100, 200), (50, 250)])
def test_a_faster_link_can_make_the_step_longer_where_another_is_shared(first_ns: int, step_ns: int):
    # a1 takes 100: b is alone until 100, a2 is alone [100, 200) beside c [100, 200).
    # a1 takes 50: a2 starts at 50 and shares with b, which ends at 50 + 2 * 50 = 150; c [150, 250).
    made = program(
        launch("a1", first_ns, "one"),
        launch("b", 100, "dp"),
        wait("a1"),
        launch("a2", 100, "tp"),
        wait("b"),
        compute("c", 100),
        wait("a2"),
        links=SHARED,
    )
    assert simulate(made).step_ns == step_ns


# Slowdown.


def test_compute_slows_while_a_collective_runs():
    # half as fast: 40 of work takes 80 beside g; the other 20 take 20
    made = program(launch("g", 80), compute("a", 60), wait("g"), slowdown_ppm=1_000_000)
    assert spans(simulate(made)) == {"g": (0, 80), "a": (0, 100)}
    assert simulate(made).compute[0].alone_ns == 60


def test_compute_that_a_collective_covers_is_slow_to_its_end():
    # 10 * 1.189 = 11.89, rounded up
    made = program(launch("g", 80), compute("a", 10), wait("g"), slowdown_ppm=189_000)
    assert spans(simulate(made))["a"] == (0, 12)


def test_slow_progress_is_not_rounded():
    # in 5 ns 5 / 1.189 = 4.205 of 10 are done; 5.795 are left: 10.795, rounded up
    made = program(launch("g", 5), compute("a", 10), wait("g"), slowdown_ppm=189_000)
    assert spans(simulate(made))["a"] == (0, 11)


def test_a_queue_that_goes_on_keeps_compute_slow():
    # g1 [0, 10), g2 [10, 20): 20 / 2 = 10 done by 20, 5 left: 25
    made = program(launch("g1", 10), launch("g2", 10), compute("a", 15), wait("g1 g2"), slowdown_ppm=1_000_000)
    assert spans(simulate(made))["a"] == (0, 25)


# What a timeline says.


def test_the_critical_path_goes_through_what_each_waited_for():
    made = program(compute("a", 10), launch("g", 30), compute("b", 5), wait("g"), compute("c", 5))
    assert path(made) == ["a", "g", "c"]
    made = program(compute("a", 10), launch("g", 30), compute("b", 50), wait("g"), compute("c", 5))
    assert path(made) == ["a", "b", "c"]


def test_the_critical_path_follows_a_queue():
    made = program(compute("a", 10), launch("g1", 30), launch("g2", 30), wait("g2"), compute("c", 5), launch("g3", 9))
    assert path(made) == ["a", "g1", "g2", "c", "g3"]


def test_an_empty_program_takes_no_time():
    found = simulate(program())
    assert (found.step_ns, found.critical_path, found.peak_bytes, found.idle_us) == (0, (), 0, 0)


def test_hidden_by_names_the_longest_overlaps():
    # g [0, 60) beside a 5, b 30, c 10, d 15 of 40: overlaps 5, 30, 10, 15
    ops = [compute("a", 5), compute("b", 30), compute("c", 10), compute("d", 40)]
    (span,) = simulate(program(launch("g", 60), *ops, wait("g"))).collectives
    assert (span.hidden_ns, span.hidden_by) == (60, ("b", "d", "c"))


# Memory.


def test_a_storage_lives_from_its_operation_to_its_last_use():
    ops = [
        compute("a", 10, makes={"s": 100}),
        compute("b", 10, makes={"t": 10}, uses=("s",)),
        compute("c", 10, uses=("t",)),
    ]
    found = simulate(program(*ops))
    assert found.memory == ((0, 0), (0, 100), (10, 110), (20, 10), (30, 0))
    assert found.peak_bytes == 110


def test_inputs_are_there_from_the_beginning_and_outputs_stay():
    ops = [compute("a", 10, makes={"out": 5}), view("x", makes={"in": 7}), compute("b", 10, uses=("in", "out"))]
    found = simulate(program(*ops, given="in", kept="out"))
    assert found.memory == ((0, 7), (0, 12))


@pytest.mark.parametrize(
    ("ending", "memory"),
    [
        # sent and received are held until the wait returns at 50, not only until it is reached or to the last use
        ([wait("g"), compute("b", 10)], ((0, 0), (0, 8), (10, 24), (50, 0))),
        # nothing waits: both are held to the end
        ([compute("b", 10)], ((0, 0), (0, 8), (10, 24))),
    ],
)
def test_a_launch_holds_what_it_sends_and_receives(ending: list[Op], memory: object):
    ops = [compute("a", 10, makes={"sent": 8}), launch("g", 40, makes={"received": 16}, uses=("sent",))]
    assert simulate(program(*ops, *ending)).memory == memory


def test_what_lives_for_no_time_counts_for_the_peak():
    ops = [compute("fused", 0, makes={"s": 100}), compute("end", 0, uses=("s",)), compute("a", 10)]
    assert simulate(program(*ops)).peak_bytes == 100


# Orders.


def test_another_order_is_simulated():
    made = program(compute("a", 10), launch("g", 30), wait("g"), compute("b", 30))
    assert simulate(made).step_ns == 70
    assert simulate(made, [1, 3, 0, 2]).step_ns == 40
    assert simulate(made, [0, 1, 2, 3]) == simulate(made)


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ([1, 0, 2], "simulate: b stands before a, which it needs\nkeep the order of the edges of the program"),
        ([0, 1, 1], "simulate: operation 1 is there twice\norder each of 0 to 2 once"),
        ([0, 1, 3], "simulate: there is no operation 3\norder each of 0 to 2 once"),
        ([0, 1], "simulate: the order has 2 operations, the program 3\norder each of 0 to 2 once"),
    ],
)
def test_an_order_that_is_not_legal_is_refused(order: list[int], message: str):
    made = program(compute("a", 10), compute("b", 10, needs="a"), compute("c", 10))
    with pytest.raises(GraphError) as refused:
        simulate(made, order)
    assert str(refused.value) == message


# Speed.


def test_a_hundred_thousand_operations_take_seconds_at_most():
    # 20 000 rounds: two launches that share a link, compute beside both, a wait for both. About a second where it was
    # measured; the limit leaves room for machines that do something else besides.
    names = ("dp", "tp")
    ops: list[Op] = []
    for k in range(20_000):
        ops += [launch(f"{queue}{k}", 100 + k % 7, queue) for queue in names]
        ops += [compute(f"a{k}", 150 + k % 11), compute(f"b{k}", 0), wait(f"dp{k} tp{k}")]
    made = program(*ops, links=SHARED, gap_ns=2, slowdown_ppm=189_000)
    began = time.perf_counter()
    found = simulate(made)
    assert time.perf_counter() - began < 10
    assert (len(found.compute), len(found.collectives)) == (20_000, 40_000)
