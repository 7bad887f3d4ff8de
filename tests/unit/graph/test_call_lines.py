"""Lines of plans: calls written down and read again, by look-up."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import weft
from weft.errors import WeftError
from weft.graph.listings.call_lines import GroupOf, LineReader, write
from weft.graph.ops import op_of

MODULE = weft.parse(
    "group('dp', size=2)\n\ndef graph(x: f32[4, 4], f32_: f32[4]):\n"
    "    ag: f32[8, 4] = all_gather(x, 2, 'dp')\n    w: f32[8, 4] = wait(ag)\n    return [w]\n"
)
NODES = {node.name: node for node in MODULE.graph.nodes}


@pytest.mark.parametrize(
    "arguments",
    [
        (NODES["x"], [NODES["x"], NODES["f32"]], 3, -1, 2.5, True, None, "text"),
        (math.inf, -math.inf, (1,), (), [[1, 2], []], 1e-30, complex(1, -2)),
        (torch.float32, torch.device("cpu"), torch.strided, torch.contiguous_format),
    ],
)
def test_what_is_written_is_read_again(arguments: tuple[Any, ...]):
    text = write("new", op_of("view"), arguments, {"key": arguments[0]})
    assert text is not None
    line = LineReader([text], NODES).read(text)
    assert (line.name, line.target, line.args, line.kwargs) == (
        "new",
        op_of("view"),
        arguments,
        {"key": arguments[0]},
    )


def test_a_group_is_written_by_a_launch_that_is_of_it():
    text = write("r", op_of("all_reduce"), (NODES["x"], "sum", GroupOf(NODES["ag"])), {})
    assert text == "r = all_reduce(x, 'sum', group(ag))"
    assert LineReader([text], NODES).read(text).args == (NODES["x"], "sum", "dp")


def test_a_symbolic_size_has_no_text():
    module = weft.parse("symbol('s0', hint=8)\n\ndef graph(x: f32[s0]):\n    return [x]\n")
    size = next(iter(module.graph.nodes)).meta["val"].shape[0]
    assert write("v", op_of("view"), (NODES["x"], [size]), {}) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = (", "'x = (' is not a line of a listing"),
        ("mm(x, x)", "'mm(x, x)' is not a call"),
        ("a = b = mm(x, x); c = 1", "is not a line of a listing"),
        ("a = no_such(x)", "no operator is called 'no_such'"),
        ("a = __import__('os').system('true')", "no operator is called"),
        ("a = higher_order.cond(x, x, x)", "cannot be created by a plan"),
        ("a = operator.pow(9999999, 9999999)", "is not arithmetic on numbers of the graph"),
        ("a = operator.mul([1], 9999999999)", "is not arithmetic on numbers of the graph"),
        ("a = operator.add(1, 2)", "is not arithmetic on numbers of the graph"),
        ("a = mm(x, nobody)", "'nobody' is not defined"),
        ("a = mm(x, [y for y in x])", "is not an argument"),
    ],
)
def test_a_line_that_is_none_is_refused(text: str, message: str):
    with pytest.raises(WeftError) as error:
        LineReader([text], NODES).read(text)
    assert message in str(error.value)
