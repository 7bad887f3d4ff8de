"""Value numbers: values that are equal by construction, in graphs of any depth."""

from __future__ import annotations

from torch.fx import GraphModule

import weft
from weft.graph.dag import Dag
from weft.graph.value_numbers import ValueNumbers

DEPTH = 3000
"""Operators in a row: more than calls that Python's stack holds."""


def twice(operator: str) -> GraphModule:
    """Two equal chains of an operator, each with a gather of its result."""
    lines = ["group('dp', size=2)", "", "def graph(x: f32[4, 4], y: f32[4, 4]):"]
    for chain in "ab":
        last = "x"
        for i in range(DEPTH):
            lines.append(f"    {chain}{i}: f32[4, 4] = {operator.format(last)}")
            last = f"{chain}{i}"
        lines += [f"    {chain}g: f32[8, 4] = all_gather({last}, 2, 'dp')", f"    {chain}w: f32[8, 4] = wait({chain}g)"]
    return weft.parse("\n".join([*lines, "    c: f32[8, 4] = add(aw, bw)\n    return [c]"]))


def test_long_chains_of_cheap_operators_are_numbered():
    module = twice("t({})")
    numbers = ValueNumbers(Dag(module.graph))
    nodes = {node.name: node for node in module.graph.nodes}
    assert numbers.of(nodes["aw"]) == numbers.of(nodes["bw"]) != numbers.of(nodes["a0"])


def test_long_chains_of_operators_that_compute_are_numbered_on_request():
    module = twice("mm({}, y)")
    nodes = {node.name: node for node in module.graph.nodes}
    for all_operators in (True, False):
        numbers = ValueNumbers(Dag(module.graph), all_operators=all_operators)
        assert (numbers.of(nodes["aw"]) == numbers.of(nodes["bw"])) == all_operators


def test_equal_gathers_after_long_chains_become_one():
    after = weft.listing(weft.optimize(twice("t({})"), pipeline="dedupe-collectives").module)
    assert after.count("all_gather(") == 1
