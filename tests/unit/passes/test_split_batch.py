"""A step in chunks of its batch: the same values, a shorter step where communication is exposed, reasons elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx import GraphModule

import weft
from tests.tiers import quick_first
from weft import zoo
from weft.errors import MemoryLimitError
from weft.graph.assumed_sizes import notes_on_sizes
from weft.graph.groups import read_groups
from weft.plan.plan import Arrange
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


def assert_alike(before: GraphModule, after: GraphModule, inputs: list[list[Any]], names: list[str]) -> None:
    """Both graphs compute the same on virtual ranks; gradients of experts are sums of bf16 products."""
    runs = (VirtualCluster(len(inputs)).run(module, inputs, read_groups(module)) for module in (before, after))
    for old, new in zip(*runs, strict=True):
        for name, first, second in zip(names, old.outputs, new.outputs, strict=False):
            if first is None:
                continue
            error = (first - second).abs().max() / first.abs().max().clamp_min(1e-30)
            assert error < (2**-6 if ".experts_" in name.replace("forward_", ".") else 1e-6), name


@pytest.mark.parametrize("routing", quick_first(["random", "one rank"]))
@pytest.mark.parametrize(
    ("model", "parallel", "chunks"),
    quick_first(
        [("dropless", "ep-fsdp", 2), ("dropless", "ep-fsdp", 4), ("dropless", "none", 2), ("deepseek", "ep-fsdp", 2)]
    ),
)
def test_rows_that_reach_experts_in_chunks_come_back_the_same(model: str, parallel: str, chunks: int, routing: str):
    """Gradients of experts are sums of bf16 products; all else is f32 or wider."""
    wide = {"compute_dtype": torch.float64, "reduce_dtype": torch.float64}
    mesh = {"dp": 2, "ep": 2} if parallel == "ep-fsdp" else None
    dense = {"num_dense": 0} if model == "deepseek" else {}
    module = zoo.load(f"{model}-debug", parallel, mesh=mesh, layers=1, batch=4, **dense, **wide)
    num_ranks = 4 if mesh else 1
    inputs = example_inputs(module, num_ranks)
    names = [node.name for node in module.graph.nodes if node.op == "placeholder"]
    for given in inputs if routing == "one rank" else ():  # equal scores choose the last experts for every token
        given[names.index("layers_0_feed_forward_router_weight")].zero_()
    result = split(module, chunks)
    assert why(result) == [f"split the batch of tokens, targets into {chunks} chunks"]
    planned = weft.optimize(result.module, "h100-8x8", verify="equivalence", sizes="balanced").module
    assert_alike(module, planned, inputs, ["loss", *names])


JOINT = (Path(__file__).parents[2] / "data" / "experts_joint.txt").read_text()
"""Written by torch.compile: primals_18 is the router's weight, the outputs are the loss and the gradients."""
COUNTED = """    unsqueeze: i64[64, 1] = unsqueeze(view_17, 1)
    arange: i64[4] = arange(4, device=device('cpu'), pin_memory=False)
    eq: b8[64, 4] = eq(unsqueeze, arange)
    sum_2: i64[4] = sum.dim_IntList(eq, [0])
"""
SPELLINGS: dict[str, list[tuple[str, str]]] = {
    "as compiled": [],
    "histogram": [
        (
            COUNTED,
            "    wide: f32[64] = _to_copy(view_17, dtype=f32)\n    bins = histc(wide, 4, 0, 4)\n"
            "    sum_2: i64[4] = _to_copy(bins, dtype=i64)\n",
        )
    ],
    "one-hot sum": [
        (
            "sum_2: i64[4] = sum.dim_IntList(eq, [0])",
            "hot = _to_copy(eq, dtype=i64)\n    sum_2 = sum.dim_IntList(hot, [0])",
        )
    ],
    "views of the ids": [
        (COUNTED, "    view_17_again: i64[64] = view(getitem_3, [64])\n" + COUNTED.replace("view_17", "view_17_again"))
    ],
    "index": [
        ("index_select(view_15, 0, floor_divide)", "index.Tensor(view_15, [floor_divide])"),
        ("index_select(_to_copy_22, 0, getitem_9)", "index.Tensor(_to_copy_22, [getitem_9])"),
    ],
    "index_put": [
        ("index_add(new_zeros, 0, getitem_11, ", "index_put(new_zeros, [getitem_11], "),
        (
            "index_add(new_zeros_1, 0, getitem_9, wait_tensor_24)",
            "index_put(new_zeros_1, [getitem_9], wait_tensor_24, True)",
        ),
        (
            "index_add(new_zeros_3, 0, floor_divide, wait_tensor_28)",
            "index_put(new_zeros_3, [floor_divide], wait_tensor_28, True)",
        ),
    ],
    "constant zeros": [
        ("new_zeros(wait_tensor_24, [", "zeros(["),
        ("new_zeros(wait_tensor_28, [32, 64]", "full([32, 64], 0"),
    ],
    "counts of the whole batch": [
        (COUNTED, COUNTED + "    seen: i64[4] = add(sum_2, 100)\n"),
        ("    return [", "    return [sum_2, seen, "),
    ],
    "ranges": [
        (
            "    ge: bool = operator.ge(_local_scalar_dense, 0)\n",
            "    small = sym_constrain_range_for_size(_local_scalar_dense)\n"
            "    ge: bool = operator.ge(_local_scalar_dense, 0)\n",
        )
    ],
}


