"""Bytes between nodes: sums that send whole tensors are told of, with the pass that changes them; others are not."""

from __future__ import annotations

import pytest
from torch.fx import GraphModule

import weft
from weft.cost.cluster import Cluster
from weft.graph.listings.text import parse, render
from weft.prediction.between_nodes import notes_on_bytes_between_nodes

CLUSTER = Cluster.load("h100-4x8")
MESH = "group('outer', size=4, stride=8)\ngroup('inner', size=8)\n\n"
NUMEL = 1 << 23
"""Elements of a gradient: 32 MiB in f32, of which a ring over four nodes sends 3/4 twice."""


def gradient(*lines: str) -> GraphModule:
    return parse(f"{MESH}def graph(g: f32[{NUMEL}]):\n" + "".join(f"    {line}\n" for line in lines))


WHOLE_FIRST = (
    "ar = all_reduce(g, 'sum', 'outer')",
    "w = wait(ar)",
    "rs = reduce_scatter(w, 'sum', 8, 'inner')",
    "p = wait(rs)",
    "return [p]",
)
PART_FIRST = (
    "rs = reduce_scatter(g, 'sum', 8, 'inner')",
    "p = wait(rs)",
    "ar = all_reduce(p, 'sum', 'outer')",
    "w = wait(ar)",
    "return [w]",
)
CHAIN = (
    "ar = all_reduce(g, 'sum', 'outer')",
    "w = wait(ar)",
    "ar1 = all_reduce(w, 'sum', 'inner')",
    "w1 = wait(ar1)",
    "return [w1]",
)


@pytest.mark.parametrize(("lines", "by"), [(WHOLE_FIRST, "sink-all-reduces"), (CHAIN, "decompose-mesh-all-reduces")])
def test_sums_of_whole_tensors_are_told_of_with_both_sizes_and_the_pass(lines: tuple[str, ...], by: str):
    module = gradient(*lines)
    before = render(module)
    (note,) = notes_on_bytes_between_nodes(module, CLUSTER)
    assert "48.0 MiB" in note  # 2 x 3/4 x 32 MiB
    assert "6.00 MiB" in note  # an eighth of it
    assert by in note
    assert render(module) == before


@pytest.mark.parametrize("cluster", [CLUSTER, Cluster.load("h100-1x8")])
def test_sums_of_parts_and_sums_in_a_node_are_fine(cluster: Cluster):
    lines = PART_FIRST if cluster.num_nodes > 1 else CHAIN
    mesh = MESH if cluster.num_nodes > 1 else "group('outer', size=2, stride=4)\ngroup('inner', size=4)\n\n"
    module = parse(f"{mesh}def graph(g: f32[{NUMEL}]):\n" + "".join(f"    {line}\n" for line in lines))
    assert notes_on_bytes_between_nodes(module, cluster) == ()


def test_small_sums_are_not_worth_a_note():
    module = parse(f"{MESH}def graph(g: f32[1024]):\n" + "".join(f"    {line}\n" for line in CHAIN))
    assert notes_on_bytes_between_nodes(module, CLUSTER) == ()


def test_a_report_tells_of_what_its_pipeline_left_and_not_of_what_it_changed():
    module = gradient(*WHOLE_FIRST)
    left = weft.optimize(module, CLUSTER, pipeline="none").report
    assert [note for note in left.notes if "sink-all-reduces" in note]
    assert "sink-all-reduces" in left.explain().why
    assert [note for note in weft.predict(module, CLUSTER).notes if "sink-all-reduces" in note]
    changed = weft.optimize(module, CLUSTER).report
    assert not [note for note in changed.notes if "between nodes" in note]
