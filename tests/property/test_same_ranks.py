"""Several groups of the same ranks: `agreement.check` refuses exactly the programs that stand still.

Random programs of three ranks launch in groups that share their ranks; a rank may exchange groups, launches and waits.
A small model that knows nothing of Weft runs all ranks and says which programs end. Each program is given as listings
with names of each rank's own, and as graphs with live groups.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from random import Random

import pytest
import torch
import torch.distributed as dist
from torch.fx import Graph, GraphModule

from weft.compat import fake_store
from weft.verification.agreement.agreement import check

NUM_SEEDS = 20_000 if os.environ.get("WEFT_FUZZ") == "full" else 400
CHUNK = 100
CHUNKS = [range(start, start + CHUNK) for start in range(0, NUM_SEEDS, CHUNK)]
NUM_RANKS = 3
EVERYBODY, PAIR = (0, 1, 2), (0, 1)
GROUPS = ((EVERYBODY, ""), (EVERYBODY, "#1"), (EVERYBODY, "#2"), (EVERYBODY, "dp"), (PAIR, ""), (PAIR, "#1"))
"""Ranks and identity."""
FUNCTIONAL = torch.ops._c10d_functional

Event = tuple[str, int]
"""`launch` and the number of a group, or `wait` and the number of a launch of the rank, counted from 0."""
Program = list[Event]


def random_programs(rng: Random) -> list[Program]:
    """One order of launches of which each rank does its part and waits when it likes; then some ranks change theirs."""
    groups = rng.sample(range(len(GROUPS)), rng.randint(2, 4))
    order = [rng.choice(groups) for _ in range(rng.randint(1, 6))]
    eager = rng.random() < 0.5
    programs = [_part(rank, order, rng, eager) for rank in range(NUM_RANKS)]
    for _ in range(rng.choice([0, 1, 1, 2])):
        rank = rng.randrange(NUM_RANKS)
        own = [k for k, (members, _) in enumerate(GROUPS) if rank in members and k in groups]
        launches = [g for kind, g in programs[rank] if kind == "launch"]
        if not own or not launches:
            continue
        match rng.randrange(4):
            case 0:  # two groups take each other's places
                one, two = rng.choice(own), rng.choice(own)
                renamed = {one: two, two: one}
                launches = [renamed.get(g, g) for g in launches]
            case 1:  # another order of launches
                rng.shuffle(launches)
            case 2:  # one launch in another group
                launches[rng.randrange(len(launches))] = rng.choice(own)
            case _:  # one launch less
                del launches[rng.randrange(len(launches))]
        programs[rank] = _part(rank, launches, rng, eager)
    return programs


def _part(rank: int, order: Sequence[int], rng: Random, eager: bool) -> Program:
    program: Program = []
    open_: list[int] = []
    for number, group in enumerate(g for g in order if rank in GROUPS[g][0]):
        program.append(("launch", group))
        open_.append(number)
        while open_ and (eager or rng.random() < 0.5):
            program.append(("wait", open_.pop(rng.randrange(len(open_)))))
    return program + [("wait", number) for number in open_]


def ends(programs: Sequence[Program]) -> bool:
    """Whether all ranks come to their ends: a wait holds a rank until all members have launched as often there."""
    at, counts = [0] * NUM_RANKS, [[0] * len(GROUPS) for _ in programs]
    launched: list[list[tuple[int, int]]] = [[] for _ in programs]
    moved = True
    while moved:
        moved = False
        for rank, program in enumerate(programs):
            while at[rank] < len(program):
                kind, number = program[at[rank]]
                if kind == "launch":
                    counts[rank][number] += 1
                    launched[rank].append((number, counts[rank][number]))
                else:
                    group, count = launched[rank][number]
                    if any(counts[other][group] < count for other in GROUPS[group][0]):
                        break
                at[rank] += 1
                moved = True
    return all(at[rank] == len(program) for rank, program in enumerate(programs))


def listing(program: Program, rng: Random) -> str:
    """The listing of a rank, with made-up names of its own for groups without an axis."""
    used = sorted({group for kind, group in program if kind == "launch"}, key=lambda _: rng.random())
    names = {group: "dp" if GROUPS[group][1] == "dp" else f"g{number}" for number, group in enumerate(used)}
    lines: list[str] = []
    for group, name in names.items():
        members, identity = GROUPS[group]
        layout = "size=3" if members == EVERYBODY else "ranks=[[0, 1], [2]]"
        known = "" if identity in ("", name) else f", id={identity!r}"
        lines.append(f"group({name!r}, {layout}{known})")
    lines.append("\ndef graph(x: f32[4]):")
    number = 0
    for kind, value in program:
        if kind == "launch":
            lines.append(f"    a{number} = all_reduce(x, 'sum', {names[value]!r})")
            number += 1
        else:
            lines.append(f"    w{value} = wait(a{value})")
    return "\n".join([*lines, "    return [x]\n"])


def module(program: Program, names: Sequence[str]) -> GraphModule:
    """The graph of a rank with run-time names of groups."""
    graph = Graph()
    x = graph.placeholder("x")
    launches = []
    for kind, value in program:
        if kind == "launch":
            launches.append(graph.call_function(FUNCTIONAL.all_reduce.default, (x, "sum", names[value])))
        else:
            graph.call_function(FUNCTIONAL.wait_tensor.default, (launches[value],))
    graph.output([x])
    for node in graph.nodes:
        node.meta["val"] = torch.empty(4)
    return GraphModule({}, graph)


@pytest.mark.parametrize("seeds", CHUNKS, ids=lambda seeds: str(seeds[0]))
def test_listings_that_stand_still_are_refused_and_no_others(seeds: range):
    found = {True: 0, False: 0}
    for seed in seeds:
        rng = Random(seed)
        programs = random_programs(rng)
        texts = [listing(program, rng) for program in programs]
        expected = ends(programs)
        found[expected] += 1
        assert check(texts, backend="gloo").holds == expected, f"seed {seed}"
        assert expected or not check(texts).holds, f"seed {seed}: accepted for NCCL"
    assert min(found.values()) > 5, "the programs are all of one sort"


@pytest.mark.parametrize("seeds", CHUNKS, ids=lambda seeds: str(seeds[0]))
def test_graphs_of_live_groups_that_stand_still_are_refused_and_no_others(seeds: range):
    dist.init_process_group("fake", rank=0, world_size=NUM_RANKS, store=fake_store())
    try:
        first = dist.group.WORLD.group_name
        second, pair, third, other = (
            dist.new_group(list(members)).group_name for members in (EVERYBODY, PAIR, EVERYBODY, PAIR)
        )
        axis = dist.new_group(list(EVERYBODY), group_desc="mesh_dp").group_name
        names = [first, second, third, axis, pair, other]
        for seed in seeds:
            programs = random_programs(Random(seed))
            modules = [module(program, names) for program in programs]
            assert check(modules, backend="gloo").holds == ends(programs), f"seed {seed}"
            assert ends(programs) or not check(modules).holds, f"seed {seed}: accepted for NCCL"
    finally:
        dist.destroy_process_group()
