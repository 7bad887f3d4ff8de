"""Bounds are below the optimum of small random programs, the optimum is below every order; no certificate lies.

`make test` runs a few hundred programs; `make test-full` (WEFT_FUZZ=full) runs thousands.
"""

from __future__ import annotations

import copy
import json
import os
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.errors import VerificationError
from weft.simulation.bounds import lower_bound
from weft.simulation.check_bound import check
from weft.simulation.program import Program, Queue, Sort
from weft.simulation.simulator import simulate
from weft.simulation.tasks import Merging

NUM_PROGRAMS = 4000 if os.environ.get("WEFT_FUZZ") == "full" else 150
NUM_ORDERS = 6


def random_program(rng: Random, max_ops: int = 12, is_plain: bool = False) -> Program:
    """A program of all sorts of operations; a plain one has a link per queue, no gap and no slowdown."""
    num_queues = rng.randint(1, 3)
    num_links = num_queues if is_plain else rng.randint(1, num_queues)
    links = [*range(num_queues)] if is_plain else [rng.randrange(num_links) for _ in range(num_queues)]
    sorts: list[Sort] = []
    wanted = [Sort.COMPUTE, Sort.COMPUTE, *[Sort.LAUNCH] * rng.randint(1, 3), Sort.NOTHING]
    durations, latencies, queues = [], [], []
    preds: list[tuple[int, ...]] = []
    waits: list[tuple[int, ...]] = []
    density = rng.choice((0.5, 1.0, 2.0))
    for op in range(rng.randint(max_ops // 3, max_ops)):
        pending = [before for before in range(op) if sorts[before] is Sort.LAUNCH]
        sort = rng.choice([*wanted, *[Sort.WAIT] * (2 * bool(pending))])
        before = [other for other in range(op) if rng.random() < density / (op + 1)]
        if op and rng.random() < 0.5:
            before.append(rng.randrange(op))
        launches = rng.sample(pending, rng.randint(1, min(2, len(pending)))) if sort is Sort.WAIT else []
        is_timed = sort in (Sort.COMPUTE, Sort.LAUNCH)
        sorts.append(sort)
        durations.append(rng.choice((0, *[rng.randint(1, 30)] * 9)) if is_timed else 0)
        latencies.append(rng.randint(0, durations[-1]) if sort is Sort.LAUNCH else 0)
        queues.append(rng.randrange(num_queues) if sort is Sort.LAUNCH else -1)
        preds.append(tuple(sorted({*before, *launches})))
        waits.append(tuple(sorted(launches)))
    return Program(
        names=tuple(f"op{op}" for op in range(len(sorts))),
        sorts=tuple(sorts),
        duration_ns=tuple(durations),
        preds=tuple(preds),
        queue=tuple(queues),
        waits_for=tuple(waits),
        queues=tuple(Queue(f"g{queue}", link) for queue, link in enumerate(links)),
        links=tuple(f"link{link}" for link in range(max(links) + 1)),
        drains=tuple(rng.random() < 0.05 for _ in sorts),
        launch_gap_ns=0 if is_plain else rng.choice((0, 0, 1, 5)),
        slowdown_ppm=0 if is_plain else rng.choice((0, 0, 200_000, 1_000_000)),
        latency_ns=tuple(latencies),
        kernel=tuple(rng.randint(-1, len(sorts) // 2) for _ in sorts) if rng.random() < 0.5 else (),
    )


def random_order(rng: Random, program: Program) -> list[int]:
    left = [len({*preds}) for preds in program.preds]
    ready = [op for op, count in enumerate(left) if not count]
    order = []
    while ready:
        order.append(op := ready.pop(rng.randrange(len(ready))))
        for other, preds in enumerate(program.preds):
            if op in preds:
                left[other] -= 1
                if not left[other]:
                    ready.append(other)
    return order


def random_merge(rng: Random, program: Program) -> Program | None:
    """The program with two or more collectives of one queue as one; None where none were found."""
    for _ in range(8):
        queue = rng.randrange(len(program.queues))
        launches = [op for op in range(len(program.sorts)) if program.queue[op] == queue]
        if len(launches) >= 2:
            merged = merge(program, sorted(rng.sample(launches, rng.randint(2, len(launches)))))
            if merged is not None:
                return merged
    return None


def merge(program: Program, bucket: list[int]) -> Program | None:
    """The program with some launches as one; None where they depend on each other."""
    home, gone = bucket[0], {*bucket[1:]}
    preds = [{home if pred in gone else pred for pred in preds} for preds in program.preds]
    preds[home] = set().union(*(preds[op] for op in bucket)) - {home}
    for op in gone:
        preds[op] = {home}
    order = sorted_by_preds(preds)
    if order is None:
        return None
    place = {op: number for number, op in enumerate(order)}
    latency = max(program.latency_ns[op] for op in bucket)
    bytes_ns = sum(program.duration_ns[op] - program.latency_ns[op] for op in bucket)
    durations = [0 if op in gone else duration for op, duration in enumerate(program.duration_ns)]
    latencies = [0 if op in gone else latency for op, latency in enumerate(program.latency_ns)]
    durations[home], latencies[home] = latency + bytes_ns, latency
    return replace(
        program,
        sorts=tuple(Sort.NOTHING if op in gone else program.sorts[op] for op in order),
        duration_ns=tuple(durations[op] for op in order),
        preds=tuple(tuple(sorted(place[pred] for pred in preds[op])) for op in order),
        queue=tuple(-1 if op in gone else program.queue[op] for op in order),
        waits_for=tuple(
            tuple(sorted({place[home if op in gone else op] for op in program.waits_for[waiting]})) for waiting in order
        ),
        drains=tuple(program.drains[op] for op in order),
        latency_ns=tuple(latencies[op] for op in order),
        kernel=tuple(program.kernel[op] for op in order) if program.kernel else (),
    )


def sorted_by_preds(preds: list[set[int]]) -> list[int] | None:
    order: list[int] = []
    while len(order) < len(preds):
        done = {*order}
        ready = [op for op in range(len(preds)) if op not in done and preds[op] <= done]
        if not ready:
            return None
        order.append(ready[0])
    return order


def optimum(program: Program) -> int:
    """The shortest step of any order where each queue has its link to itself, by CP-SAT. Waits hold nobody up here."""
    cp_model = pytest.importorskip("ortools.sat.python.cp_model", reason="no ortools here: no optimum to compare with")
    model: Any = cp_model.CpModel()
    horizon = sum(program.duration_ns) + 1
    starts = [model.new_int_var(0, horizon, "") for _ in program.sorts]
    ends = list(starts)
    step = model.new_int_var(0, horizon, "")
    machines: dict[int, list[Any]] = {}
    for op, sort in enumerate(program.sorts):
        if sort in (Sort.COMPUTE, Sort.LAUNCH):
            begin = starts[op] if sort is Sort.COMPUTE else model.new_int_var(0, horizon, "")
            model.add(begin >= starts[op])
            interval = model.new_fixed_size_interval_var(begin, program.duration_ns[op], "")
            machines.setdefault(program.queue[op], []).append(interval)
            model.add(step >= begin + program.duration_ns[op])
            ends[op] = begin + program.duration_ns[op]
        for pred in program.preds[op]:
            model.add(starts[op] >= (starts[pred] if program.sorts[pred] is Sort.LAUNCH else ends[pred]))
        for launch in program.waits_for[op]:
            model.add(starts[op] >= ends[launch])
    for intervals in machines.values():
        model.add_no_overlap(intervals)
    model.minimize(step)
    solver: Any = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.max_deterministic_time = 20
    assert solver.solve(model) == cp_model.OPTIMAL
    return int(solver.objective_value)


def test_the_bound_is_below_the_optimum_and_the_optimum_below_every_order():
    for seed in range(NUM_PROGRAMS):
        rng = Random(seed)
        program = random_program(rng, is_plain=True)
        bound = lower_bound(program, Merging.EXCLUDED)
        best = optimum(program)
        assert bound.bound_ns <= best, f"seed {seed}: {bound}"
        assert all(value <= best for value in bound.candidates.values()), f"seed {seed}: {bound}"
        for _ in range(NUM_ORDERS):
            assert best <= simulate(program, random_order(rng, program)).step_ns, f"seed {seed}"


def test_the_bound_is_below_the_optimum_of_every_merging():
    num_merged = 0
    for seed in range(NUM_PROGRAMS):
        rng = Random(seed)
        program = random_program(rng, is_plain=True)
        bound = lower_bound(program)
        merged: Program | None = program
        for _ in range(3):
            merged = random_merge(rng, merged)
            if merged is None:
                break
            num_merged += 1
            best = optimum(merged)
            assert all(value <= best for value in bound.candidates.values()), f"seed {seed}: {bound}"
    assert num_merged > NUM_PROGRAMS // 4


def test_the_bound_is_below_every_order_with_shared_links_gaps_slowdown_and_merging():
    for seed in range(3 * NUM_PROGRAMS):
        rng = Random(seed)
        program = random_program(rng, max_ops=24)
        bounds = (lower_bound(program, Merging.EXCLUDED), lower_bound(program))
        assert bounds[0].bound_ns >= bounds[1].bound_ns, f"seed {seed}"
        merged: Program | None = program
        is_merged = False
        while merged is not None:
            for _ in range(NUM_ORDERS):
                step_ns = simulate(merged, random_order(rng, merged)).step_ns
                most = max(bounds[is_merged].candidates.values())
                assert most <= step_ns, f"seed {seed}: {bounds[is_merged]}"
            merged, is_merged = random_merge(rng, merged), True


@settings(max_examples=NUM_PROGRAMS, deadline=None)
@given(seed=st.integers(0, 10**9), merging=st.sampled_from(Merging))
def test_the_checker_accepts_every_certificate(seed: int, merging: Merging):
    program = random_program(Random(seed), max_ops=30)
    bound = lower_bound(program, merging)
    certificate = json.loads(json.dumps(bound.certificate))
    assert check(program, certificate) >= bound.bound_ns


@settings(max_examples=NUM_PROGRAMS, deadline=None)
@given(seed=st.integers(0, 10**9))
def test_a_changed_certificate_is_refused_or_proves_what_is_true(seed: int):
    rng = Random(seed)
    program = random_program(rng, max_ops=14)
    certificate = lower_bound(program).certificate
    steps = [simulate(program, random_order(rng, program)).step_ns for _ in range(NUM_ORDERS)]
    for _ in range(10):
        changed = copy.deepcopy(certificate)
        change(rng, changed)
        changed["bound_ns"] = rng.choice((0, changed.get("bound_ns", 0)))
        try:
            proved = check(program, changed)
        except VerificationError:
            continue
        assert proved <= min(steps)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**9))
def test_a_certificate_that_claims_more_is_refused(seed: int):
    program = random_program(Random(seed))
    certificate = lower_bound(program).certificate
    certificate["bound_ns"] = int(str(certificate["bound_ns"])) + 1
    with pytest.raises(VerificationError, match=r"claims .* ns and proves .* ns"):
        check(program, certificate)


def change(rng: Random, value: Any) -> None:
    """Change a number, or remove or double an element, somewhere in nested lists and dicts."""
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    if not keys:
        return
    key = rng.choice(keys)
    if isinstance(value[key], dict | list) and value[key] and rng.random() < 0.8:
        change(rng, value[key])
        return
    kind = rng.randrange(4)
    if kind == 0:
        del value[key]
    elif kind == 1 and isinstance(value, list):
        value.insert(key, copy.deepcopy(value[key]))
    else:
        value[key] = rng.choice(
            (None, "x", -1, 0, 1, 2, rng.randint(-5, 60), 10**9, float("nan"), float("inf"), [], {})
        )
