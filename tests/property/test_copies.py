"""Random programs with copies on queues of their own: no order beats the bound, and copies slow only what they should.

Copies to or from host memory have a link to themselves. Copies through symmetric memory share theirs with collectives.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice, pairwise
from random import Random

import pytest

from tests.property.strategies.programs import random_program, with_peer_copies
from weft.bounds.lower_bound import lower_bound
from weft.simulation.program import MILLION, OpKind, Program
from weft.simulation.simulator import run, simulate

NUM_PROGRAMS = 150
MAX_ORDERS = 300
"""Of one program."""


def with_copies(program: Program) -> Program:
    """The program with its last queue as copies to or from host memory."""
    last = len(program.queues) - 1
    queues = tuple(
        replace(queue, is_copies=k == last, is_host=k == last, link=k) for k, queue in enumerate(program.queues)
    )
    latency = tuple(0 if queue == last else ns for ns, queue in zip(program.latency_ns, program.queue, strict=True))
    return replace(program, queues=queues, links=tuple(queue.group for queue in queues), latency_ns=latency)


def orders(program: Program) -> Iterator[list[int]]:
    """All legal orders."""
    stack: list[list[int]] = [[]]
    while stack:
        order = stack.pop()
        if len(order) == len(program.kinds):
            yield order
        rest = [op for op in range(len(program.kinds)) if op not in order]
        stack += [[*order, op] for op in rest if set(program.preds[op]) <= set(order)]


def num_copies(program: Program) -> int:
    return sum(queue >= 0 and program.queues[queue].is_copies for queue in program.queue)


@pytest.mark.parametrize("kind", ["host", "peer", "both"])
def test_no_order_of_a_program_with_copies_beats_its_bound(kind: str) -> None:
    found = 0
    for seed in range(NUM_PROGRAMS):
        rng = Random(seed)
        program = random_program(rng, 7)
        program = with_copies(program) if kind != "peer" else program
        program = with_peer_copies(rng, program) if kind != "host" else program
        found += num_copies(program)
        bound = lower_bound(program).bound_ns
        for order in islice(orders(program), MAX_ORDERS):
            assert bound <= run(program, order).step_ns, f"seed {seed}, order {order}"
    assert found > NUM_PROGRAMS // 4


def test_copies_alone_change_no_time_of_compute() -> None:
    for seed in range(NUM_PROGRAMS):
        program = with_copies(random_program(Random(seed), 12))
        last = len(program.queues) - 1
        alone = tuple(
            0 if 0 <= queue < last else ns for ns, queue in zip(program.duration_ns, program.queue, strict=True)
        )
        timeline = simulate(replace(program, duration_ns=alone))
        assert all(span.end_ns - span.start_ns == span.alone_ns for span in timeline.compute), f"seed {seed}"
        assert all(span.end_ns - span.start_ns == span.alone_ns for span in timeline.copies), f"seed {seed}"
        assert all(program.kinds[span.op] is OpKind.LAUNCH for span in timeline.copies)


def test_compute_is_slowed_exactly_by_the_collective_or_copy_beside_it_that_slows_it_most() -> None:
    slowed = 0
    for seed in range(NUM_PROGRAMS):
        rng = Random(seed)
        program = with_peer_copies(rng, random_program(rng, 14))
        timeline = simulate(program)
        for span in timeline.compute:
            edges = {span.start_ns, span.end_ns}
            for each in timeline.collectives:
                edges |= {time for time in (each.start_ns, each.end_ns) if span.start_ns < time < span.end_ns}
            work, times = 0.0, sorted(edges)
            for start, end in pairwise(times):
                beside = [each for each in timeline.collectives if each.start_ns <= start and end <= each.end_ns]
                work += (end - start) * min((speed_beside(program, each.op) for each in beside), default=1.0)
            slowed += work < span.end_ns - span.start_ns - 1
            assert span.alone_ns <= work + 1e-6 < span.alone_ns + 1 + 1e-6, f"seed {seed}, {span.name}"
    assert slowed > NUM_PROGRAMS // 4


def speed_beside(program: Program, launch: int) -> float:
    """The speed of compute beside one launch."""
    if program.queues[program.queue[launch]].is_copies:
        return 1 - (program.sm_share_ppm[launch] if program.sm_share_ppm else 0) / MILLION
    return MILLION / (MILLION + program.slowdown_ppm)
