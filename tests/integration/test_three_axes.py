"""Graphs whose collectives run over all three axes of a mesh: replicas, shards and tensor parallelism."""

from __future__ import annotations

from random import Random

import pytest
from torch.fx import GraphModule

import weft
from weft.graph.check import validate
from weft.graph.collective import Kind, collectives
from weft.graph.dag import Dag
from weft.graph.origins import origins_of
from weft.verification.agreement.agreement import check
from weft.verification.symbolic.equivalence import prove

MESH = {"replicate": 2, "shard": 2, "tp": 2}
PASSES = {
    "bucket-all-gathers": Kind.ALL_GATHER,
    "bucket-reduce-scatters": Kind.REDUCE_SCATTER,
    "bucket-all-reduces": Kind.ALL_REDUCE,
}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def step() -> GraphModule:
    return weft.zoo.load("llama-debug", "hsdp-tp", mesh=MESH, layers=1)


def subjects(module: GraphModule) -> set[str]:
    """The modules and parameters that launches are for, with those of every member of a merged launch."""
    return {origin.subject for origins in origins_of(module.graph).values() for origin in origins}


def test_a_step_over_three_axes_is_planned_and_proved_and_computes_the_same(step: GraphModule):
    assert len({each.group for each in collectives(step.graph)}) == len(MESH)
    result = weft.optimize(step, "h100-8", verify="equivalence")
    report = result.report
    assert report.after.num_collectives < 0.5 * report.before.num_collectives
    assert any("proved equal" in witness for witness in report.witnesses)
    assert weft.verify(step, result.module, ranks=8)
    assert check([result.module] * 8).holds
    assert subjects(result.module) == subjects(step)
    assert any(subject.startswith("layers.0.") for subject in subjects(step))


@pytest.mark.parametrize("seed", range(12))
def test_no_choice_of_buckets_over_three_axes_makes_a_cycle(step: GraphModule, seed: int):
    """Launches are drawn without regard to their axes or dependencies; those that cannot merge are declined."""
    rng = Random(seed)
    specs: list[str] = []
    for name, kind in PASSES.items():
        launches = [each.launch.name for each in collectives(step.graph) if each.kind is kind]
        rng.shuffle(launches)
        pins: list[str] = []
        while len(launches) > 1:
            size = rng.randint(2, 6)
            pins.append("+".join(launches[:size]))
            launches = launches[size:]
        pins = [pin for pin in pins if "+" in pin]
        specs.append(f"{name}{{pinned={'/'.join(pins)}}}" if pins else name)
    result = weft.optimize(step, pipeline=",".join(rng.sample(specs, len(specs))))
    validate(Dag(result.module.graph))
    assert result.report.applied
    assert prove(step, result.module)
    assert check([result.module] * 8).holds
