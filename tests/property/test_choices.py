"""Bounds over all choices are below the best mixture of small programs, and below mixtures of random graphs.

`make test` runs a few hundred programs and graphs; `make test-full` (WEFT_FUZZ=full) runs thousands.
"""

from __future__ import annotations

import copy
import functools
import json
import os
from collections import Counter
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from torch.fx import GraphModule

import weft
import weft.zoo
from tests.property.strategies.mixtures import (
    random_choices,
    random_collectives,
    random_small_choices,
    shortest_step,
    with_copies,
)
from tests.property.strategies.programs import random_order
from tests.property.test_memory_decisions import two_parts, with_random_sites_again
from weft.bounds.checker import check
from weft.bounds.choices import Choices
from weft.bounds.lower_bound import lower_bound
from weft.bounds.problem import BoundError, MergingAssumption
from weft.cost.cluster import Cluster, assumed_cluster
from weft.cost.device import Device, HostMemory
from weft.cost.execution import BACKWARD
from weft.errors import MemoryLimitError, VerificationError
from weft.graph.dag import Dag
from weft.graph.groups import read_groups
from weft.graph.listings.text import parse
from weft.retention.all_choices import all_choices
from weft.retention.sites import Sites
from weft.scheduling.search import search
from weft.simulation.build import program_of
from weft.simulation.simulator import simulate

IS_FULL = os.environ.get("WEFT_FUZZ") == "full"
NUM_PROGRAMS = 3000 if IS_FULL else 120
NUM_WITH_COPIES = 60 if IS_FULL else 12
NUM_GRAPHS = 2000 if IS_FULL else 20
CHUNK = 100 if IS_FULL else 20
CHUNKS = [range(start, start + CHUNK) for start in range(0, NUM_GRAPHS, CHUNK)]
seeds_of = pytest.mark.parametrize("seeds", CHUNKS, ids=lambda seeds: f"seeds {seeds.start}-{seeds.stop - 1}")
EXCLUDED = MergingAssumption.EXCLUDED


def total_bytes(choices: Choices) -> int:
    return sum(size for made in choices.program.allocates for _, size in made)


def compare_with_shortest(choices: Choices, limit_bytes: int, seed: int) -> Counter[str]:
    """Compare a bound with the shortest step of all mixtures; what it is, compared with the bound without a limit."""
    best = shortest_step(choices, limit_bytes)
    try:
        found = lower_bound(choices, EXCLUDED, memory_limit_bytes=limit_bytes)
    except BoundError:
        assert best is None, f"seed {seed}"
        return Counter(["refused"])
    if best is None:
        return Counter()
    assert found.bound_ns <= best, f"seed {seed}"
    assert check(choices, found.certificate) == found.bound_ns
    least = lower_bound(choices, EXCLUDED).bound_ns
    what = {"higher": found.bound_ns > least, "tight": found.bound_ns == best, "both": found.bound_ns == best > least}
    return Counter([name for name, is_so in what.items() if is_so])


