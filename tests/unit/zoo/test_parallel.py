"""Which part of a parameter a rank holds, and how meshes are chosen."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from weft import zoo
from weft.errors import CaptureError
from weft.frontends.fake_world import fake_world
from weft.zoo.parallel.parameters import ParameterLayout, Precision, part_of, spread
from weft.zoo.parallel.strategies import mesh_of, parallelise

MESH = {"dp": 2, "tp": 2}
WHOLE = torch.arange(16.0).view(8, 2)


@pytest.mark.parametrize(
    ("layout", "rows"),
    [
        (ParameterLayout(shard=("dp",)), [[0, 1, 2, 3], [0, 1, 2, 3], [4, 5, 6, 7], [4, 5, 6, 7]]),
        (ParameterLayout(shard=("dp", "tp")), [[0, 1], [2, 3], [4, 5], [6, 7]]),
        (ParameterLayout(split=("tp", 0)), [[0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 2, 3], [4, 5, 6, 7]]),
        (ParameterLayout(shard=("dp",), split=("tp", 0)), [[0, 1], [4, 5], [2, 3], [6, 7]]),
    ],
)
def test_a_rank_holds_its_rows(layout: ParameterLayout, rows: list[list[int]]):
    for rank in range(4):
        with fake_world(MESH, rank=rank) as mesh:
            part = part_of(WHOLE, layout, mesh)
        assert part.shape == WHOLE.shape
        assert (part.to_local()[:, 0] / 2).tolist() == rows[rank]


def test_a_split_of_dim_1_leaves_the_rows_to_the_shards():
    with fake_world(MESH, rank=1) as mesh:
        part = part_of(WHOLE, ParameterLayout(shard=("dp",), split=("tp", 1)), mesh)
    assert part.placements == (Shard(0), Shard(1))
    assert part.to_local().tolist() == [[1.0], [3.0], [5.0], [7.0]]


def test_a_parameter_whose_rows_do_not_split_evenly_stays_whole():
    with fake_world({"dp": 3}) as mesh:
        model = nn.Linear(4, 4)
        layouts: dict[str, ParameterLayout] = dict.fromkeys(["weight", "bias"], ParameterLayout(shard=("dp",)))
        spread(model, layouts, mesh, Precision(), lambda _path: True)
        placements = [parameter.placements for parameter in model.parameters() if isinstance(parameter, DTensor)]
    assert placements == [(Replicate(),), (Replicate(),)]


@pytest.mark.parametrize(("parallel", "axes"), [("fsdp", {"dp": 2}), ("tp", {"tp": 2}), ("fsdp-tp", MESH)])
def test_parameters_keep_their_names_and_stay_shared(parallel: str, axes: dict[str, int]):
    with fake_world(axes) as mesh:
        model, _ = zoo.build("llama-debug", parallel, mesh, tied=True)
        plain, _ = zoo.build("llama-debug", tied=True)
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert list(model.state_dict()) == list(plain.state_dict())
    raw = [dict(m.named_parameters(recurse=False))["weight"] for m in (model.tokens, model.output)]  # type: ignore[union-attr]
    assert raw[0] is raw[1]


def test_under_ddp_parameters_stay_plain_and_are_read_in_the_compute_dtype():
    with fake_world({"dp": 2}) as mesh:
        model = nn.Linear(4, 4)
        parallelise(model, "ddp", mesh, Precision())
        assert [type(parameter) for parameter in model.parameters()] == [nn.Parameter, nn.Parameter]
        assert model.weight.dtype == torch.bfloat16
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())


def test_gradients_arrive_on_the_parameters_in_their_own_dtype():
    with fake_world({"dp": 2}) as mesh:
        model, make_batch = zoo.build("llama-debug", "fsdp", mesh, layers=1)
        model(*make_batch(1)).backward()
        for parameter in model.parameters():
            assert isinstance(parameter.grad, DTensor)
            assert parameter.grad.placements == parameter.placements  # type: ignore[attr-defined]
            assert parameter.grad.dtype == torch.float32


@pytest.mark.parametrize(
    ("parallel", "ranks", "expected"),
    [
        ("ddp", 64, {"dp": 64}),
        ("fsdp", None, {"dp": 8}),
        ("fsdp-tp", 64, {"dp": 8, "tp": 8}),
        ("hsdp", 12, {"replicate": 2, "shard": 6}),
        ("fsdp-tp", 4, {"dp": 2, "tp": 2}),
        ("fsdp-tp", 2, {"dp": 2, "tp": 1}),
        ("hsdp-tp", 64, {"replicate": 2, "shard": 4, "tp": 8}),
        ("hsdp-tp", 8, {"replicate": 2, "shard": 2, "tp": 2}),
        ("ep-fsdp", 1024, {"dp": 128, "ep": 8}),
        ("ep-tp", 64, {"ep": 8, "tp": 8}),
    ],
)
def test_ranks_alone_put_up_to_eight_inside(parallel: str, ranks: int | None, expected: dict[str, int]):
    assert mesh_of(parallel, ranks, None) == expected


def test_a_mesh_of_a_part_of_the_world_is_refused():
    with fake_world(MESH) as mesh, pytest.raises(CaptureError) as caught:
        zoo.build("llama-debug", "tp", mesh["tp"])
    assert str(caught.value) == "zoo: the mesh has 2 ranks, the world 4\nuse a mesh of all ranks"
