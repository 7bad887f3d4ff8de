"""Plain orders on programs by hand: launches as early, waits as late as they may be, and buckets that close in time."""

from __future__ import annotations

from tests.unit.scheduling.test_scheduler import ALL, OUTPUT, AsOne
from tests.unit.simulation.programs import Op, compute, launch, program, wait
from weft.scheduling.job_tables import JobTables
from weft.scheduling.jobs import Emitter, jobs_of
from weft.scheduling.memory_budget import NO_LIMIT
from weft.scheduling.recipes import recipe
from weft.simulation.simulator import check_order


def ordered(*ops: Op, latencies: int = 0, in_flight_bytes: int = NO_LIMIT) -> str:
    """The names in order, without the output; members of a bucket with a +."""
    source = program(*ops, OUTPUT)
    jobs = jobs_of(source)
    made = recipe(JobTables(jobs), AsOne(jobs.duration, least=20), latencies, in_flight_bytes)
    order = Emitter(jobs).order(made.events)
    check_order(source, order)
    later = {jobs.ops[member][0] for bucket in made.buckets for member in bucket[1:]}
    return " ".join(("+" if op in later else "") + source.names[op] for op in order[:-1])


LAYERS = (
    compute("a", 100),
    launch("g0", 60, makes={"x0": 100}),
    wait("g0"),
    compute("b", 100, "wait_g0", uses=("x0",)),
    launch("g1", 60, makes={"x1": 100}),
    wait("g1"),
    compute("c", 100, "wait_g1 b", uses=("x1",)),
)


def test_launches_go_up_and_waits_go_down():
    assert ordered(*LAYERS) == "a g0 g1 wait_g0 b wait_g1 c"


def test_no_more_bytes_are_in_flight_than_allowed():
    assert ordered(*LAYERS, in_flight_bytes=100) == "a g0 wait_g0 b g1 wait_g1 c"


def test_launches_of_one_key_become_one_until_one_of_them_is_needed():
    ops = (
        compute("a", 100),
        launch("r0", 60, needs="a"),
        compute("b", 100, "a"),
        launch("r1", 60, needs="b"),
        wait("r1"),
        compute("c", 100, "wait_r1"),
        launch("r2", 60, needs="c"),
        launch("r3", 60, needs="c"),
    )
    assert ordered(*ops, latencies=ALL) == "a b r0 +r1 wait_r1 c r2 +r3"


def test_a_bucket_takes_no_more_latencies_than_asked_for():
    """Three of 60 with a latency of 20 take 140, seven latencies; two take five."""
    ops = (compute("a", 100), *(launch(f"r{k}", 60, needs="a") for k in range(4)))
    assert ordered(*ops, latencies=7) == "a r0 +r1 +r2 r3"
    assert ordered(*ops, latencies=6) == "a r0 +r1 r2 +r3"
