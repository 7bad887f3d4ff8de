"""Mutated plans: each is refused with an error of Weft's own, or leads to the very graph that was planned.

A file that was edited is refused when it is read. The second test makes the digest of the contents anew, so that the
digests of the steps and of the outcome must find the mutation.

`make test` runs a few hundred seeds; `make test-full` (WEFT_FUZZ=full) runs many more.
"""

from __future__ import annotations

import functools
import json
import os
from random import Random
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError
from torch.fx import GraphModule

import weft
from tests.property.strategies.listings import random_listing
from weft.errors import WeftError
from weft.plan.plan import Plan

NUM_SEEDS = 20_000 if os.environ.get("WEFT_FUZZ") == "full" else 300
CHUNK = 50
CHUNKS = [range(start, start + CHUNK) for start in range(0, NUM_SEEDS, CHUNK)]
PIPELINES = ("auto", "exact", "fsdp", "ddp", "clean,bucket-all-gathers,hoist-launches,sink-waits", "tp")
NUM_GRAPHS = 12
STREAMED = """group('dp', size=2)

def graph(x: f32[4, 8], w: f32[8, 8]):
    g: f32[8, 8] = all_gather(x, 2, 'dp')
    full: f32[8, 8] = wait(g)
    y: f32[8, 8] = mm(full, w)
    return [y]
"""
READER: TypeAdapter[Plan] = TypeAdapter(Plan)


@functools.cache
def planned(number: int) -> tuple[GraphModule, str, str]:
    """A graph, its plan as JSON, and the listing that the plan leads to."""
    pipeline = PIPELINES[number % len(PIPELINES)] if number else "fuse-all-gather-matmuls{chunks=2}"
    module = weft.parse(random_listing(Random(number)) if number else STREAMED)
    result = weft.optimize(module, "h100-8" if number % 2 else None, pipeline=pipeline)
    return module, result.plan.to_json(), weft.listing(result.module)


def mutate(data: Any, rng: Random) -> Any:
    """One change somewhere in a tree of JSON."""
    if isinstance(data, dict) and data and rng.random() < 0.9:
        key = rng.choice(sorted(data))
        if rng.random() < 0.1:
            return {name: value for name, value in data.items() if name != key}
        return {**data, key: mutate(data[key], rng)}
    if isinstance(data, list) and data and rng.random() < 0.9:
        place = rng.randrange(len(data))
        match rng.randrange(8):
            case 0:
                return [*data[:place], *data[place + 1 :]]
            case 1:
                return [*data, data[place]]
            case 2:
                return rng.sample(data, len(data))
            case _:
                return [*data[:place], mutate(data[place], rng), *data[place + 1 :]]
    if isinstance(data, bool) or data is None:
        return rng.choice([True, False, None, 0, ""])
    if isinstance(data, int | float):
        return rng.choice([data + 1, data - 1, -data, 0, 2 * data + 3, 1 << 70, str(data), None])
    if isinstance(data, str):
        words = ["", "w", "a", "x", data + "_1", data[::-1], data.upper(), "before", "after", "pack", "coalesced", "\0"]
        return rng.choice([*words, len(data), [data]])
    return rng.choice([[], {}, None, 0, "x"])


def mutated(seed: int) -> tuple[int, str, Any]:
    """The number of a graph, its plan, and that with one to three changes."""
    rng = Random(seed)
    number = rng.randrange(NUM_GRAPHS)
    text = planned(number)[1]
    data: Any = json.loads(text)
    del data["digest"]
    for _ in range(rng.randint(1, 3)):
        whole = rng.random() < 0.3 or not isinstance(data, dict)
        data = mutate(data, rng) if whole else {**data, "steps": mutate(data.get("steps", []), rng)}
    return number, text, data


@pytest.mark.parametrize("seeds", CHUNKS, ids=lambda seeds: str(seeds[0]))
def test_a_plan_that_was_edited_is_refused_when_it_is_read(seeds: range):
    for seed in seeds:
        _, text, data = mutated(seed)
        original = json.loads(text)
        edited = {**data, "digest": original["digest"]} if isinstance(data, dict) else data
        if edited == original:
            continue
        try:
            found = Plan.from_json(json.dumps(edited))
        except WeftError:
            continue
        assert found == Plan.from_json(text), f"seed {seed}: read as another plan"


@pytest.mark.parametrize("seeds", CHUNKS, ids=lambda seeds: str(seeds[0]))
def test_a_plan_that_was_edited_and_sealed_anew_is_refused_or_leads_to_the_same_graph(seeds: range):
    applied = 0
    for seed in seeds:
        number, _, data = mutated(seed)
        module, _, expected = planned(number)
        try:
            plan = READER.validate_json(json.dumps(data))
            plan = Plan.from_json(plan.to_json())
        except (ValidationError, WeftError):
            continue
        before = weft.listing(module)
        try:
            found = weft.listing(weft.apply(module, plan))
        except WeftError:
            found = expected
        else:
            applied += 1
        assert found == expected, f"seed {seed}: the plan leads to another graph"
        assert weft.listing(module) == before, f"seed {seed}: the graph itself was changed"
    assert applied or seeds[0], "no mutated plan was applied at all"
