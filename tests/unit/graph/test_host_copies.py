"""Copies to host memory and back: the operators, their effects, their times, their memory, their proof."""

from __future__ import annotations

import pytest
import torch

import weft
from weft.cost.cluster import Cluster
from weft.errors import ClusterError, GraphError
from weft.graph import check
from weft.graph.dag import Dag
from weft.graph.host_copies import FETCH, OFFLOAD, WAIT_COPY
from weft.verification.symbolic.equivalence import prove

KEPT = """
def graph(x: f32[64, 64], w: f32[64, 64]):
    y: f32[64, 64] = mm(x, w)
    r: f32[64, 64] = relu(y)
    z: f32[64, 64] = mm(r, w)
    s: f32[64, 64] = mm(z, w)
    o: f32[64, 64] = mul(s, y)
    return [o]
"""
AWAY = """
def graph(x: f32[64, 64], w: f32[64, 64]):
    y: f32[64, 64] = mm(x, w)
    leaving: f32[64, 64] = weft.offload.default(y)
    r: f32[64, 64] = relu(y)
    away: f32[64, 64] = weft.wait_copy.default(leaving, y)
    z: f32[64, 64] = mm(r, w)
    coming: f32[64, 64] = weft.fetch.default(away, device='cpu')
    s: f32[64, 64] = mm(z, w)
    back: f32[64, 64] = weft.wait_copy.default(coming, away)
    o: f32[64, 64] = mul(s, back)
    return [o]
"""


def test_a_value_comes_back_with_its_strides_in_new_memory():
    value = torch.randn(4, 6).t()
    copy = WAIT_COPY(OFFLOAD(value), value)
    back = WAIT_COPY(FETCH(copy, value.device), copy)
    assert torch.equal(back, value)
    assert back.stride() == value.stride()
    assert len({each.data_ptr() for each in (value, copy, back)}) == 3


@pytest.mark.parametrize(("operator", "others"), [(OFFLOAD, ()), (FETCH, (torch.device("cpu"),))])
def test_torch_accepts_the_operators(operator: torch._ops.OpOverload, others: tuple[torch.device, ...]):
    torch.library.opcheck(operator, (torch.randn(4, 6), *others))


def test_listings_hold_copies():
    assert weft.listing(weft.parse(AWAY)).strip() == AWAY.strip()


def test_a_copy_of_a_copy_in_host_memory_is_proved_equal():
    assert prove(weft.parse(KEPT), weft.parse(AWAY))


def test_compute_in_host_memory_is_not_proved_equal():
    on_host = AWAY.replace("mul(s, back)", "mul(s, away)")
    assert not prove(weft.parse(KEPT), weft.parse(on_host))


def test_virtual_ranks_run_copies():
    assert weft.verify(weft.parse(KEPT), weft.parse(AWAY))


def test_a_copy_is_read_after_its_wait():
    wait = "    back: f32[64, 64] = weft.wait_copy.default(coming, away)\n"
    early = AWAY.replace(wait, "").replace("mul(s, back)", "mul(s, coming)")
    early = early.replace("    return [o]", f"{wait}    return [o, back]")
    with pytest.raises(GraphError, match="reads the result of coming before its wait"):
        check.validate(Dag(weft.parse(early).graph))


def test_the_source_is_not_written_before_the_wait():
    written = AWAY.replace("r: f32[64, 64] = relu(y)", "r: f32[64, 64] = relu_.default(y)")
    with pytest.raises(GraphError, match="leaving still sends"):
        check.validate(Dag(weft.parse(written).graph))


def test_copies_run_next_to_compute_and_free_memory():
    timeline = weft.simulate(weft.parse(AWAY), cluster="h100-8x8")
    leaving, coming = timeline.copies
    spans = {span.name: span for span in timeline.compute}
    assert timeline.collectives == ()
    assert (leaving.start_ns, leaving.end_ns) == (spans["y"].end_ns, spans["y"].end_ns + 10_298)  # 10 us and 16 KiB
    assert leaving.exposed_ns == leaving.end_ns - spans["r"].end_ns
    assert coming.start_ns == spans["z"].end_ns
    assert spans["o"].start_ns == coming.end_ns
    assert all(span.end_ns - span.start_ns == span.alone_ns for span in timeline.compute)  # copies slow no compute
    size = 64 * 64 * 4
    at = dict(timeline.memory)
    assert at[leaving.end_ns] == 4 * size  # x, w, r, z: y is gone when the wait is over
    assert timeline.lower_bound_us <= timeline.step_us


def test_a_cluster_without_host_memory_refuses_copies():
    with pytest.raises(ClusterError, match="states no host memory"):
        weft.simulate(weft.parse(AWAY), cluster=Cluster.load("mi300x-1x8"))
