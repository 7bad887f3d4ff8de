"""Properties of the simulator, on random graphs and on random programs."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

import weft
from tests.property.strategies.listings import random_listing
from tests.property.strategies.programs import random_order, random_program
from weft.cost.cluster import Cluster
from weft.cost.device import Device
from weft.cost.levels import Level, Link
from weft.graph.groups import read_groups
from weft.simulation.build import program_of, sequence_of
from weft.simulation.program import OpKind, Program, Queue
from weft.simulation.simulator import simulate

SEEDS = st.integers(0, 2**32 - 1)
DEVICE = Device("test", peak_tflops=(("bf16", 1.0), ("f32", 0.5), ("f64", 0.1)), memory_gbps=1.0, launch_gap_us=0.05)
NEAR, FAR = Level("near", 2, Link(0.2, 0.05, 2.0)), Level("far", 4, Link(0.5, 0.1, 0.5))
CLUSTER = Cluster("test", 2, 2, (NEAR, FAR), DEVICE)


def random_graph(rng: Random) -> Program:
    """The program of a random graph on a small cluster, with or without slowdown."""
    module = weft.parse(random_listing(rng))
    slow, talk, gap = (rng.choice([0.0, share]) for share in (0.19, 0.15, 0.05))
    device = replace(DEVICE, overlap_slowdown=slow, collective_slowdown=talk, launch_gap_us=gap)
    return program_of(module, read_groups(module), replace(CLUSTER, device=device))


def either(seed: int) -> tuple[Program, list[int]]:
    """A random program of one of the two kinds, and an order of it."""
    rng = Random(seed)
    made = random_graph(rng) if rng.random() < 0.3 else random_program(rng)
    return made, random_order(rng, made)


def unshared(made: Program) -> Program:
    """The same with a link of its own for every queue."""
    queues = tuple(Queue(queue.group, k) for k, queue in enumerate(made.queues))
    return replace(made, queues=queues, links=tuple(queue.group for queue in queues))


def longest_path(made: Program) -> int:
    """The longest chain of edges: what compute and collectives on it take, waits included."""
    reached = [0] * len(made.names)
    landed: dict[int, int] = {}
    for op, kind in enumerate(made.kinds):
        start = max((reached[before] for before in made.preds[op]), default=0)
        reached[op] = start + (made.duration_ns[op] if kind is OpKind.COMPUTE else 0)
        if kind is OpKind.LAUNCH:
            landed[op] = start + made.duration_ns[op]
        reached[op] = max([reached[op], *(landed[launch] for launch in made.waits_for[op])])
    return max([0, *reached, *landed.values()])


@settings(max_examples=200, deadline=None)
@given(SEEDS)
def test_a_step_lies_between_the_longest_path_and_the_sum_of_all(seed: int):
    made, order = either(seed)
    num_launches = sum(kind is OpKind.LAUNCH for kind in made.kinds)
    rounding = num_launches * 2 + len(order) * (made.slowdown_ppm > 0 or made.collective_slowdown_ppm > 0)
    serial = sum(made.duration_ns) + made.launch_gap_ns * len(order) + rounding
    for found in (simulate(made), simulate(made, order)):
        assert longest_path(made) <= found.step_ns <= serial


@settings(max_examples=200, deadline=None)
@given(SEEDS)
def test_a_step_is_no_shorter_than_compute_or_the_busiest_link(seed: int):
    made, order = either(seed)
    busy: Counter[object] = Counter()
    for op, kind in enumerate(made.kinds):
        if kind is OpKind.COMPUTE:
            busy["compute"] += made.duration_ns[op]
        elif kind is OpKind.LAUNCH:
            busy[made.queues[made.queue[op]].link] += made.duration_ns[op]
            busy["queue", made.queue[op]] += made.duration_ns[op]
    assert simulate(made, order).step_ns >= max([0, *busy.values()])


@settings(max_examples=200, deadline=None)
@given(SEEDS)
def test_spans_keep_to_the_model(seed: int):
    made, order = either(seed)
    found = simulate(made, order)
    at = {span.op: span for span in found.collectives}
    for before, after in zip(found.compute, found.compute[1:], strict=False):
        assert before.end_ns <= after.start_ns
    last: dict[int, int] = {}
    for span in found.collectives:
        assert span.launched_ns <= span.start_ns <= span.end_ns - span.alone_ns
        assert last.get(span.queue, 0) <= span.start_ns
        last[span.queue] = span.end_ns
    place = {op: k for k, op in enumerate(order)}
    for op, launches in enumerate(made.waits_for):
        behind = [span for span in found.compute if place[span.op] > place[op]]
        assert all(span.start_ns >= at[launch].end_ns for span in behind for launch in launches)
    busy = sum(span.end_ns - span.start_ns for span in found.compute)
    idle = found.step_ns - busy - sum(span.exposed_ns for span in found.collectives)
    assert 0 <= idle <= made.launch_gap_ns * len(order)


@settings(max_examples=200, deadline=None)
@given(SEEDS)
def test_the_critical_path_has_no_hole_but_gaps(seed: int):
    made, order = either(seed)
    found = simulate(made, order)
    at = {span.op: span for span in (*found.compute, *found.collectives)}
    chain = [at[op] for op in found.critical_path]
    now = 0
    for span in chain:
        assert now <= span.start_ns <= now + made.launch_gap_ns * len(order)
        now = span.end_ns
    assert found.step_ns - made.launch_gap_ns * len(order) <= now <= found.step_ns


@settings(max_examples=200, deadline=None)
@given(SEEDS)
def test_more_bandwidth_never_slows_an_order_without_shared_links_and_slowdown(seed: int):
    made, order = either(seed)
    made = replace(unshared(made), slowdown_ppm=0, collective_slowdown_ppm=0)
    rng = Random(seed)
    faster = [
        rng.randint(ns // 2, ns) if queue >= 0 else ns for ns, queue in zip(made.duration_ns, made.queue, strict=True)
    ]
    assert simulate(replace(made, duration_ns=tuple(faster)), order).step_ns <= simulate(made, order).step_ns


@settings(max_examples=200, deadline=None)
@given(SEEDS)
def test_without_shared_links_and_slowdown_two_maxima_say_it_all(seed: int):
    made, order = either(seed)
    made = replace(unshared(made), slowdown_ppm=0, collective_slowdown_ppm=0, launch_gap_ns=0, kernel=())
    stream, free, end = 0, [0] * len(made.queues), dict[int, int]()
    for op in order:
        if made.kinds[op] is OpKind.LAUNCH:
            queue = made.queue[op]
            free[queue] = end[op] = max(stream, free[queue]) + made.duration_ns[op]
        elif made.kinds[op] is OpKind.COMPUTE:
            stream += made.duration_ns[op]
        stream = max([stream, *(end[launch] for launch in made.waits_for[op])])
    assert simulate(made, order).step_ns == max([stream, *free])


@settings(max_examples=100, deadline=None)
@given(SEEDS)
def test_the_same_program_gives_the_same_timeline(seed: int):
    made, order = either(seed)
    again, same_order = either(seed)
    assert order == same_order
    assert simulate(made, order) == simulate(again, order)
    assert simulate(made) == simulate(made, range(len(order)))


@settings(max_examples=200, deadline=None)
@given(SEEDS)
def test_memory_never_falls_below_what_is_given_and_ends_with_what_is_kept(seed: int):
    made, order = either(seed)
    found = simulate(made, order)
    size: Counter[int] = Counter()
    for allocated in made.allocates:
        for storage, num_bytes in allocated:
            size[storage] += num_bytes
    waited = {launch for launches in made.waits_for for launch in launches}
    kept = set(made.kept)
    for op, kind in enumerate(made.kinds):
        if kind is OpKind.LAUNCH and op not in waited:
            kept |= {*made.uses[op], *(storage for storage, _ in made.allocates[op])}
    used = [num_bytes for _, num_bytes in found.memory] or [0]
    assert min(used) >= sum(size[s] for s in made.given)
    assert used[-1] == sum(size[s] for s in kept)
    assert found.peak_bytes == max(used) <= size.total()
    times = [time for time, _ in found.memory]
    assert times == sorted(times)
    assert all(0 <= time <= found.step_ns for time in times)


@settings(max_examples=30, deadline=None)
@given(SEEDS)
def test_a_sequence_takes_no_longer_than_its_graphs_one_by_one(seed: int):
    rng = Random(seed)
    modules = [weft.parse(random_listing(rng, num_steps=15)) for _ in range(2)]
    sources = [(module, read_groups(module)) for module in modules]
    alone = [simulate(unshared(program_of(module, groups, CLUSTER))) for module, groups in sources]
    found = simulate(unshared(sequence_of(sources, CLUSTER)))
    gap = round(DEVICE.launch_gap_us * 1000)
    assert max(each.step_ns for each in alone) <= found.step_ns <= sum(each.step_ns for each in alone) + gap
    assert len(found.collectives) == sum(len(each.collectives) for each in alone)
