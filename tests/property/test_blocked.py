"""What lifting a block gains is never more than is told, in random orders of random programs.

All else is held as it was: every operation keeps the time that it took, and a second collective, which only those who
wait for the first one see, ends as early as the first would without its block.
"""

from __future__ import annotations

import os
from dataclasses import replace
from random import Random

import pytest

from tests.property.strategies.programs import random_gradients, random_order, random_program
from weft.plan.decision import Decision, Reason
from weft.scheduling.explanation import explain_exposed
from weft.scheduling.search import Outcome
from weft.simulation.memory import memory_of
from weft.simulation.program import OpKind, Program, Queue
from weft.simulation.simulator import OperationTimes, run

NUM_PROGRAMS = 3000 if os.environ.get("WEFT_FUZZ") == "full" else 150


def outcome_of(program: Program, order: list[int], spare_bytes: int) -> Outcome:
    trace = run(program, order)
    peak, curve = memory_of(program, order, trace.reached_ns, trace.end_ns)
    return Outcome(
        program=program,
        order=order,
        buckets=(),
        step_ns=trace.step_ns,
        peak_bytes=peak,
        num_evaluations=1,
        trace=trace,
        memory=curve,
        duration_ns=program.duration_ns,
        given_exposed_ns=run(program).exposed_ns,
        limit_bytes=peak + spare_bytes,
    )


def frozen(program: Program, trace: OperationTimes) -> Program:
    """Each operation takes the time that it took; nothing shares a link, and nothing slows down."""
    took = (end - start for start, end in zip(trace.start_ns, trace.end_ns, strict=True))
    timed = (kind in (OpKind.COMPUTE, OpKind.LAUNCH) for kind in program.kinds)
    return replace(
        program,
        duration_ns=tuple(ns if is_timed else 0 for ns, is_timed in zip(took, timed, strict=True)),
        queues=tuple(Queue(queue.group, number) for number, queue in enumerate(program.queues)),
        links=tuple(queue.group for queue in program.queues),
        slowdown_ppm=0,
        collective_slowdown_ppm=0,
    )


def lifted(program: Program, trace: OperationTimes, decision: Decision) -> tuple[Program, list[int]]:
    """A program in which those who wait for an exposed collective wait for one that is not held back."""
    op = program.names.index(decision.nodes[0])
    is_all = decision.gain_us == decision.exposed_us
    end = trace.reached_ns[op] if is_all else trace.end_ns[op] - round(decision.gain_us * 1000)
    ghost, queue = len(program.names), len(program.queues)
    made = replace(
        program,
        names=(*program.names, "ghost"),
        kinds=(*program.kinds, OpKind.LAUNCH),
        duration_ns=(*program.duration_ns, max(end - trace.reached_ns[op], 0)),
        preds=(*program.preds, ()),
        queue=(*program.queue, queue),
        waits_for=(*(tuple(ghost if launch == op else launch for launch in each) for each in program.waits_for), ()),
        queues=(*program.queues, Queue("ghost", queue)),
        links=(*program.links, "ghost"),
        drains=(*program.drains, False),
        allocates=(),
        uses=(),
        kernel=(*program.kernel, -1) if program.kernel else (),
    )
    order = [each for old in trace.order for each in ((old, ghost) if old == op else (old,))]
    return made, order


def test_lifting_a_block_gains_no_more_than_is_told():
    reasons: dict[Reason, int] = {}
    num_gained = 0
    for seed in range(NUM_PROGRAMS):
        rng = Random(seed)
        made = random_program(rng, 30) if seed % 2 else random_gradients(rng, 5)
        program = replace(made, launch_gap_ns=0)
        outcome = outcome_of(program, random_order(rng, program), rng.choice((0, 50, 1000)))
        decisions = explain_exposed("schedule-overlap", program, outcome)
        trace, still = outcome.trace, frozen(program, outcome.trace)
        assert run(still, outcome.order).step_ns == trace.step_ns, seed
        exposed = [decision for decision in decisions if decision.exposed_us]
        assert sum(round(each.exposed_us * 1000) for each in exposed) == sum(trace.exposed_ns.values()), seed
        for decision in exposed:
            assert 0 < decision.gain_us <= decision.exposed_us, (seed, decision)
            gain = trace.step_ns - run(*lifted(still, trace, decision)).step_ns
            assert 0 <= gain <= round(decision.gain_us * 1000), (seed, decision, gain)
            num_gained += gain > 0
            reasons[decision.reason] = reasons.get(decision.reason, 0) + 1
    assert num_gained > NUM_PROGRAMS  # the test is one only where something is gained
    assert set(reasons) == {reason for reason in Reason if reason.value.startswith("exposed-by-")}, reasons


@pytest.mark.parametrize("seed", range(20))
def test_every_collective_is_told_of_exactly_once(seed: int):
    rng = Random(seed)
    program = random_program(rng, 30)
    outcome = outcome_of(program, random_order(rng, program), 0)
    told = [name for each in explain_exposed("schedule-overlap", program, outcome) for name in each.nodes]
    assert sorted(told) == sorted(
        name for name, kind in zip(program.names, program.kinds, strict=True) if kind is OpKind.LAUNCH
    )
