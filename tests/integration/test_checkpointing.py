"""Captured steps with activation checkpointing: how often products, attention and collectives run, and where."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import weft
from weft import zoo
from weft.graph.collective import collectives
from weft.graph.groups import read_groups
from weft.verification.comparison import compare, example_inputs
from weft.verification.virtual.cluster import VirtualCluster

LAYERS = 2
PRODUCTS_OF_A_BLOCK = ("query", "key", "value", "output", "gate", "up", "down")


def load(parallel: str, checkpoint: str, mesh: dict[str, int] | None = None, **options: Any) -> GraphModule:
    return zoo.load("llama-debug", parallel, mesh=mesh, layers=LAYERS, checkpoint=checkpoint, **options)


def calls(module: GraphModule, name: str, phase: str) -> list[str]:
    """The modules whose calls of an operator run in a phase."""
    found = [node for node in module.graph.nodes if str(node.target) == name]
    paths = [node for node in found if node.meta["partitioner_tag"] == f"is_{phase}"]
    return [list(node.meta["nn_module_stack"])[-1] for node in paths]


def products_again(module: GraphModule) -> dict[str, list[str]]:
    """The products that backward of each block repeats, in order: each linear has two of its own in backward."""
    seen: Counter[str] = Counter(calls(module, "aten.mm.default", "backward"))
    again = [path for path, count in seen.items() if count == 3]
    assert all(count in (2, 3) for count in seen.values())
    blocks: dict[str, list[str]] = {}
    for path in again:
        _, number, *_, linear = path.split(".")
        blocks.setdefault(number, []).append(linear)
    return {number: sorted(found, key=PRODUCTS_OF_A_BLOCK.index) for number, found in sorted(blocks.items())}


ALL_BUT_LAST = [*PRODUCTS_OF_A_BLOCK[:-1]]


@pytest.mark.parametrize(
    ("checkpoint", "again", "num_attention"),
    [
        ("none", {}, 0),
        ("full", {str(i): ALL_BUT_LAST for i in range(LAYERS)}, LAYERS),
        ("selective", {str(i): ["key", "output", "up"] for i in range(LAYERS)}, 0),
        ("products", {}, 0),
        ("attention", {str(i): ALL_BUT_LAST for i in range(LAYERS)}, 0),
        ("layer", {"1": ALL_BUT_LAST}, 1),
    ],
)
@pytest.mark.parametrize(("parallel", "mesh"), [("none", None), ("fsdp", {"dp": 2})])
def test_backward_repeats_the_products_that_the_policy_names(
    parallel: str, mesh: dict[str, int] | None, checkpoint: str, again: dict[str, list[str]], num_attention: int
):
    module = load(parallel, checkpoint, mesh)
    assert products_again(module) == again
    attention = "aten._scaled_dot_product_flash_attention_for_cpu.default"
    assert len(calls(module, attention, "forward")) == LAYERS
    assert len(calls(module, attention, "backward")) == num_attention


def launches(module: GraphModule, kind: str, group: str, phase: str) -> Counter[str]:
    """Number of collectives by the module that launches them."""
    table = read_groups(module)
    found = [
        collective.launch
        for collective in collectives(module.graph)
        if collective.kind.value == kind and table.group(collective.group).name == group
    ]
    tagged = [node for node in found if node.meta["partitioner_tag"] == f"is_{phase}"]
    return Counter(list(node.meta["nn_module_stack"])[-1] for node in tagged)


@pytest.mark.parametrize("checkpoint", ["none", "full", "selective", "layer"])
@pytest.mark.parametrize(("parallel", "mesh"), [("fsdp", {"dp": 2}), ("fsdp-tp", {"dp": 2, "tp": 2})])
def test_checkpointing_never_adds_a_gather_of_weights(parallel: str, mesh: dict[str, int], checkpoint: str):
    names = load(parallel, checkpoint, mesh, reshard=True)
    first, second = (launches(names, "all_gather", "dp", phase) for phase in ("forward", "backward"))
    assert set(first.values()) == {1}
    assert set(second.values()) == {1}
    matrices = {path for path in first if path.rpartition(".")[2] in (*PRODUCTS_OF_A_BLOCK, "output")}
    assert matrices <= set(second)
    kept = load(parallel, checkpoint, mesh, reshard=False)
    assert launches(kept, "all_gather", "dp", "forward") == first
    assert launches(kept, "all_gather", "dp", "backward") == {}


@pytest.mark.parametrize(
    ("checkpoint", "gathers", "scatters"),
    # Gradients bring two gathers and two scatters for each block. A recomputed block adds two gathers, and the scatter
    # whose result the feed-forward reads.
    [("none", 2, 2), ("full", 4, 3), ("selective", 4, 2)],
)
def test_a_recomputed_block_repeats_the_gathers_of_tensor_parallelism(checkpoint: str, gathers: int, scatters: int):
    module = load("tp", checkpoint, {"tp": 2})
    for kind, expected in (("all_gather", gathers), ("reduce_scatter", scatters)):
        found = launches(module, kind, "tp", "backward")
        blocks = Counter(path.split(".")[1] for path in found.elements() if path.startswith("layers."))
        assert blocks == {str(i): expected for i in range(LAYERS)}


@pytest.mark.parametrize(("parallel", "mesh"), [("none", None), ("fsdp", {"dp": 2})])
def test_the_graph_says_what_eager_execution_keeps_without_need(parallel: str, mesh: dict[str, int] | None):
    key = "saved_unread_bytes"
    last_product = 32 * 64 * 2  # of each block: a bf16 value for each token and feature
    assert load(parallel, "selective", mesh).meta["weft.about"][key] == LAYERS * last_product
    for options in ({"checkpoint": "full"}, {"checkpoint": "selective", "partition": "min-cut"}):
        assert key not in load(parallel, mesh=mesh, **options).meta["weft.about"]


@pytest.mark.parametrize(("checkpoint", "reshard"), [("full", True), ("selective", True), ("layer", False)])
def test_a_checkpointed_step_computes_the_same_bits(checkpoint: str, reshard: bool):
    plain = load("fsdp", "none", {"dp": 2}, reshard=reshard)
    module = load("fsdp", checkpoint, {"dp": 2}, reshard=reshard)
    inputs = example_inputs(plain, 2)
    results = [VirtualCluster(2).run(graph, inputs, read_groups(graph)) for graph in (plain, module)]
    assert compare(*results, num_terms=1).bitwise


def test_checkpointing_lowers_the_peak_in_the_order_of_what_is_saved():
    peaks = {
        checkpoint: weft.simulate(load("fsdp", checkpoint, {"dp": 2}, sequence=2048)).peak_bytes
        for checkpoint in ("none", "layer", "products", "selective", "full")
    }
    assert peaks["full"] < peaks["selective"] < peaks["products"] < peaks["none"]
    assert peaks["full"] < peaks["layer"] < peaks["none"]


@pytest.mark.filterwarnings("ignore:capture")
def test_long_regions_are_recomputed():
    """As many operators in a row as calls that Python's stack does not hold; parameters are constants of the graph."""
    layers = [nn.Sequential(nn.Linear(8, 8, bias=False), nn.ReLU()) for _ in range(300)]
    model = nn.Sequential(*layers)

    def again(*_arguments: Any, **_keywords: Any) -> CheckpointPolicy:
        return CheckpointPolicy.PREFER_RECOMPUTE

    def step(x: Tensor) -> Tensor:
        contexts = functools.partial(create_selective_checkpoint_contexts, again)
        result: Any = checkpoint(model, x, use_reentrant=False, context_fn=contexts)
        return torch.autograd.grad(result.sum(), x)[0]

    module = weft.capture(step, (torch.randn(4, 8, requires_grad=True),), mesh={"dp": 2})
    assert Counter(str(node.target) for node in module.graph.nodes)["aten.relu.default"] == 2 * len(layers)
