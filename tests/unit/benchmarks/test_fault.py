"""Contracted steps keep their structure, and the solver's order and proof are those of the simulator."""

from __future__ import annotations

import importlib
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from benchmarks import scenarios
from tests.property.strategies.programs import random_gradients
from tests.property.test_planner_optimum import with_output
from tests.unit.bounds.test_lower_bound import program
from weft.bounds.lower_bound import lower_bound
from weft.bounds.problem import MergingAssumption
from weft.simulation.program import OpKind, Program
from weft.simulation.simulator import run

STEP = """
    c0: compute 1
    g0: launch 10/2 on 0 c0
    c1: compute 1
    g1: launch 10/2 on 0 c1
    v0: wait g0
    f0: compute 20 v0
    v1: wait g1
    f1: compute 20 v1 f0
    b1: compute 20 f1
    d1: compute 20 f1
    r1: launch 30/2 on 0 d1
    w1: wait r1
    a1: launch 5/2 on 1 w1
    b0: compute 20 b1
    d0: compute 20 b1
    r0: launch 30/2 on 0 d0
    w0: wait r0
    a0: launch 5/2 on 1 w0
    e: compute 1 b0
    out: nothing e
"""
"""Two layers: gathered weights, gradients that are scattered and then summed elsewhere."""


@pytest.fixture
def fault(monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("ortools", reason="no ortools here: nothing solves a program")
    monkeypatch.syspath_prepend(str(scenarios.HERE))
    return importlib.import_module("fault")


def totals(given: Program) -> dict[int, int]:
    """The time of the stream, as -1, and of each queue."""
    found: dict[int, int] = {}
    for queue, ns in zip(given.queue, given.duration_ns, strict=True):
        found[queue] = found.get(queue, 0) + ns
    return found


def test_a_step_in_one_block_has_all_its_work_and_one_bucket_for_each_end(fault: Any) -> None:
    given = program(STEP)
    made = fault.contract(given, 1)
    assert totals(made) == {-1: totals(given)[-1], 0: 2 + 16 + 2 + 56, 1: 2 + 6}
    launches = [op for op, kind in enumerate(made.kinds) if kind is OpKind.LAUNCH]
    assert [made.names[op] for op in launches] == ["g0", "r1", "a1"]
    assert run(made).step_ns == 18 + 123 + 58 + 8


def test_a_step_in_many_blocks_is_as_it_was_but_for_its_casts(fault: Any) -> None:
    given = program(STEP)
    made = fault.contract(given, 100)
    assert totals(made) == totals(given)
    assert sum(kind is OpKind.LAUNCH for kind in made.kinds) == 6
    bounds = [lower_bound(each, MergingAssumption.EXCLUDED).bound_ns for each in (made, given)]
    assert abs(bounds[0] - bounds[1]) <= 1 + 1


@pytest.mark.parametrize("seed", range(10))
def test_what_is_proved_is_below_the_order_and_no_bound_is_above_it(fault: Any, seed: int) -> None:
    plain = with_output(random_gradients(Random(seed), 2, is_plain=True))
    given = replace(plain, duration_ns=tuple(ns * 10_000 for ns in plain.duration_ns), latency_ns=())
    for slowdown_ppm in (0, 189_000):
        verdict = fault.judge("random", replace(given, slowdown_ppm=slowdown_ppm), 20, "fast")
        unit = fault.GRAIN_NS * len(given.kinds)
        assert verdict.bound_ns <= verdict.known_ns <= verdict.weft_ns
        if verdict.proved_ns is not None:
            assert verdict.bound_ns - unit <= verdict.proved_ns <= verdict.known_ns
            assert verdict.known_ns - verdict.proved_ns <= unit, "the solver's order is as long as it proves"


def test_a_verdict_says_how_far_each_is_from_the_next(fault: Any) -> None:
    verdict = fault.Verdict("ddp", 31, "drag cut", 100_000_000, 102_000_000, 102_000_000, 105_060_000)
    assert verdict.line() == "| ddp | 31 | 100.00 (drag cut) | 102.00 | 102.00 | 105.06 | 2.00% | 0.00% | 3.00% |"
    unproved = replace(verdict, proved_ns=None)
    assert unproved.line() == "| ddp | 31 | 100.00 (drag cut) | - | 102.00 | 105.06 | 0.00% | 2.00% | 3.00% |"
