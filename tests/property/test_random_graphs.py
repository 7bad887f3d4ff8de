"""Random graphs through every pass: equal values on every rank, valid, idempotent, replayable, the same text every
time.

`make test` runs 300 seeds; `make test-full` (WEFT_FUZZ=full) runs 5 000 and lets hypothesis look for small failures.
"""

from __future__ import annotations

import functools
import os
from collections import Counter
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from torch.fx import GraphModule

import weft
from tests.property.strategies.listings import listings, random_listing
from weft.graph import check, metadata
from weft.graph.collective import collectives
from weft.graph.dag import Dag
from weft.graph.edit import Edit, copy_module, recompile
from weft.graph.groups import read_groups
from weft.graph.listings.text import parse, render
from weft.graph.ops import op_of
from weft.passes.base import Numerics, all_passes, parse_pass
from weft.passes.bucket_pass import BucketPass
from weft.passes.communication.schedule_overlap import ScheduleOverlap
from weft.passes.pipeline import Pipeline, replay
from weft.passes.rewrite_pass import RewritePass
from weft.verification.comparison import compare, example_inputs
from weft.verification.rank import RankResult
from weft.verification.virtual.cluster import VirtualCluster

FULL = os.environ.get("WEFT_FUZZ") == "full"
NUM_SEEDS = 5000 if FULL else 150
CHUNK = 30
CHUNKS = [range(start, start + CHUNK) for start in range(0, NUM_SEEDS, CHUNK)]
NUM_RANKS = 4
VARIANTS = {
    name: [f"{name}{{max-in-flight-bytes=none}}", f"{name}{{max-in-flight-bytes=600}}"]
    for name in ("hoist-launches", "sink-waits")
}
SPECS = [
    spec
    for name, cls in all_passes().items()
    if not name.startswith("test-")
    and not issubclass(cls, BucketPass | RewritePass | ScheduleOverlap)  # those have tests of their own
    for spec in VARIANTS.get(name, [name])
]


def seeded(seeds: range) -> list[tuple[int, GraphModule]]:
    return [(seed, parse(random_listing(Random(seed)))) for seed in seeds]


@dataclass(frozen=True)
class Known:
    """A graph that every pass is given, with what it computes."""

    module: GraphModule
    text: str
    inputs: list[list[Any]]
    values: list[RankResult]


@functools.cache
def known(seed: int) -> Known:
    module = parse(random_listing(Random(seed)))
    inputs = example_inputs(module, NUM_RANKS, seed=seed)
    values = VirtualCluster(NUM_RANKS).run(module, inputs, read_groups(module), seed=seed)
    return Known(module, render(module), inputs, values)


def launches(module: GraphModule) -> dict[str, list[str]]:
    """The names of the launches of each group in the order of their issue."""
    found: dict[str, list[str]] = {}
    for collective in collectives(module.graph):
        found.setdefault(collective.group, []).append(collective.launch.name)
    return found


@pytest.mark.parametrize("seeds", CHUNKS, ids=lambda seeds: f"seeds {seeds.start}-{seeds.stop - 1}")
@pytest.mark.parametrize("spec", [*SPECS, "auto"])
def test_a_pass_keeps_values_on_every_rank_and_changes_nothing_the_second_time(spec: str, seeds: range) -> None:
    pipeline = Pipeline.parse(spec)
    for seed in seeds:
        before = known(seed)
        run = pipeline.run(before.module, effort="fast")
        check.validate(Dag(run.module.graph))
        after = render(run.module)
        assert render(before.module) == before.text, f"seed {seed}: the pass changed its argument"
        if after == before.text and not any(entry.changed for entry in run.log):
            continue  # it is the same program
        values = VirtualCluster(NUM_RANKS).run(run.module, before.inputs, read_groups(run.module), seed=seed)
        verdict = compare(before.values, values, num_terms=NUM_RANKS)
        exact = all(parse_pass(step.spec).numerics is Numerics.EXACT for step in run.plan.steps)
        assert verdict.bitwise if exact else verdict.equal, f"seed {seed}: {verdict}\n{before.text}"
        again = pipeline.run(run.module) if len(pipeline.passes) == 1 else run
        assert render(again.module) == after, f"seed {seed} changes twice\n{before.text}"
        replayed = replay(before.module, weft.Plan.from_json(run.plan.to_json()))
        assert render(replayed.module) == after, f"seed {seed} replays differently"


