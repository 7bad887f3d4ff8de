"""Random programs with copies on a queue of their own: no order beats the bound, and copies slow no compute."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from random import Random

from tests.property.strategies.programs import random_program
from weft.bounds.lower_bound import lower_bound
from weft.simulation.program import OpKind, Program
from weft.simulation.simulator import run, simulate

NUM_PROGRAMS = 150
MAX_ORDERS = 300
"""Of one program."""


def with_copies(program: Program) -> Program:
    """The program with its last queue as copies on a link of their own."""
    last = len(program.queues) - 1
    queues = tuple(replace(queue, is_copies=k == last, link=k) for k, queue in enumerate(program.queues))
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


def test_no_order_of_a_program_with_copies_beats_its_bound() -> None:
    num_copies = 0
    for seed in range(NUM_PROGRAMS):
        program = with_copies(random_program(Random(seed), 7))
        num_copies += sum(queue == len(program.queues) - 1 for queue in program.queue)
        bound = lower_bound(program).bound_ns
        for order in islice(orders(program), MAX_ORDERS):
            assert bound <= run(program, order).step_ns, f"seed {seed}, order {order}"
    assert num_copies > NUM_PROGRAMS // 4


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
