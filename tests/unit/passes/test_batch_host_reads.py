"""Numbers that the host reads with one copy: the same numbers, and fewer reads, in mixtures of experts."""

from __future__ import annotations

import pytest
from torch.fx import GraphModule

import weft
from weft import zoo
from weft.cost.cluster import Cluster
from weft.graph.assumed_sizes import notes_on_sizes
from weft.graph.groups import read_groups
from weft.graph.host import is_read_on_host
from weft.simulation.build import program_of
from weft.simulation.host_stalls import host_stalls
from weft.verification.symbolic.equivalence import prove

MESH = {"dp": 2, "ep": 2}
TWO_NUMBERS = """
def graph(x: f32[4], a: i64[2]):
    a0: i64[()] = select.int(a, 0, 0)
    n0: int[u0] = _local_scalar_dense(a0)
    a1: i64[()] = select.int(a, 0, 1)
    n1: int[u1] = _local_scalar_dense(a1)
    m: int[2*u1] = operator.mul(n1, 2)
    k: int[u0 + 2*u1] = operator.add(n0, m)
    y: f32[4] = mul(x, k)
    return [y]
"""


def dropless(**options: int) -> GraphModule:
    return zoo.load("dropless-debug", "ep-fsdp", mesh=MESH, **{"layers": 2, "batch": 2, **options})


def num_reads(module: GraphModule) -> int:
    return sum(map(is_read_on_host, module.graph.nodes))


def test_each_layer_reads_the_sizes_of_its_exchange_with_one_copy():
    """Two ranks: each layer reads two numbers of rows to send, and two to receive."""
    module = dropless()
    result = weft.optimize(module, pipeline="batch-host-reads", verify="equivalence")
    assert (num_reads(module), num_reads(result.module)) == (8, 2)
    assert weft.verify(module, result.module, mesh=MESH).bitwise


def test_the_default_pipeline_of_experts_batches_reads_and_keeps_assumed_sizes():
    module = dropless(layers=1)
    planned = weft.optimize(module, "h100-8x8", sizes="balanced", verify="equivalence").module
    assert num_reads(planned) == 1
    assert notes_on_sizes(planned) == notes_on_sizes(module)


def test_chunks_of_a_batch_read_their_sizes_apart():
    """A chunk that waited for the sizes of the next one could not trail it."""
    module = weft.optimize(dropless(layers=1, batch=4), pipeline="split-batch{chunks=2}").module
    result = weft.optimize(module, pipeline="batch-host-reads", verify="equivalence")
    assert num_reads(result.module) == 2


@pytest.mark.parametrize("execution", ["eager", "compiled"])
def test_the_host_waits_once_for_each_exchange(execution: str):
    module = dropless(layers=1)
    weft.simulate(module, "h100-8x8", sizes="balanced")
    cluster = Cluster.load("h100-8x8").running(execution)
    batched = weft.optimize(module, pipeline="batch-host-reads").module
    before, after = (program_of(m, read_groups(m), cluster) for m in (module, batched))
    assert (len(host_stalls(before)), len(host_stalls(after))) == (4, 1)
    assert weft.simulate(batched, cluster).step_us < weft.simulate(module, cluster).step_us


def test_numbers_in_another_order_are_not_proved():
    module = weft.parse(TWO_NUMBERS)
    batched = weft.optimize(module, pipeline="batch-host-reads").module
    assert prove(module, batched)
    text = weft.listing(batched)
    swapped = text.replace("_numbers, 0, 0)", "_numbers, 0, 2)").replace("_numbers, 0, 1)", "_numbers, 0, 0)")
    assert not prove(module, weft.parse(swapped.replace("_numbers, 0, 2)", "_numbers, 0, 1)")))
