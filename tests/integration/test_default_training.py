"""Real ranks train models of the zoo with the default pipeline, whatever it chooses: the weights of the backend below.

Streamed products and merged reductions may round otherwise; three steps of AdamW carry that on.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.integration.test_training import ON_FOUR, ON_TWO
from tests.integration.training import distance, same, train
from tests.integration.worlds import World

pytestmark = [pytest.mark.distributed, pytest.mark.xdist_group("ranks")]

ROUNDING = 1e-5
"""Largest difference of a weight after three steps of AdamW with a learning rate of 0.01, in f32."""
Step = tuple[str, str, dict[str, int]]
"""A model, how it is spread, and its mesh."""
TWO: list[Step] = [
    ("llama-debug", "fsdp", {"dp": 2}),
    ("llama-debug", "ddp", {"dp": 2}),
    ("llama-debug", "tp", {"tp": 2}),
    ("moe-debug", "ep-fsdp", {"dp": 1, "ep": 2}),
    ("vision-debug", "ddp", {"dp": 2}),
    ("vision-debug", "fsdp", {"dp": 2}),
]
FOUR: list[Step] = [
    ("llama-debug", "fsdp-tp", {"dp": 2, "tp": 2}),
    ("llama-debug", "hsdp", {"replicate": 2, "shard": 2}),
    ("llama-debug", "hsdp-dtensor", {"replicate": 2, "shard": 2}),
    ("llama-debug", "hsdp-tp", {"replicate": 2, "shard": 2, "tp": 1}),
    ("llama-debug", "hsdp-tp", {"replicate": 2, "shard": 1, "tp": 2}),
    ("llama-debug", "ddp-dtensor", {"outer": 2, "inner": 2}),
    ("moe-debug", "ep-fsdp", {"dp": 2, "ep": 2}),
    ("vision-debug", "ddp", {"dp": 4}),
]
EXACT_ELSEWHERE = [
    *(("llama-debug", parallel, mesh) for meshes in (ON_TWO, ON_FOUR) for parallel, mesh in meshes.items()),
    ("moe-debug", "ep-fsdp", ON_FOUR["ep-fsdp"]),
]
"""Steps that `test_training.py` trains with the pipeline `exact`."""


def with_pipelines(steps: list[Step]) -> list[Any]:
    """Each step with the default pipeline, and with `exact`; all but the first are long."""
    cases = [(*step, p) for step in steps for p in (None, "exact") if p is None or step not in EXACT_ELSEWHERE]
    return [cases[0], *(pytest.param(*case, marks=pytest.mark.long) for case in cases[1:])]


def check(world: World, model: str, parallel: str, mesh: dict[str, int], pipeline: str | None) -> None:
    """Weights as the backend below trains them; every bit of them where the pipeline is exact."""
    options = {} if pipeline is None else {"weft.pipeline": pipeline}
    found = world.run(train, parallel=parallel, mesh=mesh, backend="weft_eager", model=model, options=options)
    expected = world.reference(train, parallel=parallel, mesh=mesh, backend="aot_eager", model=model)
    for mine, theirs in zip(found, expected, strict=True):
        assert same(mine, theirs) if pipeline == "exact" else distance(mine, theirs) < ROUNDING
        assert mine.messages == ()
        applied = {decision["pass_name"] for graph in mine.graphs for decision in graph["applied"]}
        assert "remove-noops" in applied or "cancel-views" in applied
    assert len({tuple(graph["plan_digest"] for graph in rank.graphs) for rank in found}) == 1


@pytest.mark.slow
@pytest.mark.parametrize(("model", "parallel", "mesh", "pipeline"), with_pipelines(TWO))
def test_the_default_trains_as_aot_eager_does(
    two_ranks: World, model: str, parallel: str, mesh: dict[str, int], pipeline: str | None
):
    check(two_ranks, model, parallel, mesh, pipeline)


@pytest.mark.long
@pytest.mark.parametrize(("model", "parallel", "mesh", "pipeline"), with_pipelines(FOUR))
def test_the_default_trains_as_aot_eager_does_on_four_ranks(
    four_ranks: World, model: str, parallel: str, mesh: dict[str, int], pipeline: str | None
):
    check(four_ranks, model, parallel, mesh, pipeline)


@pytest.mark.long
@pytest.mark.needs_cpp
@pytest.mark.parametrize(("model", "parallel", "mesh"), TWO)
def test_the_default_trains_as_inductor_does(two_ranks: World, model: str, parallel: str, mesh: dict[str, int]):
    """Inductor has cleaned its graphs already, and rounds by the loops that it makes of an order."""
    found = two_ranks.run(train, parallel=parallel, mesh=mesh, backend="weft", model=model)
    expected = two_ranks.reference(train, parallel=parallel, mesh=mesh, backend="inductor", model=model)
    assert all(distance(mine, theirs) < ROUNDING for mine, theirs in zip(found, expected, strict=True))
    assert all(rank.messages == () for rank in found)
