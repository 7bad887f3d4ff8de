"""Texts of mixtures of experts: lost nested graphs, kernels, and sizes that the host reads at run time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.fx import GraphModule

import weft
from tests.unit.frontends.test_runnable import fault, script
from weft.cost.cluster import Cluster
from weft.cost.flops import flops_of
from weft.cost.prices import price
from weft.errors import GraphError, ListingError
from weft.frontends.printed.runnable import read_runnable
from weft.graph import ops
from weft.graph.assumed_sizes import assume_sizes
from weft.graph.groups import read_groups
from weft.graph.operator_effects import profile_of
from weft.graph.versions import dag_of

DATA = Path(__file__).parents[2] / "data"
TEXTS = ["experts_forward.txt", "experts_backward.txt"]
GIVEN = ("buf0 = reader.storage(None, 256)", "reader.tensor(buf0, (1, 1, 8, 8))  # x")


def node(module: GraphModule, name: str) -> torch.fx.Node:
    return next(node for node in module.graph.nodes if node.name == name)


@pytest.mark.parametrize("file", TEXTS)
def test_a_text_is_read_listed_read_back_and_planned(file: str):
    module = read_runnable(DATA / file)
    text = weft.listing(module)
    assert weft.listing(weft.parse(text)) == text
    result = weft.optimize(module, "h100-8x8", verify="equivalence")
    assert "proved equal" in result.report.witnesses[1]
    assert weft.listing(weft.parse(weft.listing(result.module))) == weft.listing(result.module)


def test_a_plan_keeps_checks_before_uses_and_reads_of_the_host_behind_the_copy_that_waits():
    order = [node.name for node in weft.optimize(read_runnable(DATA / TEXTS[0]), "h100-8x8").module.graph.nodes]
    exchange, waits = order.index("all_to_all_single_1"), order.index("device_put_1")
    assert order.index("device_put") < waits
    assert all(order.index(f"_assert_scalar{k}") < exchange for k in ("", "_1", "_2", "_3"))
    assert all(waits < order.index(f"_local_scalar_dense{k}") < exchange for k in ("", "_1", "_2", "_3"))


def test_sizes_that_the_host_reads_are_symbols():
    lines = [line.strip() for line in weft.listing(read_runnable(DATA / TEXTS[0])).splitlines()]
    assert "sym_sum: int[u2 + u3] = torch.sym_sum((_local_scalar_dense_2, _local_scalar_dense_3))" in lines
    assert "mul: int[8*(((u2 + u3 + 71)//8))] = operator.mul(floordiv_1, 8)" in lines
    assert any(line.startswith("all_to_all_single_1: bf16[u2 + u3, 64] = all_to_all(rows,") for line in lines)


def test_placeholders_of_such_sizes_are_ignored():
    """The script gives 512 to every number, although one of them is the sum of two others, and one more."""
    (head,) = (line for line in weft.listing(read_runnable(DATA / TEXTS[1])).splitlines() if line.startswith("def"))
    assert "_local_scalar_dense_3: int[u3], add_3: int[u4], perm: i32[8*(((u5 + u6 + 71)//8))]" in head


def test_attention_keeps_the_strides_of_its_query_in_a_listing():
    text = weft.listing(read_runnable(DATA / TEXTS[1]))
    value = ops.value_of(node(weft.parse(text), "dq"))
    assert value.stride() == (4096, 16, 64, 1)


FORMS = {
    "a lambda": "self.score = lambda s, b, h, i, j, *rest: s",
    "a class": "self.score = GraphModule()",
    "a class with an odd name": "self.score = <lambda>()",
}
ATTENTION = (
    "score = self.score",
    "a = torch.ops.higher_order.flex_attention(x, x, x, score, (8, 8, score), 1.0, {}, (), ());  score = None",
    "r = a[0]",
)


@pytest.mark.parametrize("form", FORMS)
def test_a_nested_graph_without_a_body_is_read(form: str):
    module = read_runnable(script(*ATTENTION, initial=(FORMS[form],), loads=GIVEN))
    assert weft.listing(module).startswith("nested('score')\n\ndef graph(x: f32[1, 1, 8, 8]):\n")
    assert "    r: f32[1, 1, 8, 8] = a[0]\n" in weft.listing(module)
    with pytest.raises(GraphError, match="nested graph: its body is not known, so it cannot be run"):
        module.score(torch.ones(1))


def test_attention_with_lost_graphs_only_reads_and_other_calls_with_lost_graphs_may_do_anything():
    attention = read_runnable(script(*ATTENTION, initial=("self.score = GraphModule()",), loads=GIVEN))
    found = profile_of(node(attention, "a"))
    assert (found.opaque, found.writes, found.random) == (False, (), True)
    call = "c = torch.ops.higher_order.invoke_subgraph(g, 'id', x);  g = None"
    lost = read_runnable(script("g = self.g", call, initial=("self.g = GraphModule()",), result="(x,)"))
    assert profile_of(node(lost, "c")).opaque


def test_a_result_of_a_lost_graph_has_no_type():
    text = script(
        "g = self.g",
        "c = torch.ops.higher_order.cond(x, g, g, (x,));  g = None",
        "r = c[0]",
        initial=("self.g = <lambda>()",),
    )
    assert fault(text) == (
        "runnable:14: the text does not say what the call returns\n"
        "    r = c[0]\n"
        "    ^\n"
        "read the graph from a TORCH_TRACE log, which prints types and nested graphs"
    )


KERNEL = "k = torch.ops.higher_order.triton_kernel_wrapper_functional(kernel_idx = 0, constant_args_idx = 1, "


def test_a_kernel_returns_the_tensors_that_it_writes():
    rest = "grid = [(4, 1)], kwargs = {'a': x, 'dst': y, 'N': 4}, tensors_to_clone = ['dst'])"
    module = read_runnable(script("y = torch.ops.aten.relu.default(x)", KERNEL + rest, "r = k['dst']"))
    assert "    k: {'dst': f32[2, 4]} = higher_order.triton_kernel_wrapper_functional(" in weft.listing(module)
    assert profile_of(node(module, "k")).plain
    assert weft.listing(weft.parse(weft.listing(module))) == weft.listing(module)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ((KERNEL + "grid = [], kwargs = {'a': x}, tensors_to_clone = ['b'])",), "triton_kernel_wrapper_functional"),
        ((KERNEL + "grid = [])",), "triton_kernel_wrapper_functional"),
        ((KERNEL + "kwargs = {'a': 3}, tensors_to_clone = ['a'])",), "triton_kernel_wrapper_functional"),
        (("k = torch.ops.higher_order.flex_attention(x, x)",), "flex_attention"),
        (("k = u3 + 1",), "'u3' is not defined here"),
    ],
)
def test_faulty_calls_are_told(lines: tuple[str, ...], message: str):
    assert message in fault(script(*lines, result="(k,)"))


def test_chained_values_are_hints_unless_they_are_known_only_at_run_time():
    loads = ("buf0 = reader.storage(None, 16*s7*u3)", "reader.tensor(buf0, (s7, u3, 4))")
    text = weft.listing(
        read_runnable(script("r = torch.ops.aten.relu.default(x)", top="s7 = u3 = u4 = 6", loads=loads))
    )
    assert text.startswith("symbol('s0', hint=6)\nsymbol('u0')\n\ndef graph(x: f32[s0, u0, 4]):\n")


def test_an_all_to_all_states_the_size_of_its_group():
    lines = (
        "a = torch.ops._c10d_functional.all_to_all_single.default(x, [1, 1], [1, 1], '9')",
        "r = torch.ops._c10d_functional.wait_tensor.default(a);  a = None",
    )
    assert weft.listing(read_runnable(script(*lines))).startswith("group('g0', size=2)\n")


def test_a_declared_nested_graph_has_a_path_of_names():
    with pytest.raises(ListingError, match="'a b' is not a path of names"):
        weft.parse("nested('a b')\n\ndef graph(x: f32[2]):\n    return [x]\n")


@pytest.mark.parametrize(("file", "batch"), [("experts_forward.txt", "x"), ("experts_backward.txt", "tangents_1")])
def test_a_text_whose_rows_cannot_be_followed_is_not_split(file: str, batch: str):
    result = weft.optimize(read_runnable(DATA / file), pipeline=f"split-batch{{chunks=2 inputs={batch}}}")
    (decision,) = result.report.declined
    assert decision.sentence.startswith("the batch is not split: ")


LONG = ("buf0 = reader.storage(None, 4194304)", "reader.tensor(buf0, (1, 4, 4096, 64))  # x")
FLEX = "a = torch.ops.higher_order.flex_attention(x, x, x, score, BLOCKS, 1.0, {}, (), ());  score = None"
BLOCKS = "(4096, 4096, None, None, None, None, None, None, None, None, SIZE, SIZE, score)"


@pytest.mark.parametrize(("size", "share"), [(128, 0.5), (1 << 30, 1.0)])
def test_attention_with_a_mask_counts_as_causal_and_without_one_in_full(size: int, share: float):
    call = FLEX.replace("BLOCKS", BLOCKS.replace("SIZE", str(size)))
    text = script("score = self.score", call, "r = a[0]", initial=("self.score = GraphModule()",), loads=LONG)
    module = read_runnable(text)
    assert flops_of(node(module, "a")) == share * 4 * 4 * 4096 * 4096 * 64
    assert ("counts as causal" in " ".join(weft.predict(module, "h100-8x8").notes)) == (share == 0.5)


def test_a_kernel_and_what_reads_its_result_take_the_time_of_their_bytes():
    module = read_runnable(DATA / TEXTS[0])
    order = [node.name for node in module.graph.nodes]
    times: dict[int, list[int]] = {}
    for rows in (1 << 20, 1 << 24):
        assume_sizes(module, {f"u{k}": rows for k in range(4)})
        prices = price(dag_of(module.graph), read_groups(module), Cluster.load("h100-8x8"))
        names = ("triton_kernel_wrapper_functional_proxy", "g", "index_put")
        times[rows] = [prices.compute_ns[order.index(name)] for name in names]
    assert all(large > 8 * small for small, large in zip(times[1 << 20], times[1 << 24], strict=True))


def test_a_prediction_names_what_it_may_price_too_low():
    module = read_runnable(DATA / TEXTS[0])
    kernel, expected = "triton_kernel_wrapper_functional_proxy", "may be too low"
    found = weft.predict(module, "h100-8x8", sizes="balanced").notes
    assert any(kernel in note and expected in note for note in found)
    notes = weft.optimize(module, "h100-8x8", pipeline="clean", sizes="balanced").report.notes
    assert any(kernel in note and expected in note for note in notes)
