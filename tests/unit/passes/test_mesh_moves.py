"""Gathers and scatters over two axes: the form that is fastest on a cluster, proved and right on every rank."""

from __future__ import annotations

import pytest

import weft
from weft.cost.cluster import Cluster
from weft.graph.collective import collectives
from weft.graph.groups import read_groups
from weft.verification.symbolic.equivalence import prove

HEAD = """group('inner', size={inner})
group('outer', size={outer}, stride={inner})
"""
GATHERS = """
def graph(x: bf16[{rows}, 64]):
    ag = all_gather(x, {inner}, 'inner')
    w = wait(ag)
    ag1 = all_gather(w, {outer}, 'outer')
    w1 = wait(ag1)
    return [w1]
"""
SCATTERS = """
def graph(x: f32[{rows}, 64]):
    rs = reduce_scatter(x, 'sum', {outer}, 'outer')
    w = wait(rs)
    rs1 = reduce_scatter(w, 'sum', {inner}, 'inner')
    w1 = wait(rs1)
    return [w1]
"""
FLAT = """group('all', size={ranks})

def graph(x: bf16[{rows}, 64], g: f32[4], h: f32[4]):
    ar = all_reduce(g, 'sum', 'inner')
    g1 = wait(ar)
    ar1 = all_reduce(h, 'sum', 'outer')
    h1 = wait(ar1)
    ag = all_gather(x, {ranks}, 'all')
    w1 = wait(ag)
    return [g1, h1, w1]
"""


def text_of(body: str, inner: int, outer: int, rows: int) -> str:
    return (HEAD + body).format(inner=inner, outer=outer, rows=rows, ranks=inner * outer)


@pytest.mark.parametrize("body", [GATHERS, SCATTERS])
def test_the_default_pipeline_sends_less_over_the_slow_axis(body: str):
    rows = 1 << 12 if body == GATHERS else 1 << 17
    module, cluster = weft.parse(text_of(body, 8, 4, rows)), Cluster.load("h100-4x8")
    result = weft.optimize(module, cluster, pipeline="axes,schedule-overlap")
    groups = read_groups(result.module)
    order = [groups.group(each.group).name for each in collectives(result.module.graph)]
    assert order == (["outer", "inner"] if body == GATHERS else ["inner", "outer"])
    before, after = (weft.simulate(each, cluster).step_us for each in (module, result.module))
    assert after < before / 2
    assert prove(module, result.module, reassociates=body == SCATTERS)


SLOW = """name = "slow"
num_nodes = {outer}
ranks_per_node = {inner}

[[levels]]
name = "node"
spans = "node"
latency = "1 us"
bandwidth = "10 GB/s"

[[levels]]
name = "wire"
spans = "cluster"
rails = false
latency = "1 us"
bandwidth = "0.01 GB/s"

[device]
peak_tflops = {{ f32 = 1.0, bf16 = 1.0 }}
memory_bandwidth = "100000 GB/s"
"""


@pytest.mark.filterwarnings("ignore::weft.errors.ClusterWarning")
@pytest.mark.parametrize("body", [GATHERS, SCATTERS, FLAT])
@pytest.mark.parametrize(("inner", "outer"), [(2, 2), (2, 3), (4, 2)])
def test_the_values_are_the_same_on_every_rank(body: str, inner: int, outer: int):
    module = weft.parse(text_of(body, inner, outer, inner * outer * 2))
    cluster = Cluster.read("slow.toml", SLOW.format(inner=inner, outer=outer).encode())
    result = weft.optimize(module, cluster, pipeline="decompose-mesh-all-gathers,decompose-mesh-reduce-scatters")
    assert len(result.report.applied) == 1
    verdict = weft.verify(module, result.module, ranks=inner * outer)
    assert verdict.bitwise if body != SCATTERS else verdict
    assert prove(module, result.module, reassociates=body == SCATTERS)
