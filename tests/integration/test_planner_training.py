"""Real ranks train with planned steps: the same weights as the same backend without Weft.

Without merged reductions no bit changes, however far the order is from that of the graph. Merged ones may change the
last bits where more than two ranks add.
"""

from __future__ import annotations

import pytest

from tests.integration.training import Trained, distance, same, train
from tests.integration.worlds import World
from tests.tiers import quick_first, quick_only

pytestmark = [pytest.mark.distributed, pytest.mark.xdist_group("ranks")]

ROUNDING = 1e-5
"""Largest difference of a weight after three steps of AdamW with a learning rate of 0.01, in f32."""
EXACT, ALL = "schedule-overlap{merge=gathers}", "schedule-overlap"
TWO = {"ddp": {"dp": 2}, "fsdp": {"dp": 2}, "tp": {"tp": 2}}
FOUR = {
    "ddp": {"dp": 4},
    "fsdp": {"dp": 4},
    "tp": {"tp": 4},
    "fsdp-tp": {"dp": 2, "tp": 2},
    "hsdp": {"replicate": 2, "shard": 2},
}


def both(
    world: World, parallel: str, mesh: dict[str, int], pipeline: str, backend: str = "weft_eager", model: str = "mini"
) -> tuple[list[Trained], list[Trained]]:
    """What planned steps train, and what the backend underneath does."""
    reference = {"weft_eager": "aot_eager", "weft": "inductor"}[backend]
    found = world.run(
        train, parallel=parallel, mesh=mesh, backend=backend, options={"weft.pipeline": pipeline}, model=model
    )
    for rank in found:
        assert rank.messages == ()
        # in reports, not in counters: a rank may find in Inductor's cache what another has just compiled
        assert any(graph["before"]["digest"] != graph["after"]["digest"] for graph in rank.graphs)
    plans = {tuple(sorted((graph["phase"], graph["plan_digest"]) for graph in rank.graphs)) for rank in found}
    assert len(plans) == 1, "ranks decided differently"
    return found, world.reference(train, parallel=parallel, mesh=mesh, backend=reference, model=model)


@pytest.mark.parametrize("pipeline", quick_first([ALL, EXACT]))
@pytest.mark.parametrize("parallel", quick_only(TWO, "fsdp"))
def test_planned_steps_change_no_bit_on_two_ranks(two_ranks: World, parallel: str, pipeline: str):
    """Sums of two have one order, merged or not."""
    assert all(map(same, *both(two_ranks, parallel, TWO[parallel], pipeline)))


@pytest.mark.long
@pytest.mark.parametrize("parallel", FOUR)
def test_planned_steps_change_no_bit_on_four_ranks_where_only_gathers_merge(four_ranks: World, parallel: str):
    assert all(map(same, *both(four_ranks, parallel, FOUR[parallel], EXACT, model="llama-debug")))


@pytest.mark.long
@pytest.mark.parametrize("parallel", FOUR)
def test_planned_steps_with_merged_reductions_change_the_last_bits_on_four_ranks(four_ranks: World, parallel: str):
    found, expected = both(four_ranks, parallel, FOUR[parallel], ALL, model="llama-debug")
    assert all(distance(a, b) < ROUNDING for a, b in zip(found, expected, strict=True))


@pytest.mark.long
@pytest.mark.needs_cpp
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_inductor_trains_planned_steps_the_same(two_ranks: World, parallel: str):
    assert all(map(same, *both(two_ranks, parallel, TWO[parallel], ALL, backend="weft")))
