"""Random tensor-parallel programs through the passes that stream collectives, and proofs of what is wrong on purpose.

`make test` runs 150 programs; `make test-full` (WEFT_FUZZ=full) runs 5 000.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch.fx import GraphModule, Node

import weft
from tests.golden.goldens import FOLDER
from tests.property.strategies.streams import random_streams
from weft.graph import metadata
from weft.graph.edit import Edit, copy_module, recompile
from weft.graph.listings.text import parse, render
from weft.passes.pipeline import Pipeline, Run, replay
from weft.verification.agreement import agreement
from weft.verification.comparison import example_inputs
from weft.verification.symbolic.equivalence import prove

NUM_SEEDS = 5000 if os.environ.get("WEFT_FUZZ") == "full" else 60
CHUNK = 10
CHUNKS = [range(start, start + CHUNK) for start in range(0, NUM_SEEDS, CHUNK)]
chunks = pytest.mark.parametrize("seeds", CHUNKS, ids=lambda seeds: f"seeds {seeds.start}-{seeds.stop - 1}")


@functools.cache
def streamed(seed: int) -> tuple[GraphModule, Run]:
    rng = Random(seed)
    before = parse(random_streams(rng))
    numbers = [rng.choice((2, 2, 4)) for _ in range(2)]
    spec = f"fuse-all-gather-matmuls{{chunks={numbers[0]}}},fuse-matmul-reduce-scatters{{chunks={numbers[1]}}}"
    return before, Pipeline.parse(spec).run(before, cluster=cluster_of(seed))


def cluster_of(seed: int) -> Path:
    """A machine whose sums over ranks are slow, so that they are scattered and gathered, or not."""
    return FOLDER / "clusters" / ("unit-slow-sums.toml" if seed % 2 else "unit.toml")


def group_size(module: GraphModule) -> int:
    return 4 if "size=4" in render(module) else 2


@chunks
def test_streams_compute_the_same_and_are_proved(seeds: range):
    applied = 0
    for seed in seeds:
        before, run = streamed(seed)
        told = f"seed {seed}\n{render(before)}\n{render(run.module)}"
        ranks = group_size(before)
        inputs = example_inputs(before, ranks, seed=seed, integers=True)
        verdict = weft.verify(before, run.module, ranks=ranks, inputs=inputs)
        assert verdict.bitwise, f"{verdict}\n{told}"
        proof = prove(before, run.module, reassociates=True)
        assert proof, f"{proof}\n{told}"
        applied += sum(len(entry.step.applied) for entry in run.log)
    assert applied > len(seeds)


def rings(before: GraphModule, num_ranks: int) -> list[Run]:
    """The program of each rank with rings in the place of its collectives."""
    names = ("fuse-all-gather-matmuls", "fuse-matmul-reduce-scatters")
    specs = [",".join(f"{name}{{chunks=2 kernel=ring rank={rank}}}" for name in names) for rank in range(num_ranks)]
    return [Pipeline.parse(spec).run(before) for spec in specs]


@pytest.mark.parametrize("seeds", CHUNKS[::2], ids=lambda seeds: f"seeds {seeds.start}-{seeds.stop - 1}")
def test_rings_compute_the_same_and_never_wait_for_each_other(seeds: range):
    applied = 0
    for seed in seeds:
        before = parse(random_streams(Random(seed)))
        ranks = group_size(before)
        runs = rings(before, ranks)
        told = f"seed {seed}\n{render(before)}\n{render(runs[0].module)}"
        inputs = example_inputs(before, ranks, seed=seed, integers=True)
        verdict = weft.verify(before, [run.module for run in runs], ranks=ranks, inputs=inputs)
        assert verdict.bitwise, f"{verdict}\n{told}"
        assert agreement.check([run.module for run in runs]).holds, told
        applied += sum(len(entry.step.applied) for entry in runs[0].log)
    assert applied > len(seeds) // 2


@chunks
def test_streams_are_made_once_and_replay(seeds: range):
    for seed in seeds:
        before, run = streamed(seed)
        for entry in run.log:
            once = Pipeline.parse(entry.step.spec).run(before, cluster=cluster_of(seed)).module
            again = Pipeline.parse(entry.step.spec).run(once, cluster=cluster_of(seed)).module
            assert render(again) == render(once), f"seed {seed}, {entry.step.spec}\n{render(before)}"
        replayed = replay(before, weft.Plan.from_json(run.plan.to_json()))
        assert render(replayed.module) == render(run.module), f"seed {seed}\n{render(before)}"


@pytest.mark.parametrize("seeds", CHUNKS[::3], ids=lambda seeds: f"seeds {seeds.start}-{seeds.stop - 1}")
def test_fake_values_are_those_of_a_full_recomputation(seeds: range):
    for seed in seeds:
        module = streamed(seed)[1].module
        mode = metadata.mode_of(module.graph.nodes)
        for node in module.graph.nodes:
            if node.op == "call_function":
                assert metadata.same(node.meta["val"], metadata.of_node(node, mode)), f"seed {seed}: {node.name}"


@pytest.mark.parametrize("seeds", CHUNKS[::3], ids=lambda seeds: f"seeds {seeds.start}-{seeds.stop - 1}")
def test_every_collective_is_streamed_or_has_a_reason(seeds: range):
    kinds = {"fuse-all-gather-matmuls": "all_gather", "fuse-matmul-reduce-scatters": "reduce_scatter"}
    for seed in seeds:
        before, run = streamed(seed)
        for entry in run.log:
            told = {name for decision in entry.step.decisions for name in decision.nodes}
            kind = kinds[entry.step.spec.partition("{")[0]]
            launched = [line.split(":")[0].strip() for line in entry.before.splitlines() if f" = {kind}(" in line]
            assert [name for name in launched if name not in told] == [], f"seed {seed}\n{render(before)}"


# Wrong on purpose: what computes something else is not proved.


def swapped_parts(node: Node) -> tuple[Any, ...] | None:
    """The arguments of a concatenation with its first and its last part in each other's place."""
    parts = list(node.args[0]) if node.target is torch.ops.aten.cat.default else []  # type: ignore[arg-type]
    if len(parts) < 2 or parts[0] is parts[-1]:
        return None
    return ([parts[-1], *parts[1:-1], parts[0]], *node.args[1:])


