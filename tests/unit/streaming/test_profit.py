"""Chunks where they pay: the decision, its reasons, and programs with chunks against those of graphs with chunks."""

from __future__ import annotations

import pytest
from torch.fx import GraphModule

import weft
from weft.cost.cluster import Cluster
from weft.graph.collective import collectives
from weft.graph.dag import Dag
from weft.graph.groups import read_groups
from weft.passes.pipeline import Pipeline
from weft.plan.decision import Decision, Refusal
from weft.simulation.build import program_of
from weft.simulation.program import OpKind
from weft.simulation.simulator import run
from weft.streaming.chunking import Chunking
from weft.streaming.gather_sites import read_gather
from weft.streaming.lowerings.symmetric_memory import SymmetricMemory
from weft.streaming.scatter_sites import read_scatter
from weft.streaming.trial_program import ChunkCosts, TrialProgram

CLUSTER = "h100-1x8"


def gather(rows: int, between: str = "", results: str = "y") -> GraphModule:
    return weft.parse(
        f"group('tp', size=8)\n\ndef graph(x: bf16[{rows}, 8192], b: bf16[8192, 8192], c: bf16[8192, 8192]):\n"
        f"    ag = all_gather(x, 8, 'tp')\n{between}    w = wait(ag)\n    y = mm(w, b)\n    return [{results}]\n"
    )


def scatter(rows: int) -> GraphModule:
    return weft.parse(
        f"group('tp', size=8)\n\ndef graph(a: bf16[{8 * rows}, 8192], b: bf16[8192, 8192]):\n    y = mm(a, b)\n"
        "    rs = reduce_scatter(y, 'sum', 8, 'tp')\n    w = wait(rs)\n    return [w]\n"
    )


def gather_along(dim: int, kind: str) -> GraphModule:
    """A gather of shards of three dims along one of them, and a product of its rows."""
    shape = [4, 1024, 4096]
    whole = [8 * n if d == dim else n for d, n in enumerate(shape)]
    rows, terms = whole[0] * whole[1], whole[2]
    parts = "".join(f"    p{k} = s[{k}]\n" for k in range(8))
    joined = f"    s = split(w, 4)\n{parts}    c = cat([{', '.join(f'p{k}' for k in range(8))}], {dim})\n"
    source, used = ("c", joined) if dim else ("w", "")
    used += f"    e = relu({source})\n" if "used" in kind else ""
    return weft.parse(
        f"group('tp', size=8)\n\ndef graph(x: bf16{shape}, b: bf16[{terms}, 4096]):\n    ag = all_gather(x, 8, 'tp')\n"
        f"    w = wait(ag)\n{used}    v = view({source}, [{rows}, {terms}])\n    y = mm(v, b)\n"
        f"    return [{'y, e' if 'used' in kind else 'y'}]\n"
    )


def scatter_along(dim: int, terms: int) -> GraphModule:
    """A product, or a sum of two, and a scatter of its rows along one of two dims."""
    inputs = ", ".join(f"a{k}: bf16[32768, 4096], b{k}: bf16[4096, 4096]" for k in range(terms))
    products = "".join(f"    y{k} = mm(a{k}, b{k})\n" for k in range(terms))
    products += "    z = add(y0, y1)\n" if terms == 2 else ""
    sizes = "[32, 1024, 4096]" if dim == 0 else "[4, 8192, 4096]"
    parts = "".join(f"    p{k} = s[{k}]\n" for k in range(8))
    joined = f"    s = split(u, 1024, 1)\n{parts}    c = cat([{', '.join(f'p{k}' for k in range(8))}])\n" if dim else ""
    return weft.parse(
        f"group('tp', size=8)\n\ndef graph({inputs}):\n{products}    u = view({'z' if terms == 2 else 'y0'}, {sizes})\n"
        f"{joined}    rs = reduce_scatter({'c' if dim else 'u'}, 'sum', 8, 'tp')\n    w = wait(rs)\n    return [w]\n"
    )


def decide(module: GraphModule, spec: str) -> list[Decision]:
    return list(Pipeline.parse(spec).run(module, cluster=CLUSTER).plan.steps[0].decisions)


def test_a_large_gather_that_nothing_hides_is_streamed():
    (decision,) = decide(gather(2048), "fuse-all-gather-matmuls")
    assert decision.applied
    assert decision.nodes == ("ag", "y")


def test_a_large_scatter_that_nothing_hides_is_streamed():
    (decision,) = decide(scatter(2048), "fuse-matmul-reduce-scatters")
    assert decision.applied


@pytest.mark.parametrize("module", [gather(16), scatter(16)], ids=["gather", "scatter"])
def test_a_small_one_takes_longer_in_chunks_and_stays(module: GraphModule):
    name = "fuse-all-gather-matmuls" if "all_gather" in weft.listing(module) else "fuse-matmul-reduce-scatters"
    (decision,) = decide(module, name)
    assert decision.reason.value == "no-gain"
    assert "us whole and " in decision.sentence


def test_one_that_other_work_hides_stays():
    work = "".join(f"    h{k} = mm({'c' if k == 0 else f'h{k - 1}'}, b)\n" for k in range(40))
    (decision,) = decide(gather(2048, work, "y, h39"), "fuse-all-gather-matmuls")
    assert f"{decision.reason.value}: {decision.sentence}" == "no-gain: ag stays whole: other work can hide it"


