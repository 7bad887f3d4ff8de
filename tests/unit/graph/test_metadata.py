"""Fake values: closed forms equal what torch's own fake kernels give, and updates reach exactly as far as they must."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Node

import weft
from tests.versions import needs_transfers
from weft.compat import new_fake_mode
from weft.errors import GraphError
from weft.graph import metadata
from weft.graph.edit import Edit
from weft.graph.ops import op_names, op_of, value_of

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool)
TENSORS = {
    "a vector": lambda dtype: torch.zeros(4, dtype=dtype),
    "a matrix": lambda dtype: torch.zeros(4, 6, dtype=dtype),
    "a transposed matrix": lambda dtype: torch.zeros(6, 4, dtype=dtype).t(),
    "every other row": lambda dtype: torch.zeros(8, 6, dtype=dtype)[::2],
    "a column": lambda dtype: torch.zeros(4, 6, dtype=dtype)[:, 2],
    "a part behind an offset": lambda dtype: torch.zeros(10, dtype=dtype)[2:6],
    "permuted dims": lambda dtype: torch.zeros(2, 3, 4, dtype=dtype).permute(2, 0, 1),
    "channels last": lambda dtype: torch.zeros(4, 3, 5, 6, dtype=dtype).to(memory_format=torch.channels_last),
    "an expanded vector": lambda dtype: torch.zeros(4, 1, dtype=dtype).expand(4, 3),
    "dims of one": lambda dtype: torch.zeros(4, 1, 1, dtype=dtype),
    "no elements": lambda dtype: torch.zeros(0, 4, dtype=dtype),
    "no columns": lambda dtype: torch.zeros(4, 0, dtype=dtype),
}
FORMS: dict[str, Any] = {
    "all_gather": lambda x: ((x, 2, "dp"), {}),
    "all_gather_coalesced": lambda x: (([x, x + x], 2, "dp"), {}),
    "reduce_scatter": lambda x: ((x, "sum", 2, "dp"), {}),
    "reduce_scatter_coalesced": lambda x: (([x, x + x], "sum", 2, "dp"), {}),
    "all_reduce": lambda x: ((x, "sum", "dp"), {}),
    "all_reduce_": lambda x: ((x, "sum", "dp"), {}),
    "all_reduce_coalesced": lambda x: (([x, x + x], "sum", "dp"), {}),
    "all_reduce_coalesced_": lambda x: (([x, x + x], "sum", "dp"), {}),
    "all_to_all": lambda x: ((x, [3, 2], [x.shape[0] - 1, 1], "dp"), {}),
    "broadcast": lambda x: ((x, 0, "dp"), {}),
    "broadcast_": lambda x: ((x, 0, "dp"), {}),
    "all_gather_out": lambda x: ((x, 2, "dp"), {"out": x.new_empty(2 * x.shape[0], *x.shape[1:])}),
    "reduce_scatter_out": lambda x: ((x, "sum", 2, "dp"), {"out": x.new_empty(x.shape[0] // 2, *x.shape[1:])}),
    "send": lambda x: ((x, 1, 0, "dp"), {}),
    "recv": lambda x: ((x, 1, 0, "dp"), {}),
    "batch_p2p": lambda x: ((["isend", "irecv"], [1, 1], [0, 0], [x, x + x], "dp"), {}),
    "wait": lambda x: ((x,), {}),
}
TRANSFERS = {"send", "recv", "batch_p2p"}


def facts(value: Any) -> Any:
    """What must be equal: dtype, size, stride, device."""
    if isinstance(value, Tensor):
        return value.dtype, tuple(value.shape), value.stride(), value.device
    return [facts(item) for item in value]


def test_every_collective_of_this_torch_is_compared():
    assert set(FORMS) - TRANSFERS == set(op_names()) - TRANSFERS - {"wait_all"}


# A wait and a receive return their argument; torch's fake kernels make a new tensor, and pack one that has gaps.
GAPS = ("every other row", "a column", "an expanded vector")


@pytest.mark.parametrize(
    "form", [pytest.param(form, marks=needs_transfers) if form in TRANSFERS else form for form in FORMS]
)
@pytest.mark.parametrize("tensor", TENSORS)
def test_the_closed_form_of_a_collective_is_what_torch_computes(form: str, tensor: str):
    for dtype in DTYPES if not (form in ("wait", "recv") and tensor in GAPS) else ():
        mode = new_fake_mode()
        with mode:
            args, kwargs = FORMS[form](mode.from_tensor(TENSORS[tensor](dtype), static_shapes=True))
            expected = op_of(form)(*args, **kwargs)
        assert facts(metadata.compute(op_of(form), args, kwargs, mode)) == facts(expected)


@pytest.mark.parametrize("form", ["all_gather", "reduce_scatter", "all_reduce", "broadcast", "all_gather_coalesced"])
def test_closed_forms_hold_for_symbolic_sizes(form: str):
    mode = new_fake_mode()
    x = mode.from_tensor(torch.zeros(4, 6))
    assert not isinstance(x.shape[0], int)
    args, kwargs = FORMS[form](x)
    with mode:
        expected = op_of(form)(*args, **kwargs)
    found = metadata.compute(op_of(form), args, kwargs, mode)
    assert str(facts(found)) == str(facts(expected))


def test_in_place_forms_return_their_argument():
    mode = new_fake_mode()
    x = mode.from_tensor(torch.zeros(4))
    assert metadata.compute(op_of("all_reduce_"), (x, "sum", "dp"), {}, mode) is x
    assert metadata.compute(op_of("all_reduce_coalesced_"), ([x], "sum", "dp"), {}, mode)[0] is x
    assert metadata.compute(op_of("wait"), (x,), {}, mode) is x


def test_keyword_arguments_give_the_same_value():
    mode = new_fake_mode()
    x = mode.from_tensor(torch.zeros(4))
    by_keyword = metadata.compute(op_of("all_gather"), (), {"group_name": "dp", "input": x, "group_size": 2}, mode)
    assert facts(by_keyword) == facts(metadata.compute(op_of("all_gather"), (x, 2, "dp"), {}, mode))


def test_a_result_never_shares_the_storage_of_what_was_sent():
    mode = new_fake_mode()
    x = mode.from_tensor(torch.zeros(4))
    for form in ("all_gather", "all_reduce", "broadcast", "reduce_scatter"):
        made = metadata.compute(op_of(form), *FORMS[form](x), mode)
        assert made.untyped_storage()._cdata != x.untyped_storage()._cdata


@pytest.mark.parametrize(
    ("form", "args", "message"),
    [
        (
            "all_gather",
            (torch.zeros(()), 2, "dp"),
            "all_gather: all_gather takes tensors with at least one dim, got one with none",
        ),
        ("all_gather", (3, 2, "dp"), "all_gather: takes tensors, got int"),
        (
            "reduce_scatter",
            (torch.zeros(5), "sum", 2, "dp"),
            "reduce_scatter: dim 0 of size 5 does not split over 2 ranks",
        ),
        ("all_reduce", (torch.zeros(5),), "all_reduce: takes (input, reduce_op, group_name), got 1 arguments"),
        ("relu", (3,), None),
        ("mm", (torch.zeros(2), torch.zeros(2)), None),
        ("from_file.default", ("/etc/hostname", False, 4), "from_file: the operator reaches outside the graph"),
    ],
)
def test_a_call_that_is_not_possible_is_refused(form: str, args: tuple[Any, ...], message: str | None):
    mode = new_fake_mode()
    fakes = tuple(mode.from_tensor(a, static_shapes=True) if isinstance(a, Tensor) else a for a in args)
    with pytest.raises(GraphError) as error:
        metadata.compute(op_of(form), fakes, {}, mode)
    text = str(error.value)
    assert text == message if message else text.startswith(f"{form}: ")


def test_a_refusal_by_torch_is_not_logged(caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]):
    mode = new_fake_mode()
    x = mode.from_tensor(torch.zeros(2), static_shapes=True)
    with pytest.raises(GraphError):
        metadata.compute(op_of("mm"), (x, x), {}, mode)
    assert [record for record in caplog.records if "failed" in record.getMessage()] == []
    assert capfd.readouterr().err == ""


# Updating.


LISTING = """group('dp', size=2)

