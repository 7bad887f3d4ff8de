"""A step in chunks of its batch: the same values, a shorter step where communication is exposed, reasons elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.fx import GraphModule

import weft
from tests.tiers import quick_first
from weft import zoo
from weft.graph.assumed_sizes import notes_on_sizes
from weft.graph.groups import read_groups
from weft.verification.comparison import example_inputs
from weft.verification.symbolic.equivalence import prove
from weft.verification.virtual.cluster import VirtualCluster

MESHES: dict[str, Any] = {"none": None, "fsdp": {"dp": 2}, "tp": {"tp": 2}, "fsdp-tp": {"dp": 2, "tp": 2}}
FORWARD = """
group('tp', size=2)

def graph(x: f32[4, 8], w: f32[8, 8], v: f32[8, 8]):
    h: f32[4, 8] = mm(x, w)
    ar: f32[4, 8] = all_reduce(h, 'sum', 'tp')
    y: f32[4, 8] = wait(ar)
    r: f32[4, 8] = relu(y)
    o: f32[4, 8] = mm(r, v)
    return [o, r]
"""


def split(module: GraphModule, chunks: int, inputs: str = "") -> weft.Result:
    named = f" inputs={inputs}" if inputs else ""
    return weft.optimize(module, pipeline=f"split-batch{{chunks={chunks}{named}}}")


def why(result: weft.Result) -> list[str]:
    return [decision.sentence for decision in (*result.report.applied, *result.report.declined)]


@pytest.mark.parametrize(("parallel", "chunks"), quick_first([("tp", 2), ("fsdp", 4), ("fsdp-tp", 4), ("none", 3)]))
def test_a_training_step_in_chunks_computes_the_same(parallel: str, chunks: int):
    """Parameters and their gradients are f32: norms and reductions round differently, products are exact enough."""
    wide = {"compute_dtype": torch.float64, "reduce_dtype": torch.float64}
    module = zoo.load("llama-debug", parallel, mesh=MESHES[parallel], layers=1, batch=4 if chunks != 3 else 3, **wide)
    result = split(module, chunks)
    assert why(result) == [f"split the batch of tokens, targets into {chunks} chunks"]
    assert weft.verify(module, result.module).equal
    planned = weft.optimize(result.module, "h100-8x8", verify="equivalence")
    assert weft.verify(module, planned.module).equal


@pytest.mark.parametrize("routing", ["random", "one rank"])
@pytest.mark.parametrize(("parallel", "chunks"), quick_first([("ep-fsdp", 2), ("ep-fsdp", 4), ("none", 2)]))
def test_rows_that_reach_experts_in_chunks_come_back_the_same(parallel: str, chunks: int, routing: str):
    """Gradients of experts are sums of bf16 products; all else is f32 or wider."""
    wide = {"compute_dtype": torch.float64, "reduce_dtype": torch.float64}
    mesh = {"dp": 2, "ep": 2} if parallel == "ep-fsdp" else None
    module = zoo.load("dropless-debug", parallel, mesh=mesh, layers=1, batch=4, **wide)
    num_ranks = 4 if mesh else 1
    inputs = example_inputs(module, num_ranks)
    names = [node.name for node in module.graph.nodes if node.op == "placeholder"]
    for given in inputs if routing == "one rank" else ():  # equal scores choose the last experts for every token
        given[names.index("layers_0_feed_forward_router_weight")].zero_()
    result = split(module, chunks)
    assert why(result) == [f"split the batch of tokens, targets into {chunks} chunks"]
    planned = weft.optimize(result.module, "h100-8x8", verify="equivalence", sizes="balanced").module
    before, after = (VirtualCluster(num_ranks).run(m, inputs, read_groups(m)) for m in (module, planned))
    for old, new in zip(before, after, strict=True):
        for name, first, second in zip(["loss", *names], old.outputs, new.outputs, strict=False):
            error = (first - second).abs().max() / first.abs().max().clamp_min(1e-30)
            assert error < (2**-6 if ".experts_" in name.replace("forward_", ".") else 1e-6), name


def test_chunks_have_even_parts_of_assumed_sizes():
    module = zoo.load("dropless-debug", "ep-fsdp", mesh={"dp": 2, "ep": 2}, layers=1, batch=4)
    result = weft.optimize(module, "h100-8x8", pipeline="split-batch{chunks=2}", sizes="balanced")
    assert notes_on_sizes(module) == ("sizes that the data decides are assumed: u0, u1, u2, u3 = 128",)
    (note,) = notes_on_sizes(result.module)
    assert note == "sizes that the data decides are assumed: u0, u1, u2, u3 and 4 more = 64"


WRONG_ROUTES = {
    "another order": ("sort.stable(view_9, stable=True)", "sort.stable(view_9, stable=True, descending=True)"),
    "another count": (
        "sum_2: i64[8] = sum.dim_IntList(eq, [0])",
        "sum_2: i64[8] = sum.dim_IntList(eq, [0])\n    odd: i64[8] = add(sum_2, 1)",
    ),
    "swapped sizes": (
        "[_local_scalar_dense_2, _local_scalar_dense_3], [_local_scalar_dense, _local_scalar_dense_1]",
        "[_local_scalar_dense_3, _local_scalar_dense_2], [_local_scalar_dense, _local_scalar_dense_1]",
    ),
    "another token": ("floor_divide(getitem_5, 2)", "floor_divide(getitem_5, 4)"),
}


@pytest.mark.parametrize("case", WRONG_ROUTES)
def test_rows_that_take_another_way_stay_whole(case: str):
    module = zoo.load("dropless-debug", "ep-fsdp", mesh={"dp": 2, "ep": 2}, layers=1, batch=4)
    text, (old, new) = weft.listing(module), WRONG_ROUTES[case]
    assert old in text
    (sentence,) = why(split(weft.parse(text.replace(old, new, 1)), 2))
    assert sentence.startswith("the batch is not split: ")


def test_a_forward_pass_in_chunks_is_proved_equal():
    module = weft.parse(FORWARD)
    result = split(module, 2, "x")
    assert prove(module, result.module, reassociates=True)


@pytest.mark.parametrize(
    ("model", "parallel", "reason"),
    [
        ("moe-debug", "none", "works along the batch (cumsum)"),
        ("vision-debug", "none", "_log_softmax has its rows in another dim, or none"),
    ],
)
def test_a_batch_whose_rows_mix_stays_whole(model: str, parallel: str, reason: str):
    (sentence,) = why(split(zoo.load(model, parallel, layers=1, batch=4), 2))
    assert sentence.startswith("the batch is not split: ")
    assert reason in sentence


def test_the_number_of_chunks_is_chosen_by_simulation():
    module = zoo.load("llama-1b", "tp", mesh={"tp": 8}, layers=1, batch=4, vocabulary=8192)
    passes = "clean,split-batch,schedule-overlap"
    (chosen,) = (d for d in weft.optimize(module, "h100-1x8", pipeline=passes).report.applied if "chunks" in d.sentence)
    assert "2 chunks" in chosen.sentence


def test_a_step_without_exposed_communication_stays_whole():
    module = zoo.load("llama-debug", "none", layers=1, batch=4)
    (sentence,) = why(weft.optimize(module, "h100-1x8", pipeline="split-batch"))
    assert sentence.startswith("the batch is not split: planned, the step takes ")


def test_without_a_cluster_the_number_of_chunks_must_be_given():
    (sentence,) = why(weft.optimize(weft.parse(FORWARD), pipeline="split-batch{inputs=x}"))
    assert sentence == "the batch is not split: without a cluster the gain is unknown; chunks=2 splits it"


ATTENTIONS = {
    "flash": ("q, k, v, 0.0, True", "g, q, k, v, o, l, None, None, 16, 16, 0.0, True, s, t"),
    "cudnn": ("q, k, v, None, True, 0.0, True", "g, q, k, v, o, l, s, t, None, None, None, 16, 16, 0.0, True"),
}
ON_GPU = """
device('cuda:0')

