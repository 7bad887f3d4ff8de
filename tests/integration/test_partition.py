"""Captured steps whose saved values AOTAutograd chooses: what crosses to backward, and that nothing else changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

import weft
from weft import zoo
from weft.cost.flops import flops_of
from weft.errors import CaptureError
from weft.frontends.provenance import BACKWARD, FORWARD, region_of
from weft.graph.groups import read_groups
from weft.graph.operator_effects import profile_of
from weft.verification.comparison import compare, example_inputs
from weft.verification.virtual.cluster import VirtualCluster


def load(partition: Any, parallel: str = "fsdp", **options: Any) -> GraphModule:
    mesh = {"none": None, "fsdp": {"dp": 2}, "tp": {"tp": 2}, "fsdp-tp": {"dp": 1, "tp": 2}}[parallel]
    return zoo.load("llama-debug", parallel, mesh=mesh, partition=partition, **options)


def crossing(module: GraphModule, region: str) -> list[str]:
    """The operators of a region, without views, whose results backward reads."""
    nodes: dict[Node, None] = {}
    for node in module.graph.nodes:
        if node.meta.get("partitioner_tag") == BACKWARD:
            nodes.update((source, None) for source in node.all_input_nodes)
    roots: dict[Node, None] = {}
    for node in nodes:
        root = node
        while profile_of(root).is_view:
            root = root.all_input_nodes[0]
        roots[root] = None
    made = [node for node in roots if node.meta.get("partitioner_tag") == FORWARD and region_of(node) == region]
    return sorted(node.name.rstrip("_0123456789") for node in made)


@pytest.mark.parametrize(
    ("partition", "parallel", "checkpoint"),
    [
        ("min-cut", "none", "none"),
        ("min-cut", "fsdp", "selective"),
        ("min-cut-layers", "tp", "none"),
        ("min-cut", "fsdp-tp", "selective"),
        ("min-cut", "tp", "full"),
    ],
)
def test_a_partitioned_step_computes_the_same_bits(partition: str, parallel: str, checkpoint: str):
    plain = load("autograd", parallel, checkpoint=checkpoint)
    module = load(partition, parallel, checkpoint=checkpoint)
    assert weft.listing(module) != weft.listing(plain)
    ranks = 1 if parallel == "none" else 2
    inputs = example_inputs(plain, ranks)
    results = [VirtualCluster(ranks).run(graph, inputs, read_groups(graph)) for graph in (plain, module)]
    assert compare(*results, num_terms=1).bitwise


def test_a_layer_saves_products_inputs_of_products_and_statistics():
    eager, compiled = (
        crossing(load(partition, "none", compute_dtype=torch.float32), "layers.1")
        for partition in ("autograd", "min-cut")
    )
    attention = ["_scaled_dot_product_flash_attention_for_cpu"]
    # Both save the turned queries and keys (add), and the products that are read pointwise in backward. Eager also
    # saves the result of silu, each norm before its weight is multiplied, and the sum in the middle of the block, which
    # the compiler makes again of the block's input and a product.
    assert eager == attention + ["add"] * 4 + ["mm"] * 3 + ["mul"] * 5 + ["rsqrt"] * 2 + ["silu"]
    assert compiled == attention + ["add"] * 3 + ["mm"] * 4 + ["mul"] * 3 + ["rsqrt"] * 2


def test_the_loss_keeps_its_logits_and_not_their_logarithms():
    eager, layers, compiled = (load(partition, "fsdp") for partition in ("autograd", "min-cut-layers", "min-cut"))
    assert "_log_softmax" in crossing(eager, "loss")
    assert "_log_softmax" in crossing(layers, "loss")
    assert "_log_softmax" not in crossing(compiled, "loss")


def test_the_cut_lowers_the_peak():
    modules = (load(partition, sequence=2048) for partition in ("autograd", "min-cut-layers"))
    eager, compiled = (weft.simulate(module).peak_bytes for module in modules)
    assert compiled < 0.9 * eager


def test_a_smaller_memory_budget_saves_less_and_computes_more_again():
    modules = [
        load("min-cut-layers", "none", sequence=2048, memory_budget=budget, compute_dtype=torch.float32)
        for budget in (1.0, 0.5, 0.0)
    ]
    peaks, flops = [weft.simulate(module).peak_bytes for module in modules], [num_products(each) for each in modules]
    assert peaks == sorted(peaks, reverse=True)
    assert flops == sorted(flops)
    assert len({*peaks}) == len({*flops}) == 3
    assert crossing(modules[-1], "layers.1") == ["add"]  # its result, which the next region takes
    assert modules[1].meta["weft.about"]["memory_budget"] == 0.5


def test_a_step_within_a_memory_budget_computes_the_same_bits():
    plain, module = load("autograd", "tp"), load("min-cut", "tp", memory_budget=0.25)
    inputs = example_inputs(plain, 2)
    results = [VirtualCluster(2).run(graph, inputs, read_groups(graph)) for graph in (plain, module)]
    assert compare(*results, num_terms=1).bitwise


def num_products(module: GraphModule) -> int:
    """Number of matrix products and attentions."""
    return sum(bool(flops_of(node)) for node in module.graph.nodes if node.op == "call_function")


def test_alike_layers_get_the_same_cut():
    module = load("min-cut", "fsdp", layers=4)
    first, *others = (crossing(module, f"layers.{i}") for i in range(1, 4))
    assert others == [first, first]


class Plain(nn.Module):
    """A model without layers is one region."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight).exp().sin().sum()


def test_a_model_without_layers_is_cut_as_a_whole():
    module = weft.capture(Plain(), [torch.ones(4, 8)], part="joint", partition="min-cut")
    repeated = [node.name for node in module.graph.nodes if node.meta.get("partitioner_tag") == BACKWARD]
    assert "exp_1" in repeated
    inputs = torch.eye(8), torch.randn(4, 8)
    weight = inputs[0].clone().requires_grad_()
    loss = (inputs[1] @ weight).exp().sin().sum()
    found = module(*inputs)
    assert torch.equal(found[0], loss)
    assert torch.equal(found[1], torch.autograd.grad(loss, weight)[0])


@pytest.mark.parametrize(
    ("step", "partition", "message"),
    [
        (Plain(), "mincut", "capture: partition is 'mincut', expected autograd, min-cut, min-cut-layers\ndid you mean"),
        (torch.sin, "min-cut", "capture: a function is traced as it is, so its partition is 'autograd', not 'min-cut'"),
    ],
)
def test_a_partition_that_cannot_be_is_refused(step: Any, partition: Any, message: str):
    with pytest.raises(CaptureError) as caught:
        weft.capture(step, [torch.ones(4, 8)], partition=partition, part="joint" if isinstance(step, Plain) else "step")
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("partition", "budget", "message"),
    [
        ("min-cut", 1.5, "capture: memory_budget is 1.5, expected 0 to 1"),
        (
            "autograd",
            0.5,
            "capture: autograd saves what each operator asks for, whatever the memory budget",
        ),
    ],
)
def test_a_memory_budget_that_cannot_be_is_refused(partition: Any, budget: float, message: str):
    with pytest.raises(CaptureError) as caught:
        weft.capture(Plain(), [torch.ones(4, 8)], part="joint", partition=partition, memory_budget=budget)
    assert str(caught.value).startswith(message)
