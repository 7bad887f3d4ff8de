"""Models that advice is given on: those of the zoo, and modules by their import path."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from tests.integration.sharded import local
from tests.unit.advice import own_models
from weft.advice.advisor import advise
from weft.advice.layout import TrainingLayout
from weft.advice.layouts import layouts_of
from weft.advice.models import ImportedModel, ZooModel, model_of
from weft.cost.cluster import Cluster
from weft.errors import CaptureError
from weft.frontends.capture import TrainingStep, capture
from weft.frontends.fake_world import fake_world
from weft.graph.about import tokens_per_step
from weft.graph.collective import collectives
from weft.graph.groups import read_groups
from weft.graph.ops import Kind
from weft.verification.virtual.cluster import VirtualCluster
from weft.zoo.parallel.parameters import Precision
from weft.zoo.parallel.strategies import parallelise
from weft.zoo.parallel.tensor import plan_by_names, why_not_split

PATH = "tests.unit.advice.own_models:decoder"


def test_a_module_of_ones_own_is_sharded_without_rewriting():
    module = ImportedModel(PATH).capture(TrainingLayout("fsdp", (("dp", 8),)), 2)
    kinds = {each.kind for each in collectives(module.graph)}
    assert {Kind.ALL_GATHER, Kind.REDUCE_SCATTER} <= kinds
    assert tokens_per_step(module) == 2 * 32 * 8


def test_a_module_of_ones_own_is_counted():
    model = ImportedModel(PATH)
    assert model.tokens_per_sample == 32
    assert model.num_parameters == sum(each.numel() for each in own_models.Decoder().parameters())


def test_a_function_that_returns_something_else_is_an_error():
    with pytest.raises(CaptureError, match="does not return a function and a tuple of inputs"):
        _ = ImportedModel("tests.unit.advice.own_models:without_inputs").tokens_per_sample


def test_a_source_is_a_model_of_the_zoo_or_an_import_path():
    assert model_of("zoo:llama-debug") == ZooModel("llama-debug")
    assert model_of(PATH) == ImportedModel(PATH)


NAMED = "tests.unit.advice.own_models:named_decoder"


def test_blocks_with_known_names_are_split_where_their_heads_allow():
    model = ImportedModel(NAMED)
    assert [degree for degree in (2, 4, 8) if model.splits_over(degree)] == [2]  # two heads for keys and values
    assert not ImportedModel(PATH).splits_over(2)
    meshes = dict.fromkeys(layout.shape for layout in layouts_of(model, Cluster.load("h100-8")))
    assert [shape for shape in meshes if "TP" in shape] == ["FSDP x TP 4 x 2"]
    with pytest.raises(CaptureError, match=r"k_proj.weight of \(32, 64\) in heads of 16 does not split over 4 ranks"):
        model.capture(TrainingLayout("tp", (("tp", 4),)), 1)


@pytest.mark.parametrize("bias", [False, True])
def test_a_bias_that_every_rank_would_add_is_not_split(bias: bool):
    mlp = nn.ModuleDict({"c_fc": nn.Linear(8, 32, bias=bias), "gelu": nn.GELU(), "c_proj": nn.Linear(32, 8, bias=bias)})
    model = nn.ModuleDict({"mlp": mlp})
    found = plan_by_names(model)
    why = why_not_split(model, found, 2)
    assert why == ("mlp.c_proj.bias would be added once on every rank" if bias else None)
    assert list(found) == ["mlp", "mlp.c_fc", "mlp.c_proj"]


def test_a_plan_that_the_model_states_is_used(monkeypatch: pytest.MonkeyPatch):
    plan = {"mlp": "sum", "gate_proj": "column", "up_proj": "column", "down_proj": "row"}
    monkeypatch.setattr(own_models.NamedDecoder, "tensor_plan", plan, raising=False)
    layout = TrainingLayout("tp", (("tp", 8),))
    module = ImportedModel(NAMED).capture(layout, 1)
    sums = [each for each in collectives(module.graph) if each.kind is Kind.ALL_REDUCE]
    assert len(sums) == 4  # of each of two layers, the result and the gradient of the input


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"tp": 2}, {"dp": 2, "tp": 2}])
def test_split_blocks_compute_the_gradients_of_one_process(sizes: dict[str, int]):
    parallel, precision = "fsdp-tp" if "dp" in sizes else "tp", Precision(torch.float32, torch.float32)

    def build() -> own_models.NamedDecoder:
        torch.manual_seed(0)
        return own_models.NamedDecoder()

    def divide(mesh: DeviceMesh | None, gradients: list[Tensor] | None = None) -> nn.Module:
        model = build()
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients or [], strict=False):
                parameter.copy_(gradient)
        model.tensor_plan = plan_by_names(model)  # type: ignore[assignment]
        parallelise(model, parallel, mesh, precision)
        return model

    num_ranks = math.prod(sizes.values())
    tokens = torch.randint(0, 128, (num_ranks // sizes["tp"], 2, 32), generator=torch.Generator().manual_seed(1))
    whole = build()
    loss = torch.stack([whole(part, part) for part in tokens]).mean()
    gradients = list(torch.autograd.grad(loss, list(whole.parameters())))
    inputs: list[list[Tensor]] = []
    wanted: list[list[Tensor]] = []
    for rank in range(num_ranks):
        with fake_world(sizes, rank=rank) as mesh:
            model, batch = divide(mesh), tokens[rank // sizes["tp"]]
            inputs.append([*map(local, model.parameters()), *map(local, model.buffers()), batch, batch])
            wanted.append([local(part) for part in divide(mesh, gradients).parameters()])
    module = capture(TrainingStep(divide), (tokens[0], tokens[0]), sizes, "joint")
    for result, expected in zip(
        VirtualCluster(num_ranks).run(module, inputs, read_groups(module)), wanted, strict=True
    ):
        for found, exact in zip(result.outputs[1:], expected, strict=True):
            torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_advice_on_a_module_of_ones_own():
    found = advise(PATH, "h100-2x8", 32 * 32)
    assert {each.layout.parallel for each in (*found.ranked, *found.left_out)} == {"ddp", "fsdp", "hsdp"}
    assert found.best.found.step_us == min(each.found.step_us for each in found.ranked)
