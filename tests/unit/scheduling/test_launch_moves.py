"""Launch moves: every one is legal, and a search with them finds shorter steps."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest

from tests.unit.simulation.programs import Op, compute, launch, program, view, wait
from weft.scheduling import search as search_module
from weft.scheduling.jobs import Jobs, jobs_of
from weft.scheduling.launch_moves import LaunchMoves
from weft.scheduling.local_moves import with_waits
from weft.scheduling.scheduler import Unit
from weft.scheduling.search import search
from weft.simulation.program import Program
from weft.simulation.simulator import run

LATENCY = 300


class LongLatency:
    """Launches of one queue may merge; each has a long latency."""

    def __init__(self, jobs: Jobs) -> None:
        self.jobs = jobs

    def key(self, launch: int) -> int:
        return self.jobs.queue[launch]

    def latency(self, launch: int) -> int:
        return LATENCY

    def duration(self, launches: Sequence[int]) -> int:
        return LATENCY + sum(self.jobs.duration[launch] - LATENCY for launch in launches)


def sharded_step(num: int) -> Program:
    """Layers that cast and gather a weight, and later reduce a gradient; a single optimizer needs all gradients."""
    made: list[Op] = []
    for k in range(num):
        made += [compute(f"c{k}", 1), launch(f"g{k}", LATENCY + 8, needs=f"c{k}"), wait(f"g{k}")]
        made.append(compute(f"f{k}", 30, f"wait_g{k} f{k - 1}" if k else f"wait_g{k}"))
    last = f"f{num - 1}"
    for k in reversed(range(num)):
        made += [compute(f"b{k}", 30, last), compute(f"d{k}", 30, last), launch(f"r{k}", LATENCY + 16, needs=f"d{k}")]
        last = f"b{k}"
    made += [wait(f"r{k}") for k in range(num)]
    return program(*made, compute("adam", 20, " ".join(f"wait_r{k}" for k in range(num))), view("output"))


def events(units: list[Unit]) -> list[int]:
    return [event for unit in units for event in unit]


@pytest.mark.parametrize("seed", range(3))
def test_moves_keep_every_event_and_every_dependency(seed: int):
    jobs = jobs_of(sharded_step(8))
    moves = LaunchMoves(jobs, LongLatency(jobs), Random(seed))
    given = units = with_waits(jobs)
    sizes: set[int] = set()
    for _ in range(400):
        moved = moves.changed_launch(units, {1: 5})
        if moved is None:
            continue
        assert sorted(events(moved)) == sorted(events(given))
        place = {event: i for i, unit in enumerate(moved) for event in unit}
        late = [(event, other) for event in place for other in moves.needs[event] if place[other] >= place[event]]
        assert late == []
        assert all(jobs.queue[job] >= 0 for unit in moved if len(unit) > 1 for job in unit)
        sizes |= {len(unit) for unit in moved}
        units = moved
    assert max(sizes) > 2  # buckets grew by merging
    assert units != given


def test_a_search_with_launch_moves_finds_a_shorter_step(monkeypatch: pytest.MonkeyPatch):
    source = sharded_step(60)
    with_moves = search(source, merging=LongLatency)
    monkeypatch.setitem(search_module.LAUNCH_OPERATIONS, "default", 0)
    without = search(source, merging=LongLatency)
    assert with_moves.step_ns < without.step_ns
    assert with_moves.peak_bytes <= with_moves.limit_bytes
    assert run(source, with_moves.order).step_ns > with_moves.step_ns  # its buckets save latencies