@pytest.mark.parametrize("seeds", CHUNKS, ids=lambda seeds: f"seeds {seeds.start}-{seeds.stop - 1}")
def test_any_order_that_the_dag_allows_computes_the_same(seeds: range) -> None:
    """Every node is asked to go to a random place; what the sort makes of it must be the same program."""
    for seed, before in seeded(seeds):
        after = copy_module(before)
        nodes = [node for node in after.graph.nodes if node.op == "call_function"]
        Random(seed).shuffle(nodes)
        with Edit(after.graph, keep_issue_order=seed % 2 == 0) as edit:
            edit.move_before(nodes, list(after.graph.nodes)[-1])
        recompile(after)
        verdict = weft.verify(before, after, ranks=NUM_RANKS, seed=seed)
        assert verdict.bitwise, f"seed {seed}: {verdict}\n{render(before)}\n{render(after)}"
        if seed % 2 == 0:
            assert launches(before) == launches(after), f"seed {seed} issues in another order"


@pytest.mark.parametrize("seeds", CHUNKS, ids=lambda seeds: f"seeds {seeds.start}-{seeds.stop - 1}")
def test_moving_passes_conserve_bytes_on_the_wire_and_the_issue_order(seeds: range) -> None:
    for seed, before in seeded(seeds):
        after = Pipeline.parse("hoist-launches,sink-waits").run(before).module
        assert launches(before) == launches(after), f"seed {seed}"
        sizes = [Counter((c.kind, c.group, c.input_bytes) for c in collectives(m.graph)) for m in (before, after)]
        assert sizes[0] == sizes[1], f"seed {seed}"


@pytest.mark.parametrize("seeds", CHUNKS[:10], ids=lambda seeds: f"seeds {seeds.start}-{seeds.stop - 1}")
def test_listings_round_trip_and_types_are_those_of_a_full_recomputation(seeds: range) -> None:
    for seed, module in seeded(seeds):
        text = render(module)
        assert render(parse(text)) == text, f"seed {seed}"
        mode = metadata.mode_of(module.graph.nodes)
        for node in module.graph.nodes:
            if node.op == "call_function":
                assert metadata.same(node.meta["val"], metadata.of_node(node, mode)), f"seed {seed}: {node.name}"


@pytest.mark.parametrize("seeds", CHUNKS[:10], ids=lambda seeds: f"seeds {seeds.start}-{seeds.stop - 1}")
def test_an_edit_that_fails_leaves_the_graph_as_it_was(seeds: range) -> None:
    for seed, module in seeded(seeds):
        rng = Random(seed)
        text, nodes = render(module), list(module.graph.nodes)
        calls = [node for node in nodes if node.op == "call_function"]
        if len(calls) < 2:
            continue
        edit = Edit(module.graph)
        for _ in range(10):
            first, second = rng.sample(calls, 2)
            if not isinstance(first.meta["val"], list):
                new = edit.call(op_of("neg"), (first,), before=second, like=[second])
                edit.replace(second, new)
            edit.erase(second)
        with pytest.raises(ZeroDivisionError), edit:
            raise ZeroDivisionError
        assert render(module) == text, f"seed {seed}"
        assert list(module.graph.nodes) == nodes


@pytest.mark.slow
@settings(max_examples=2000 if FULL else 25, deadline=None, suppress_health_check=list(HealthCheck))
@given(listings)
def test_the_whole_pipeline_keeps_values(text: str) -> None:
    before = parse(text)
    result = weft.optimize(before)
    assert weft.verify(before, result.module, ranks=NUM_RANKS).bitwise
