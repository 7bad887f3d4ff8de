"""Arguments that cannot be, as each public function refuses them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import weft
from weft.errors import (
    ClusterError,
    GraphError,
    ListingError,
    PipelineError,
    PlanError,
    ReportError,
    VerificationError,
    WeftError,
)

TEXT = """group('dp', size=4)

def graph(x: f32[4]):
    total: f32[4] = all_reduce(x, 'sum', 'dp')
    w: f32[4] = wait(total)
    return [w]
"""
GRAPH: Any = weft.parse(TEXT)
RESULT: Any = weft.optimize(GRAPH, pipeline="none")
WRONG: Any = "x"
FROM = "pass what weft.capture or weft.parse returns"
READ = "read the listing of a file first: weft.parse(Path('step.txt').read_text())"
GROUPS = "give sizes or ranks: groups={'dp': 8} or groups={'dp': [[0, 1], [2, 3]]}"
MESH = "give axes and sizes: mesh={'dp': 8}"
RANKS = "give ranks=4, or leave it out: the groups of the graph say how many"


def optimized(**options: Any) -> Callable[[], Any]:
    return lambda: weft.optimize(GRAPH, **options)


def verified(**options: Any) -> Callable[[], Any]:
    return lambda: weft.verify(GRAPH, GRAPH, **options)


REFUSED: list[tuple[Callable[[], Any], type[WeftError], str]] = [
    # modules
    (lambda: weft.optimize(WRONG), GraphError, f"optimize: module is 'x', a graph module is needed\n{READ}"),
    (lambda: weft.optimize(None), GraphError, f"optimize: module is None, a graph module is needed\n{FROM}"),  # type: ignore[arg-type]
    (
        lambda: weft.optimize(nn.Linear(2, 2)),  # type: ignore[arg-type]
        GraphError,
        "optimize: module is of type Linear, a graph module is needed\n"
        "capture it first: weft.capture(model, example_inputs, mesh={'dp': 8}, part='joint')",
    ),
    (
        lambda: weft.listing(RESULT),
        GraphError,
        "listing: module is of type Result, a graph module is needed\npass the module of the result: result.module",
    ),
    (
        lambda: weft.simulate(RESULT),
        GraphError,
        "simulate: modules is of type Result, a graph module or a list of them is needed\n"
        "pass the module of the result: result.module",
    ),
    (
        lambda: weft.simulate("s.txt"),  # type: ignore[arg-type]
        GraphError,
        f"simulate: modules is 's.txt', a graph module or a list of them is needed\n{READ}",
    ),
    (
        lambda: weft.simulate([GRAPH, None]),  # type: ignore[list-item]
        GraphError,
        f"simulate: modules[1] is None, a graph module is needed\n{FROM}",
    ),
    (
        lambda: weft.verify(GRAPH, None),  # type: ignore[arg-type]
        GraphError,
        f"verify: after is None, a graph module or a list of them is needed\n{FROM}",
    ),
    (
        lambda: weft.verify([], GRAPH),
        GraphError,
        "verify: before is empty, at least one graph is needed\ngive one graph module or more as before",
    ),
    (lambda: weft.bisect(WRONG), GraphError, f"bisect: module is 'x', a graph module is needed\n{READ}"),
    # options
    (
        optimized(cluster=8),
        ClusterError,
        "optimize: cluster is 8, a name, a path or a Cluster is needed\n"
        "give a preset, cluster='h100-8x8', or the path of a TOML file",
    ),
    (
        optimized(pipeline=8),
        PipelineError,
        "optimize: pipeline is 8, a text or a Pipeline is needed\n"
        "give it as pipeline='auto', or as Pipeline.parse('auto')",
    ),
    (
        optimized(memory_limit_bytes="40GiB"),
        PipelineError,
        "optimize: memory_limit_bytes is '40GiB', a whole number of bytes is needed\n"
        "40 GiB are memory_limit_bytes=40 << 30",
    ),
    (
        optimized(effort="max"),
        PipelineError,
        "optimize: no effort is called 'max'\nuse one of 'fast', 'default', 'best'",
    ),
    (optimized(effort="bestt"), PipelineError, "optimize: no effort is called 'bestt'\ndid you mean 'best'?"),
    (
        optimized(tokens_per_step="x"),
        ReportError,
        "optimize: tokens_per_step is 'x', a whole number is needed\nleave it out if it is not known",
    ),
    (optimized(groups=8), GraphError, f"optimize: groups is 8, a mapping of names is needed\n{GROUPS}"),
    (
        optimized(groups={"dp": "8"}),
        GraphError,
        "optimize: group 'dp' is given as '8', a size of at least 1 or lists of ranks are needed\n" + GROUPS,
    ),
    # texts and plans
    (
        lambda: weft.parse(None),  # type: ignore[arg-type]
        ListingError,
        "parse: text is None, the text of a listing is needed\n"
        "pass the text of a listing: weft.parse(Path('step.txt').read_text())",
    ),
    (
        lambda: weft.apply(GRAPH, "s.json"),  # type: ignore[arg-type]
        PlanError,
        "apply: plan is 's.json', a Plan is needed\nload it first: Plan.load('s.json')",
    ),
    (
        lambda: weft.apply(GRAPH, RESULT),
        PlanError,
        "apply: plan is of type Result, a Plan is needed\npass result.plan, or what Plan.load returns",
    ),
    # ranks and meshes
    (verified(ranks=0), VerificationError, f"verify: ranks is 0, at least 1 is needed\n{RANKS}"),
    (verified(ranks="4"), VerificationError, f"verify: ranks is '4', a whole number is needed\n{RANKS}"),
    (verified(ranks=True), VerificationError, f"verify: ranks is True, a whole number is needed\n{RANKS}"),
    (verified(mesh=[4]), VerificationError, f"verify: mesh is of type list, a mapping of axes is needed\n{MESH}"),
    (verified(mesh={}), VerificationError, f"verify: the mesh has no axes\n{MESH}"),
    (
        verified(mesh={"dp": 0}),
        VerificationError,
        f"verify: axis 'dp' of the mesh has size 0, a whole number of at least 1 is needed\n{MESH}",
    ),
    (
        verified(mesh={"tp": 4}),
        VerificationError,
        "verify: the graph has group 'dp', the mesh only 'tp'\ngive every group of the graph its size: mesh={'dp': 4}",
    ),
]


@pytest.mark.parametrize(("call", "kind", "message"), REFUSED, ids=[row[2].partition("\n")[0] for row in REFUSED])
def test_a_wrong_argument_is_refused_with_what_to_do(call: Callable[[], Any], kind: type[WeftError], message: str):
    with pytest.raises(WeftError) as error:
        call()
    assert type(error.value) is kind
    assert str(error.value) == message


def test_a_long_text_is_cut():
    with pytest.raises(GraphError) as error:
        weft.listing("x" * 1000)  # type: ignore[arg-type]
    assert str(error.value).startswith(f"listing: module is '{'x' * 59}..., a graph module is needed")


def test_every_group_that_the_mesh_leaves_out_is_named():
    text = TEXT.replace("group('dp', size=4)", "group('dp', size=4)\ngroup('ep', size=2)\ngroup('tp', size=2)")
    module = weft.parse(text)
    with pytest.raises(VerificationError, match="the graph has groups 'dp' and 'ep', the mesh only 'tp'"):
        weft.verify(module, module, mesh={"tp": 2})


def test_the_groups_of_both_sides_are_asked_of_the_mesh():
    other = weft.parse(TEXT.replace("'dp'", "'ep'"))
    with pytest.raises(VerificationError, match="the graph has group 'ep', the mesh only 'dp'"):
        weft.verify(GRAPH, other, mesh={"dp": 4})


@pytest.mark.parametrize(
    "declared",
    [
        "group('both', size=4)",
        "group('both', size=4, ranks=[[0, 1, 2, 3]])",
        "group('world', size=4)",
    ],
)
def test_a_mesh_need_not_name_a_group_of_neighbouring_axes_or_of_listed_ranks(declared: str):
    name = declared.split("'")[1]
    module = weft.parse(TEXT.replace("group('dp', size=4)", declared).replace("'dp'", f"'{name}'"))
    assert weft.verify(module, module, mesh={"dp": 2, "tp": 2}).num_ranks == 4


def test_a_mesh_need_not_name_a_group_that_is_given():
    assert weft.verify(GRAPH, GRAPH, mesh={"tp": 4}, groups={"dp": 4}).num_ranks == 4


def test_a_path_is_as_good_as_a_name(tmp_path: Path):
    with pytest.raises(ClusterError, match="it cannot be read"):
        weft.simulate(GRAPH, tmp_path / "missing.toml")