def graph(q: bf16[4, 2, 16, 64], k: bf16[4, 2, 16, 64], v: bf16[4, 2, 16, 64], g: bf16[4, 2, 16, 64]):
    a = _scaled_dot_product_KIND_attention(FORWARD)
    o = a[0]
    l = a[1]
    s = a[6]
    t = a[7]
    b = _scaled_dot_product_KIND_attention_backward(BACKWARD)
    d = b[0]
    return [o, dRETURNED]
"""


def on_gpu(kind: str, dropout: str = "0.0", returned: str = "") -> GraphModule:
    forward, backward = ATTENTIONS[kind]
    text = ON_GPU.replace("KIND", kind).replace("FORWARD", forward).replace("BACKWARD", backward)
    return weft.parse(text.replace("0.0", dropout).replace("RETURNED", returned))


@pytest.mark.parametrize("kind", ATTENTIONS)
def test_backward_of_attention_takes_the_seeds_of_its_own_chunk(kind: str):
    result = split(on_gpu(kind), 2, "q/k/v/g")
    assert result.report.applied
    nodes = {node.name: node for node in result.module.graph.nodes}
    for chunk in range(2):
        sources = {str(source) for source in nodes[f"b_chunk{chunk}"].all_input_nodes}
        assert {f"s_chunk{chunk}", f"t_chunk{chunk}", f"o_chunk{chunk}"} <= sources


@pytest.mark.parametrize("change", [{"dropout": "0.5"}, {"returned": ", s"}])
def test_attention_with_dropout_or_a_returned_seed_is_not_split(change: dict[str, str]):
    result = split(on_gpu("flash", **change), 2, "q/k/v/g")
    assert not result.report.applied


def test_a_constant_with_the_rows_of_the_batch_is_sliced():
    module = weft.parse(
        "def graph(i: i64[4, 2], x: f32[4, 2]):\n    z = zeros([4, 8], dtype=f32)\n    y = scatter.src(z, -1, i, x)\n"
        "    return [y]\n"
    )
    result = split(module, 2, "i/x")
    assert result.report.applied
    assert weft.verify(module, result.module).equal