def spelled(spelling: str) -> str:
    text = JOINT
    for old, new in SPELLINGS[spelling]:
        assert old in text, old
        text = text.replace(old, new, 1)
    return text


@pytest.mark.parametrize("routing", quick_first(["random", "one expert"]))
@pytest.mark.parametrize(("spelling", "chunks"), quick_first([*((s, 2) for s in SPELLINGS), ("as compiled", 4)]))
def test_a_graph_of_torch_compile_in_chunks_computes_the_same(spelling: str, chunks: int, routing: str):
    module = weft.parse(spelled(spelling))
    inputs = example_inputs(module, 4)
    names = [node.name for node in module.graph.nodes if node.op == "placeholder"]
    for given in inputs if routing == "one expert" else ():  # equal scores choose the same experts for every token
        given[names.index("primals_18")].zero_()
    result = split(module, chunks, "primals_3/primals_36")
    assert why(result) == [f"split the batch of primals_3, primals_36 into {chunks} chunks"]
    planned = weft.optimize(result.module, "h100-8x8", verify="equivalence", sizes="balanced").module
    assert weft.listing(weft.parse(weft.listing(result.module))) == weft.listing(result.module)
    (output,) = (node for node in module.graph.nodes if node.op == "output")
    results = list(output.args[0])
    experts = {result for result in results if result is not None and result.name in ("view_54", "view_52", "view_50")}
    assert len(experts) == 3
    assert_alike(module, planned, inputs, [".experts_" if result in experts else str(result) for result in results])


def test_checks_of_sizes_are_made_for_each_chunk():
    text = weft.listing(split(weft.parse(JOINT), 2, "primals_3/primals_36").module)
    assert JOINT.count("= _assert_scalar(") == 4
    assert text.count("= _assert_scalar(") == 8


WRONG_SPELLINGS = {
    "other bins": ("histogram", "histc(wide, 4, 0, 4)", "histc(wide, 4, 0, 8)"),
    "rounded ids": (
        "histogram",
        "wide: f32[64] = _to_copy(view_17, dtype=f32)",
        "wide = _to_copy(view_17, dtype=bf16)",
    ),
    "last of several rows": ("index_put", "[floor_divide], wait_tensor_28, True", "[floor_divide], wait_tensor_28"),
    "another check": ("as compiled", "operator.ge(_local_scalar_dense, 0)", "operator.ge(_local_scalar_dense, 8)"),
    "a check of another kind": (
        "as compiled",
        "operator.ge(_local_scalar_dense, 0)",
        "operator.le(_local_scalar_dense, 64)",
    ),
    "ones": ("constant zeros", "full([32, 64], 0", "full([32, 64], 1"),
    "an upper bound": ("ranges", "_for_size(_local_scalar_dense)", "_for_size(_local_scalar_dense, max=64)"),
}


@pytest.mark.parametrize("case", WRONG_SPELLINGS)
def test_a_graph_of_torch_compile_that_differs_stays_whole(case: str):
    spelling, old, new = WRONG_SPELLINGS[case]
    text = spelled(spelling)
    assert old in text
    (sentence,) = why(split(weft.parse(text.replace(old, new, 1)), 2, "primals_3/primals_36"))
    assert sentence.startswith("the batch is not split: ")


