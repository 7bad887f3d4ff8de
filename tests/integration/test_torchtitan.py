"""torchtitan's debug models train under its own parallelisms, on real ranks, with the same losses as without Weft."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.titan import Outcome, error_of_settings, read_config, train
from tests.integration.worlds import World
from tests.unit.advice.made_advice import advice_of
from weft.advice.layout import TrainingLayout
from weft.advice.recipe import titan_lines

pytestmark = [
    pytest.mark.long,
    pytest.mark.distributed,
    pytest.mark.needs_package("torchtitan"),
    pytest.mark.xdist_group("ranks"),
]

SHARDED = {"data_parallel_shard": 2}
REPLICATED = {"data_parallel_replicate": 2}
SPLIT = {"tensor_parallel": 2}
TOLERANCES = {"llama3": 1e-6, "deepseek_v3": 1e-5}
"""Relative, for the losses of ten steps: merged sums round otherwise. With the pipeline `exact`, losses are equal."""
EXPERTS = {"expert_parallel": 2}
TRACE, COMPILE = ("trace", "default", "weft"), ("compile", "aot_eager", "weft_eager")


@pytest.mark.parametrize(
    ("num_ranks", "model", "degrees", "ways", "merges"),
    [
        pytest.param(2, "llama3", SHARDED, (TRACE, COMPILE), True, id="fsdp"),
        pytest.param(2, "llama3", SPLIT, (TRACE,), True, id="tp"),
        # The planner hides these all-reduces and merges none.
        pytest.param(2, "llama3", REPLICATED | {"data_parallel_shard": 1}, (TRACE,), False, id="ddp"),
        pytest.param(4, "llama3", REPLICATED | SHARDED, (TRACE,), True, id="hsdp"),
        pytest.param(4, "llama3", SHARDED | SPLIT, (TRACE,), True, id="fsdp-tp"),
        pytest.param(2, "deepseek_v3", SHARDED | EXPERTS, (TRACE,), True, id="experts"),
        pytest.param(2, "deepseek_v3", SPLIT | EXPERTS, (TRACE,), True, id="experts-tp"),
        pytest.param(4, "deepseek_v3", REPLICATED | SHARDED | EXPERTS, (TRACE,), True, id="experts-hsdp"),
        pytest.param(4, "deepseek_v3", SHARDED | SPLIT | {"expert_parallel": 4}, (TRACE,), True, id="experts-fsdp-tp"),
    ],
)
def test_losses_are_those_without_weft(
    tmp_path: Path,
    num_ranks: int,
    model: str,
    degrees: dict[str, int],
    ways: tuple[tuple[str, str, str], ...],
    merges: bool,
):
    with World(num_ranks, tmp_path) as world:  # torchtitan changes classes: a process can hold one parallelism only
        for way, plain, woven in ways:
            common = {"model": model, "degrees": degrees, "way": way, "folder": str(tmp_path)}
            theirs = world.run(train, **common, name=plain)
            ours = world.run(train, **common, name=woven)
            check(theirs, ours, merges, TOLERANCES[model])


def check(plain: list[Outcome], woven: list[Outcome], merges: bool, tolerance: float) -> None:
    for theirs, ours in zip(plain, woven, strict=True):
        assert len(ours.losses) == 10
        assert ours.losses == pytest.approx(theirs.losses, rel=tolerance)
        assert ours.messages == ()
        assert theirs.graphs == []
        before, after = (sum(graph[k] for graph in ours.graphs) for k in range(2))
        assert before > 10
        assert (after < before) == merges


def test_settings_of_torchtitan_that_schedule_the_same_collectives_are_refused(two_ranks: World):
    for error in two_ranks.run(error_of_settings, name="enable_fsdp_ag_rs_overlap"):
        assert "compile.enable_fsdp_ag_rs_overlap is set" in error


@pytest.mark.parametrize("checkpoint", ["none", "selective", "full"])
@pytest.mark.parametrize("reshard", ["always", "never"])
def test_options_that_the_advice_prints_are_read_by_torchtitan(checkpoint: str, reshard: str):
    mesh = (("replicate", 2), ("shard", 8))
    advice = advice_of(TrainingLayout("hsdp", mesh, reshard, checkpoint))
    config = read_config("--module=llama3", "--config=llama3_debugmodel", *titan_lines(advice, advice.best))
    parallelism, training = config.parallelism, config.training
    assert (parallelism.data_parallel_replicate_degree, parallelism.data_parallel_shard_degree) == (2, 8)
    assert parallelism.fsdp_reshard_after_forward == reshard
    assert (training.local_batch_size, training.global_batch_size, training.seq_len) == (2, 128, 1024)
    found = config.activation_checkpoint
    assert found is None if checkpoint == "none" else checkpoint in type(found).__qualname__.lower()
