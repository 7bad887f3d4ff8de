"""Blocks of a user's model: found, cut for probes only where few layers foretell all, and checkpointed."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn

from tests.unit.advice import own_models
from weft.advice.blocks import blocks_of, checkpoint, cut, few_layers
from weft.advice.evaluation import PlannedLayout, Question, plan_layout, probe
from weft.advice.layout import TrainingLayout
from weft.advice.models import ImportedModel, TrainedModel, ZooModel
from weft.cost.cluster import Cluster
from weft.frontends.capture import TrainingStep, capture

DEEPSEEK = ZooModel("deepseek-debug", (("num_layers", 6), ("num_dense", 3)))


def own(name: str) -> ImportedModel:
    return ImportedModel(f"{own_models.__name__}:{name}")


@pytest.mark.parametrize(
    ("kinds", "found"),
    [
        ("a", None),
        ("aa", None),
        ("aaa", (1, 2)),
        ("baaaa", (1, 2)),
        ("bbbaaaa", (3, 4)),
        ("ababab", (2, 4)),
        ("babab", (1, 3)),
        ("abcdef", None),
        ("aaaab", None),
    ],
)
def test_few_layers_are_those_after_which_all_repeat(kinds: str, found: tuple[int, int] | None):
    assert few_layers(kinds) == found


def test_a_model_of_the_zoo_is_measured_behind_its_dense_layers():
    assert ZooModel("llama-8b").few_layers == (1, 2)
    assert ZooModel("deepseek-671b").few_layers == (3, 4)
    assert ZooModel("llama-debug").few_layers is None


def test_blocks_are_the_longest_container_that_no_other_one_contains():
    experts = nn.ModuleList(nn.ModuleDict({"experts": nn.ModuleList(nn.Linear(2, 2) for _ in range(9))}) for _ in "ab")
    heads = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))
    assert blocks_of(nn.ModuleDict({"layers": experts})) is experts
    assert blocks_of(nn.Sequential(nn.ModuleDict({"layers": experts}), heads)) is heads
    assert blocks_of(nn.Sequential(nn.Linear(2, 2), nn.ReLU())) is None


@pytest.mark.parametrize("kind", [nn.ModuleList, nn.ModuleDict, nn.Sequential])
def test_a_container_of_any_kind_is_cut(kind: type[nn.Module]):
    layers = [nn.Linear(2, 2) for _ in range(5)]
    blocks = kind({str(k): layer for k, layer in enumerate(layers)}) if kind is nn.ModuleDict else kind()
    for layer in layers if kind is not nn.ModuleDict else ():
        blocks.append(layer)  # type: ignore[operator]
    cut(blocks, 2)
    assert list(blocks.children()) == layers[:2]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("deep_decoder", (1, 2)),
        ("mixed_decoder", (2, 3)),
        ("turning_decoder", None),
        ("naming_decoder", None),
        ("split_decoder", None),
    ],
)
def test_blocks_are_cut_only_where_graphs_confirm_it(name: str, found: tuple[int, int] | None):
    assert own(name).few_layers == found


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "checkpoint"), [(own("mixed_decoder"), "full"), (own("turning_decoder"), "none"), (DEEPSEEK, "none")]
)
def test_a_bound_from_few_layers_holds_for_all(model: TrainedModel, checkpoint: str):
    layout = TrainingLayout("fsdp", (("dp", 8),), checkpoint=checkpoint)
    question = Question(model, layout, Cluster.load("h100-8"), 64, None, 8)
    probed, planned = probe(question), plan_layout(question)
    assert isinstance(planned, PlannedLayout)
    assert 0.3 * planned.step_us < probed.bound_us <= planned.step_us
    assert probed.estimate_us == pytest.approx(planned.step_us, rel=0.2)


@pytest.mark.slow
def test_checkpointed_blocks_multiply_again():
    products: dict[str, int] = {}
    for mode in ("none", "selective", "full"):
        layout = TrainingLayout("fsdp", (("dp", 8),), checkpoint=mode)
        graph = own("named_decoder").capture(layout, 1).graph
        products[mode] = Counter(node.target for node in graph.nodes)[torch.ops.aten.mm.default]
    assert products["full"] == products["none"] + 2 * 6  # of seven in each of two blocks; backward needs no last one
    assert products["none"] < products["selective"] < products["full"]


@pytest.mark.slow
def test_a_model_cut_to_one_block_still_checkpoints_it():
    products: list[int] = []
    for num_layers in (1, 2):
        layout = TrainingLayout("fsdp", (("dp", 8),), checkpoint="full")
        graph = own("named_decoder").capture(layout, 1, num_layers).graph
        products.append(Counter(node.target for node in graph.nodes)[torch.ops.aten.mm.default])
    assert products == [3 + 27, 3 + 2 * 27]  # of the head; of a block, forward, again, and backward


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["selective", "full"])
def test_graphs_of_checkpointed_blocks_compute_the_gradients_of_the_model(mode: str):
    def build(mode: str) -> own_models.NamedDecoder:
        torch.manual_seed(0)
        model = own_models.NamedDecoder()  # its norms add in place
        blocks = blocks_of(model)
        assert blocks is not None
        checkpoint(blocks, mode)
        return model

    model, tokens = build("none"), torch.randint(0, 128, (2, 32))
    module = capture(TrainingStep(lambda _: build(mode)), (tokens, tokens), None, "joint")
    found = module(*model.parameters(), *model.buffers(), tokens, tokens)
    loss = model(tokens, tokens)
    torch.testing.assert_close(list(found), [loss, *torch.autograd.grad(loss, list(model.parameters()))])
