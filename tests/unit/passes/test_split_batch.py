"""A step in chunks of its batch: the same values, a shorter step where communication is exposed, reasons elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.fx import GraphModule

import weft
from tests.tiers import quick_first
from weft import zoo
from weft.verification.symbolic.equivalence import prove

MESHES: dict[str, Any] = {"none": None, "fsdp": {"dp": 2}, "tp": {"tp": 2}, "fsdp-tp": {"dp": 2, "tp": 2}}
FORWARD = """
group('tp', size=2)

def graph(x: f32[4, 8], w: f32[8, 8], v: f32[8, 8]):
    h: f32[4, 8] = mm(x, w)
    ar: f32[4, 8] = all_reduce(h, 'sum', 'tp')
    y: f32[4, 8] = wait(ar)
    r: f32[4, 8] = relu(y)
    o: f32[4, 8] = mm(r, v)
    return [o, r]
"""


def split(module: GraphModule, chunks: int, inputs: str = "") -> weft.Result:
    named = f" inputs={inputs}" if inputs else ""
    return weft.optimize(module, pipeline=f"split-batch{{chunks={chunks}{named}}}")


def why(result: weft.Result) -> list[str]:
    return [decision.sentence for decision in (*result.report.applied, *result.report.declined)]


@pytest.mark.parametrize(("parallel", "chunks"), quick_first([("tp", 2), ("fsdp", 4), ("fsdp-tp", 4), ("none", 3)]))
def test_a_training_step_in_chunks_computes_the_same(parallel: str, chunks: int):
    """Parameters and their gradients are f32: norms and reductions round differently, products are exact enough."""
    wide = {"compute_dtype": torch.float64, "reduce_dtype": torch.float64}
    module = zoo.load("llama-debug", parallel, mesh=MESHES[parallel], layers=1, batch=4 if chunks != 3 else 3, **wide)
    result = split(module, chunks)
    assert why(result) == [f"split the batch of tokens, targets into {chunks} chunks"]
    assert weft.verify(module, result.module).equal
    planned = weft.optimize(result.module, "h100-8x8", verify="equivalence")
    assert weft.verify(module, planned.module).equal


def test_a_forward_pass_in_chunks_is_proved_equal():
    module = weft.parse(FORWARD)
    result = split(module, 2, "x")
    assert prove(module, result.module, reassociates=True)


@pytest.mark.parametrize(
    ("model", "parallel", "reason"),
    [
        ("moe-debug", "none", "works along the batch (cumsum)"),
        ("dropless-debug", "none", "has no rule"),
        ("vision-debug", "none", "_log_softmax has its rows in another dim, or none"),
    ],
)
def test_a_batch_whose_rows_mix_stays_whole(model: str, parallel: str, reason: str):
    (sentence,) = why(split(zoo.load(model, parallel, layers=1, batch=4), 2))
    assert sentence.startswith("the batch is not split: ")
    assert reason in sentence


def test_the_number_of_chunks_is_chosen_by_simulation():
    module = zoo.load("llama-1b", "tp", mesh={"tp": 8}, layers=1, batch=4, vocabulary=8192)
    passes = "clean,split-batch,schedule-overlap"
    (chosen,) = (d for d in weft.optimize(module, "h100-1x8", pipeline=passes).report.applied if "chunks" in d.sentence)
    assert "2 chunks" in chosen.sentence


def test_a_step_without_exposed_communication_stays_whole():
    module = zoo.load("llama-debug", "none", layers=1, batch=4)
    (sentence,) = why(weft.optimize(module, "h100-1x8", pipeline="split-batch"))
    assert sentence.startswith("the batch is not split: planned, the step takes ")


def test_without_a_cluster_the_number_of_chunks_must_be_given():
    (sentence,) = why(weft.optimize(weft.parse(FORWARD), pipeline="split-batch{inputs=x}"))
    assert sentence == "the batch is not split: without a cluster the gain is unknown; chunks=2 splits it"