def test_the_streamed_step_is_shorter_in_the_simulator():
    for module, spec in ((gather(2048), "fuse-all-gather-matmuls"), (scatter(2048), "fuse-matmul-reduce-scatters")):
        after = Pipeline.parse(spec).run(module, cluster=CLUSTER).module
        steps = [weft.simulate(graph, cluster=CLUSTER).step_us for graph in (module, after)]
        assert steps[1] < 0.95 * steps[0]


def test_sites_that_are_alike_are_decided_alike():
    lines, source = "", "x"
    for k in range(3):
        lines += f"    ag{k} = all_gather({source}, 8, 'tp')\n    w{k} = wait(ag{k})\n    y{k} = mm(w{k}, b)\n"
        lines += f"    z{k} = mm(y{k}, b)\n    rs{k} = reduce_scatter(z{k}, 'sum', 8, 'tp')\n    v{k} = wait(rs{k})\n"
        source = f"v{k}"
    module = weft.parse(
        f"group('tp', size=8)\n\ndef graph(x: bf16[2048, 8192], b: bf16[8192, 8192]):\n{lines}    return [v2]\n"
    )
    for spec in ("fuse-all-gather-matmuls", "fuse-matmul-reduce-scatters"):
        actions = Pipeline.parse(spec).run(module, cluster=CLUSTER).plan.steps[0].actions
        assert len(actions) == 3
        assert len({action.chunks for action in actions}) == 1  # type: ignore[union-attr]


@pytest.mark.parametrize("chunks", [2, 4, 8])
@pytest.mark.parametrize("kind", ["gather", "gather, used", "scatter"])
def test_a_trial_takes_as_long_as_the_graph_with_chunks(kind: str, chunks: int):
    module = scatter(1024) if kind == "scatter" else gather(1024, results="y, w" if "used" in kind else "y")
    cluster, groups, dag = Cluster.load(CLUSTER), read_groups(module), Dag(module.graph)
    collective = next(collectives(module.graph))
    site = read_scatter(collective, dag) if kind == "scatter" else read_gather(collective, dag)
    assert not isinstance(site, Refusal)
    cut = site.cut(chunks)
    assert isinstance(cut, Chunking)
    trial = TrialProgram(program_of(dag, groups, cluster), dag, ChunkCosts(cluster, groups))
    trial.stream(cut)
    name = "fuse-matmul-reduce-scatters" if kind == "scatter" else "fuse-all-gather-matmuls"
    after = Pipeline.parse(f"{name}{{chunks={chunks}}}").run(module).module
    expected = run(program_of(after, groups, cluster)).step_ns
    assert run(trial.result()).step_ns == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize(
    ("kind", "dim"),
    [
        (kind, dim)
        for kind, dims in (("gather", 3), ("gather, used", 3), ("scatter", 2), ("scatter of a sum", 2))
        for dim in range(dims)
    ],
)
def test_a_trial_takes_as_long_as_the_graph_with_a_fused_operator(kind: str, dim: int):
    module = scatter_along(dim, terms=2 if "sum" in kind else 1) if "scatter" in kind else gather_along(dim, kind)
    cluster, groups, dag = Cluster.load(CLUSTER), read_groups(module), Dag(module.graph)
    collective = next(collectives(module.graph))
    site = read_scatter(collective, dag) if "scatter" in kind else read_gather(collective, dag)
    assert not isinstance(site, Refusal)
    cut, kernel = site.cut(2), SymmetricMemory()
    assert isinstance(cut, Chunking)
    assert kernel.why_not(kernel.fit(cut), None) is None
    trial = TrialProgram(program_of(dag, groups, cluster), dag, ChunkCosts(cluster, groups))
    trial.stream(kernel.fused(kernel.fit(cut)))
    name = "fuse-matmul-reduce-scatters" if "scatter" in kind else "fuse-all-gather-matmuls"
    made = Pipeline.parse(f"{name}{{kernel=symmetric-memory chunks=2}}").run(module, cluster=cluster)
    assert "symm_mem" in str([node.target for node in made.module.graph.nodes])
    expected = run(program_of(made.module, groups, cluster)).step_ns
    assert run(trial.result()).step_ns == pytest.approx(expected, rel=0.001)


def test_a_trial_issues_its_chunks_from_the_host():
    module, cluster = gather(1024), Cluster.load("h200-1x8").running("eager")
    groups, dag = read_groups(module), Dag(module.graph)
    site = read_gather(next(collectives(module.graph)), dag)
    assert not isinstance(site, Refusal)
    cut = site.cut(4)
    assert isinstance(cut, Chunking)
    trial = TrialProgram(program_of(dag, groups, cluster), dag, ChunkCosts(cluster, groups))
    trial.stream(cut)
    found = trial.result()
    launches = [ns for kind, ns in zip(found.kinds, found.host_ns, strict=True) if kind is OpKind.LAUNCH]
    assert cluster.device.host is not None
    assert launches == [round(cluster.device.host.collective_us * 1000)] * 4


def test_chunks_must_be_two_or_more():
    with pytest.raises(weft.errors.PipelineError, match="chunks is 1, expected 2 or more"):
        Pipeline.parse("fuse-all-gather-matmuls{chunks=1}")
