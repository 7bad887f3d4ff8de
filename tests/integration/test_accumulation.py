"""Several microbatches in one captured step."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import GraphModule

import weft
from weft import zoo
from weft.errors import CaptureError
from weft.graph.collective import collectives
from weft.graph.groups import read_groups
from weft.graph.ops import Kind
from weft.verification.comparison import compare, example_inputs
from weft.verification.virtual.cluster import VirtualCluster

NUM_PARAMETERS, NUM_LARGE = 12, 8


def load(parallel: str = "fsdp", **options: Any) -> GraphModule:
    mesh = {"none": None, "ddp": {"dp": 2}, "fsdp": {"dp": 2}, "tp": {"tp": 2}}[parallel]
    options = {"layers": 1, "compute_dtype": torch.float32, **options}
    return zoo.load("llama-debug", parallel, mesh=mesh, **options)


def gathered_bytes(module: GraphModule) -> list[int]:
    return [each.output_bytes or 0 for each in collectives(module.graph) if each.kind is Kind.ALL_GATHER]


@pytest.mark.parametrize(
    ("parallel", "reduce", "expected"),
    [
        ("fsdp", "last", {"all_gather": 3 * (NUM_PARAMETERS + NUM_LARGE), "reduce_scatter": NUM_PARAMETERS}),
        ("fsdp", "each", {"all_gather": 3 * (NUM_PARAMETERS + NUM_LARGE), "reduce_scatter": 3 * NUM_PARAMETERS}),
        ("ddp", "last", {"all_reduce": NUM_PARAMETERS}),
        ("ddp", "each", {"all_reduce": 3 * NUM_PARAMETERS}),
    ],
)
def test_gradients_are_reduced_once_or_for_each_microbatch(parallel: str, reduce: str, expected: dict[str, int]):
    module = load(parallel, accumulate=3, reduce=reduce)
    assert Counter(collective.kind.value for collective in collectives(module.graph)) == expected
    about = module.meta["weft.about"]
    assert (about["accumulate"], about["reduce"], about["tokens_per_step"]) == (3, reduce, 3 * 32 * 2)


@pytest.mark.parametrize(
    ("parallel", "options"),
    [
        ("none", {}),
        ("fsdp", {"reduce": "last"}),
        ("fsdp", {"reduce": "each", "checkpoint": "selective"}),
        ("fsdp", {"reduce": "last", "loss": "chunked"}),
        ("tp", {"reduce": "last"}),
    ],
)
def test_microbatches_give_the_gradients_of_the_whole_batch(parallel: str, options: dict[str, Any]):
    whole, parts = load(parallel, batch=2), load(parallel, accumulate=2, **options)
    ranks = 1 if parallel == "none" else 2
    inputs = example_inputs(whole, ranks)
    results = [VirtualCluster(ranks).run(graph, inputs, read_groups(graph)) for graph in (whole, parts)]
    assert compare(*results, num_terms=16).equal


@pytest.mark.slow
def test_a_memory_limit_with_room_gathers_each_parameter_once_and_reduces_once():
    module = load(accumulate=4)
    total = sum(gathered_bytes(load(reshard=False)))  # one microbatch gathers each parameter once
    assert sum(gathered_bytes(module)) > 4 * total
    woven = weft.optimize(module, "h100-8", memory_limit_bytes=1 << 24).module
    assert sum(gathered_bytes(woven)) == total
    assert Counter(collective.kind.value for collective in collectives(woven.graph))["reduce_scatter"] == 1
    inputs = example_inputs(module, 2)
    results = [VirtualCluster(2).run(graph, inputs, read_groups(graph)) for graph in (module, woven)]
    assert compare(*results, num_terms=16).equal


def test_a_microbatch_runs_back_before_the_next_one_starts():
    module = load("none", accumulate=2)
    phases = [node.meta["partitioner_tag"] for node in module.graph.nodes if "mm" in node.name]
    changes = [phase for phase, before in zip(phases, [None, *phases], strict=False) if phase != before]
    assert changes == ["is_forward", "is_backward"] * 2


class Plain(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).square().mean()


@pytest.mark.parametrize(
    ("options", "keywords", "message"),
    [
        ({"accumulate": 0}, {}, "capture: accumulate is 0, expected 1 or more"),
        ({"accumulate": 3}, {}, "capture: an example input has 4 rows, which 3 microbatches cannot share evenly"),
        ({"accumulate": 2}, {"part": "forward"}, "capture: part 'forward' covers one microbatch, but accumulate"),
        ({"accumulate": 2}, {"mesh": {"dp": 2}}, "capture: Plain cannot leave gradients unreduced"),
        ({"reduce": "lats"}, {}, "capture: reduce is 'lats', expected last, each\ndid you mean 'last'?"),
    ],
)
def test_an_accumulation_that_cannot_be_is_refused(options: dict[str, Any], keywords: dict[str, Any], message: str):
    step, keywords = weft.TrainingStep(Plain(8, 8), **options), {"part": "joint", **keywords}
    with pytest.raises(CaptureError) as caught:
        weft.capture(step, [torch.ones(4, 8)], **keywords)
    assert str(caught.value).startswith(message)
