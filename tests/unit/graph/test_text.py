"""Listings: whatever a trace gives is written, read back, and written the same again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch._functorch.aot_autograd import aot_function
from torch.distributed.device_mesh import DeviceMesh
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import weft
from tests.unit.conftest import fake_mesh
from weft.compat import new_fake_mode
from weft.errors import GraphError, ListingError
from weft.graph import ops
from weft.graph.about import ABOUT_KEY, TOKENS_KEY, tokens_per_step
from weft.graph.edit import Edit
from weft.graph.listings.text import KnownLines, digest, excerpt, line_of, parse, render, source_of
from weft.graph.metadata import same
from weft.verification.rank import same_bits

aten = torch.ops.aten
# The names of functional collectives change between versions; those that all versions have are deprecated in some.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:Your compiler for AOTAutograd")


def trace(function: Callable[..., Any], *inputs: Any, mode: str = "fake") -> GraphModule:
    return make_fx(function, tracing_mode=mode, _allow_non_fake_inputs=True)(*inputs)


def assert_round_trip(module: GraphModule) -> str:
    """Writing, reading and writing gives one text, and reading gives the fake values back."""
    text = weft.listing(module)
    again = parse(text)
    assert weft.listing(again) == text
    values = [(ops.value_of(a), ops.value_of(b)) for a, b in zip(module.graph.nodes, again.graph.nodes, strict=True)]
    symbolic = "symbol(" in text
    assert symbolic or [pair for pair in values if None not in pair and not same(*pair)] == []
    return text


def body(text: str) -> str:
    return text[text.index("def graph") :]


X = torch.zeros(4, 4)


@pytest.mark.parametrize("header", ["", "group('dp', size=2)\n\n"])
def test_tokens_survive_a_listing_and_leave_its_digest_alone(header: str):
    plain = f"{header}def graph(x: f32[4]):\n    r: f32[4] = relu(x)\n    return [r]\n"
    module = parse(plain)
    assert tokens_per_step(module) is None
    assert render(module) == plain
    module.meta[ABOUT_KEY] = {TOKENS_KEY: 640}
    text = assert_round_trip(module)
    assert text != plain
    assert tokens_per_step(parse(text)) == 640
    assert digest(text) == digest(plain)


# Inputs.


@pytest.mark.parametrize(
    ("inputs", "parameters"),
    [
        ([X.t()], "a_1: f32[4, 4](strides=(1, 4))"),
        ([torch.zeros(8, 4)[::2]], "a_1: f32[4, 4](strides=(8, 1))"),
        ([torch.zeros(10)[3:7]], "a_1: f32[4](offset=3)"),
        ([torch.zeros(4, 1).expand(4, 4)], "a_1: f32[4, 4](strides=(1, 0))"),
        ([torch.zeros(5)[::2]], "a_1: f32[3](strides=(2,))"),
        ([torch.zeros(())], "a_1: f32[()]"),
        ([torch.zeros(0, 4)], "a_1: f32[0, 4]"),
        (
            [torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last)],
            "a_1: f32[2, 3, 4, 5](strides=(60, 1, 15, 3))",
        ),
    ],
)
def test_inputs_carry_their_strides_and_offsets(inputs: list[Tensor], parameters: str):
    text = assert_round_trip(trace(lambda a: [a * 2], *inputs))
    assert f"def graph({parameters}):" in text


@pytest.mark.parametrize(
    "dtype", ["f64", "f16", "bf16", "b8", "i64", "i32", "i8", "u8", "u32", "c64", "f8e4m3fn", "f8e5m2"]
)
def test_every_dtype_has_a_short_name(dtype: str):
    text = f"def graph(x: {dtype}[2, 3]):\n    v: {dtype}[6] = view(x, [6])\n    return [v]\n"
    assert weft.listing(parse(text)) == text


def test_inputs_that_share_a_storage_say_so():
    base = torch.zeros(16)
    text = assert_round_trip(trace(lambda a, b, c: [a + b, c], base[:8], base[8:], base.view(4, 4).t()))
    assert "b_1: f32[8](offset=8, base='a_1'), c_1: f32[4, 4](strides=(1, 4), base='a_1')" in text
    placeholders = [node for node in parse(text).graph.nodes if node.op == "placeholder"]
    assert len({ops.value_of(node).untyped_storage()._cdata for node in placeholders}) == 1


def test_an_input_without_metadata_has_no_type():
    graph = Graph()
    graph.output([graph.placeholder("x")])
    assert weft.listing(GraphModule({}, graph)) == "def graph(x):\n    return [x]\n"


def test_inputs_may_be_numbers():
    text = "symbol('s0', hint=6)\n\ndef graph(n: int[s0], x: f32[s0, 2], p: float, q: bool):\n    return [n, x, p, q]\n"
    assert weft.listing(parse(text)) == text


# Sizes.


def test_symbolic_sizes_are_named_by_first_use_and_keep_their_hints():
    module = trace(
        lambda a, b: [a @ b, a.view(-1), torch.cat([a, a])], torch.zeros(4, 6), torch.zeros(6, 5), mode="symbolic"
    )
    text = assert_round_trip(module)
    assert text.startswith("symbol('s0', hint=4)\nsymbol('s1', hint=6)\nsymbol('s2', hint=5)\n\n")
    assert "view: f32[s0*s1] = view(a_1, [-1])" in text
    assert "cat: f32[2*s0, s1] = cat([a_1, a_1])" in text


def test_symbols_of_another_trace_give_the_same_text():
    def function(a: Tensor, b: Tensor) -> list[Tensor]:
        return [a @ b]

    first = trace(function, torch.zeros(4, 6), torch.zeros(6, 5), mode="symbolic")
    second = trace(lambda a, b: function(a, b), torch.zeros(4, 6), torch.zeros(6, 5), mode="symbolic")
    assert weft.listing(first) == weft.listing(second)


def test_arithmetic_on_sizes_is_written_as_python_functions():
    def function(a: Tensor) -> list[Tensor]:
        return [a[: a.shape[0] // 2], torch.zeros(a.shape[0] * 2 + 3), a.reshape(a.shape[0] * 2, -1)]

    text = assert_round_trip(trace(function, torch.zeros(8, 6), mode="symbolic"))
    assert "floordiv: int[(s0//2)] = operator.floordiv(sym_size_int, 2)" in text


def test_sizes_that_only_the_data_knows_are_unbacked():
    text = assert_round_trip(trace(lambda a: [a.nonzero()], torch.zeros(4)))
    assert body(text) == "def graph(a_1: f32[4]):\n    nonzero: i64[u0, 1] = nonzero(a_1)\n    return [nonzero]\n"


def test_a_number_read_from_a_tensor_is_unbacked():
    def function(a: Tensor) -> list[Tensor]:
        return [torch.zeros(a.sum().item())]

    assert "int[u0] = _local_scalar_dense(" in assert_round_trip(trace(function, torch.zeros(4, dtype=torch.int64)))


def test_an_unbacked_input_needs_no_hint():
    text = "symbol('u0')\n\ndef graph(x: f32[u0, 4]):\n    v: f32[4*u0] = view(x, [-1])\n    return [v]\n"
    assert weft.listing(parse(text)) == text


# Constants.


def test_small_constants_stand_in_the_listing():
    numbers = torch.tensor([1.5, -2.0, float("inf")])
    text = assert_round_trip(trace(lambda a: [a * numbers], torch.zeros(3)))
    assert text.startswith("tensor('_tensor_constant0', f32[3], [1.5, -2.0, inf])\n")


@pytest.mark.parametrize(
    "constant",
    [
        torch.tensor([[True, False]]),
        torch.tensor([1.0, 2.0], dtype=torch.bfloat16),
        torch.tensor([1 + 2j]),
        torch.tensor([float("nan"), -0.0, float("-inf")]),
        torch.tensor([2**63 - 1, -(2**63)]),
        torch.tensor(3),
        torch.tensor(0.1, dtype=torch.float64),
        torch.tensor([0.1, 1e-38, 3.4e38]),
        torch.zeros(0, 3),
        torch.arange(6.0).view(2, 3).t(),
    ],
)
def test_constants_keep_every_bit(constant: Tensor):
    module = trace(lambda a: [a.clone(), constant.clone()], X)
    text = assert_round_trip(module)
    (found,) = parse(text).buffers()
    assert found.dtype == constant.dtype
    assert found.stride() == constant.stride()
    assert same_bits(found, constant)


def test_large_constants_are_named_and_given_apart():
    table = torch.arange(100.0)
    module = trace(lambda a: [a * table], torch.zeros(100))
    text = weft.listing(module)
    assert text.startswith("tensor('_tensor_constant0', f32[100])\n")
    given = parse(text, {"_tensor_constant0": table})
    assert weft.listing(given) == text
    assert torch.equal(given(torch.ones(100))[0], table)


def test_a_large_constant_whose_values_are_not_given_still_parses():
    text = (
        "tensor('c', f32[100])\n\ndef graph():\n"
        "    c: f32[100] = attribute('c')\n    r: f32[100] = relu(c)\n    return [r]\n"
    )
    assert weft.listing(parse(text)) == text


def test_a_constant_that_is_read_twice_is_one_tensor():
    text = (
        "tensor('c', f32[1], [1.0])\n\ndef graph():\n    a: f32[1] = attribute('c')\n    b: f32[1] = attribute('c')\n"
        "    return [a, b]\n"
    )
    module = parse(text)
    first, second = module()
    assert first is second
    assert weft.listing(module) == text


# Arguments.


def test_dtypes_devices_layouts_and_special_numbers_are_written_as_names():
    def function(a: Tensor) -> list[Tensor]:
        cpu = torch.device("cpu")
        return [
            aten._to_copy(a, dtype=torch.float16, device=cpu),
            aten.clone(a, memory_format=torch.contiguous_format),
            aten.full_like(a, float("-inf")),
            aten.full([2], float("nan"), dtype=torch.float32, layout=torch.strided, device=cpu, pin_memory=False),
        ]

    text = assert_round_trip(trace(function, X))
    assert "_to_copy(a_1, dtype=f16, device=device('cpu'))" in text
    assert "clone(a_1, memory_format=memory_format.contiguous_format)" in text
    assert "full_like(a_1, -inf)" in text
    assert "full([2], nan, dtype=f32, layout=layout.strided, device=device('cpu'), pin_memory=False)" in text


@pytest.mark.parametrize("number", [2 + 3j, 1j, -1j, -2.5 - 1j, complex("inf"), complex(0.0, -0.0)])
def test_complex_numbers_are_written_and_read_back(number: complex):
    text = assert_round_trip(trace(lambda a: [aten.full([2], number)], X))
    (node,) = (node for node in parse(text).graph.nodes if node.op == "call_function")
    assert repr(node.args[1]) == repr(number)


@pytest.mark.parametrize("number", [0.1, 1e-45, 1e308, -0.0, 1e22, 2**53 + 1, -(2**62)])
def test_numbers_are_written_and_read_back_exactly(number: float):
    text = assert_round_trip(trace(lambda a: [aten.mul(a, number)], X))
    (node,) = (node for node in parse(text).graph.nodes if node.op == "call_function")
    assert repr(node.args[1]) == repr(number)


def test_strings_with_quotes_and_line_ends_are_one_line():
    message = 'it\'s "bad"\nvery \\ bad ü'
    text = assert_round_trip(trace(lambda a: [aten._assert_async.msg(a, message), a][1:], torch.ones(())))
    assert len(text.splitlines()) == 3


def test_an_index_with_missing_parts_is_written():
    text = assert_round_trip(trace(lambda a, i: [a[:, i]], X, torch.zeros(2, dtype=torch.int64)))
    assert "index(a_1, [None, i_1])" in text


# Nodes.


def test_nodes_with_several_results_are_taken_apart_by_items():
    def function(a: Tensor, scale: Tensor) -> list[Tensor]:
        return [*aten.native_layer_norm(a, [4], scale, None, 1e-5), *a.split(2), *torch.topk(a, 2), *a.unbind()]

    text = assert_round_trip(trace(function, X, torch.ones(4)))
    assert (
        "native_layer_norm: (f32[4, 4], f32[4, 1], f32[4, 1]) = native_layer_norm(a_1, [4], scale_1, None, 1e-05)"
        in text
    )
    assert "topk: (f32[4, 2], i64[4, 2]) = topk(a_1, 2)" in text
    assert "split: [f32[2, 4], f32[2, 4]] = split(a_1, 2)" in text


def test_results_that_are_missing_are_none():
    def function(grad: Tensor, a: Tensor, scale: Tensor) -> list[Tensor]:
        mean, rstd = a.mean(1, True), a.std(1, keepdim=True)
        return [aten.native_layer_norm_backward(grad, a, [4], mean, rstd, scale, None, [True, False, False])[0]]

    text = assert_round_trip(trace(function, X, X, torch.ones(4)))
    assert "(f32[4, 4], None, None) = native_layer_norm_backward(" in text


@pytest.mark.parametrize(
    ("function", "returned"),
    [
        (lambda a: (a.relu(), None, [a, (a,)]), "return (relu, None, [a_1, (a_1,)])"),
        (lambda a: a.relu(), "return relu"),
        (lambda a: {"out": a.relu()}, "return {'out': relu}"),
        (lambda a: [], "return []"),
        (lambda a: (), "return ()"),
        (lambda a: None, "return None"),
    ],
)
def test_outputs_of_any_structure_are_written(function: Callable[..., Any], returned: str):
    assert assert_round_trip(trace(function, X)).endswith(f"    {returned}\n")


def test_in_place_and_foreach_operators_are_written():
    def function(a: Tensor, b: Tensor) -> list[Tensor]:
        aten.add_(a, 1)
        aten._foreach_mul_.Scalar([a, b], 2)
        return [aten.relu_(a), *aten._foreach_add.List([a, b], [b, a])]

    text = assert_round_trip(trace(function, X, X + 1))
    assert "_foreach_mul_ = _foreach_mul_.Scalar([add_, b_1], 2)" in text
    assert "_foreach_add: [f32[4, 4], f32[4, 4]] = _foreach_add.List([relu_, b_1], [b_1, relu_])" in text


def named(*names: str) -> GraphModule:
    """A chain of relus of these names."""
    value = new_fake_mode().from_tensor(torch.zeros(2), static_shapes=True)
    graph = Graph()
    node = graph.placeholder("x")
    node.meta["val"] = value
    for name in names:
        node = graph.create_node("call_function", aten.relu.default, (node,), {}, name)
        node.meta["val"] = value
    graph.output([node])
    return GraphModule({}, graph)


def test_names_that_mean_something_in_a_listing_get_a_tail():
    words = [
        "f32",
        "inf",
        "nan",
        "device",
        "layout",
        "graph",
        "attribute",
        "lambda",
        "None",
        "wait",
        "mm",
        "self",
        "group",
    ]
    text = assert_round_trip(named(*words))
    assert "f32_: f32[2] = relu(x)" in text
    assert "wait: f32[2] = relu(None_)" in text


def test_a_name_with_a_tail_does_not_meet_one_that_has_it_already():
    assert_round_trip(named("f32", "f32_", "f32__"))


# Nested graphs.


def branch(p: Tensor, a: Tensor) -> Any:
    return torch.cond(p, lambda y: (y.sin(),), lambda y: (y.cos(),), (a,))


def test_nested_graphs_are_functions_inside_the_function():
    text = assert_round_trip(trace(branch, torch.tensor(True), torch.zeros(4)))
    assert text == (
        "def graph(p_1: b8[()], a_1: f32[4]):\n"
        "    def true_graph_0(arg0_1: f32[4]):\n"
        "        sin: f32[4] = sin(arg0_1)\n"
        "        return (sin,)\n"
        "    true_graph_0 = attribute('true_graph_0')\n"
        "    def false_graph_0(arg0_1: f32[4]):\n"
        "        cos: f32[4] = cos(arg0_1)\n"
        "        return (cos,)\n"
        "    false_graph_0 = attribute('false_graph_0')\n"
        "    cond: (f32[4],) = higher_order.cond(p_1, true_graph_0, false_graph_0, (a_1,))\n"
        "    getitem: f32[4] = cond[0]\n"
        "    return (getitem,)\n"
    )


def test_nested_graphs_inside_nested_graphs_are_written():
    def twice(p: Tensor, a: Tensor) -> Any:
        return torch.cond(p, lambda y: branch(y.sum() > 0, y), lambda y: (y.cos(),), (a,))

    text = assert_round_trip(trace(twice, torch.tensor(True), torch.zeros(4)))
    assert "        def true_graph_0(" in text


def branch_that_reduces(group: str) -> Callable[..., Any]:
    def reduce(y: Tensor) -> tuple[Tensor]:
        return (funcol.all_reduce(y, "sum", group).sin(),)

    return lambda p, a: torch.cond(p, reduce, lambda y: (y.cos(),), (a,))


def test_a_group_that_only_a_nested_graph_uses_is_declared():
    texts = []
    for rank in (0, 3):
        with fake_mesh(rank) as mesh:
            group = mesh.get_group("dp").group_name

            texts.append(assert_round_trip(trace(branch_that_reduces(group), torch.tensor(True), X)))
    assert texts[0] == texts[1]
    assert texts[0].startswith("group('dp', size=4, stride=2)\n")


# Groups, devices, real programs.


def test_several_groups_are_declared_once_each_the_largest_first():
    with fake_mesh() as mesh:
        dp, tp = mesh.get_group("dp"), mesh.get_group("tp")

        def function(a: Tensor) -> list[Tensor]:
            first = funcol.all_reduce(a, "sum", tp)
            second = funcol.all_gather_tensor(first, 0, dp)
            return [funcol.all_reduce(second, "avg", tp)]

        text = assert_round_trip(trace(function, X))
    assert text.startswith("group('dp', size=4, stride=2)\ngroup('tp', size=2)\n\n")
    assert "all_gather(wait_tensor, 4, 'dp')" in text


def test_a_group_called_like_a_reduction_is_told_apart():
    text = (
        "group('sum', size=2)\n\ndef graph(x: f32[2]):\n    a: f32[2] = all_reduce(x, 'sum', 'sum')\n"
        "    w: f32[2] = wait(a)\n    return [w]\n"
    )
    assert weft.listing(parse(text)) == text


def test_another_device_than_the_cpu_is_declared_once():
    text = (
        "device('cuda:0')\n\ndef graph(x: f32[2], y: f32[2](device='cpu')):\n    r: f32[2] = relu(x)\n"
        "    s: f32[2](device='cpu') = relu(y)\n    return [r, s]\n"
    )
    assert weft.listing(parse(text)) == text


def test_a_constant_on_another_device_is_declared_there():
    text = (
        "device('cuda:0')\ntensor('c', f32[2], [1.0, 2.0])\n\ndef graph(x: f32[2]):\n    c: f32[2] = attribute('c')\n"
        "    r: f32[2] = mul(x, c)\n    return [r]\n"
    )
    assert weft.listing(parse(text)) == text


class Block(torch.nn.Module):
    """A small model with dropout and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(4, 8), torch.nn.Linear(8, 4)
        self.dropout, self.norm = torch.nn.Dropout(0.5), torch.nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.down(self.dropout(torch.nn.functional.gelu(self.up(x)))))


