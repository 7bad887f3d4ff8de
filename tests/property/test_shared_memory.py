"""Random graphs over constants and inputs that share memory: the memory is really shared when they are run.

Values are compared bitwise on every rank where all passes are exact, and every change is proved. `make test` runs 40
graphs for each pipeline; `make test-full` (WEFT_FUZZ=full) runs 2 000.
"""

from __future__ import annotations

import os
from random import Random
from typing import Any

import pytest
import torch
from torch.fx import GraphModule

from tests.property.checks import is_exact
from tests.property.strategies.shared_memory import random_aliased
from weft.compat import fake_tensor
from weft.graph.aliasing import APART_KEY
from weft.graph.groups import read_groups
from weft.graph.listings.text import parse, render
from weft.passes.pipeline import Pipeline
from weft.verification.comparison import compare, example_inputs
from weft.verification.symbolic.equivalence import prove
from weft.verification.virtual.cluster import VirtualCluster

NUM_SEEDS = 2000 if os.environ.get("WEFT_FUZZ") == "full" else 40
PIPELINES = (
    "auto",
    "exact",
    "clean",
    "tp",
    "hoist-launches,sink-waits",
    "schedule-overlap",
    "move-producers",
    "remove-dead-code",
    "dedupe-collectives",
    "bucket-all-gathers,bucket-all-reduces",
)


def inputs_for(module: GraphModule, seed: int) -> list[list[list[Any]]]:
    """Inputs by their metadata; where they may share memory, also some that do, with each other and with constants."""
    found = [example_inputs(module, 2, seed=seed)]
    if not module.meta[APART_KEY]:
        rng = Random(seed)
        constant = module.c0.untyped_storage().nbytes() // 4
        whole = torch.empty(0).set_(module.c0.untyped_storage(), 0, (constant,), (1,))
        for flat in (torch.randn(9, generator=torch.Generator().manual_seed(seed)), whole):
            starts = [rng.randint(0, len(flat) - 4) for _ in found[0][0]]
            found.append([[flat[start : start + 4] for start in starts]] * 2)
    return found


@pytest.mark.parametrize("spec", PIPELINES)
def test_memory_that_is_shared_outside_the_graph_keeps_its_values(spec: str):
    pipeline = Pipeline.parse(spec)
    for seed in range(NUM_SEEDS):
        before = parse(random_aliased(Random(seed)))
        if seed % 3 == 0 and "constant=" not in render(
            before
        ):  # then only the storages of constants tell what they share
            for node in before.graph.find_nodes(op="get_attr"):
                value = node.meta["val"]
                sizes, strides = value.shape, value.stride()
                node.meta["val"] = fake_tensor(value.fake_mode, sizes, strides, value.dtype, value.device)
        told = f"seed {seed}, {spec}\n{render(before)}"
        run = pipeline.run(before, cluster="h100-8", effort="fast")
        after = render(run.module)
        if not any(entry.changed for entry in run.log):
            continue
        exact = is_exact(pipeline)
        proof = prove(before, run.module, reassociates=not exact)
        assert proof, f"{proof}\n{told}\n{after}"
        for inputs in inputs_for(before, seed):
            results = [VirtualCluster(2).run(m, inputs, read_groups(before), seed=seed) for m in (before, run.module)]
            verdict = compare(*results, num_terms=16)
            assert verdict.bitwise if exact else verdict.equal, f"{verdict}\n{told}\n{after}"


def test_graphs_over_shared_memory_come_back_from_their_listings():
    for seed in range(NUM_SEEDS):
        module = parse(random_aliased(Random(seed)))
        text = render(module)
        again = parse(text)
        assert render(again) == text
        if module.meta[APART_KEY] and "constant=" not in text:  # an input is in one memory, not in a copy of it
            assert prove(module, again), f"seed {seed}\n{text}"
        inputs = example_inputs(module, 2, seed=seed)
        copies = example_inputs(again, 2, seed=seed)
        results = [VirtualCluster(2).run(m, given, read_groups(m)) for m, given in ((module, inputs), (again, copies))]
        assert compare(*results, num_terms=16).bitwise, f"seed {seed}\n{text}"
