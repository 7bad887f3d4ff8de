"""Random graphs with many collectives through the passes that merge them, in every strategy and with many caps.

`make test` runs 500 graphs; `make test-full` (WEFT_FUZZ=full) runs 10 000.
"""

from __future__ import annotations

import os
from collections import Counter
from random import Random

import pytest
from torch.fx import GraphModule

import weft
from tests.property.strategies.listings import BUCKET_STEPS, random_listing
from weft.graph import metadata
from weft.graph.collective import collectives
from weft.graph.edit import MEMBERS_KEY
from weft.graph.listings.text import parse, render
from weft.passes.base import Numerics
from weft.passes.pipeline import Pipeline, Run, replay
from weft.verification.symbolic.equivalence import prove

NUM_SEEDS = 10_000 if os.environ.get("WEFT_FUZZ") == "full" else 500
CHUNK = 25
CHUNKS = [range(start, start + CHUNK) for start in range(0, NUM_SEEDS, CHUNK)]
NUM_RANKS = 4
MERGING = (
    "bucket-all-gathers",
    "bucket-reduce-scatters",
    "bucket-all-reduces",
    "bucket-transfers",
    "fuse-ddp-all-reduces",
)


def random_case(seed: int) -> tuple[GraphModule, Pipeline]:
    rng = Random(seed)
    dtypes = rng.choice([("f32",), ("f32", "bf16"), ("f32", "bf16", "f64")])
    module = parse(random_listing(rng, rng.randint(20, 60), BUCKET_STEPS, dtypes))
    options = [f"strategy={rng.choice(['concat', 'coalesced', 'pack'])}"]
    if rng.random() < 0.5:
        options.append(
            f"max-bytes={'/'.join(str(rng.choice([64, 256, 1024, 4096])) for _ in range(rng.randint(1, 2)))}"
        )
    if rng.random() < 0.2:
        options.append("alias-outputs=true")
    return module, Pipeline.parse(
        ",".join(f"{name}{{{' '.join(options)}}}" for name in rng.sample(MERGING, len(MERGING)))
    )


def check_one(seed: int) -> Run:
    before, pipeline = random_case(seed)
    told = f"seed {seed}, {pipeline}\n{render(before)}"
    run = pipeline.run(before)
    verdict = weft.verify(before, run.module, ranks=NUM_RANKS, seed=seed)
    exact = all(
        p.numerics is Numerics.EXACT for p, entry in zip(pipeline.passes, run.log, strict=True) if entry.changed
    )
    assert verdict.bitwise if exact else verdict.equal, f"{verdict}\n{told}"
    proof = prove(before, run.module)
    assert proof, f"{proof}\n{told}"
    after = render(run.module)
    assert render(parse(after)) == after, told
    assert render(replay(before, weft.Plan.from_json(run.plan.to_json())).module) == after, f"replays otherwise: {told}"
    if "/" in str(pipeline):  # buckets are numbered anew in every run, and so have other caps
        return run
    # What is packed is in flight no more: a second run may merge more.
    again = pipeline.run(run.module)
    changes = sum(entry.changed for entry in again.log)
    assert changes <= 1, f"changes much twice: {told}"
    settled = pipeline.run(again.module) if changes else again
    assert render(settled.module) == render(again.module), f"does not settle: {told}"
    return run


@pytest.mark.parametrize("seeds", CHUNKS, ids=lambda seeds: f"seeds {seeds.start}-{seeds.stop - 1}")
def test_merged_graphs_compute_the_same_and_are_merged_once(seeds: range):
    merged = sum(len(entry.step.applied) for seed in seeds for entry in check_one(seed).log)
    assert merged > len(seeds)


@pytest.mark.parametrize("seeds", CHUNKS[::5], ids=lambda seeds: f"seeds {seeds.start}-{seeds.stop - 1}")
def test_fake_values_are_those_of_a_full_recomputation(seeds: range):
    for seed in seeds:
        before, pipeline = random_case(seed)
        module = pipeline.run(before).module
        mode = metadata.mode_of(module.graph.nodes)
        for node in module.graph.nodes:
            if node.op == "call_function":
                assert metadata.same(node.meta["val"], metadata.of_node(node, mode)), f"seed {seed}: {node.name}"


@pytest.mark.parametrize("seeds", CHUNKS[::5], ids=lambda seeds: f"seeds {seeds.start}-{seeds.stop - 1}")
def test_every_collective_is_in_one_bucket_or_has_one_reason_and_no_byte_is_lost(seeds: range):
    for seed in seeds:
        before, pipeline = random_case(seed)
        run = pipeline.run(before)
        bytes_before = Counter[str]()
        bytes_after = Counter[str]()
        for module, total in ((before, bytes_before), (run.module, bytes_after)):
            for c in collectives(module.graph):
                total[f"{c.kind.value} {c.group}"] += c.input_bytes or 0
        for key, size in bytes_before.items():
            assert bytes_after[key] >= size, f"seed {seed}: {key}"
            assert "strategy=pack" in str(pipeline) or bytes_after[key] == size, f"seed {seed}: {key}"
        members = [m for c in collectives(run.module.graph) for m in c.launch.meta.get(MEMBERS_KEY, (c.launch.name,))]
        assert sorted(members) == sorted(c.launch.name for c in collectives(before.graph)), f"seed {seed}"
        for entry in run.log:
            told = [d.nodes[0] for d in entry.step.declined] + [n for d in entry.step.applied for n in d.nodes[:-2]]
            assert len(told) == len(set(told)), f"seed {seed}: {entry.step.spec} decides twice"
