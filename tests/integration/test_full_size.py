"""Whole steps at full size: captured without a cluster, merged, and proved to compute the same.

Every parallelism of the 8b preset with 32 layers on 64 ranks. Times are of the processor, and bounds for a slow
machine, not figures.
"""

from __future__ import annotations

import time
from collections import Counter

import pytest
from torch.fx import GraphModule

import weft
from weft.graph.collective import collectives
from weft.passes.pipeline import Pipeline
from weft.verification.symbolic.equivalence import prove

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

MESHES = {
    "ddp": {"dp": 64},
    "fsdp": {"dp": 64},
    "tp": {"tp": 8},
    "fsdp-tp": {"dp": 8, "tp": 8},
    "hsdp": {"replicate": 8, "shard": 8},
}


BUCKETS = "bucket-all-gathers,bucket-reduce-scatters,bucket-all-reduces"


@pytest.mark.parametrize("parallel", MESHES)
def test_an_8b_step_is_captured_merged_and_proved(parallel: str):
    module = weft.zoo.load("llama-8b", parallel=parallel, mesh=MESHES[parallel], layers=32, part="joint")
    counts = check(parallel, module, BUCKETS, reassociates=False)
    assert sum(counts[1].values()) < sum(counts[0].values())
    check(parallel, module, "auto", reassociates=True)  # streamed products have other shapes


def check(parallel: str, module: GraphModule, pipeline: str, *, reassociates: bool) -> list[Counter[str]]:
    """Run a pipeline and prove its result; the collectives before and after by kind."""
    run = Pipeline.parse(pipeline).run(module, cluster="h100-8x8")
    start = time.process_time()
    proof = prove(module, run.module, reassociates=reassociates)
    seconds = time.process_time() - start
    counts = [Counter(c.kind.value for c in collectives(m.graph)) for m in (module, run.module)]
    passes = {entry.step.spec: round(entry.seconds, 2) for entry in run.log}
    print(f"{parallel}: {len(module.graph.nodes)} nodes, {dict(counts[0])} to {dict(counts[1])}")
    print(f"{parallel}: proof {seconds:.1f} s, {proof.num_values} values; passes {passes}")
    assert proof, str(proof)
    assert seconds < 60
    return counts
