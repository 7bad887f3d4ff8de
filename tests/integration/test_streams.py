"""Tensor-parallel training steps of the zoo with their collectives streamed through products."""

from __future__ import annotations

import pytest
import torch
from torch.fx import GraphModule

import weft
from tests.tiers import quick_first
from weft.graph.collective import collectives
from weft.graph.groups import read_groups
from weft.graph.ops import Kind
from weft.passes.pipeline import Pipeline
from weft.plan.decision import Reason
from weft.verification.symbolic.equivalence import prove

STREAM = "fuse-all-gather-matmuls{chunks=2},fuse-matmul-reduce-scatters{chunks=2}"
FUSE = STREAM.replace("chunks=2", "chunks=2 kernel=symmetric-memory")
CLUSTER = "h100-1x8"
"""Its nodes share memory, so operators can be fused without a device."""
STEPS = [
    ("tp", {"tp": 2}, 1),
    ("tp", {"tp": 4}, 2),
    ("tp", {"tp": 4}, 3),
    ("fsdp-tp", {"dp": 2, "tp": 2}, 1),
    ("fsdp-tp", {"dp": 2, "tp": 4}, 2),
]
kernels = pytest.mark.parametrize("spec", [STREAM, FUSE], ids=["chunks", "fused"])
steps = pytest.mark.parametrize(("parallel", "mesh", "batch"), quick_first(STEPS), ids=lambda value: str(value))


def load(parallel: str, mesh: dict[str, int], batch: int) -> GraphModule:
    """Computes in f64: a fused sum of products adds in another order, and the decoder amplifies rounding."""
    return weft.zoo.load("llama-debug", parallel=parallel, mesh=mesh, batch=batch, compute_dtype=torch.float64)


@kernels
@steps
def test_forward_and_backward_compute_the_same_and_are_proved(
    spec: str, parallel: str, mesh: dict[str, int], batch: int
):
    before = load(parallel, mesh, batch)
    after = Pipeline.parse(spec).run(before, cluster=CLUSTER).module
    verdict = weft.verify(before, after, mesh=mesh)
    assert verdict.equal, str(verdict)
    proof = prove(before, after, reassociates=True)
    assert proof, str(proof)


@kernels
@steps
def test_every_collective_of_activations_is_streamed_or_has_a_reason(
    spec: str, parallel: str, mesh: dict[str, int], batch: int
):
    before = load(parallel, mesh, batch)
    table = read_groups(before)
    run = Pipeline.parse(spec).run(before, cluster=CLUSTER)
    applied = {d.nodes[0] for entry in run.log for d in entry.step.applied}
    declined = {d.nodes[0]: (d.reason, d.blocking) for entry in run.log for d in entry.step.declined}
    kinds = (Kind.ALL_GATHER, Kind.REDUCE_SCATTER)
    mine = [c.launch.name for c in collectives(before.graph) if table.canonical(c.group) == "tp" and c.kind in kinds]
    left = [name for name in mine if name not in applied]
    assert len(mine) == 20
    assert [name for name in left if name not in declined] == []
    assert [declined[name] for name in left] == [
        (Reason.NO_PRODUCT, "embedding"),
        (Reason.NO_PRODUCT, "embedding_dense_backward"),
    ]


@kernels
def test_every_collective_of_a_mixture_of_experts_has_a_reason(spec: str):
    before = weft.zoo.load("moe-debug", parallel="ep-fsdp", mesh={"dp": 2, "ep": 2})
    run = Pipeline.parse(spec).run(before, cluster=CLUSTER)
    told = [decision.nodes[0] for entry in run.log for decision in (*entry.step.applied, *entry.step.declined)]
    kinds = (Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.ALL_REDUCE)
    mine = {c.launch.name for c in collectives(before.graph) if c.kind in kinds}
    assert mine
    assert mine <= {*told}


def test_the_optimizer_step_computes_the_same():
    before = weft.zoo.load(
        "llama-debug", parallel="tp", ranks=2, part="step", batch=2, layers=1, compute_dtype=torch.float32
    )
    run = Pipeline.parse(STREAM).run(before)
    assert len([d for entry in run.log for d in entry.step.applied]) == 10
    verdict = weft.verify(before, run.module, ranks=2)
    assert verdict.equal, str(verdict)


def test_the_report_says_what_became_of_each():
    before = load("tp", {"tp": 2}, 1)
    result = weft.optimize(before, cluster="h100-1x8", pipeline="fuse-all-gather-matmuls,fuse-matmul-reduce-scatters")
    assert {decision.reason.value for decision in result.report.declined} >= {"no-gain", "no-product", "dependency"}
    assert "no-gain" in str(result.report)


def test_an_mlp_whose_input_is_sharded_along_the_sequence_is_streamed():
    mlp = weft.parse(
        "group('tp', size=8)\n\n"
        "def graph(x: bf16[1024, 8192], up: bf16[8192, 3584], down: bf16[3584, 8192]):\n"
        "    ag = all_gather(x, 8, 'tp')\n    w = wait(ag)\n    h = mm(w, up)\n    a = silu(h)\n    y = mm(a, down)\n"
        "    rs = reduce_scatter(y, 'sum', 8, 'tp')\n    r = wait(rs)\n    return [r]\n"
    )
    result = weft.optimize(mlp, cluster=CLUSTER)
    assert {decision.nodes[0] for decision in result.report.applied} >= {"ag", "rs"}
    whole = weft.optimize(mlp, cluster=CLUSTER, pipeline="schedule-overlap")
    assert weft.simulate(result.module, cluster=CLUSTER).step_us < weft.simulate(whole.module, cluster=CLUSTER).step_us
