"""The search on programs by hand: what it finds, what it never exceeds, and how much it tries."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.tiers import quick_first
from tests.unit.simulation.programs import Op, compute, launch, program, view, wait
from weft.scheduling.jobs import Jobs
from weft.scheduling.search import LEAST, MOST, SPARE_BYTES, Effort, search
from weft.simulation.program import Program
from weft.simulation.simulator import run, simulate

OUTPUT = view("output")


def small() -> Program:
    """A gather in front of what needs it, and a weight gradient behind: 10 + 100 + 90 + 30 as given."""
    return program(
        compute("a", 10),
        launch("g", 100, needs="a"),
        wait("g"),
        compute("b", 30, "wait_g"),
        compute("f", 90, "a"),
        OUTPUT,
    )


def names(source: Program, order: object) -> list[str]:
    return [source.names[op] for op in order]  # type: ignore[attr-defined]


def test_a_weight_gradient_hides_a_gather():
    """10 of `a`, 100 of the gather with all of `f` beside it, 30 of `b`."""
    source = small()
    found = search(source)
    assert run(source).step_ns == 10 + 100 + 30 + 90
    assert found.step_ns == 10 + 100 + 30
    assert names(source, found.order) == ["a", "g", "f", "wait_g", "b", "output"]
    assert run(source, found.order).step_ns == found.step_ns


def test_what_cannot_be_improved_stays_as_it_is():
    source = program(compute("a", 10), launch("g", 50, needs="a"), wait("g"), compute("b", 10, "wait_g"), OUTPUT)
    found = search(source)
    assert list(found.order) == [0, 1, 2, 3, 4]
    assert found.buckets == ()


def test_a_program_without_collectives_is_not_searched():
    found = search(program(compute("a", 10), compute("b", 10), OUTPUT))
    assert (found.num_evaluations, list(found.order)) == (0, [0, 1, 2])


@pytest.mark.parametrize("effort", quick_first(["fast", "default", "best"], 2))
def test_effort_bounds_the_number_of_evaluations(effort: Effort):
    assert LEAST[effort] <= search(layers(30), effort).num_evaluations <= MOST[effort]


def test_the_same_program_gives_the_same_order_every_time():
    first, second = search(layers(12)), search(layers(12))
    assert (list(first.order), first.step_ns, first.num_evaluations) == (
        list(second.order),
        second.step_ns,
        second.num_evaluations,
    )


def layers(num: int) -> Program:
    """Each gathers a weight of 64 bytes in 80, computes for 100, and reduces a gradient of 64 bytes in 60."""
    ops: list[Op] = [view("x", makes={"x": 8})]
    last = "x"
    for k in range(num):
        ops += [
            launch(f"g{k}", 80, makes={f"w{k}": 64}),
            wait(f"g{k}"),
            compute(f"a{k}", 100, f"wait_g{k} {last}", makes={f"y{k}": 8}, uses=(f"w{k}",)),
            compute(f"d{k}", 50, f"a{k}", makes={f"dw{k}": 64}, uses=(f"y{k}",)),
            launch(f"r{k}", 60, needs=f"d{k}", makes={f"s{k}": 8}, uses=(f"dw{k}",)),
            wait(f"r{k}"),
        ]
        last = f"a{k}"
    return program(*ops, OUTPUT)


def test_layers_are_pipelined():
    """The first gather and the last reduction are exposed, and nothing else: 80 + 12 * 150 + 60 at most."""
    source = layers(12)
    found = search(source)
    assert run(source).step_ns == 12 * (80 + 150 + 60)
    assert found.step_ns <= 80 + 12 * 150 + 60


def test_the_peak_is_that_of_the_order_and_never_above_the_limit():
    source = layers(12)
    least = simulate(source).peak_bytes
    for limit in (least, least + 16, least + 64, least + 200, None):
        found = search(source, limit_bytes=limit)
        assert simulate(source, found.order).peak_bytes == found.peak_bytes
        assert found.peak_bytes <= (least + SPARE_BYTES if limit is None else limit)


def test_more_memory_makes_no_longer_step():
    source = layers(8)
    least = simulate(source).peak_bytes
    steps = [search(source, limit_bytes=least + more).step_ns for more in (0, 64, 500)]
    assert steps == sorted(steps, reverse=True)
    assert steps[0] > steps[-1]


def test_an_order_that_uses_too_much_is_given_up_for_one_that_fits():
    """All gathers at the beginning hold 6 * 64 bytes; launched one by one, no more than half of that is needed."""
    gathers = [launch(f"g{k}", 80, makes={f"w{k}": 64}) for k in range(6)]
    uses = [
        op
        for k in range(6)
        for op in (wait(f"g{k}"), compute(f"a{k}", 100, f"wait_g{k} a{k - 1}" if k else "wait_g0", uses=(f"w{k}",)))
    ]
    source = program(*gathers, *uses, OUTPUT)
    assert simulate(source).peak_bytes == 6 * 64
    found = search(source, limit_bytes=3 * 64)
    assert found.peak_bytes <= 3 * 64
    assert found.step_ns == run(source).step_ns == 80 + 6 * 100


def test_what_nothing_can_meet_is_told_with_the_least_and_that_is_met():
    source = layers(4)
    refused = search(source, limit_bytes=10)
    assert refused.peak_bytes > 10
    again = search(source, limit_bytes=refused.peak_bytes)
    assert again.peak_bytes <= refused.peak_bytes


class LatencyOf40:
    """Launches of one queue may be one; of each time all but 40 are bytes."""

    def __init__(self, jobs: Jobs) -> None:
        self.jobs = jobs

    def key(self, launch: int) -> int:
        return self.jobs.queue[launch]

    def latency(self, launch: int) -> int:
        return 40

    def duration(self, launches: tuple[int, ...]) -> int:
        return 40 + sum(self.jobs.duration[launch] - 40 for launch in launches)


def test_launches_that_need_each_other_never_become_one():
    source = program(
        launch("g", 50),
        wait("g"),
        compute("a", 10, "wait_g"),
        launch("h", 50, needs="a"),
        wait("h"),
        compute("b", 10, "wait_h"),
        OUTPUT,
    )
    assert search(source, merging=LatencyOf40).buckets == ()  # type: ignore[arg-type]


def test_launches_beside_each_other_become_one():
    """Three reductions of 50 behind 10 of compute: 10 + 150 apart, 10 + 40 + 30 as one."""
    ops = [compute("a", 10), *(launch(f"r{k}", 50, needs="a") for k in range(3))]
    source = program(*ops, *(wait(f"r{k}") for k in range(3)), OUTPUT)
    found = search(source, merging=LatencyOf40)  # type: ignore[arg-type]
    assert found.step_ns == 10 + 40 + 3 * 10
    assert [len(bucket) for bucket in found.buckets] == [3]


def test_launches_become_one_to_save_the_host_time():
    """The host needs 100 for each launch: four reductions of 50 take 10 + 400 + 50 apart, 10 + 100 + 80 as one."""
    ops = [compute("a", 10), *(launch(f"r{k}", 50, needs="a") for k in range(4))]
    source = program(*ops, *(wait(f"r{k}") for k in range(4)), OUTPUT)
    source = replace(source, host_ns=(10, *[100] * 4, *[0] * 5))
    found = search(source, merging=LatencyOf40)  # type: ignore[arg-type]
    assert run(source).step_ns == 10 + 4 * 100 + 50
    assert [len(bucket) for bucket in found.buckets] == [4]
    assert found.step_ns == 10 + 100 + 40 + 4 * 10


def test_a_read_by_the_host_moves_to_where_it_delays_least():
    """Before `a`, the host waits for `c` only, and issues the small kernels while `a` runs."""
    small_kernels = [compute(f"k{k}", 10, "r" if k == 0 else f"k{k - 1}") for k in range(5)]
    source = program(
        compute("c", 10),
        compute("a", 1000),
        launch("g", 50, needs="a"),
        compute("r", 0, "c", drains=True),
        *small_kernels,
        wait("g"),
        OUTPUT,
    )
    source = replace(source, host_ns=(10, 10, 10, 10, *[100] * 5, 0, 0))
    found = search(source)
    assert run(source).step_ns == 10 + 10 + 1000 + 5 * 100 + 10
    order = names(source, found.order)
    assert order.index("r") < order.index("a")
    assert found.step_ns < 10 + 10 + 1000 + 5 * 10 + 50


def training_step(num: int) -> Program:
    """Layers of 100, each with a cast and a reduction of 160, of which 40 is latency, and an optimizer at the end."""
    made: list[Op] = []
    for k in range(num):
        made += [compute(f"a{k}", 100, f"a{k - 1}" if k else ""), compute(f"c{k}", 2, f"a{k}")]
        made.append(launch(f"r{k}", 160, needs=f"c{k}"))
    made += [wait(f"r{k}") for k in range(num)]
    moments = compute("moments", 2000, " ".join(f"wait_r{k}" for k in range(num)))
    return program(*made, moments, compute("p", 1000, "moments"), compute("q", 1000, "moments"), OUTPUT)


def test_reductions_that_only_an_optimizer_needs_are_merged_as_their_queue_is_free():
    """100 + 2 before the first, 400 x 120 of bytes in 6 buckets, and 4000 after the last; the tail of casts is exposed.

    Without settings for late launches, the search finds 54 632.
    """
    found = search(training_step(400), merging=LatencyOf40)  # type: ignore[arg-type]
    assert found.step_ns <= 54_414
    assert found.settings[0].together
    assert found.settings[0].at_once