def graph(x: f32[4, 2], y: f32[6, 2]):
    a: f32[4, 2] = relu(x)
    ag: f32[8, 2] = all_gather(a, 2, 'dp')
    w: f32[8, 2] = wait(ag)
    s: f32[2] = sum.dim_IntList(w, [0])
    r: f32[2] = neg(s)
    other: f32[6, 2] = neg(y)
    return [r, other]
"""


def test_an_update_stops_where_a_value_is_as_before():
    module = weft.parse(LISTING)
    nodes = {node.name: node for node in module.graph.nodes}
    old = {name: value_of(node) for name, node in nodes.items()}
    nodes["a"].args = (nodes["y"],)
    changed = metadata.update(list(module.graph.nodes), [nodes["a"]], metadata.mode_of(module.graph.nodes))
    assert [node.name for node, _ in changed] == ["a", "ag", "w"]
    assert all(value is old[node.name] for node, value in changed)
    assert value_of(nodes["s"]) is old["s"]
    assert value_of(nodes["r"]) is old["r"]


def test_an_update_equals_full_recomputation():
    module = weft.parse(LISTING)
    nodes = {node.name: node for node in module.graph.nodes}
    with Edit(module.graph) as edit:
        edit.set_arguments(nodes["a"], (nodes["y"],))
    text = weft.listing(module)
    untyped = "\n".join(strip_type(line) for line in text.splitlines()) + "\n"
    assert weft.listing(weft.parse(untyped)) == text
    assert "w: f32[12, 2] = wait(ag)" in text


def strip_type(line: str) -> str:
    """`    a: f32[2] = relu(x)` without its type."""
    name, colon, rest = line.partition(": ")
    return f"{name} = {rest.partition(' = ')[2]}" if colon and line.startswith("    ") else line


def test_an_update_computes_each_node_once_however_many_ways_lead_to_it():
    lines = "".join(
        f"    n{k + 1}: f32[4] = add(n{k}, n{k})\n    m{k + 1}: f32[4] = add(n{k}, n{k + 1})\n" for k in range(40)
    )
    module = weft.parse(f"def graph(x: f32[4], y: f32[6]):\n    n0: f32[4] = relu(x)\n{lines}    return [n40]\n")
    nodes = {node.name: node for node in module.graph.nodes}
    nodes["n0"].args = (nodes["y"],)
    changed = metadata.update(list(module.graph.nodes), [nodes["n0"]], metadata.mode_of(module.graph.nodes))
    assert len(changed) == len({node for node, _ in changed}) == 81


def test_views_of_a_changed_node_share_its_new_storage():
    module = weft.parse("def graph(x: f32[4], y: f32[4]):\n    a = relu(x)\n    v = view(a, [2, 2])\n    return [v]\n")
    nodes = {node.name: node for node in module.graph.nodes}
    nodes["a"].args = (nodes["y"],)
    metadata.update(list(module.graph.nodes), [nodes["a"]], metadata.mode_of(module.graph.nodes))
    assert value_of(nodes["v"]).untyped_storage()._cdata == value_of(nodes["a"]).untyped_storage()._cdata


def test_a_view_of_another_node_shares_that_one_s_storage():
    module = weft.parse("def graph(x: f32[4], y: f32[4]):\n    v = view(x, [2, 2])\n    return [v]\n")
    nodes = {node.name: node for node in module.graph.nodes}
    with Edit(module.graph) as edit:
        edit.set_arguments(nodes["v"], (nodes["y"], [2, 2]))
    assert storage(nodes["v"]) == storage(nodes["y"])


def storage(node: Node) -> int:
    return value_of(node).untyped_storage()._cdata


@pytest.mark.parametrize(
    ("first", "second", "equal"),
    [
        (torch.zeros(4), torch.ones(4), True),
        (torch.zeros(4), torch.zeros(5), False),
        (torch.zeros(4), torch.zeros(4, dtype=torch.int32), False),
        (torch.zeros(2, 2), torch.zeros(2, 2).t(), False),
        (torch.zeros(4)[1:3], torch.zeros(4)[2:4], False),
        ([torch.zeros(4)], [torch.zeros(4)], True),
        ([torch.zeros(4)], [torch.zeros(4), torch.zeros(4)], False),
        (1, 1, True),
        (1, True, False),
        (None, None, True),
        (None, torch.zeros(4), False),
    ],
)
def test_values_are_the_same_by_type_size_stride_and_place(first: Any, second: Any, equal: bool):
    assert metadata.same(first, second) is equal


@pytest.mark.parametrize("size", [(), (0,), (3,), (2, 3), (2, 0, 3), (1, 1), (2, 3, 4)])
def test_contiguous_strides_are_those_of_torch(size: tuple[int, ...]):
    assert tuple(metadata.contiguous_strides(size)) == torch.empty(size).stride()
