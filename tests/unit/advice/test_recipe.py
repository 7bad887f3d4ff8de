"""Recipe: the options and lines choose the layout that was advised."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.advice.made_advice import advice_of
from weft.advice.layout import TrainingLayout
from weft.advice.recipe import script_lines, titan_lines


@pytest.mark.parametrize(
    ("layout", "degrees"),
    [
        (TrainingLayout("ddp", (("dp", 16),)), (16, 1, 1)),
        (TrainingLayout("fsdp", (("dp", 16),)), (1, 16, 1)),
        (TrainingLayout("hsdp", (("replicate", 2), ("shard", 8))), (2, 8, 1)),
        (TrainingLayout("fsdp-tp", (("dp", 8), ("tp", 2))), (1, 8, 2)),
        (TrainingLayout("hsdp-tp", (("replicate", 2), ("shard", 4), ("tp", 2))), (2, 4, 2)),
    ],
)
def test_degrees_are_those_of_the_mesh(layout: TrainingLayout, degrees: tuple[int, int, int]):
    advice = advice_of(layout)
    options = dict(line.removeprefix("--").split("=") for line in titan_lines(advice, advice.best)[:-1])
    names = ("data_parallel_replicate_degree", "data_parallel_shard_degree", "tensor_parallel_degree")
    assert tuple(int(options[f"parallelism.{name}"]) for name in names) == degrees
    assert options["training.local_batch_size"] == "2"
    assert options["training.global_batch_size"] == "128"
    assert options["training.seq_len"] == "1024"


@pytest.mark.parametrize("checkpoint", ["none", "selective", "full"])
def test_checkpointing_is_the_subcommand(checkpoint: str):
    advice = advice_of(TrainingLayout("fsdp", (("dp", 16),), "always", checkpoint))
    assert titan_lines(advice, advice.best)[-1] == f"activation_checkpoint:{checkpoint}"


def test_a_script_has_the_mesh_the_accumulation_and_the_resharding():
    advice = advice_of(TrainingLayout("hsdp", (("replicate", 2), ("shard", 8)), "never"))
    mesh, accumulate, divide, _ = script_lines(advice, advice.best)
    assert mesh == 'mesh = init_device_mesh("cuda", (2, 8), mesh_dim_names=("replicate", "shard"))'
    assert "accumulate 4 microbatches of 2 sequences" in accumulate
    assert "reshard_after_forward=False" in divide


def test_a_cluster_that_only_the_program_knows_is_left_for_the_user_to_name():
    advice = replace(advice_of(TrainingLayout("ddp", (("dp", 16),))), cluster="ours", cluster_option=None)
    lines = script_lines(advice, advice.best)
    assert "options=" not in lines[-1]
    assert any("a file that describes ours" in line for line in lines)
