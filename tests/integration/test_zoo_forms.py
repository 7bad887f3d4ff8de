"""The forms of a training step that changed over the years, as captured graphs."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule

import weft
from weft import zoo
from weft.frontends.provenance import FORWARD, OPTIMIZER
from weft.graph.collective import collectives
from weft.graph.groups import read_groups
from weft.verification.comparison import compare, example_inputs
from weft.verification.virtual.cluster import VirtualCluster
from weft.zoo.llama import ComplexRotary, LlamaConfig


def load(parallel: str = "fsdp", **options: Any) -> GraphModule:
    mesh = {"none": None, "fsdp": {"dp": 2}, "fsdp-tp": {"dp": 2, "tp": 2}}[parallel]
    options = {"layers": 1, "compute_dtype": torch.float32, **options}
    return zoo.load("llama-debug", parallel, mesh=mesh, **options)


def operators(module: GraphModule, phase: str | None = None) -> Counter[str]:
    nodes = [node for node in module.graph.nodes if node.op == "call_function"]
    return Counter(str(n.target) for n in nodes if phase is None or n.meta.get("partitioner_tag") == phase)


def same_values(first: GraphModule, second: GraphModule, num_ranks: int, num_terms: int) -> bool:
    inputs = example_inputs(first, num_ranks)
    results = [VirtualCluster(num_ranks).run(graph, inputs, read_groups(graph)) for graph in (first, second)]
    return compare(*results, num_terms=num_terms).equal


def test_repeated_keys_and_values_are_copies_for_all_query_heads():
    shared, repeated = load("none"), load("none", repeat_kv=True)
    names = ["attention_for_cpu.default" in str(node.target) for node in repeated.graph.nodes]
    attention = list(repeated.graph.nodes)[names.index(True)]
    assert [source.meta["val"].shape[1] for source in attention.args[:3]] == [8, 8, 8]
    copies = (operators(module, FORWARD)["aten.clone.default"] for module in (shared, repeated))
    assert list(copies) == [0, 2]
    assert same_values(shared, repeated, 1, 2)


@pytest.mark.parametrize(("parallel", "num_ranks"), [("none", 1), ("fsdp", 2)])
def test_a_norm_of_one_kernel_computes_the_same(parallel: str, num_ranks: int):
    operators_of_norm, kernel = load(parallel), load(parallel, norm="kernel")
    assert same_values(operators_of_norm, kernel, num_ranks, 2048)  # two orders of the same sums of 64 terms
    found = operators(kernel)
    assert (found["weft.rms_norm.default"], found["weft.rms_norm_backward.default"]) == (3, 3)
    assert "aten.rsqrt.default" not in found


def test_a_checkpointed_norm_of_one_kernel_runs_again_in_backward():
    module = load("fsdp", norm="kernel", checkpoint="full")
    assert operators(module, FORWARD)["weft.rms_norm.default"] == 3
    assert operators(module)["weft.rms_norm.default"] == 5


def test_complex_rotary_embeddings_turn_pairs_of_features():
    config = LlamaConfig(32, 1, 2, 2, 64, 64, 8)
    x, positions = torch.randn(1, 8, 2, 16), torch.arange(8.0)[:, None]
    angles = positions * config.rope_base ** (-torch.arange(8.0) / 8)
    first, second, cosines, sines = x[..., 0::2], x[..., 1::2], angles.cos()[:, None], angles.sin()[:, None]
    expected = torch.stack([first * cosines - second * sines, first * sines + second * cosines], -1).flatten(3)
    torch.testing.assert_close(ComplexRotary(config).turn(x), expected)


@pytest.mark.parametrize("partition", ["autograd", "min-cut-layers"])
def test_a_step_with_complex_rotary_embeddings_runs_on_virtual_ranks(partition: str):
    plain, module = (load("fsdp", rotary="complex", **options) for options in ({}, {"partition": partition}))
    assert operators(module)["aten.view_as_complex.default"] >= 2
    assert same_values(plain, module, 2, 2)


@pytest.mark.parametrize(("parallel", "num_ranks"), [("none", 1), ("fsdp", 2), ("fsdp-tp", 4)])
def test_a_chunked_loss_computes_the_same_with_an_eighth_of_the_logits(parallel: str, num_ranks: int):
    whole, chunked = load(parallel), load(parallel, loss="chunked")
    assert same_values(whole, chunked, num_ranks, 8)
    rows = [largest_logits(module) for module in (whole, chunked)]
    assert rows == [32, 4]


def largest_logits(module: GraphModule) -> int:
    """Number of rows of the largest result of the head."""
    heads = [n for n in module.graph.nodes if "output" in n.meta.get("nn_module_stack", {}) and "mm" in n.name]
    return max(
        n.meta["val"].shape[0] for n in heads if isinstance(n.meta["val"], Tensor) and n.meta["val"].shape[1] > 64
    )


@pytest.mark.slow
def test_a_parallel_loss_computes_the_same_and_holds_four_times_the_logits():
    options: dict[str, Any] = {"sequence": 256, "vocabulary": 8192, "batch": 4}
    whole, parallel = (load("fsdp-tp", loss=loss, **options) for loss in ("f32", "parallel"))
    small = [load("fsdp-tp", loss=loss) for loss in ("f32", "parallel")]
    inputs = example_inputs(small[0], 4)
    names = [node.name for node in small[0].graph.nodes if node.op == "placeholder"]
    for rank, given in enumerate(inputs):  # tokens that no rank held would have another loss
        for name in ("tokens_first_row", "loss_first_row"):
            given[names.index(name)].fill_(128 * (rank % 2))
    results = [VirtualCluster(4).run(graph, inputs, read_groups(graph)) for graph in small]
    assert compare(*results, num_terms=2048).equal  # the exponentials of log-probabilities of up to 40
    peaks = [
        weft.predict(module, "h100-1x8", runtime=runtime, execution="eager").memory.allocated_bytes
        for module, runtime in ((whole, "fsdp2"), (parallel, "fsdp2"), (parallel, "simple-fsdp"))
    ]
    logits_bytes = 4 * 256 * 8192 // 2 * 4  # in f32, split over two ranks
    assert peaks[1] - peaks[0] == pytest.approx(2 * logits_bytes, rel=0.02)
    assert peaks[1] - peaks[2] == pytest.approx(
        logits_bytes, rel=0.02
    )  # one graph frees each tensor after its last use


def test_without_a_split_vocabulary_a_parallel_loss_is_the_usual_one():
    assert weft.listing(load("fsdp", loss="parallel")) == weft.listing(load("fsdp"))


def test_a_min_cut_leaves_a_chunked_loss_as_it_is():
    autograd, cut = (load("fsdp", loss="chunked", partition=partition) for partition in ("autograd", "min-cut"))
    assert same_values(autograd, cut, 2, 8)
    assert largest_logits(cut) == 4


def test_a_chunked_head_is_gathered_once_and_reduced_for_each_chunk():
    module = load("fsdp", loss="chunked")
    head = [c for c in collectives(module.graph) if "output" in c.launch.meta["nn_module_stack"]]
    assert Counter(collective.kind.value for collective in head) == {"all_gather": 1, "reduce_scatter": 8}


@pytest.mark.parametrize(("checkpoint", "products", "maxima"), [("none", 3, 5), ("selective", 4, 5), ("full", 4, 7)])
def test_fp8_products_are_cast_and_scaled_forward_and_backward(checkpoint: str, products: int, maxima: int):
    module = load("fsdp", products="fp8", checkpoint=checkpoint, compute_dtype=torch.bfloat16)
    found = operators(module)
    # The last product of the block is never needed again; its operands are cast twice in forward, three times after.
    assert found["aten._scaled_mm.default"] == 7 * products - (checkpoint != "none")
    assert found["aten.max.default"] == 7 * maxima - (2 if checkpoint == "full" else 0)
    assert found["aten.mm.default"] == 3  # the head
    text = weft.listing(module)
    assert weft.listing(weft.parse(text)) == text


def test_a_fused_optimizer_is_one_operator_for_all_parameters():
    module = load("fsdp-tp", optimizer="fused-adamw", part="step")
    assert operators(module, OPTIMIZER) == {"aten._foreach_add_.Scalar": 1, "aten._fused_adamw_.default": 1}
    fused = next(node for node in module.graph.nodes if str(node.target) == "aten._fused_adamw_.default")
    assert [len(arguments) for arguments in fused.args[:4]] == [12] * 4
    text = weft.listing(module)
    assert weft.listing(weft.parse(text)) == text


def test_clipping_takes_one_scalar_all_reduce_for_each_axis_that_shards():
    for parallel, expected in (("none", 0), ("fsdp", 1), ("fsdp-tp", 2)):
        plain, clipped = (load(parallel, optimizer="sgd", part="step", clip_norm=norm) for norm in (0.0, 1.0))
        before, after = (operators(module, OPTIMIZER) for module in (plain, clipped))
        assert after["_c10d_functional.all_reduce.default"] - before["_c10d_functional.all_reduce.default"] == expected
        assert clipped.meta["weft.about"]["clip_norm"] == 1.0


@pytest.mark.parametrize("parallel", ["none", "fsdp", "fsdp-tp"])
def test_clipped_gradients_are_those_of_torch(parallel: str):
    """One step of plain gradient descent: the difference of parameters shows the gradients."""
    ranks = {"none": 1, "fsdp": 2, "fsdp-tp": 4}[parallel]
    limit = 1e-3
    steps = [load(parallel, optimizer=descent, part="step", clip_norm=norm) for norm in (0.0, limit)]
    inputs = example_inputs(steps[0], ranks)
    moved = [total_change(step, inputs, ranks) for step in steps]
    assert moved[0] > 10 * limit
    assert moved[1] == pytest.approx(limit, rel=1e-2)


def descent(parameters: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1.0, foreach=True)


def total_change(step: GraphModule, inputs: list[list[Any]], num_ranks: int) -> float:
    """The norm of what a step adds to the parameters; norms, which all ranks of `tp` hold, count once."""
    after = VirtualCluster(num_ranks).run(step, inputs, read_groups(step))
    names = [node.name for node in step.graph.nodes if node.op == "placeholder"]
    sizes = {group.name: group.size for group in read_groups(step)}
    total = 0.0
    for rank in range(num_ranks):
        for place, name in enumerate(names):
            old, new = inputs[rank][place], after[rank].inputs[place]
            if old.is_floating_point() and ("norm" not in name or rank % (sizes.get("tp") or 1) == 0):
                total += (new - old).double().square().sum().item()
    return total**0.5


def test_the_default_resharding_keeps_the_last_layer():
    counts = {
        reshard: sum(c.kind.value == "all_gather" for c in collectives(load(layers=2, reshard=reshard).graph))
        for reshard in ("always", "default", "never")
    }
    assert counts == {"always": 21 + 15, "default": 21 + 8, "never": 21}


def test_the_graph_says_which_options_it_was_made_with():
    module = load(repeat_kv=True, checkpoint="selective", partition="min-cut", reshard="default")
    options = {"repeat_kv": True, "checkpoint": "selective", "partition": "min-cut", "reshard": "default"}
    assert module.meta["weft.about"].items() >= options.items()
