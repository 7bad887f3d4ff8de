"""The same input gives the same text, plan and digest, for every PYTHONHASHSEED."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
from random import Random
import weft
from weft.graph.listings.text import digest
from tests.property.strategies.listings import random_listing

for seed in range(40):
    module = weft.parse(random_listing(Random(seed)))
    result = weft.optimize(module, effort="fast")
    print(seed, digest(weft.listing(module)), digest(weft.listing(result.module)), result.plan.digest)
"""


def test_hash_seeds_change_nothing() -> None:
    root = Path(__file__).parents[2]
    outputs = [
        subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(root)},
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        ).stdout
        for hash_seed in ("0", "1", "4242")
    ]
    assert len(outputs[0].splitlines()) == 40
    assert outputs[0] == outputs[1] == outputs[2]
