"""The search against the optimum of small random programs, by CP-SAT: how far it is at most, and on average.

`make test` runs a few hundred programs; `make test-full` (WEFT_FUZZ=full) runs thousands.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from random import Random
from statistics import mean
from typing import Any

import pytest

from tests.property.strategies.programs import random_gradients, random_program
from weft.bounds.lower_bound import lower_bound
from weft.bounds.problem import MergingAssumption
from weft.scheduling.search import search
from weft.simulation.program import OpKind, Program
from weft.simulation.simulator import run

NUM_PROGRAMS = 1500 if os.environ.get("WEFT_FUZZ") == "full" else 100
CHUNK = 25
CHUNKS = [range(start, start + CHUNK) for start in range(0, NUM_PROGRAMS, CHUNK)]
MEAN, WORST = 0.01, 0.05
"""By how much the search may be longer than the optimum."""


def with_output(program: Program) -> Program:
    """The program with an output at its end, as those of graphs have, no memory, and a kernel for each operation."""
    nothing = ((),) * (len(program.kinds) + 1)
    return replace(
        program,
        names=(*program.names, "output"),
        kinds=(*program.kinds, OpKind.NOTHING),
        duration_ns=(*program.duration_ns, 0),
        preds=(*program.preds, ()),
        queue=(*program.queue, -1),
        waits_for=(*program.waits_for, ()),
        drains=(*program.drains, False),
        latency_ns=(*program.latency_ns, 0),
        allocates=nothing,
        uses=nothing,
        kernel=(),
    )


def shortest(program: Program) -> tuple[int, list[int]]:
    """The shortest step where each queue has its link to itself, and an order that has it.

    Launches and waits are points on the stream that lie inside no compute: what is launched or waited for between two
    kernels comes behind the first. So every solution is an order, and every order is a solution
    (but that a queue here may take its launches in another order than the stream issues them).
    """
    cp_model = pytest.importorskip("ortools.sat.python.cp_model", reason="no ortools here: no optimum to compare with")
    model: Any = cp_model.CpModel()
    horizon = sum(program.duration_ns) + 1
    at = [model.new_int_var(0, horizon, "") for _ in program.kinds]
    ends: list[Any] = list(at)
    step = model.new_int_var(0, horizon, "")
    stream: list[Any] = []
    queues: dict[int, list[Any]] = {}
    begins: dict[int, Any] = {}
    for op, (kind, ns) in enumerate(zip(program.kinds, program.duration_ns, strict=True)):
        on_stream = ns if kind is OpKind.COMPUTE else 0
        if kind is not OpKind.NOTHING:
            stream.append(model.new_fixed_size_interval_var(at[op], on_stream, ""))
            ends[op] = at[op] + on_stream
        if kind is OpKind.LAUNCH:
            begins[op] = model.new_int_var(0, horizon, "")
            model.add(begins[op] >= at[op])
            queues.setdefault(program.queue[op], []).append(model.new_fixed_size_interval_var(begins[op], ns, ""))
        model.add(step >= (begins[op] + ns if kind is OpKind.LAUNCH else ends[op]))
        for pred in program.preds[op]:
            model.add(at[op] >= ends[pred])
        for launch in program.waits_for[op]:
            model.add(at[op] >= begins[launch] + program.duration_ns[launch])
    for intervals in (stream, *queues.values()):
        model.add_no_overlap(intervals)
    model.minimize(step)
    solver: Any = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.max_deterministic_time = 60
    assert solver.solve(model) == cp_model.OPTIMAL
    moments = [solver.value(time) for time in at]
    begun = {op: solver.value(begin) for op, begin in begins.items()}
    return int(solver.objective_value), _order(program, moments, begun)


def _order(program: Program, moments: list[int], begun: dict[int, int]) -> list[int]:
    """The operations by time; a launch goes no earlier than those that begin before it on its queue."""
    when, last = list(moments), dict[int, int]()
    for op in sorted(begun, key=lambda op: (begun[op], moments[op], op)):
        last[program.queue[op]] = when[op] = max(moments[op], last.get(program.queue[op], 0))
    takes = [ns if kind is OpKind.COMPUTE else 0 for kind, ns in zip(program.kinds, program.duration_ns, strict=True)]
    return sorted(range(len(when)), key=lambda op: (when[op], when[op] + takes[op], begun.get(op, 0), op))


GENERATORS: dict[str, Callable[[Random], Program]] = {
    "programs": lambda rng: random_program(rng, 14, is_plain=True),
    "gradients": lambda rng: random_gradients(rng, 3, is_plain=True),
}


def test_the_optimum_is_the_step_of_an_order():
    for seed in range(CHUNK):
        program = with_output(GENERATORS["gradients"](Random(seed)))
        best, order = shortest(program)
        assert run(program, order).step_ns == best, f"seed {seed}"


@pytest.mark.parametrize("seeds", CHUNKS, ids=lambda seeds: f"seeds {seeds.start}-{seeds.stop - 1}")
@pytest.mark.parametrize("kind", GENERATORS)
def test_the_search_is_within_a_hundredth_of_the_optimum_and_no_bound_is_above_it(kind: str, seeds: range):
    excess: dict[int, float] = {}
    for seed in seeds:
        program = with_output(GENERATORS[kind](Random(seed)))
        best, _ = shortest(program)
        found = search(program).step_ns
        assert lower_bound(program, MergingAssumption.EXCLUDED).bound_ns <= best <= found, f"seed {seed}"
        excess[seed] = found / best - 1 if best else 0.0
    worst = sorted(excess, key=lambda seed: -excess[seed])[:3]
    print(f"{kind}: mean {mean(excess.values()):.3%}, worst {[(seed, f'{excess[seed]:.1%}') for seed in worst]}")
    assert mean(excess.values()) <= MEAN
    assert excess[worst[0]] <= WORST + 1e-9, f"seed {worst[0]}"
