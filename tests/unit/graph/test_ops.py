"""The vocabulary: every operator of torch is known or a barrier, and names go both ways."""

import operator

import pytest
import torch
import torch.distributed._symmetric_memory  # registers its operators
from torch.fx import Graph, Node

import weft
import weft.streaming.peer_copies  # registers its operators
from tests.versions import needs_transfers
from weft.compat import find_op
from weft.graph import ops
from weft.graph.ops import Kind

FUNCTIONAL = torch.ops._c10d_functional


def registered(*namespaces: str) -> list[str]:
    """The full names of the operators with kernels that torch has in some namespaces, overloads included."""
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.split("::")[0] in namespaces]
    return sorted(name if "." in name else f"{name}.default" for name in names)


def target(full: str) -> torch._ops.OpOverload:
    namespace, _, rest = full.partition("::")
    found = find_op(namespace, *rest.split("."))
    assert found is not None
    return found


def node_of(target: torch._ops.OpOverload, *args: object, **kwargs: object) -> Node:
    graph = Graph()
    inputs = {name: graph.placeholder(name) for name in ("x", "y")}
    return graph.call_function(
        target,
        tuple(inputs.get(a, a) if isinstance(a, str) else a for a in args),
        {key: inputs.get(value, value) if isinstance(value, str) else value for key, value in kwargs.items()},
    )


@pytest.mark.parametrize("full", registered("_c10d_functional", "_c10d_functional_autograd"))
def test_every_functional_collective_of_this_torch_is_known(full: str):
    known = ops.launch_form(target(full)) is not None
    assert known or ops.is_wait(target(full)) or target(full).name() == "_c10d_functional::_wrap_tensor_autograd"


@pytest.mark.parametrize("full", registered("_c10d_functional"))
def test_no_functional_operator_is_both_a_launch_and_a_wait(full: str):
    assert not (ops.is_wait(target(full)) and ops.is_communication(target(full)))


@pytest.mark.parametrize("full", registered("c10d", "_dtensor", "symm_mem", "fsdp"))
def test_communication_without_a_row_is_a_barrier(full: str):
    assert ops.is_communication(target(full))
    assert ops.kind_of(target(full)) is ops.COPIED.get(target(full).name(), Kind.BARRIER)


@pytest.mark.parametrize(("name", "kind"), ops.COPIED.items())
def test_copies_through_symmetric_memory_are_launches(name: str, kind: Kind):
    form = ops.launch_form(target(f"{name}.default"))
    assert form is not None
    assert (form.kind, form.copied, form.written) == (kind, True, None)


def test_an_operator_of_any_namespace_with_a_group_argument_is_a_barrier():
    with torch.library._scoped_library("weft_test", "FRAGMENT") as library:
        library.define("exchange(Tensor x, str group_name) -> Tensor")
        library.define("local(Tensor x, str name) -> Tensor")
        assert ops.kind_of(torch.ops.weft_test.exchange.default) is Kind.BARRIER
        assert ops.kind_of(torch.ops.weft_test.local.default) is None


@pytest.mark.parametrize("target", [torch.ops.aten.mm.default, operator.getitem, torch.relu, "relu", None])
def test_what_does_not_communicate_has_no_kind(target: object):
    assert ops.kind_of(target) is None
    assert not ops.is_wait(target)


def test_the_forms_of_an_all_reduce_are_told_by_their_schemas():
    plain, in_place = ops.launch_form(FUNCTIONAL.all_reduce.default), ops.launch_form(FUNCTIONAL.all_reduce_.default)
    coalesced = ops.launch_form(FUNCTIONAL.all_reduce_coalesced_.default)
    assert (plain.tensors, plain.group, plain.coalesced, plain.written) == ("input", "group_name", False, None)
    assert (in_place.coalesced, in_place.written) == (False, "input")
    assert (coalesced.tensors, coalesced.coalesced, coalesced.written) == ("inputs", True, "inputs")


def test_an_out_form_writes_its_out_argument_and_sends_its_input():
    form = ops.launch_form(FUNCTIONAL.reduce_scatter_tensor_out.default)
    assert (form.kind, form.tensors, form.written) == (Kind.REDUCE_SCATTER, "input", "out")


