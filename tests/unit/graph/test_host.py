"""Copies between host and device that return early: readers stay after what the host waits at."""

from __future__ import annotations

import pytest
import torch

import weft
from tests.unit.graph.test_effects import effect_edges, must_precede
from weft.graph.dag import Dag
from weft.graph.groups import read_groups
from weft.verification.symbolic.equivalence import prove
from weft.verification.virtual.cluster import VirtualCluster

CUDA = "device=device('cuda')"
INPUTS = f"x: f32[4]({CUDA}), z: f32[4]({CUDA}), n: f32[()]({CUDA}), h: f32[4], g: f32[4]"
COPIES = {
    "_to_copy": "c = _to_copy(x, device=device('cpu'), non_blocking=True)",
    "device_put": "c = prims.device_put.default(x, device('cpu'), True)",
    "copy_": "c = copy_(h, x, True)",
    "to": "c = to.device(x, device('cpu'), f32, True)",
    "foreach": "e = _foreach_copy_([g, h], [z, x], True)\nc = view(h, [4])",
}
SYNCS = {
    "_to_copy": "s = _to_copy(z, device=device('cpu'))",
    "device_put": "s = prims.device_put.default(z, device('cpu'))",
    "copy_": "s = copy_(g, z)",
    "item": "s = _local_scalar_dense(n)",
}
READ = "y = neg(c)"


def graph_of(*lines: str, results: str = "y") -> torch.fx.GraphModule:
    body = "".join(f"    {part}\n" for line in lines for part in line.splitlines())
    return weft.parse(f"def graph({INPUTS}):\n{body}    return [{results}]\n")


@pytest.mark.parametrize("copy", COPIES)
@pytest.mark.parametrize("sync", SYNCS)
def test_a_read_stays_after_the_sync_and_the_copy_before_it(copy: str, sync: str):
    before = must_precede(Dag(graph_of(COPIES[copy], SYNCS[sync], READ).graph))
    made = "e" if copy == "foreach" else "c"
    assert {(made, "s"), ("s", "y")} <= before


@pytest.mark.parametrize("copy", COPIES)
@pytest.mark.parametrize("sync", SYNCS)
def test_a_read_before_the_sync_is_not_proved_to_be_the_read_after_it(copy: str, sync: str):
    right = graph_of(COPIES[copy], SYNCS[sync], READ)
    assert prove(right, graph_of(COPIES[copy], SYNCS[sync], READ))
    assert not prove(right, graph_of(COPIES[copy], READ, SYNCS[sync]))
    assert not prove(right, graph_of(SYNCS[sync], COPIES[copy], READ))
    assert not prove(right, graph_of(COPIES[copy], READ))


def test_a_result_that_is_complete_when_the_graph_ends_stays_so():
    copy, sync = COPIES["_to_copy"], SYNCS["_to_copy"]
    right = graph_of(copy, sync, results="c, s")
    assert prove(right, right)
    assert not prove(right, graph_of(sync, copy, results="c, s"))


def test_a_sync_that_nobody_uses_stays_while_somebody_reads_the_copy():
    module = graph_of(COPIES["_to_copy"], SYNCS["_to_copy"], READ)
    kept = weft.optimize(module, pipeline="remove-dead-code").module
    assert [node.name for node in kept.graph.nodes if node.op == "call_function"] == ["c", "s", "y"]


@pytest.mark.skipif(not hasattr(torch.ops.c10d, "check_for_nan"), reason="torch has this operator from 2.12")
def test_an_unknown_call_may_be_the_sync():
    right = graph_of(COPIES["_to_copy"], "s = c10d.check_for_nan.default(z)", READ)
    assert ("s", "y") in must_precede(Dag(right.graph))
    assert prove(right, right)
    assert not prove(right, graph_of(COPIES["_to_copy"], READ, "s = c10d.check_for_nan.default(z)"))


def test_a_write_to_what_a_copy_from_the_host_still_reads_stays_after_the_sync():
    copy, write = "c = _to_copy(h, device=device('cuda'), non_blocking=True)", "w = zero_(h)"
    right = graph_of(copy, SYNCS["_to_copy"], write, READ)
    assert {("c", "s"), ("s", "w")} <= must_precede(Dag(right.graph))
    assert prove(right, right)
    assert not prove(right, graph_of(copy, write, SYNCS["_to_copy"], READ))


def test_copies_that_block_order_nothing():
    dag = Dag(graph_of("c = _to_copy(x, device=device('cpu'))", SYNCS["_to_copy"], READ).graph)
    assert effect_edges(dag) == set()


def test_a_copy_within_one_device_returns_when_it_is_done_for_that_device():
    dag = Dag(graph_of("c = _to_copy(x, dtype=f16, non_blocking=True)", SYNCS["_to_copy"], READ).graph)
    assert effect_edges(dag) == set()


@pytest.mark.parametrize("copy", ["_to_copy", "device_put", "copy_"])
def test_virtual_ranks_see_nonsense_before_the_sync(copy: str):
    def run(*lines: str) -> torch.Tensor:
        module = graph_of(*lines)
        inputs = [[torch.ones(4), torch.zeros(4), torch.zeros(()), torch.zeros(4), torch.zeros(4)]]
        (found,) = VirtualCluster(1).run(module, inputs, read_groups(module))
        return found.outputs[0]

    sync = SYNCS["_to_copy"]
    assert run(COPIES[copy], sync, READ).tolist() == [-1.0] * 4
    assert run(COPIES[copy], READ, sync).isnan().all()


EXPERTS = """group('ep', size=2)

def graph(nt: i64[8](device=device('cuda')), ri: f32[512, 128](device=device('cuda'))):
    a = view(nt, [2, 4])
    i = sum.dim_IntList(a, [1])
    ci = _to_copy(i, device=device('cpu'), non_blocking=True)
    h = all_reduce(ri, 'sum', 'ep')
    t0 = t(ri)
    m = mm(ri, t0)
    b = sum(m)
    co = _to_copy(b, device=device('cpu'))
    y = mul.Tensor(ci, 2)
    w = wait(h)
    return [w, m, co, y]
"""


@pytest.mark.parametrize("pipeline", ["auto", "hoist-launches,sink-waits", "move-producers"])
def test_plans_leave_the_counts_of_experts_after_the_copy_that_makes_them_safe(pipeline: str):
    module = weft.parse(EXPERTS)
    names = [n.name for n in weft.optimize(module, cluster="h100-8", pipeline=pipeline).module.graph.nodes]
    assert names.index("ci") < names.index("co") < names.index("y")
