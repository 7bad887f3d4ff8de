"""Real ranks train with collectives streamed through products: the weights of the same backend without Weft.

A product of fewer rows may run another kernel, so the last bits may differ.
"""

from __future__ import annotations

import pytest

from tests.integration.training import Trained, distance, train
from tests.integration.worlds import World

pytestmark = [pytest.mark.distributed, pytest.mark.xdist_group("ranks")]

ROUNDING = 1e-5
"""Largest difference of a weight after three steps of AdamW with a learning rate of 0.01, in f32."""
STREAM = "fuse-all-gather-matmuls{chunks=2},fuse-matmul-reduce-scatters{chunks=2},hoist-launches,sink-waits"


def both(
    world: World, parallel: str, mesh: dict[str, int], backend: str, reference: str
) -> list[tuple[Trained, Trained]]:
    options = {"weft.pipeline": STREAM}
    found = world.run(train, parallel=parallel, mesh=mesh, backend=backend, options=options, model="llama-debug")
    expected = world.reference(train, parallel=parallel, mesh=mesh, backend=reference, model="llama-debug")
    for rank in found:
        before, after = (sum(graph[side]["num_collectives"] for graph in rank.graphs) for side in ("before", "after"))
        assert after > before  # one became two
        assert rank.messages == ()
    return list(zip(found, expected, strict=True))


@pytest.mark.slow
def test_tensor_parallel_training_ends_with_the_same_weights(two_ranks: World):
    assert all(distance(a, b) < ROUNDING for a, b in both(two_ranks, "tp", {"tp": 2}, "weft_eager", "aot_eager"))


@pytest.mark.long
def test_training_on_a_mesh_ends_with_the_same_weights(four_ranks: World):
    pairs = both(four_ranks, "fsdp-tp", {"dp": 2, "tp": 2}, "weft_eager", "aot_eager")
    assert all(distance(a, b) < ROUNDING for a, b in pairs)


@pytest.mark.long
@pytest.mark.needs_cpp
def test_inductor_runs_chunks(two_ranks: World):
    assert all(distance(a, b) < ROUNDING for a, b in both(two_ranks, "tp", {"tp": 2}, "weft", "inductor"))
