"""Sketches of steps: lanes, joined bars, and the time during which compute is blocked."""

from __future__ import annotations

from weft import zoo
from weft.advice.sketch import BLOCKED_LANE, COMPUTE_LANE, PARTS, sketch_of
from weft.cost.cluster import Cluster
from weft.graph.groups import read_groups
from weft.graph.versions import dag_of
from weft.simulation.build import program_of
from weft.simulation.simulator import simulate


def test_a_sketch_shows_compute_the_groups_and_the_blocked_time():
    module = zoo.load("llama-debug", "fsdp-tp", mesh={"dp": 2, "tp": 2}, layers=1)
    program = program_of(dag_of(module.graph), read_groups(module), Cluster.load("h100-1x8"))
    timeline = simulate(program)
    lanes = sketch_of(timeline, program)
    assert [lane.name for lane in lanes[:2]] == [COMPUTE_LANE, BLOCKED_LANE]
    assert {lane.name for lane in lanes[2:]} == {"dp", "tp"}
    for lane in lanes:
        points = [point for bar in lane.bars for point in bar]
        assert points == sorted(set(points)), f"the bars of {lane.name} touch or overlap"
        assert not points or (points[0] >= 0 and points[-1] <= PARTS)
    blocked = sum(end - start for start, end in lanes[1].bars) / PARTS
    assert blocked >= timeline.exposed_us / timeline.step_us - 0.01
