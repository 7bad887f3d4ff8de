"""A model sharded by `weft.simple_fsdp` trains as under FSDP2's `fully_shard`, and exchanges checkpoints with it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import weft
from tests.integration.bridge import exchange, exchange_checkpoints, exchange_optimizers, parameters_of, train
from tests.integration.worlds import World
from weft.errors import CaptureError
from weft.frontends.fake_world import fake_world

pytestmark = [pytest.mark.distributed, pytest.mark.xdist_group("ranks")]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_losses_are_those_of_fully_shard(two_ranks: World, dtype: torch.dtype | None):
    theirs, ours = (
        two_ranks.run(train, way=way, shape={"dp": 2}, backend="eager", dtype=dtype)
        for way in ("fully_shard", "simple_fsdp")
    )
    tolerance = 1e-6 if dtype is None else 2e-2
    for a, b in zip(theirs, ours, strict=True):
        assert b.losses == pytest.approx(a.losses, rel=tolerance)


def test_weft_sees_the_collectives_and_changes_no_loss(two_ranks: World):
    plain, woven = (
        two_ranks.run(train, way="simple_fsdp", shape={"dp": 2}, backend=name) for name in ("aot_eager", "weft_eager")
    )
    for a, b in zip(plain, woven, strict=True):
        assert b.losses == pytest.approx(a.losses, rel=1e-6)
        assert b.collectives > 10


def test_parameters_load_both_ways(two_ranks: World):
    assert two_ranks.run(exchange, shape={"dp": 2}) == [[], []]


def test_states_of_optimizers_load_both_ways(two_ranks: World):
    for results in two_ranks.run(exchange_optimizers, shape={"dp": 2}):
        for source, target in results:
            assert target == pytest.approx(source, rel=1e-6)


@pytest.mark.slow
def test_sharded_checkpoints_load_both_ways(two_ranks: World, tmp_path: Path):
    for results in two_ranks.run(exchange_checkpoints, shape={"dp": 2}, folder=str(tmp_path)):
        for source, target in results:
            assert target == pytest.approx(source, rel=1e-6)


@pytest.mark.parametrize("backend", ["eager", pytest.param("weft_eager", marks=pytest.mark.slow)])
def test_gradients_that_wait_for_the_last_microbatch_are_those_of_fully_shard(two_ranks: World, backend: str):
    given = {"shape": {"dp": 2}, "num_microbatches": 3}
    theirs = two_ranks.reference(train, way="fully_shard", backend="eager", **given)
    ours = two_ranks.run(train, way="simple_fsdp", backend=backend, **given)
    for a, b in zip(theirs, ours, strict=True):
        assert b.losses == pytest.approx(a.losses, rel=1e-6)


@pytest.mark.slow
@pytest.mark.needs_cpp
def test_inductor_with_weft_changes_no_loss(two_ranks: World):
    plain, woven = (
        two_ranks.run(train, way="simple_fsdp", shape={"dp": 2}, backend=name) for name in ("aot_eager", "weft")
    )
    for a, b in zip(plain, woven, strict=True):
        assert b.losses == pytest.approx(a.losses, rel=1e-5)
        assert b.collectives > 10


@pytest.mark.long
def test_two_dims_replicate_and_shard(four_ranks: World):
    shape = {"replicate": 2, "shard": 2}
    theirs, ours = (
        four_ranks.run(train, way=way, shape=shape, backend="eager") for way in ("fully_shard", "simple_fsdp")
    )
    for a, b in zip(theirs, ours, strict=True):
        assert b.losses == pytest.approx(a.losses, rel=1e-6)
    assert four_ranks.run(exchange, shape=shape) == [[]] * 4


UNITS = "only={} units=split strategy=pack"
AS_FSDP2 = f"bucket-all-gathers{{{UNITS.format('parameters')}}},bucket-reduce-scatters{{{UNITS.format('gradients')}}}"


@pytest.mark.slow
@pytest.mark.parametrize(("pipeline", "num_reductions"), [("exact", 14), (AS_FSDP2, 3)], ids=["exact", "units"])
def test_parameters_are_those_of_fully_shard_bit_for_bit(four_ranks: World, pipeline: str, num_reductions: int):
    theirs = four_ranks.reference(parameters_of, way="fully_shard", backend="eager")
    ours = four_ranks.run(parameters_of, way="simple_fsdp", backend="weft_eager", pipeline=pipeline)
    for (wanted, _), (found, reductions) in zip(theirs, ours, strict=True):
        assert reductions == num_reductions
        assert found == wanted


def test_wrong_arguments_are_refused():
    with fake_world({"dp": 2}) as mesh:
        unnamed = init_device_mesh("cpu", (2,))
        with pytest.raises(CaptureError, match="expected one or two named dims"):
            weft.simple_fsdp(nn.Linear(4, 4), unnamed)
        with pytest.raises(CaptureError, match="several dtypes"):
            weft.simple_fsdp(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).half()), mesh)
        model = weft.simple_fsdp(nn.Linear(4, 4), mesh)
        with pytest.raises(CaptureError, match="is sharded already"):
            weft.simple_fsdp(model, mesh)
