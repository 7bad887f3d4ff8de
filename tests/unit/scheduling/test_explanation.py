"""What holds back a collective that stays exposed, in programs by hand: the reason, and what lifting it gains."""

from __future__ import annotations

import pytest

import weft
from tests.tiers import quick_first
from tests.unit.simulation.programs import Op, compute, launch, program, view, wait
from weft.plan.decision import Decision, Reason
from weft.report.explain import explain
from weft.report.simulated import SimulatedReport
from weft.scheduling.explanation import explain_exposed
from weft.scheduling.search import search
from weft.simulation.program import Program


def planned(made: Program, limit_bytes: int | None = None) -> tuple[int, list[Decision]]:
    """The step, and what is exposed."""
    outcome = search(made, "default", limit_bytes)
    found = explain_exposed("schedule-overlap", made, outcome)
    exposed = [decision for decision in found if decision.exposed_us]
    assert sum(d.exposed_us for d in exposed) == sum(outcome.trace.exposed_ns.values()) / 1000
    launches = {name for name, queue in zip(made.names, made.queue, strict=True) if queue >= 0}
    assert {name for decision in found for name in decision.nodes} == launches
    return outcome.step_ns, exposed


def only(found: list[Decision]) -> Decision:
    (decision,) = found
    return decision


END = view("end")

SHARED = (
    launch("a", 100_000, "dp"),
    launch("b", 100_000, "tp"),
    compute("c", 50_000),
    wait("a"),
    wait("b"),
    compute("u", 10_000, "c wait_a wait_b"),
    END,
)


def test_what_compute_slows_is_not_put_down_to_the_link():
    # 45 of g are done beside c, which takes 90; the other 5 are exposed, and nobody shares its link.
    ops = (launch("g", 50_000, "dp"), compute("c", 90_000), wait("g"), compute("u", 10_000, "c wait_g"), END)
    step, found = planned(program(*ops, collective_slowdown_ppm=1_000_000))
    decision = only(found)
    assert (step, decision.reason, decision.exposed_us) == (105_000, Reason.EXPOSED_BY_DEPENDENCY, 5.0)


def test_a_shared_link_holds_back_and_one_of_its_own_gains_no_more_than_is_told():
    step, found = planned(program(*SHARED, links={"dp": "nic", "tp": "nic"}))
    decision = only(found)  # both end at 200 us: the stream stands still for one of them
    assert (decision.reason, decision.exposed_us, decision.gain_us) == (Reason.EXPOSED_BY_LINK, 150.0, 100.0)
    lifted, _ = planned(program(*SHARED))
    assert step - lifted == 100_000


QUEUED = (
    launch("a", 100_000, "dp"),
    compute("c", 10_000),
    launch("b", 50_000, "dp", "c"),
    wait("a"),
    compute("u", 10_000, "wait_a"),
    wait("b"),
    compute("v", 10_000, "u wait_b"),
    END,
)


def test_a_queue_holds_back_and_one_of_its_own_gains_no_more_than_is_told():
    step, found = planned(program(*QUEUED))
    first, second = found
    assert (first.reason, first.nodes) == (Reason.EXPOSED_BY_DEPENDENCY, ("a",))
    assert (first.blocking, first.gain_us) == ("u", 90.0)
    assert (second.reason, second.blocking) == (Reason.EXPOSED_BY_QUEUE, "a")
    assert (second.exposed_us, second.gain_us) == (40.0, 40.0)
    lifted, _ = planned(program(*(_elsewhere(op) if op.name == "b" else op for op in QUEUED)))
    assert 0 < step - lifted <= 40_000


def _elsewhere(op: Op) -> Op:
    return launch(op.name, op.duration_ns, "other", " ".join(op.needs))


CROWDED = (
    compute("c", 50_000, makes={"x": 100}),
    compute("d", 50_000, "c", uses=("x",)),
    launch("a", 60_000, "dp", makes={"y": 100}),
    wait("a", uses=("y",)),
    compute("u", 10_000, "d wait_a", uses=("y",)),
    END,
)


def test_memory_holds_back_and_more_of_it_gains_no_more_than_is_told():
    step, found = planned(program(*CROWDED), limit_bytes=150)
    decision = only(found)
    assert decision.reason is Reason.EXPOSED_BY_MEMORY
    assert (decision.exposed_us, decision.gain_us) == (60.0, 60.0)
    lifted, rest = planned(program(*CROWDED), limit_bytes=200)
    assert (step - lifted, rest) == (60_000, [])


CHAIN = (
    compute("c", 70_000),
    view("v", "c"),
    launch("a", 60_000, "dp", "v"),
    wait("a"),
    compute("u", 10_000, "wait_a"),
    END,
)


def test_a_dependency_holds_back_and_to_be_without_it_gains_no_more_than_is_told():
    step, found = planned(program(*CHAIN))
    decision = only(found)
    assert (decision.reason, decision.blocking) == (Reason.EXPOSED_BY_DEPENDENCY, "c")
    assert decision.sentence == (
        "a is exposed for 60.0 us (60.0 us before): it needs c and u needs it; "
        "removing this obstacle could save up to 60.0 us"
    )
    free = [launch("a", 60_000, "dp") if op.name == "a" else op for op in CHAIN]
    lifted, _ = planned(program(*free))
    assert 0 < step - lifted <= 60_000


def test_what_prepares_a_launch_is_part_of_it():
    made = program(compute("cast", 5_000), launch("a", 60_000, "dp", "cast"), wait("a"), compute("u", 9, "wait_a"), END)
    decision = only(planned(made)[1])
    assert (decision.reason, decision.blocking, decision.exposed_us) == (Reason.EXPOSED_BY_DEPENDENCY, "u", 60.0)


def test_a_collective_that_nothing_waits_for_ends_the_step():
    decision = only(planned(program(compute("c", 70_000), launch("a", 60_000, "dp", "c"), END))[1])
    assert (decision.reason, decision.blocking, decision.exposed_us) == (Reason.EXPOSED_BY_DEPENDENCY, "c", 60.0)


@pytest.mark.parametrize("parallel", quick_first(["fsdp", "ddp", "tp"]))
def test_a_step_of_the_zoo_tells_every_collective_and_all_that_is_exposed(parallel: str):
    module = weft.zoo.load("llama-debug", parallel, ranks=4)
    report = weft.optimize(module, "h100-8").report
    found = explain(module, report)
    assert found.unconsidered == ()
    assert isinstance(report, SimulatedReport)
    exposed_us = report.runs[1].timeline.exposed_us
    assert exposed_us > 0
    assert sum(total.exposed_us for total in found.totals) == pytest.approx(exposed_us, rel=1e-3)
    assert all(total.gain_us <= total.exposed_us for total in found.totals)