@needs_transfers
def test_a_receive_writes_its_buffer_although_its_schema_does_not_say_so():
    assert ops.launch_form(ops.op_of("recv")).written == "tensor"
    assert ops.launch_form(ops.op_of("send")).written is None


@pytest.mark.parametrize(
    ("by_position", "by_keyword"),
    [
        (
            node_of(FUNCTIONAL.all_gather_into_tensor.default, "x", 2, "dp"),
            node_of(FUNCTIONAL.all_gather_into_tensor.default, input="x", group_size=2, group_name="dp"),
        ),
        (
            node_of(FUNCTIONAL.reduce_scatter_tensor.default, "x", "sum", 2, "dp"),
            node_of(FUNCTIONAL.reduce_scatter_tensor.default, "x", "sum", group_name="dp", group_size=2),
        ),
        (
            node_of(FUNCTIONAL.all_gather_into_tensor_out.default, "x", 2, "dp", out="y"),
            node_of(FUNCTIONAL.all_gather_into_tensor_out.default, out="y", group_name="dp", group_size=2, input="x"),
        ),
    ],
)
def test_arguments_by_keyword_and_by_position_bind_to_the_same_names(by_position: Node, by_keyword: Node):
    first, second = ops.bind(by_position), ops.bind(by_keyword)
    assert {key: str(value) for key, value in first.items()} == {key: str(value) for key, value in second.items()}


def test_defaults_are_filled_in():
    bound = ops.bind(node_of(torch.ops.aten.add.Tensor, "x", "y"))
    assert bound["alpha"] == 1


@pytest.mark.parametrize("namespace", ["aten", "_c10d_functional", "_c10d_functional_autograd", "prims", "_dtensor"])
def test_names_of_operators_lead_back_to_them(namespace: str):
    names = registered(namespace)
    assert names
    assert [full for full in names if ops.op_of(ops.name_of(target(full))) is not target(full)] == []


@pytest.mark.parametrize(
    ("op", "name"),
    [
        (FUNCTIONAL.all_gather_into_tensor.default, "all_gather"),
        (FUNCTIONAL.wait_tensor.default, "wait"),
        (torch.ops.aten.mm.default, "mm"),
        (torch.ops.aten.add.Tensor, "add"),
        (torch.ops.aten.add.Scalar, "add.Scalar"),
        (torch.ops.aten.select.int, "select.int"),
        (torch.ops.prims.convert_element_type.default, "prims.convert_element_type.default"),
        (torch.ops._c10d_functional_autograd.all_to_all_single.default, None),
        (torch.ops.higher_order.cond, "higher_order.cond"),
        (operator.getitem, "operator.getitem"),
        (torch.sym_max, "torch.sym_max"),
    ],
)
def test_operators_have_short_names_where_they_are_plain(op: object, name: str | None):
    expected = name or "_c10d_functional_autograd.all_to_all_single.default"
    assert ops.name_of(op) == expected
    assert ops.op_of(expected) is op


@pytest.mark.parametrize("name", ["", "no_such_op", "os.system", "aten.mm.default.more", "mm.no_overload", "a.b.c.d.e"])
def test_an_unknown_name_leads_nowhere(name: str):
    assert ops.op_of(name) is None


def test_a_function_without_a_name_has_none():
    assert ops.name_of(torch.nn.functional.gelu) is None


def test_a_bare_name_never_hides_a_collective():
    """`all_reduce` is the functional collective, whatever aten may come to have under that name."""
    assert all(ops.op_of(name) is op for name, op in ops.op_names().items())


def test_a_launch_by_its_autograd_operator_is_one_of_the_kind():
    assert ops.kind_of(torch.ops._c10d_functional_autograd.all_gather_into_tensor.default) is Kind.ALL_GATHER


@pytest.mark.parametrize("name", ["rand_like", "bernoulli.default", "native_dropout", "randn.default"])
def test_operators_that_draw_random_numbers_are_known_by_their_tags(name: str):
    assert ops.is_random(ops.op_of(name))


def test_a_value_is_the_metadata_of_the_node():
    module = weft.parse("def graph(x: f32[2]):\n    r = relu(x)\n    return [r]\n")
    _, relu, output = module.graph.nodes
    assert tuple(ops.value_of(relu).shape) == (2,)
    assert ops.value_of(output) is None
