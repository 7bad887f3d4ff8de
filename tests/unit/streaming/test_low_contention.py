"""Copies from peer to peer: the launch is torch's operator, nothing else changes; what it cannot take is declined."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.fx import GraphModule

import weft
from weft.frontends.fake_world import fake_world
from weft.graph.dag import Dag
from weft.passes.pipeline import Pipeline, Run
from weft.streaming.lowerings import sharing

GATHER, SCATTER = "fuse-all-gather-matmuls{kernel=low-contention}", "fuse-matmul-reduce-scatters{kernel=low-contention}"
GATHERED = """group('tp', size=2)

def graph(x: f32[4, 4](device='cuda'), b: f32[4, 6](device='cuda')):
    ag = all_gather(x, 2, 'tp')
    w = wait(ag)
    y = mm(w, b)
    return [y]
"""
SCATTERED = """group('tp', size=2)

def graph(a: f32[8, 4](device='cuda'), b: f32[4, 6](device='cuda')):
    y = mm(a, b)
    rs = reduce_scatter(y, '{reduce_op}', 2, 'tp')
    w = wait(rs)
    return [w]
"""


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing, "has_symmetric_memory", lambda name, enabled: True)


def copied(listing: str, spec: str) -> Run:
    return Pipeline.parse(spec).run(weft.parse(listing))


def sentence(run: Run) -> str:
    (decision,) = run.plan.steps[0].decisions
    return f"{decision.reason.value}: {decision.sentence}"


def lines(module: GraphModule) -> list[str]:
    return [line.partition(" = ")[2] for line in weft.listing(module).splitlines() if " = " in line]


def test_a_gather_is_copied_and_its_product_stays(shared: None):
    run = copied(GATHERED, GATHER)
    assert sentence(run) == "applied: copied ag from peer to peer"
    expected = ["weft.copy_all_gather.default(x, 'tp')", "wait(ag_copied)", "mm(ag_copied_done, b)"]
    assert lines(run.module) == expected
    replayed = weft.apply(weft.parse(GATHERED), weft.Plan.from_json(run.plan.to_json()))
    assert weft.listing(replayed) == run.after


def test_a_scatter_is_copied_and_its_product_stays(shared: None):
    run = copied(SCATTERED.format(reduce_op="avg"), SCATTER)
    assert lines(run.module) == [
        "mm(a, b)",
        "weft.copy_reduce_scatter.default(y, 'avg', 'tp')",
        "wait(rs_copied)",
    ]


def test_maxima_are_declined(shared: None):
    found = sentence(copied(SCATTERED.format(reduce_op="max"), SCATTER))
    assert found == "no-kernel: rs reduces by max, but copies are summed or averaged"


def test_without_a_live_group_it_is_declined():
    assert sentence(copied(GATHERED, GATHER)) == "no-kernel: symmetric memory is not available for the group of ag"


@pytest.mark.parametrize("kind", ["gather", "scatter"])
def test_torch_takes_what_is_given_to_it_and_gives_what_is_expected(shared: None, kind: str):
    run = copied(GATHERED, GATHER) if kind == "gather" else copied(SCATTERED.format(reduce_op="sum"), SCATTER)
    node = next(n for n in run.module.graph.nodes if "copy_" in str(n.target))
    value = node.args[0].meta["val"]
    with fake_world({"tp": 2}) as mesh:
        given = torch.empty(value.shape, device="meta")
        found = node.target(given, *node.args[1:-1], mesh.get_group("tp").group_name)
    assert found.shape == node.meta["val"].shape


TWO_USES = """group('tp', size=2)

def graph(x: f32[4, 4](device='cuda'), z: f32[4, 4](device='cuda'), b: f32[4, 6](device='cuda')):
    first = weft.copy_all_gather.default(x, 'tp')
    w = wait(first)
    second = weft.copy_all_gather.default(z, 'tp')
    v = wait(second)
    return [w, v]
"""


def test_the_groups_memory_is_in_use_until_the_wait():
    module = weft.parse(TWO_USES)
    nodes = {node.name: node for node in module.graph.nodes}
    assert Dag(module.graph).reaches(nodes["w"], nodes["second"])


BESIDE = """group('tp', size=8)

def graph(x: bf16[32768, 4096](device='cuda'), a: bf16[8192, 8192](device='cuda'), b: bf16[8192, 8192](device='cuda')):
    sent = {launch}
    y = mm(a, b)
    w = wait(sent)
    return [w, y]
"""
NCCL_SCATTER, COPIED_SCATTER = "reduce_scatter(x, 'sum', 8, 'tp')", "weft.copy_reduce_scatter.default(x, 'sum', 'tp')"
NCCL_GATHER, COPIED_GATHER = "all_gather(x, 8, 'tp')", "weft.copy_all_gather.default(x, 'tp')"
H100 = weft.Cluster.load("h100-8")


def product_beside(launch: str, cluster: weft.Cluster = H100) -> tuple[float, float]:
    """How much longer a product takes beside a collective, and how long the collective takes, in microseconds."""
    timeline = weft.simulate(weft.parse(BESIDE.format(launch=launch)), cluster=cluster)
    (product,), (collective,) = timeline.compute, timeline.collectives
    assert collective.end_ns - collective.start_ns == collective.alone_ns
    return (product.end_ns - product.start_ns - product.alone_ns) / 1000, collective.alone_ns / 1000


def with_sm_share(share: float) -> weft.Cluster:
    level = H100.levels[0]
    assert level.symmetric is not None
    return replace(H100, levels=(replace(level, symmetric=replace(level.symmetric, sm_share=share)),))


def test_copy_engines_slow_no_product_beside_a_gather():
    assert product_beside(NCCL_GATHER)[0] > 0
    assert product_beside(COPIED_GATHER)[0] == 0


def test_copies_by_multiprocessors_take_their_share_from_a_product():
    slower, taken = product_beside(COPIED_GATHER, with_sm_share(0.25))
    assert slower == pytest.approx(0.25 * taken, abs=0.01)


def test_the_sum_at_the_end_of_a_copied_scatter_takes_its_time_from_a_product():
    part = 32768 * 4096 * 2 // 8
    summed = H100.device.traffic_ns(9 * part)
    assert summed is not None
    assert product_beside(COPIED_SCATTER)[0] == pytest.approx(summed / 1000, rel=0.01)


def test_copies_and_other_collectives_of_a_group_run_at_once_and_share_its_link():
    text = BESIDE.format(launch=COPIED_SCATTER).replace("    y = mm(a, b)", "    other = all_gather(a, 8, 'tp')")
    text = text.replace("return [w, y]", "o = wait(other)\n    return [w, o]")
    timeline = weft.simulate(weft.parse(text), cluster=H100)
    alone = [span.alone_ns for span in timeline.collectives]
    first, second = timeline.collectives
    assert second.start_ns < first.end_ns
    assert min(first.end_ns, second.end_ns) == pytest.approx(2 * min(alone), rel=0.01)
    assert max(first.end_ns, second.end_ns) == pytest.approx(sum(alone), rel=0.01)
