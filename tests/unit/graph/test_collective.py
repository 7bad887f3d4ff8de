"""Collective: a live view of a launch and its waits, in every form."""

from __future__ import annotations

import re

import pytest
import torch

import weft
from tests.versions import needs_transfers
from weft.graph.collective import Collective, collectives, num_bytes
from weft.graph.edit import Edit
from weft.graph.ops import Kind


def only(body: str, parameters: str = "x: f32[4, 2], y: f32[8, 2]") -> Collective:
    """The one collective of a graph."""
    lines = "".join(f"    {line.strip()}\n" for line in body.strip().splitlines())
    module = weft.parse(f"group('dp', size=2)\n\ndef graph({parameters}):\n{lines}")
    (found,) = collectives(module.graph)
    found.launch.meta["module"] = module  # the graph lives as long as its module
    return found


FORMS = {
    "ag = all_gather(x, 2, 'dp')": (Kind.ALL_GATHER, None, ["x"], True, 32, 64),
    "ag = all_gather(x, group_name='dp', group_size=2)": (Kind.ALL_GATHER, None, ["x"], True, 32, 64),
    "ag = all_gather_out(x, 2, 'dp', out=y)": (Kind.ALL_GATHER, None, ["x"], False, 32, 64),
    "ag = reduce_scatter(x, 'avg', 2, 'dp')": (Kind.REDUCE_SCATTER, "avg", ["x"], True, 32, 16),
    "ag = all_reduce(x, 'sum', 'dp')": (Kind.ALL_REDUCE, "sum", ["x"], True, 32, 32),
    "ag = all_reduce_(x, 'max', 'dp')": (Kind.ALL_REDUCE, "max", ["x"], False, 32, 32),
    "ag = all_to_all(x, [1, 2], [2, 2], 'dp')": (Kind.ALL_TO_ALL, None, ["x"], True, 32, 24),
    "ag = broadcast(x, 0, 'dp')": (Kind.BROADCAST, None, ["x"], True, 32, 32),
    "ag = send(x, 1, 0, 'dp')": (Kind.SEND, None, ["x"], True, 32, 0),
    "ag = recv(x, 1, 0, 'dp')": (Kind.RECV, None, ["x"], False, 32, 32),
}


@pytest.mark.parametrize(
    "line", [pytest.param(line, marks=needs_transfers) if re.search(r"send|recv", line) else line for line in FORMS]
)
def test_every_form_is_read(line: str):
    found = only(f"{line}\nw = wait(ag)\nreturn [w]")
    kind, reduce_op, inputs, functional, sent, received = FORMS[line]
    assert (found.kind, found.reduce_op, found.group, found.dtype) == (kind, reduce_op, "dp", torch.float32)
    assert [node.name for node in found.inputs] == inputs
    assert found.is_functional is functional
    assert (found.input_bytes, found.output_bytes) == (sent, received)
    assert [node.name for node in found.waits] == ["w"]
    assert not found.escapes


def test_a_coalesced_launch_has_its_items_as_results():
    found = only(
        "ag = all_gather_coalesced([x, y], 2, 'dp')\na = ag[0]\nb = ag[1]\nu = wait(b)\nv = wait(a)\nreturn [u, v]"
    )
    assert [node.name for node in found.inputs] == ["x", "y"]
    assert [node.name for node in found.results] == ["a", "b"]
    assert sorted(node.name for node in found.waits) == ["u", "v"]
    assert (found.input_bytes, found.output_bytes) == (96, 192)


def test_several_waits_and_waits_on_views_are_found():
    found = only(
        "ag = all_gather(x, 2, 'dp')\nv = view(ag, [16])\na = wait(ag)\nb = wait(v)\nc = wait(ag)\nreturn [a, b, c]"
    )
    assert sorted(node.name for node in found.waits) == ["a", "b", "c"]


def test_what_follows_a_wait_is_not_a_wait_of_the_launch():
    found = only("ag = all_gather(x, 2, 'dp')\na = wait(ag)\nb = wait(a)\nreturn [b]")
    assert [node.name for node in found.waits] == ["a"]


@pytest.mark.parametrize(
    ("body", "escapes"),
    [
        ("ag = all_gather(x, 2, 'dp')\nreturn [ag]", True),
        ("ag = all_gather(x, 2, 'dp')\nw = wait(ag)\nreturn [w, ag]", True),
        ("ag = all_gather(x, 2, 'dp')\nv = view(ag, [16])\nreturn [v]", True),
        ("ag = all_gather_coalesced([x], 2, 'dp')\na = ag[0]\nreturn [a]", True),
        ("ag = all_gather(x, 2, 'dp')\nw = wait(ag)\nreturn [w]", False),
        ("ag = all_gather(x, 2, 'dp')\nw = wait(ag)\nr = relu(w)\nreturn [r]", False),
    ],
)
def test_a_result_that_is_returned_before_its_wait_escapes(body: str, escapes: bool):
    assert only(body).escapes is escapes


def test_a_collective_follows_the_edits_of_its_graph():
    found = only("a = relu(x)\nag = all_gather(a, 2, 'dp')\nw = wait(ag)\nreturn [w]")
    nodes = {node.name: node for node in found.launch.graph.nodes}
    with Edit(found.launch.graph) as edit:
        edit.set_arguments(found.launch, (nodes["x"], 2, "dp"))
        edit.call(nodes["w"].target, (found.launch,), name="again", before=nodes["output"])
    assert [node.name for node in found.inputs] == ["x"]
    assert [node.name for node in found.waits] == ["w", "again"]


def test_bytes_are_by_hint_and_unknown_without_one():
    text = "symbol('s0', hint=6)\nsymbol('u0')\n\ndef graph(x: f32[s0, 2], y: f32[u0]):\n    return [x, y]\n"
    x, y, _ = weft.parse(text).graph.nodes
    assert num_bytes(x.meta["val"]) == 48
    assert num_bytes(y.meta["val"]) is None
    assert num_bytes(3) is None


def test_a_node_that_launches_nothing_is_no_collective():
    module = weft.parse("def graph(x: f32[2]):\n    r = relu(x)\n    return [r]\n")
    relu = next(node for node in module.graph.nodes if node.name == "r")
    with pytest.raises(ValueError, match="r is not a launch of a known kind"):
        _ = Collective(relu).kind


def test_collectives_come_in_the_order_of_their_launches():
    module = weft.parse(
        "group('dp', size=2)\n\ndef graph(x: f32[4]):\n"
        "    b = all_reduce(x, 'sum', 'dp')\n    a = all_reduce(x, 'max', 'dp')\n"
        "    moved: f32[4] = _dtensor.shard_dim_alltoall.default(x, 0, 0, 'dp')\n"
        "    wa = wait(a)\n    wb = wait(b)\n    return [wa, wb, moved]\n"
    )
    assert [found.launch.name for found in collectives(module.graph)] == ["b", "a"]
