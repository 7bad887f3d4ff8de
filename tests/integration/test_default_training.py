"""Real ranks train models of the zoo with the default pipeline, whatever it chooses: the weights of the backend below.

Streamed products and merged reductions may round otherwise; three steps of AdamW carry that on.
"""

from __future__ import annotations

import pytest

from tests.integration.training import distance, same, train
from tests.integration.worlds import World

pytestmark = [pytest.mark.distributed, pytest.mark.xdist_group("ranks")]

ROUNDING = 1e-5
"""Largest difference of a weight after three steps of AdamW with a learning rate of 0.01, in f32."""
TWO = [
    ("llama-debug", "fsdp", {"dp": 2}),
    *(
        pytest.param(model, parallel, mesh, marks=pytest.mark.long)
        for model, parallel, mesh in (
            ("llama-debug", "ddp", {"dp": 2}),
            ("llama-debug", "tp", {"tp": 2}),
            ("moe-debug", "ep-fsdp", {"dp": 1, "ep": 2}),
            ("vision-debug", "ddp", {"dp": 2}),
            ("vision-debug", "fsdp", {"dp": 2}),
        )
    ),
]
FOUR = [
    ("llama-debug", "fsdp-tp", {"dp": 2, "tp": 2}),
    ("llama-debug", "hsdp", {"replicate": 2, "shard": 2}),
    ("llama-debug", "hsdp-dtensor", {"replicate": 2, "shard": 2}),
    ("moe-debug", "ep-fsdp", {"dp": 2, "ep": 2}),
    ("vision-debug", "ddp", {"dp": 4}),
]


def check(world: World, model: str, parallel: str, mesh: dict[str, int], pipeline: str | None) -> None:
    """Weights as the backend below trains them; every bit of them where the pipeline is exact."""
    options = {} if pipeline is None else {"weft.pipeline": pipeline}
    found, expected = (
        world.run(train, parallel=parallel, mesh=mesh, backend=name, model=model, options=given)
        for name, given in (("weft_eager", options), ("aot_eager", None))
    )
    for mine, theirs in zip(found, expected, strict=True):
        assert same(mine, theirs) if pipeline == "exact" else distance(mine, theirs) < ROUNDING
        assert mine.messages == ()
        applied = {decision["pass_name"] for graph in mine.graphs for decision in graph["applied"]}
        assert "remove-noops" in applied or "cancel-views" in applied
    assert len({tuple(graph["plan_digest"] for graph in rank.graphs) for rank in found}) == 1


@pytest.mark.parametrize("pipeline", [None, "exact"])
@pytest.mark.parametrize(("model", "parallel", "mesh"), TWO)
def test_the_default_trains_as_aot_eager_does(
    two_ranks: World, model: str, parallel: str, mesh: dict[str, int], pipeline: str | None
):
    check(two_ranks, model, parallel, mesh, pipeline)


@pytest.mark.long
@pytest.mark.parametrize("pipeline", [None, "exact"])
@pytest.mark.parametrize(("model", "parallel", "mesh"), FOUR)
def test_the_default_trains_as_aot_eager_does_on_four_ranks(
    four_ranks: World, model: str, parallel: str, mesh: dict[str, int], pipeline: str | None
):
    check(four_ranks, model, parallel, mesh, pipeline)


@pytest.mark.long
@pytest.mark.needs_cpp
@pytest.mark.parametrize(("model", "parallel", "mesh"), TWO)
def test_the_default_trains_as_inductor_does(two_ranks: World, model: str, parallel: str, mesh: dict[str, int]):
    """Inductor has cleaned its graphs already, and rounds by the loops that it makes of an order."""
    found, expected = (
        two_ranks.run(train, parallel=parallel, mesh=mesh, backend=name, model=model) for name in ("weft", "inductor")
    )
    assert all(distance(mine, theirs) < ROUNDING for mine, theirs in zip(found, expected, strict=True))
    assert all(rank.messages == () for rank in found)
