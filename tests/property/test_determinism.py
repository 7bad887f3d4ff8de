"""The same input gives the same text, plan and digest, for every PYTHONHASHSEED."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys
from random import Random
import weft
from weft.errors import RefusedError
from weft.graph.listings.text import digest
from tests.property.strategies.listings import BUCKET_STEPS, random_listing
from tests.property.test_planner import random_case

NUM_SEEDS = int(sys.argv[1])
for seed in range(NUM_SEEDS):
    module = weft.parse(random_listing(Random(seed)))
    result = weft.optimize(module, effort="default" if seed < 4 else "fast")
    print(seed, digest(weft.listing(module)), digest(weft.listing(result.module)), result.plan.digest)

for seed in range(NUM_SEEDS):
    module = weft.parse(random_listing(Random(seed), steps=BUCKET_STEPS))
    result = weft.optimize(module, pipeline="bucket-all-gathers{max-bytes=96}")
    print(seed, digest(weft.listing(result.module)), result.plan.digest)

for seed in range(NUM_SEEDS * 3 // 10):
    case = random_case(seed)
    run = case.pipeline.run(case.module, cluster=case.cluster, effort="fast")
    print(seed, run.plan.digest, digest(run.after))
    try:
        case.pipeline.run(case.module, cluster=case.cluster, effort="fast", memory_limit_bytes=1)
    except RefusedError as error:
        print(seed, "refused:", *str(error).splitlines())
"""
"""Processes that import torch are expensive, so one of them runs all pipelines."""


@pytest.mark.parametrize(("num_seeds", "hash_seeds"), [(10, ("0", "4242")), (40, ("0", "1", "4242"))])
def test_hash_seeds_change_nothing(num_seeds: int, hash_seeds: tuple[str, ...]) -> None:
    root = Path(__file__).parents[2]
    outputs = [
        subprocess.run(
            [sys.executable, "-c", PROGRAM, str(num_seeds)],
            env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(root)},
            capture_output=True,
            text=True,
            check=True,
            timeout=240,
        ).stdout
        for hash_seed in hash_seeds
    ]
    assert len(outputs[0].splitlines()) > 2 * num_seeds
    assert "allow " in outputs[0], "a refusal says what to do"
    assert len({*outputs}) == 1
