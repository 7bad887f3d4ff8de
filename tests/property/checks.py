"""What every pass must keep: one check for all tests of random graphs."""

from __future__ import annotations

import torch
from torch.fx import GraphModule

import weft
from weft.graph import check, metadata
from weft.graph.dag import Dag
from weft.graph.groups import read_groups
from weft.graph.listings.text import parse, render
from weft.passes.base import Numerics
from weft.passes.pipeline import Pipeline, Run, replay
from weft.verification.comparison import compare, example_inputs
from weft.verification.virtual.cluster import VirtualCluster

NUM_RANKS = 4
NUM_TERMS = 1 << 14
"""Of the sums through which a difference in rounding may have gone: products of products, and sigmoids of them."""


def is_exact(pipeline: Pipeline) -> bool:
    return all(p.numerics is Numerics.EXACT for p in pipeline.passes)


def coarsest(module: GraphModule) -> torch.dtype:
    """The dtype with the fewest digits in which anything is computed."""
    values = [node.meta.get("val") for node in module.graph.nodes]
    found = {v.dtype for v in values if isinstance(v, torch.Tensor) and v.dtype.is_floating_point}
    return max(found, key=lambda dtype: torch.finfo(dtype).eps)


def check_sound(before: GraphModule, spec: str, seed: int, max_runs: int = 1) -> Run:
    """Run passes, and fail unless values, validity, the listing and the plan hold, and further runs change nothing.

    Values are compared on every rank: bitwise where all passes are exact, else within the tolerance of the dtype.
    """
    pipeline = Pipeline.parse(spec)
    told = f"seed {seed}, {spec}\n{render(before)}"
    effort = "fast" if seed % 5 else "default"  # a longer search gives other orders, no other edits
    run = pipeline.run(before, effort=effort)
    check.validate(Dag(run.module.graph))
    after = render(run.module)
    if after == render(before) and not any(entry.changed for entry in run.log):
        return run  # it is the same program
    inputs, groups = example_inputs(before, NUM_RANKS, seed=seed), read_groups(before)
    cluster = VirtualCluster(NUM_RANKS)
    results = [cluster.run(module, inputs, groups, seed=seed) for module in (before, run.module)]
    verdict = compare(*results, num_terms=NUM_TERMS, compute_dtype=coarsest(before))
    assert verdict.bitwise if is_exact(pipeline) else verdict.equal, f"{verdict}\n{told}\n{after}"
    assert render(parse(after)) == after, told
    settled = run.module
    for _ in range(max_runs - 1):
        settled = pipeline.run(settled, effort=effort).module
    if max_runs:
        again = pipeline.run(settled, effort=effort).module
        assert render(again) == render(settled), f"does not settle: {told}\n{after}"
    assert render(replay(before, weft.Plan.from_json(run.plan.to_json())).module) == after, f"replays otherwise: {told}"
    return run


def check_types(module: GraphModule, seed: int) -> None:
    """Fail unless the type of every call is what a full recomputation gives."""
    mode = metadata.mode_of(module.graph.nodes)
    for node in module.graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload):
            assert metadata.same(node.meta["val"], metadata.of_node(node, mode)), f"seed {seed}: {node.name}"


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two tensors have the same type and bits; every NaN counts as the same."""
    if first.dtype != second.dtype or first.shape != second.shape:
        return False
    if first.dtype.is_complex:
        return same_bits(torch.view_as_real(first.resolve_conj()), torch.view_as_real(second.resolve_conj()))
    if not first.dtype.is_floating_point:
        return torch.equal(first, second)
    is_nan = first.isnan()
    if not torch.equal(is_nan, second.isnan()):
        return False
    bits = [t.masked_fill(is_nan, 0.0).contiguous().flatten().view(torch.uint8) for t in (first, second)]
    return torch.equal(*bits)
