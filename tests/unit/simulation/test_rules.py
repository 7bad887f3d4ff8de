"""What a timeline says, other orders, and speed. The rules of the model, one by one: `tests/golden/timelines`."""

from __future__ import annotations

import time

import pytest

from tests.unit.simulation.programs import Op, compute, launch, program, wait
from weft.errors import GraphError
from weft.simulation.program import Program
from weft.simulation.simulator import simulate

SHARED = {"dp": "wire", "tp": "wire"}


def path(made: Program) -> list[str]:
    return [made.names[op] for op in simulate(made).critical_path]


# What a timeline says.


def test_a_collective_says_when_it_was_launched_and_waited_for_and_what_hid_it():
    # a1 [0, 10), gap, launch at 12, g [12, 42), gap, a2 [14, 34), the wait holds b until 42
    ops = [compute("a1", 10), launch("g", 30), compute("a2", 20), wait("g"), compute("b", 5)]
    found = simulate(program(*ops, gap_ns=2))
    (span,) = found.collectives
    assert (span.launched_ns, span.waited_ns, span.hidden_ns, span.exposed_ns) == (12, 34, 20, 8)
    assert (span.hidden_by, span.alone_ns) == (("a2",), 30)
    assert (found.communication_us, found.hidden_us, found.exposed_us) == (0.03, 0.02, 0.008)
    assert (found.step_us, found.compute_us, found.idle_us) == (0.047, 0.035, 0.004)


def test_what_takes_longer_says_what_it_takes_alone():
    made = program(launch("g", 80), compute("a", 60), wait("g"), slowdown_ppm=1_000_000)
    assert [span.alone_ns for span in simulate(made).compute] == [60]


def test_what_nothing_waits_for_was_never_waited_for():
    assert simulate(program(compute("a", 10), launch("g", 30))).collectives[0].waited_ns is None


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


# Orders.


def test_another_order_is_simulated():
    made = program(compute("a", 10), launch("g", 30), wait("g"), compute("b", 30))
    assert simulate(made).step_ns == 70
    assert simulate(made, [1, 3, 0, 2]).step_ns == 40
    assert simulate(made, [0, 1, 2, 3]) == simulate(made)


@pytest.mark.parametrize(
    ("order", "message"),
    [
        (
            [1, 0, 2],
            "simulate: b comes before a, which it needs\ngive an order that respects the edges of the program",
        ),
        ([0, 1, 1], "simulate: operation 1 appears twice\nlist each of 0 to 2 once"),
        ([0, 1, 3], "simulate: operation 3 does not exist\nlist each of 0 to 2 once"),
        ([0, 1], "simulate: the order has 2 operations, the program 3\nlist each of 0 to 2 once"),
    ],
)
def test_an_order_that_is_not_legal_is_refused(order: list[int], message: str):
    made = program(compute("a", 10), compute("b", 10, needs="a"), compute("c", 10))
    with pytest.raises(GraphError) as refused:
        simulate(made, order)
    assert str(refused.value) == message


# Speed.


@pytest.mark.slow
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
