"""Bounds over all choices are below the best mixture of small programs, and below mixtures of random graphs.

`make test` runs a few hundred programs and graphs; `make test-full` (WEFT_FUZZ=full) runs thousands.
"""

from __future__ import annotations

import copy
import functools
import json
import os
from dataclasses import replace
from heapq import heappop, heappush
from random import Random
from typing import Any

import pytest
from torch.fx import GraphModule

import weft
import weft.zoo
from tests.property.strategies.programs import random_order
from tests.property.test_memory_decisions import two_parts, with_random_sites_again
from weft.bounds.checker import check
from weft.bounds.choices import ONCE, Choices
from weft.bounds.lower_bound import lower_bound
from weft.bounds.problem import BoundError, MergingAssumption
from weft.cost.cluster import Cluster, assumed_cluster
from weft.cost.device import Device, HostMemory
from weft.errors import MemoryLimitError, VerificationError
from weft.graph.dag import Dag
from weft.graph.groups import read_groups
from weft.retention.all_choices import all_choices
from weft.retention.sites import Sites
from weft.scheduling.search import search
from weft.simulation.build import program_of
from weft.simulation.program import OpKind, Program
from weft.simulation.simulator import simulate

IS_FULL = os.environ.get("WEFT_FUZZ") == "full"
NUM_PROGRAMS = 3000 if IS_FULL else 120
NUM_GRAPHS = 2000 if IS_FULL else 20
CHUNK = 20
CHUNKS = [range(start, start + CHUNK) for start in range(0, NUM_GRAPHS, CHUNK)]
seeds_of = pytest.mark.parametrize("seeds", CHUNKS, ids=lambda seeds: f"seeds {seeds.start}-{seeds.stop - 1}")
EXCLUDED = MergingAssumption.EXCLUDED


def random_choices(rng: Random) -> Choices:
    """Kernels of a forward that may run again, then kernels that run once, each with one result."""
    num_early, num_late = rng.randint(3, 5), rng.randint(3, 4)
    num = num_early + num_late
    preds: list[tuple[int, ...]] = [()]
    for op in range(1, num):
        source = rng.randrange(op) if op < num_early else min(num_early - 1, rng.randint(0, num - op))
        preds.append(tuple(sorted({source if op < num_early and rng.random() < 0.3 else op - 1, source})))
    again = [rng.choice((ONCE, *[1] * 9)) if op < num_early else ONCE for op in range(num)]
    durations = tuple(rng.randint(1, 9) for _ in range(num))
    program = Program(
        names=tuple(f"op{op}" for op in range(num)),
        kinds=(OpKind.COMPUTE,) * num,
        duration_ns=durations,
        preds=tuple(preds),
        queue=(-1,) * num,
        waits_for=((),) * num,
        queues=(),
        links=(),
        drains=(False,) * num,
        allocates=tuple(((op, rng.randint(1, 5)),) for op in range(num)),
        uses=tuple(preds),
        kept=frozenset({num - 1}),
    )
    return Choices(program, tuple(d if a != ONCE else ONCE for d, a in zip(durations, again, strict=True)))


def least_work(choices: Choices, limit_bytes: int) -> int | None:
    """The least work of any mixture within a limit, by Dijkstra over what is held and what has run; None if none fits.

    Any value may be dropped at any time, and any operation that may run again may do so at any time.
    """
    program = choices.program
    size = [made[0][1] for made in program.allocates]
    every = (1 << len(size)) - 1
    kept = sum(1 << s for s in program.kept)
    best = {(0, 0): 0}
    waiting = [(0, 0, 0)]
    while waiting:
        work, held, done = heappop(waiting)
        if work > best[held, done]:
            continue
        if done == every:
            return work

        def reach(to: tuple[int, int], then: int) -> None:
            if then < best.get(to, then + 1):
                best[to] = then
                heappush(waiting, (then, *to))

        for op, preds in enumerate(program.preds):
            if held >> op & 1 and not kept >> op & 1:
                reach((held & ~(1 << op), done), work)
            if held >> op & 1 or (done >> op & 1 and choices.again_ns[op] == ONCE):
                continue
            if all(held >> pred & 1 for pred in preds):
                after = held | 1 << op
                if sum(size[s] for s in range(len(size)) if after >> s & 1) <= limit_bytes:
                    reach((after, done | 1 << op), work + program.duration_ns[op])
    return None


def test_the_bound_is_below_the_least_work_of_any_mixture():
    num_higher = num_tight = num_refused = 0
    for seed in range(NUM_PROGRAMS):
        rng = Random(seed)
        choices = random_choices(rng)
        total = sum(size for made in choices.program.allocates for _, size in made)
        limit = rng.randint(total * 3 // 10, total * 9 // 10)
        best = least_work(choices, limit)
        try:
            found = lower_bound(choices, EXCLUDED, memory_limit_bytes=limit)
        except BoundError:
            assert best is None, f"seed {seed}"
            num_refused += 1
            continue
        if best is None:
            continue
        assert found.bound_ns <= best, f"seed {seed}"
        assert check(choices, found.certificate) == found.bound_ns
        least = lower_bound(choices, EXCLUDED).bound_ns
        num_higher += found.bound_ns > least
        num_tight += found.bound_ns == best > least
    assert min(num_higher, num_refused) > NUM_PROGRAMS // 20
    assert num_tight


def altered(rng: Random, certificate: dict[str, Any]) -> dict[str, Any]:
    """A certificate with one number of its claim changed, or with one flow twice, away, or moved."""
    made = copy.deepcopy(certificate)
    claim = made["claim"]
    flows = claim["flows"]
    what = rng.choice(["price", "at", "flow", "more", "less", "twice", "operation", "storage"])
    if what in ("price", "at"):
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


def test_no_altered_certificate_proves_too_much():
    num_altered = 0
    for seed in range(NUM_PROGRAMS):
        rng = Random(f"altered {seed}")
        choices = random_choices(rng)
        limit = sum(size for made in choices.program.allocates for _, size in made) * rng.randint(4, 9) // 10
        best = least_work(choices, limit)
        if best is None:
            continue
        found = lower_bound(choices, EXCLUDED, memory_limit_bytes=limit)
        if found.name != "repeated work":
            continue
        for _ in range(20):
            made = altered(rng, json.loads(json.dumps(found.certificate))) | {"bound_ns": 0}
            num_altered += 1
            try:
                value = check(choices, made)
            except VerificationError:
                continue
            assert value <= best, f"seed {seed}"
    assert num_altered > NUM_PROGRAMS // 2


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
        host_memory=HostMemory(rng.choice((0.01, 1.0)), 0.1, rng.choice((64, 1 << 20))),
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


@pytest.mark.slow
@seeds_of
def test_the_bound_is_below_every_order_of_random_mixtures(seeds: range) -> None:
    for seed in seeds:
        check_mixtures(two_parts(seed), seed, num_mixtures=6)


@functools.cache
def captured() -> GraphModule:
    return weft.zoo.load("llama-debug", parallel="fsdp", ranks=8, part="step", sequence=512)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(24 if IS_FULL else 4))
def test_the_bound_is_below_every_order_of_mixtures_of_a_step(seed: int) -> None:
    check_mixtures(captured(), seed, num_mixtures=8)


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