def other_part(node: Node) -> tuple[Any, ...] | None:
    """The arguments of a selected part with another number."""
    if node.target is not torch.ops.aten.select.int:
        return None
    source, dim, index = node.args
    return (source, dim, 0 if index else 1)


def other_slice(node: Node) -> tuple[Any, ...] | None:
    """The arguments of a slice that takes the rows before or behind."""
    if node.target is not torch.ops.aten.slice.Tensor:
        return None
    source, dim, start, end = node.args
    length = end - start  # type: ignore[operator]
    first = start - length if start else start + length  # type: ignore[operator]
    return (source, dim, first, first + length)


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [swapped_parts, other_part, other_slice], ids=lambda wrong: wrong.__name__)
@pytest.mark.parametrize("seeds", CHUNKS[::3], ids=lambda seeds: f"seeds {seeds.start}-{seeds.stop - 1}")
def test_chunks_in_a_wrong_place_are_not_proved(seeds: range, wrong: Any):
    changed = 0
    for seed in seeds:
        before, run = streamed(seed)
        for place, node in enumerate(run.module.graph.nodes):
            arguments = wrong(node)
            if arguments is None or "_" not in node.name:
                continue
            after = copy_module(run.module)
            copy = list(after.graph.nodes)[place]
            names = {made.name: made for made in after.graph.nodes}
            with Edit(after.graph) as edit:
                edit.set_arguments(copy, torch.fx.node.map_arg(arguments, lambda n, names=names: names[n.name]))
            recompile(after)
            proof = prove(before, after, reassociates=True)
            if not proof and changed >= 5:
                continue  # as it should be, and others have shown that such a change is one of values
            ranks = group_size(before)
            inputs = example_inputs(before, ranks, seed=seed, integers=True)
            same = weft.verify(before, after, ranks=ranks, inputs=inputs).bitwise
            assert same or not proof, f"seed {seed}: {node.name}\n{render(after)}"
            changed += not same  # else nothing that is returned depends on it
    assert changed >= 5