def test_a_batch_of_unknown_size_stays_whole():
    module = zoo.load("llama-debug", "fsdp", mesh={"dp": 2}, layers=1, batch=2, dynamic=True)
    (sentence,) = why(split(module, 2))
    assert sentence.startswith("the batch is not split: the size of the inputs in dim 0 is not known")


@pytest.mark.slow
def test_chunks_have_even_parts_of_assumed_sizes():
    module = zoo.load("dropless-debug", "ep-fsdp", mesh={"dp": 2, "ep": 2}, layers=1, batch=4)
    result = weft.optimize(module, "h100-8x8", pipeline="split-batch{chunks=2}", sizes="balanced")
    assert notes_on_sizes(module) == ("sizes that the data decides are assumed: u0, u1, u2, u3 = 128",)
    (note,) = notes_on_sizes(result.module)
    assert note == "sizes that the data decides are assumed: u0, u1, u2, u3 and 4 more = 64"


WRONG_ROUTES = {
    "another order": ("sort.stable(view_9, stable=True)", "sort.stable(view_9, stable=True, descending=True)"),
    "counts of other ranks": (
        "view_11: i64[2, 4] = view(wait_tensor_8, [2, -1])",
        "view_11: i64[2, 4] = view(wait_tensor_8, [2, -1])\n    odd: i64[8] = add(wait_tensor_8, 1)",
    ),
    "swapped sizes": (
        "[_local_scalar_dense_2, _local_scalar_dense_3], [_local_scalar_dense, _local_scalar_dense_1]",
        "[_local_scalar_dense_3, _local_scalar_dense_2], [_local_scalar_dense, _local_scalar_dense_1]",
    ),
    "another token": ("floor_divide(getitem_5, 2)", "floor_divide(getitem_5, 4)"),
}


@pytest.mark.parametrize("case", quick_first(WRONG_ROUTES))
def test_rows_that_take_another_way_stay_whole(case: str):
    module = zoo.load("dropless-debug", "ep-fsdp", mesh={"dp": 2, "ep": 2}, layers=1, batch=4)
    text, (old, new) = weft.listing(module), WRONG_ROUTES[case]
    assert old in text
    (sentence,) = why(split(weft.parse(text.replace(old, new, 1)), 2))
    assert sentence.startswith("the batch is not split: ")


SUM = """def graph(x: f32[4, 8], w: f32[8, 8]):
    y = mm(x, w)
    columns = t(x)
    g = mm(columns, y)
BODY
"""
WRITES = {
    "a chunk is read later": ("    m = mul_(g, 0.5)\n    h = t(g)\n    return [h]", False),
    "through a view": ("    v = slice(g, 0, 0, 4)\n    m = mul_(v, 0.5)\n    h = t(g)\n    return [h]", False),
    "a view of a chunk": ("    h = t(g)\n    m = mul_(g, 0.5)\n    return [h, m]", False),
    "to a view": ("    h = t(g)\n    m = mul_(h, 0.5)\n    return [g, m]", False),
    "a chunk is read earlier": ("    h = _to_copy(g, dtype=f64)\n    m = mul_(g, 0.5)\n    return [h, m]", True),
}


@pytest.mark.parametrize("case", WRITES)
def test_a_sum_that_is_written_is_split_only_if_no_chunk_sees_it(case: str):
    body, is_split = WRITES[case]
    module = weft.parse(SUM.replace("BODY", body))
    result = split(module, 2, "x")
    assert bool(result.report.applied) is is_split, why(result)
    assert weft.verify(module, result.module).equal


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


@pytest.mark.slow
def test_the_number_of_chunks_is_chosen_by_simulation():
    module = zoo.load("llama-1b", "tp", mesh={"tp": 8}, layers=1, batch=4, vocabulary=8192)
    passes = "clean,split-batch,schedule-overlap"
    (chosen,) = (d for d in weft.optimize(module, "h100-1x8", pipeline=passes).report.applied if "chunks" in d.sentence)
    assert "2 chunks" in chosen.sentence


