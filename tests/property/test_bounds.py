"""Bounds are below the optimum of small random programs, the optimum is below every order; no certificate lies.

`make test` runs a few hundred programs; `make test-full` (WEFT_FUZZ=full) runs thousands.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from math import inf
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.property.strategies.programs import random_gradients, random_order, random_program
from weft.bounds.checker import check
from weft.bounds.lower_bound import lower_bound
from weft.bounds.problem import MergingAssumption
from weft.errors import VerificationError
from weft.simulation.program import OpKind, Program
from weft.simulation.simulator import run, simulate

NUM_PROGRAMS = 4000 if os.environ.get("WEFT_FUZZ") == "full" else 150
NUM_ORDERS = 6
MAX_ORDERS = 2000
"""Of one program, where all are tried."""
NUM_PARTS = 3
"""Parts of the programs of a test that takes seconds; the quick loop runs the first one."""


def random_merge(rng: Random, program: Program) -> Program | None:
    """The program with two or more collectives of one queue as one; None where none were found."""
    for _ in range(8):
        queue = rng.randrange(len(program.queues))
        launches = [op for op in range(len(program.kinds)) if program.queue[op] == queue]
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
    allocates, uses = list(program.allocates), list(program.uses)
    allocates[home] = tuple(pair for op in bucket for pair in program.allocates[op])
    uses[home] = tuple(sorted({storage for op in bucket for storage in program.uses[op]}))
    for op in gone:
        allocates[op] = uses[op] = ()
    durations = [0 if op in gone else duration for op, duration in enumerate(program.duration_ns)]
    latencies = [0 if op in gone else latency for op, latency in enumerate(program.latency_ns)]
    durations[home], latencies[home] = latency + bytes_ns, latency
    return replace(
        program,
        kinds=tuple(OpKind.NOTHING if op in gone else program.kinds[op] for op in order),
        duration_ns=tuple(durations[op] for op in order),
        preds=tuple(tuple(sorted(place[pred] for pred in preds[op])) for op in order),
        queue=tuple(-1 if op in gone else program.queue[op] for op in order),
        waits_for=tuple(
            tuple(sorted({place[home if op in gone else op] for op in program.waits_for[waiting]})) for waiting in order
        ),
        drains=tuple(program.drains[op] for op in order),
        allocates=tuple(allocates[op] for op in order),
        uses=tuple(uses[op] for op in order),
        latency_ns=tuple(latencies[op] for op in order),
        kernel=tuple(program.kernel[op] for op in order) if program.kernel else (),
        host_ns=tuple(0 if op in gone else program.host_ns[op] for op in order) if program.host_ns else (),
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
    starts = [model.new_int_var(0, horizon, "") for _ in program.kinds]
    ends = list(starts)
    step = model.new_int_var(0, horizon, "")
    machines: dict[int, list[Any]] = {}
    for op, kind in enumerate(program.kinds):
        if kind in (OpKind.COMPUTE, OpKind.LAUNCH):
            begin = starts[op] if kind is OpKind.COMPUTE else model.new_int_var(0, horizon, "")
            model.add(begin >= starts[op])
            interval = model.new_fixed_size_interval_var(begin, program.duration_ns[op], "")
            machines.setdefault(program.queue[op], []).append(interval)
            model.add(step >= begin + program.duration_ns[op])
            ends[op] = begin + program.duration_ns[op]
        for pred in program.preds[op]:
            model.add(starts[op] >= (starts[pred] if program.kinds[pred] is OpKind.LAUNCH else ends[pred]))
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
        program = random_program(rng, max_ops=12, is_plain=True)
        bound = lower_bound(program, MergingAssumption.EXCLUDED)
        best = optimum(program)
        assert bound.bound_ns <= best, f"seed {seed}: {bound}"
        assert all(value <= best for value in bound.candidates.values()), f"seed {seed}: {bound}"
        for _ in range(NUM_ORDERS):
            assert best <= simulate(program, random_order(rng, program)).step_ns, f"seed {seed}"


def test_the_bound_is_below_the_optimum_of_every_merging():
    num_merged = 0
    for seed in range(NUM_PROGRAMS):
        rng = Random(seed)
        program = random_program(rng, max_ops=12, is_plain=True)
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


@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_the_bound_is_below_every_order_with_shared_links_gaps_slowdown_and_merging(part: int):
    for seed in range(part, 3 * NUM_PROGRAMS, NUM_PARTS):
        rng = Random(seed)
        program = random_program(rng, max_ops=24)
        bounds = (lower_bound(program, MergingAssumption.EXCLUDED), lower_bound(program))
        assert bounds[0].bound_ns >= bounds[1].bound_ns, f"seed {seed}"
        merged: Program | None = program
        is_merged = False
        while merged is not None:
            for _ in range(NUM_ORDERS):
                step_ns = simulate(merged, random_order(rng, merged)).step_ns
                most = max(bounds[is_merged].candidates.values())
                assert most <= step_ns, f"seed {seed}: {bounds[is_merged]}"
            merged, is_merged = random_merge(rng, merged), True


def all_orders(program: Program) -> Iterator[list[int]]:
    """Every order that the edges allow."""

    def extend(order: list[int], left: set[int]) -> Iterator[list[int]]:
        if not left:
            yield order
        for op in sorted(left):
            if left.isdisjoint(program.preds[op]):
                yield from extend([*order, op], left - {op})

    return extend([], {*range(len(program.kinds))})


@pytest.mark.parametrize(
    ("collective_slowdown_ppm", "longest_issue_ns", "least"), [(150_000, 0, 20), (0, 0, 40), (0, 8, 1)]
)
def test_with_gap_slowdown_and_host_the_bound_is_below_the_shortest_of_all_orders_and_tight_sometimes(
    collective_slowdown_ppm: int, longest_issue_ns: int, least: int
):
    """By brute force over all orders of small programs and of their mergings, every one with these costs."""
    num_tight = dict.fromkeys(MergingAssumption, 0)
    for seed in range(min(2 * NUM_PROGRAMS, 2000)):
        rng = Random(seed)
        program = random_gradients(rng, 1) if seed % 3 == 0 else random_program(rng, max_ops=8)
        slowdown_ppm, gap = rng.choice((189_000, 1_000_000)), rng.choice((1, 5))
        costs = {"slowdown_ppm": slowdown_ppm, "collective_slowdown_ppm": collective_slowdown_ppm}
        program = replace(program, launch_gap_ns=gap, **costs)
        if longest_issue_ns:
            host = Random(f"host {seed}")
            program = replace(program, host_ns=tuple(host.randint(0, longest_issue_ns) for _ in program.kinds))
        merged = random_merge(rng, program)
        for merging, orders_of in (
            (MergingAssumption.EXCLUDED, program),
            (MergingAssumption.ALLOWED, merged or program),
        ):
            bound = lower_bound(program, merging)
            orders = list(islice(all_orders(orders_of), MAX_ORDERS))
            best = min(run(orders_of, order, is_legal=True).step_ns for order in orders)
            assert max(bound.candidates.values()) <= best, f"seed {seed}: {bound}"
            assert check(program, json.loads(json.dumps(bound.certificate))) >= bound.bound_ns, f"seed {seed}"
            num_tight[merging] += len(orders) < MAX_ORDERS and bound.bound_ns == best > 0
    assert all(tight > least for tight in num_tight.values()), num_tight


@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_with_a_memory_limit_the_bound_is_below_every_order_that_keeps_to_it(part: int):
    """By brute force over all orders of small programs and of their mergings; and memory is what decides sometimes."""
    num_forced = dict.fromkeys(MergingAssumption, 0)
    for seed in range(part, 2 * NUM_PROGRAMS, NUM_PARTS):
        rng = Random(seed)
        program = random_program(rng, max_ops=8)
        merged = random_merge(rng, program)
        for merging, orders_of in (
            (MergingAssumption.EXCLUDED, program),
            (MergingAssumption.ALLOWED, merged or program),
        ):
            found = [simulate(orders_of, order) for order in islice(all_orders(orders_of), MAX_ORDERS)]
            for limit in {min(each.peak_bytes for each in found), rng.choice(found).peak_bytes}:
                bound = lower_bound(program, merging, memory_limit_bytes=limit)
                best = min(each.step_ns for each in found if each.peak_bytes <= limit)
                assert max(bound.candidates.values()) <= best, f"seed {seed}: {bound}"
                assert check(program, json.loads(json.dumps(bound.certificate))) >= bound.bound_ns, f"seed {seed}"
                num_forced[merging] += bound.name == "memory"
    assert all(num_forced.values()), num_forced


@settings(max_examples=NUM_PROGRAMS, deadline=None)
@given(seed=st.integers(0, 10**9), merging=st.sampled_from(MergingAssumption))
def test_the_checker_accepts_every_certificate(seed: int, merging: MergingAssumption):
    program = random_program(Random(seed), max_ops=30)
    bound = lower_bound(program, merging)
    certificate = json.loads(json.dumps(bound.certificate))
    assert check(program, certificate) >= bound.bound_ns


@settings(max_examples=NUM_PROGRAMS, deadline=None)
@given(seed=st.integers(0, 10**9))
def test_a_changed_certificate_is_refused_or_proves_what_is_true(seed: int):
    rng = Random(seed)
    program = random_program(rng, max_ops=14)
    found = [simulate(program, random_order(rng, program)) for _ in range(NUM_ORDERS)]
    limit = rng.choice((None, min(each.peak_bytes for each in found)))
    certificate = lower_bound(program, memory_limit_bytes=limit).certificate
    for _ in range(10):
        changed = copy.deepcopy(certificate)
        change(rng, changed)
        changed["bound_ns"] = rng.choice((0, changed.get("bound_ns", 0)))
        try:
            proved = check(program, changed)
        except VerificationError:
            continue
        kept_to = changed["claim"]["limit_bytes"] if changed["claim"]["kind"] == "memory" else inf
        assert all(proved <= each.step_ns for each in found if each.peak_bytes <= kept_to)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**9))
def test_a_certificate_that_claims_more_is_refused(seed: int):
    program = random_program(Random(seed), max_ops=12)
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
