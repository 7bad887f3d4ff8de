"""The ways in which people train, on real ranks: `weft_eager` computes what `aot_eager` computes, bit by bit.

Compared are all losses and, on each rank, parameters and buffers after the last step.
"""

from __future__ import annotations

import pytest

from tests.integration.training import Trained, same
from tests.integration.ways import WAYS, error_of, train_by
from tests.integration.worlds import World

pytestmark = [pytest.mark.long, pytest.mark.distributed, pytest.mark.xdist_group("ranks")]

PHASES = ("forward", "backward")
GRAPHS: dict[str, tuple[tuple[str, ...], int]] = {
    "accumulate_gradients": (("forward", "inference", "inference", "inference"), 0),
    "checkpoint_blocks": (PHASES, 2),
    "checkpoint_blocks_of_dtensors": (PHASES, 2),
    "keep_f32_masters": (PHASES, 2),
    "scale_the_loss": ((*PHASES, "inference", "inference"), 2),
    "unscale_in_a_function": ((*PHASES, "inference"), 3),
    "clip_by_global_norm": ((*PHASES, "inference"), 2),
    "tie_embeddings": (PHASES, 2),
    "train_adapters": (PHASES, 2),
    "share_batch_statistics": (PHASES, 1),
    "change_the_batch": (PHASES * 2, 4),
    "find_the_batch_changed": (PHASES * 2, 4),
    "save_and_resume": (PHASES * 2, 4),
    "compile_the_optimizer": ((*PHASES, "inference", "inference"), 2),
    "put_the_optimizer_in_the_graph": (("inference",), 1),
}
"""The graphs that Weft is handed in each way, and how many of them it must have changed.

DDP's python reducer launches each all-reduce as soon as it can and waits last, so there is nothing to move; nor is
there around the single all-reduce of a norm, nor around DTensor's of found_inf, nor in an optimizer's own graph.
"""
MAY_FAIL_IN_TORCH = {"checkpoint_blocks_of_dtensors"}
"""Ways that some versions of torch refuse on CPU, whatever the backend: skipped with the error that torch gives."""


def test_every_way_is_expected_to_give_certain_graphs():
    assert list(GRAPHS) == list(WAYS)


@pytest.mark.parametrize("way", WAYS)
def test_weft_eager_trains_as_aot_eager_does(two_ranks: World, way: str):
    if way in MAY_FAIL_IN_TORCH and (error := two_ranks.run(error_of, way=way, backend="aot_eager")[0]):
        pytest.skip(f"torch's aot_eager fails without Weft: {error[:120]}")
    found, expected = (two_ranks.run(train_by, way=way, backend=backend) for backend in ("weft_eager", "aot_eager"))
    for mine, reference in zip(found, expected, strict=True):
        assert mine.weights.keys() == reference.weights.keys()
        assert same(mine, reference)
        assert mine.messages == ()
        assert reference.graphs == []
    assert_woven(way, found)


def assert_woven(way: str, found: list[Trained]) -> None:
    """Weft saw the graphs and changed those where something can be moved; every rank made the same plans."""
    phases, num_changed = GRAPHS[way]
    counters = found[0].counters
    assert tuple(graph["phase"] for graph in found[0].graphs) == phases
    assert counters["collectives before"] > 0
    assert counters["graphs changed"] == num_changed
    assert len({tuple(graph["plan_digest"] for graph in rank.graphs) for rank in found}) == 1