def test_the_bound_is_below_the_shortest_step_of_any_mixture():
    seen = Counter[str]()
    for seed in range(NUM_PROGRAMS):
        rng = Random(seed)
        choices = random_choices(rng)
        total = total_bytes(choices)
        seen += compare_with_shortest(choices, rng.randint(total * 3 // 10, total * 9 // 10), seed)
    assert min(seen["higher"], seen["refused"]) > NUM_PROGRAMS // 20
    assert seen["both"]


@pytest.mark.slow
def test_the_bound_is_below_the_shortest_step_with_collectives():
    seen = Counter[str]()
    for seed in range(NUM_PROGRAMS):
        rng = Random(seed)
        choices = random_collectives(rng)
        total = total_bytes(choices)
        seen += compare_with_shortest(choices, rng.randint(total // 2, total * 9 // 10), seed)
    assert min(seen["higher"], seen["refused"]) > NUM_PROGRAMS // 40
    assert seen["tight"] > NUM_PROGRAMS // 8


@pytest.mark.slow
def test_the_bound_is_below_the_shortest_step_with_collectives_and_copies():
    seen = Counter[str]()
    for seed in range(NUM_WITH_COPIES):
        rng = Random(seed)
        choices = with_copies(rng, random_collectives(rng))
        total = total_bytes(choices)
        seen += compare_with_shortest(choices, rng.randint(total // 2, total * 9 // 10), seed)
    assert min(seen["tight"], seen["refused"]) > 0


def altered(rng: Random, certificate: dict[str, Any]) -> dict[str, Any]:
    """A certificate with one number of its claim changed, or with one flow twice, away, or moved."""
    made = copy.deepcopy(certificate)
    claim = made["claim"]
    flows = claim["flows"]
    what = rng.choice(["price", "at", "flow", "more", "less", "twice", "operation", "storage", "shorter_ns"])
    if what in ("price", "at", "shorter_ns"):
        claim[what] += rng.choice((-1, 1)) * rng.randint(1, 1 + claim[what])
    elif flows:
        flow = rng.choice(flows)
        if what in ("flow", "more", "less"):
            flow[2] = max(0, flow[2] + rng.choice((-1, 1)) * rng.randint(1, 1 << 24))
        elif what == "twice":
            flows.append(list(flow))
        else:
            flow[what == "storage"] = rng.randrange(12)
    return made


def num_altered(choices: Choices, rng: Random, seed: int) -> int:
    """How many altered certificates of a program were checked: each proves no more than the shortest step."""
    limit = total_bytes(choices) * rng.randint(4, 9) // 10
    try:
        found = lower_bound(choices, EXCLUDED, memory_limit_bytes=limit)
    except BoundError:
        return 0
    if found.name != "repeated work" or (best := shortest_step(choices, limit)) is None:
        return 0
    for _ in range(20):
        made = altered(rng, json.loads(json.dumps(found.certificate))) | {"bound_ns": 0}
        try:
            value = check(choices, made)
        except VerificationError:
            continue
        assert value <= best, f"seed {seed}"
    return 20


def test_no_altered_certificate_proves_too_much():
    rngs = [(Random(f"altered {seed}"), seed) for seed in range(NUM_PROGRAMS)]
    assert sum(num_altered(random_choices(rng), rng, seed) for rng, seed in rngs) > NUM_PROGRAMS // 2


@pytest.mark.slow
def test_no_altered_certificate_proves_too_much_about_copies():
    rngs = [(Random(f"altered {seed}"), seed) for seed in range(NUM_PROGRAMS)]
    assert sum(num_altered(with_copies(rng, random_small_choices(rng)), rng, seed) for rng, seed in rngs)


def test_a_certificate_of_choices_is_none_of_the_program_alone():
    for seed in range(NUM_PROGRAMS):
        choices = random_choices(Random(seed))
        total = sum(size for made in choices.program.allocates for _, size in made)
        try:
            found = lower_bound(choices, EXCLUDED, memory_limit_bytes=total * 6 // 10)
        except BoundError:
            continue
        if found.name == "repeated work":
            with pytest.raises(VerificationError, match="run once"):
                check(choices.program, found.certificate)
            return
    raise AssertionError("no seed repeats work")


def slow_cluster(module: GraphModule, rng: Random) -> Cluster:
    """A cluster on which the small tensors of the tests take time, with and without slowdowns, gaps and fusion."""
    cluster = assumed_cluster(read_groups(module))
    device = Device(
        "slow",
        peak_tflops=(("bf16", 0.001), ("f32", 0.001), ("f64", 0.001)),
        memory_gbps=rng.choice((0.1, 1.0)),
        launch_gap_us=rng.choice((0.0, 0.0, 1.0)),
        overlap_slowdown=rng.choice((0.0, 0.3)),
        collective_slowdown=rng.choice((0.0, 0.3)),
        kernel_us=rng.choice((0.0, 1.0)),
        fuses=rng.random() < 0.7,
        host_memory=HostMemory(rng.choice((0.001, 0.01, 1.0)), 0.1, rng.choice((64, 1 << 20))),
    )
    return replace(cluster, device=device)


def check_mixtures(before: GraphModule, seed: int, num_mixtures: int) -> int:
    """Compare the bound with orders of random mixtures, each within its own peak; count those that repeat work."""
    rng = Random(f"choices {seed}")
    groups, cluster = read_groups(before), slow_cluster(before, rng)
    dag = Dag(before.graph)
    sites = Sites(dag, program_of(dag, groups, cluster), groups, {})
    copies = cluster.device.host_memory if seed % 2 else None
    choices = all_choices(sites, cluster.device, copies)
    assert choices is not None
    least = lower_bound(choices).bound_ns
    steps: dict[int, int] = {}
    for _ in range(num_mixtures):
        made = with_random_sites_again(before, rng, may_offload=copies is not None) or before
        program = program_of(made, groups, cluster)
        for order in (range(len(program.kinds)), search(program, "fast", None).order, random_order(rng, program)):
            timeline = simulate(program, order)
            peak = timeline.peak_bytes
            steps[peak] = min(steps.get(peak, timeline.step_ns), timeline.step_ns)
    assert least <= min(steps.values()), f"seed {seed}"
    num_repeated = 0
    for peak, step in sorted(steps.items())[:4]:
        found = lower_bound(choices, memory_limit_bytes=peak)
        assert found.bound_ns <= step, f"seed {seed}, {peak} bytes: {found.rests_on}"
        num_repeated += found.name == "repeated work"
    return num_repeated


def layered(seed: int) -> GraphModule:
    """Layers whose values backward reads from the last to the first. Some have a weight that is gathered."""
    rng = Random(f"layers {seed}")
    layers = range(rng.randint(4, 6))
    weights = ", ".join(f"w{i}: f64[4, 16]" for i in layers)
    early: list[str] = []
    late: list[str] = []
    last, gradient = "x", f"h{layers[-1]}"
    for i in layers:
        is_gathered = rng.random() < 0.5
        early += [f"g{i} = all_gather(w{i}, 4, 'dp')", f"v{i} = wait(g{i})"] if is_gathered else []
        early += [f"a{i} = mm({last}, {f'v{i}' if is_gathered else last})"]
        early += [f"b{i} = {rng.choice(('sigmoid', 'neg'))}(a{i})", f"h{i} = add({last}, b{i})"]
        last = f"h{i}"
    for i in reversed(layers):
        late += [f"c{i} = mul({gradient}, {rng.choice('ab')}{i})"]
        late += [f"d{i} = mm(c{i}, {rng.choice((f'a{i}', f'b{i}', f'h{i}'))})"]
        gradient = f"d{i}"
    body = "".join(f"    {line}\n" for line in (*early, *late, f"return [{gradient}]"))
    module = parse(f"group('dp', size=4)\n\ndef graph(x: f64[16, 16], {weights}):\n{body}")
    for node in [node for node in module.graph.nodes if node.op == "call_function"][len(early) :]:
        node.meta["partitioner_tag"] = BACKWARD
    return module


@pytest.mark.slow
@seeds_of
def test_the_bound_is_below_every_order_of_random_mixtures(seeds: range) -> None:
    num_repeated = [0, 0]
    """Without and with offloading."""
    for seed in seeds:
        for module in (two_parts(seed), layered(seed)):
            num_repeated[seed % 2] += check_mixtures(module, seed, num_mixtures=6)
    assert min(num_repeated) > 0


@functools.cache
def captured() -> GraphModule:
    return weft.zoo.load("llama-debug", parallel="fsdp", ranks=8, part="step", sequence=512)


@pytest.mark.slow
@pytest.mark.parametrize("may_offload", [False, True])
def test_the_bound_is_below_every_order_of_mixtures_of_a_step(may_offload: bool) -> None:
    seeds = range(may_offload, 24 if IS_FULL else 4, 2)
    assert sum(check_mixtures(captured(), seed, num_mixtures=8) for seed in seeds) > 0


@pytest.mark.slow
def test_a_small_limit_forces_work_to_be_repeated_and_a_smaller_one_cannot_be_met():
    module = weft.zoo.load("llama-1b", parallel="fsdp", ranks=8, layers=2, part="step")
    groups, cluster = read_groups(module), Cluster.load("h100-8")
    dag = Dag(module.graph)
    choices = all_choices(Sites(dag, program_of(dag, groups, cluster), groups, {}), cluster.device)
    assert choices is not None
    with pytest.raises(MemoryLimitError) as error:
        weft.optimize(module, cluster, memory_limit_bytes=1, effort="fast")
    limit = error.value.least_bytes
    made = weft.optimize(module, cluster, memory_limit_bytes=limit, effort="fast").module
    found = lower_bound(choices, memory_limit_bytes=limit)
    assert found.name == "repeated work"
    assert lower_bound(choices).bound_ns < found.bound_ns <= weft.simulate(made, cluster).step_ns
    with pytest.raises(BoundError, match="no choice fits"):
        lower_bound(choices, memory_limit_bytes=limit // 2)