@pytest.mark.slow
def test_each_chunk_trails_the_one_before_so_that_exchanges_are_hidden():
    """In the order without a cluster all chunks exchange rows at once: nothing computes meanwhile."""
    shape = {"layers": 1, "batch": 6, "sequence": 1024, "vocabulary": 2048, "num_experts": 32}
    module = zoo.load("dropless-16b", "ep-fsdp", mesh={"dp": 1, "ep": 32}, **shape)
    given = {"cluster": "h100-4x8", "sizes": "balanced"}
    whole = weft.simulate(module, **given).step_us
    lockstep = weft.simulate(split(module, 3).module, **given).step_us
    result = weft.optimize(module, pipeline="split-batch{chunks=3}", **given)
    staggered = weft.simulate(result.module, **given).step_us
    assert lockstep > whole
    assert staggered < 0.9 * whole
    order = [node.name for node in result.module.graph.nodes]
    products, exchanges = (
        [order.index(f"{name}_chunk{chunk}") for chunk in range(3)] for name in ("_grouped_mm", "all_to_all_single_1")
    )
    assert products[0] < exchanges[2]  # the first chunk computes before the last one sends its rows


@pytest.mark.slow
def test_chunks_that_trail_each_other_compute_the_same():
    wide = {"compute_dtype": torch.float64, "reduce_dtype": torch.float64}
    module = zoo.load("dropless-debug", "ep-fsdp", mesh={"dp": 2, "ep": 2}, layers=1, batch=6, **wide)
    result = weft.optimize(module, "h100-8x8", pipeline="split-batch{chunks=3}", sizes="balanced")
    assert any(isinstance(action, Arrange) for step in result.plan.steps for action in step.actions)
    names = [node.name for node in module.graph.nodes if node.op == "placeholder"]
    assert_alike(module, result.module, example_inputs(module, 4), ["loss", *names])


def test_a_step_without_exposed_communication_stays_whole():
    module = zoo.load("llama-debug", "none", layers=1, batch=4)
    (sentence,) = why(weft.optimize(module, "h100-1x8", pipeline="split-batch"))
    assert sentence.startswith("the batch is not split: planned, the whole step takes ")


@pytest.mark.slow
def test_chunks_shorten_the_planned_step_if_experts_are_on_other_nodes():
    shape = {"layers": 1, "batch": 12, "sequence": 1024, "vocabulary": 2048}
    module = zoo.load("dropless-16b", "ep-fsdp", mesh={"dp": 1, "ep": 32}, **shape)
    given: dict[str, Any] = {"cluster": "h100-4x8", "sizes": "balanced", "effort": "fast"}
    whole, chunks = (
        weft.optimize(module, pipeline=f"clean,communication,{passes}", **given).module
        for passes in ("schedule-overlap", "split-batch{chunks=3},schedule-overlap")
    )
    times = [weft.simulate(planned, "h100-4x8", sizes="balanced").step_us for planned in (whole, chunks)]
    assert times[1] <= 0.85 * times[0]


def least_bytes(module: GraphModule, pipeline: str) -> int:
    with pytest.raises(MemoryLimitError) as caught:
        weft.optimize(module, "h100-8x8", pipeline=pipeline, sizes="balanced", memory_limit_bytes=1)
    return caught.value.least_bytes


@pytest.mark.slow
def test_a_choice_that_misses_the_memory_limit_loses_to_one_that_meets_it():
    module = zoo.load("dropless-debug", "ep-fsdp", mesh={"dp": 2, "ep": 2}, layers=1, batch=4)
    whole = least_bytes(module, "schedule-overlap")
    halves = least_bytes(module, "split-batch{chunks=2},schedule-overlap")
    assert halves < whole
    pipeline = "split-batch,schedule-overlap"
    planned: dict[str, Any] = {"cluster": "h100-8x8", "pipeline": pipeline, "sizes": "balanced"}
    met = weft.optimize(module, memory_limit_bytes=whole, **planned)
    assert any(sentence.startswith("the batch is not split: planned") for sentence in why(met))
    missed = weft.optimize(module, memory_limit_bytes=whole - 1, **planned)
    (sentence,) = (sentence for sentence in why(missed) if sentence.startswith("split the batch"))
    assert "which does not fit" in sentence
    assert weft.simulate(missed.module, "h100-8x8", sizes="balanced").peak_bytes < whole
    assert least_bytes(module, pipeline) <= halves


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