@pytest.mark.parametrize("mode", ["fake", "symbolic"])
def test_forward_and_backward_of_a_model_round_trip(mode: str):
    model = Block()

    def step(parameters: dict[str, Tensor], x: Tensor) -> list[Tensor]:
        loss = torch.func.functional_call(model, parameters, (x,)).pow(2).mean()
        return [loss, *torch.autograd.grad(loss, list(parameters.values()))]

    assert_round_trip(make_fx(step, tracing_mode=mode)(dict(model.named_parameters()), X))


@pytest.mark.parametrize("dynamic", [False, True])
def test_what_aot_autograd_makes_of_functional_collectives_round_trips(mesh: DeviceMesh, dynamic: bool):
    dp, tp = mesh.get_group("dp"), mesh.get_group("tp")
    graphs: list[GraphModule] = []

    def keep(module: GraphModule, _inputs: Any) -> GraphModule:
        graphs.append(module)
        return module

    def forward(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        weight = funcol.all_gather_tensor_autograd(first, 0, dp)
        hidden = funcol.all_gather_tensor_autograd(torch.relu(x @ weight.t()), 1, tp)
        return funcol.reduce_scatter_tensor_autograd(hidden @ second, "sum", 0, tp)

    inputs = [torch.zeros(size, requires_grad=True) for size in ((8, 4), (2, 4), (16, 4))]
    aot_function(forward, keep, keep, dynamic=dynamic)(*inputs).sum().backward()
    forward_text, backward_text = map(assert_round_trip, graphs)
    assert forward_text.count("= wait(") == 3
    assert backward_text.count("= wait(") == 3


# Lines.


def test_a_digest_tells_texts_apart_and_is_stable():
    assert digest("def graph") == digest("def graph")
    assert digest("def graph") != digest("def grapH")
    assert len(digest("")) == 32


def test_an_argument_without_a_text_is_refused():
    graph = Graph()
    x = graph.placeholder("x")
    node = graph.call_function(aten.relu.default, (x, torch.Generator()))
    with pytest.raises(GraphError) as error:
        line_of(node)
    assert str(error.value) == "listing: an argument of type Generator has no text\nmake it a graph input"


def test_a_line_points_at_the_source_of_its_node():
    module = parse("def graph(x: f32[2]):\n    r: f32[2] = relu(x)\n    return [r]\n")
    relu = next(node for node in module.graph.nodes if node.op == "call_function")
    relu.meta["stack_trace"] = (
        'File "/a/outer.py", line 7, in main\n    y = model(x)\n'
        'File "/a/model.py", line 41, in forward\n    return x.relu()\n'
    )
    assert line_of(relu) == "r: f32[2] = relu(x)"
    assert source_of(relu) == "model.py:41 in forward: return x.relu()"
    assert excerpt(relu) == ["r: f32[2] = relu(x)", "^  model.py:41 in forward: return x.relu()"]


def test_a_node_without_a_stack_has_no_source():
    module = parse("def graph(x: f32[2]):\n    r: f32[2] = relu(x)\n    return [r]\n")
    relu = next(node for node in module.graph.nodes if node.op == "call_function")
    assert source_of(relu) == ""
    assert excerpt(relu) == ["r: f32[2] = relu(x)", "^"]


def test_a_constant_whose_elements_share_memory_is_read_back():
    text = """tensor('e', f32[2, 3](strides=(0, 1)), [[0.0, 1.0, 2.0], [0.0, 1.0, 2.0]])
tensor('b', f32[3](base='e'), [0.0, 1.0, 2.0])
tensor('s', bf16[3, 2](strides=(1, 1)), [[0.0, 1.0], [1.0, 2.0], [2.0, 3.0]])

def graph(x: f32[3]):
    e: f32[2, 3] = attribute('e')
    b: f32[3] = attribute('b')
    s: bf16[3, 2] = attribute('s')
    w: f32[3] = add_(b, x)
    return [e, s, w]
"""
    module = weft.parse(text)
    assert weft.listing(module) == text
    _, s, _ = module(torch.ones(3))
    assert s.tolist() == [[0.0, 1.0], [1.0, 2.0], [2.0, 3.0]]
    assert module.e.tolist() == [[1.0, 2.0, 3.0]] * 2  # the write to `b` is seen through `e`
    with pytest.raises(ListingError, match="the values of 'e' differ from those of a constant in the same memory"):
        weft.parse(text.replace("[[0.0, 1.0, 2.0], [0.0", "[[5.0, 1.0, 2.0], [0.0"))


@pytest.mark.parametrize(("call", "after"), [("resize_(a, [2])", "f32[2]"), ("t_(a)", "f32[3, 2](strides=(1, 3))")])
def test_a_node_keeps_its_type_if_a_later_call_reshapes_its_tensor_in_place(call: str, after: str):
    typed = after.partition("(")[0]
    text = f"""def graph(x: f32[2, 3]):
    a: f32[2, 3] = neg(x)
    b: f32[2, 3] = neg(a)
    r: {typed} = {call}
    c: {typed} = neg(r)
    return [b, c]
"""
    assert weft.listing(weft.parse(text)) == text
    with pytest.raises(ListingError, match="a has another type since r"):
        weft.parse(text.replace("neg(r)", "neg(a)"))


def test_lines_of_an_earlier_version_are_used_again_and_changed_ones_are_written_anew():
    module = parse("def graph(x: f32[4]):\n    a = relu(x)\n    b = neg(a)\n    c = neg(x)\n    return [b, c]\n")
    known = KnownLines()
    assert render(module, None, known) == render(module)
    nodes = {node.name: node for node in module.graph.nodes}
    with Edit(module.graph) as edit:
        edit.set_arguments(nodes["b"], (nodes["x"],))
        edit.move_before([nodes["c"]], nodes["a"])
    before = known[nodes["a"]]
    assert render(module, None, known) == render(module)
    assert "b: f32[4] = neg(x)" in render(module, None, known)
    assert known[nodes["a"]] is before


def test_lines_with_symbols_are_always_written_anew():
    text = "symbol('s0', hint=4)\n\ndef graph(x: f32[s0]):\n    a: f32[s0] = relu(x)\n    return [a]\n"
    module, known = parse(text), KnownLines()
    assert render(module, None, known) == text
    assert not known
