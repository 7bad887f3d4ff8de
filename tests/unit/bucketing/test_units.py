"""Units of FSDP2: blocks by visit, and the root in two layouts."""

from __future__ import annotations

import pytest
from torch.fx import Node

import weft
from weft.bucketing.units import units_of

LISTING = """\
group('dp', size=2)

def graph(p: f32[2, 4], q: f32[3, 4]):
    a: f32[4, 4] = all_gather(p, 2, 'dp')
    b: f32[6, 4] = all_gather(q, 2, 'dp')
    c: f32[4, 4] = all_gather(p, 2, 'dp')
    d: f32[6, 4] = all_gather(q, 2, 'dp')
    e: f32[6, 4] = all_gather(q, 2, 'dp')
    f: f32[4, 4] = all_gather(p, 2, 'dp')
    return [a, b, c, d, e, f]
"""


def launches(*modules: str) -> list[Node]:
    """Six launches, each in the given module, written outermost first: `layers.0 > layers.0.norm`."""
    nodes = [node for node in weft.parse(LISTING).graph.nodes if node.op == "call_function"]
    for node, text in zip(nodes, modules, strict=True):
        node.meta["nn_module_stack"] = {path: (path, object) for path in text.split(" > ")}
    return nodes


@pytest.mark.parametrize(
    ("root", "expected"),
    [
        ("split", ["root 0", "layers.0 1", "layers.0 1", "layers.1 2", "root 3", "root 3"]),
        ("one", ["root 0", "layers.0 1", "layers.0 1", "layers.1 2", "root 0", "root 0"]),
    ],
)
def test_blocks_are_units_and_the_root_has_one_or_two(root: str, expected: list[str]):
    nodes = launches("tokens", "layers.0 > layers.0.norm", "layers.0", "layers.1 > layers.1.moe.3", "norm", "output")
    assert list(units_of(nodes, root).values()) == expected  # type: ignore[arg-type]


def test_a_block_that_is_visited_again_is_another_unit():
    nodes = launches("layers.0", "layers.1", "layers.1", "layers.0", "layers.0", "head")
    assert list(units_of(nodes, "split").values()) == [
        "layers.0 0",
        "layers.1 1",
        "layers.1 1",
        "layers.0 2",
        "layers.0 2",
        "root 3",
    ]


def test_forward_and_backward_of_the_last_block_are_two_units():
    nodes = launches(*["layers.0"] * 6)
    for k, node in enumerate(nodes):
        node.meta["partitioner_tag"] = "is_forward" if k < 2 else "is_backward"
    assert list(units_of(nodes, "split").values()) == ["layers.0 0"] * 2 + ["layers.0 1"] * 4


def test_one_root_that_is_visited_again_is_another_unit():
    nodes = launches("tokens", "head", "layers.0", "head", "layers.0", "tokens")
    assert [units_of(nodes, "one")[node] for node in nodes] == [
        "root 0",
        "root 0",
        "layers.0 1",
        "root 1",
        "layers.0 3",
        "root 1",
    ]


def test_without_module_names_there_are_no_units():
    nodes = [node for node in weft.parse(LISTING).graph.nodes if node.op == "call_function"]
    assert units_of(nodes, "split") == {}


def test_a_model_without_blocks_is_one_unit():
    nodes = launches("encoder", "encoder", "encoder", "decoder", "decoder", "decoder")
    assert set(units_of(nodes, "split").values()) == {"root 0"}


def test_a_gradient_that_the_root_reduces_again_is_another_unit():
    text = "".join(f"    {name}: f32[2, 4] = reduce_scatter(p, 'avg', 2, 'dp')\n" for name in "abc")
    listing = f"group('dp', size=2)\n\ndef graph(p: f32[4, 4]):\n{text}    return [a, b, c]\n"
    nodes = [node for node in weft.parse(listing).graph.nodes if node.op == "call_function"]
    for node, path in zip(nodes, ["norm", "output", "output"], strict=True):
        node.meta["nn_module_stack"] = {path: (path, object)}
    assert list(units_of(nodes, "split").values()) == ["root 0", "root 0", "root 1"]
