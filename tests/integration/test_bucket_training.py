"""Real ranks train with merged collectives: the same weights as the same backend without Weft.

With two ranks every sum has one order, so that merging reductions changes no bit. With four a ring adds in an order
that depends on the place in the buffer: merged gathers alone still change no bit, merged reductions only the last ones.
"""

from __future__ import annotations

import pytest

from tests.integration.training import Trained, distance, same, train
from tests.integration.worlds import World

pytestmark = [pytest.mark.distributed, pytest.mark.xdist_group("ranks")]

ROUNDING = 1e-5
"""Largest difference of a weight after three steps of AdamW with a learning rate of 0.01, in f32."""
GATHERS = "bucket-all-gathers,hoist-launches,sink-waits"
REDUCTIONS = "fuse-ddp-all-reduces,bucket-reduce-scatters,bucket-all-reduces"
TWO = {"ddp": {"dp": 2}, "ddp-reducer": {"dp": 2}, "fsdp": {"dp": 2}}
FOUR = {
    "ddp": {"dp": 4},
    "fsdp": {"dp": 4},
    "fsdp-tp": {"dp": 2, "tp": 2},
    "hsdp": {"replicate": 2, "shard": 2},
}


def both(
    world: World, parallel: str, mesh: dict[str, int], backend: str, reference: str, pipeline: str, model: str
) -> tuple[list[Trained], list[Trained]]:
    found = world.run(
        train, parallel=parallel, mesh=mesh, backend=backend, options={"weft.pipeline": pipeline}, model=model
    )
    expected = world.reference(train, parallel=parallel, mesh=mesh, backend=reference, model=model)
    for rank in found:
        before, after = (sum(graph[side]["num_collectives"] for graph in rank.graphs) for side in ("before", "after"))
        assert after < before
        assert rank.messages == ()
    assert len({tuple(graph["plan_digest"] for graph in rank.graphs) for rank in found}) == 1
    return found, expected


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy", ["concat", *(pytest.param(s, marks=pytest.mark.long) for s in ("coalesced", "pack"))]
)
@pytest.mark.parametrize("parallel", TWO)
def test_merging_changes_no_bit_on_two_ranks(two_ranks: World, parallel: str, strategy: str):
    pipeline = ",".join(
        f"{name}{{strategy={strategy}}}" if "bucket" in name or "fuse" in name else name
        for name in (*REDUCTIONS.split(","), *GATHERS.split(","))
    )
    assert all(map(same, *both(two_ranks, parallel, TWO[parallel], "weft_eager", "aot_eager", pipeline, "llama-debug")))


@pytest.mark.long
@pytest.mark.parametrize("parallel", ["fsdp", "fsdp-tp", "hsdp"])
def test_merged_gathers_change_no_bit_on_four_ranks(four_ranks: World, parallel: str):
    assert all(
        map(same, *both(four_ranks, parallel, FOUR[parallel], "weft_eager", "aot_eager", GATHERS, "llama-debug"))
    )


@pytest.mark.long
@pytest.mark.parametrize("parallel", FOUR)
def test_merged_reductions_change_the_last_bits_on_four_ranks(four_ranks: World, parallel: str):
    pipeline = f"{REDUCTIONS},{GATHERS}"
    found, expected = both(four_ranks, parallel, FOUR[parallel], "weft_eager", "aot_eager", pipeline, "llama-debug")
    assert all(distance(a, b) < ROUNDING for a, b in zip(found, expected, strict=True))


@pytest.mark.long
@pytest.mark.needs_cpp
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_inductor_trains_the_same_with_merged_collectives(two_ranks: World, parallel: str):
    pipeline = f"{REDUCTIONS},{GATHERS}"
    assert all(map(same, *both(two_ranks, parallel, TWO[parallel], "weft", "inductor", pipeline, "mini")))
