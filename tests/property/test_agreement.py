"""Random programs of four ranks: those that agree pass, faults are found, and the virtual cluster says the same.

The generator is in `tests.unit.verification.pipelines`: one order of operations, of which each rank does its part.
"""

from __future__ import annotations

import os
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import weft
from tests.unit.verification.pipelines import NUM_RANKS, Program, drop, listing, mutate, random_programs
from weft.errors import VerificationError
from weft.graph import ops
from weft.graph.groups import read_groups
from weft.verification.agreement.agreement import Agreement, AgreementFault, check, read_orders
from weft.verification.agreement.world import World
from weft.verification.comparison import example_inputs
from weft.verification.virtual.cluster import VirtualCluster

pytestmark = pytest.mark.skipif("send" not in ops.op_names(), reason="torch has isend and irecv from 2.12")
SEEDS = st.integers(0, 2**32)
NUM_EXAMPLES = 2000 if os.environ.get("WEFT_FUZZ") == "full" else 40


def check_programs(programs: list[Program], backend: str = "nccl") -> Agreement:
    return check([listing(program) for program in programs], backend=backend)  # type: ignore[arg-type]


@settings(deadline=None, max_examples=NUM_EXAMPLES)
@given(seed=SEEDS, num_ops=st.integers(0, 12))
def test_programs_of_one_order_agree(seed: int, num_ops: int):
    found = check_programs(random_programs(seed, num_ops))
    assert found.holds, found


@settings(deadline=None, max_examples=NUM_EXAMPLES)
@given(seed=SEEDS, rank=st.integers(0, NUM_RANKS - 1), choice=SEEDS)
def test_a_rank_that_exchanges_two_launches_of_a_group_is_found(seed: int, rank: int, choice: int):
    programs = random_programs(seed, 12)
    draw = random.Random(choice)
    launches = [op for op in programs[rank] if op.kind.startswith("all")]
    pairs = [
        (a, b)
        for a in launches
        for b in launches
        if a.group == b.group and (a.kind, a.reduction, a.rows) < (b.kind, b.reduction, b.rows)
    ]
    if not pairs:
        return
    first, second = draw.choice(pairs)
    exchanged = {first: second, second: first}
    programs[rank] = [exchanged.get(op, op) for op in programs[rank] if op.kind != "wait"]
    found = check_programs(programs)
    # Ranks of a pair that exchange the same would agree; here one rank alone does.
    assert AgreementFault.ORDER in {finding.fault for finding in found.findings}, found
    assert any(rank in {at.rank for at in f.where} and f.group == first.group for f in found.findings), found


@settings(deadline=None, max_examples=NUM_EXAMPLES)
@given(seed=SEEDS, rank=st.integers(0, NUM_RANKS - 1), choice=SEEDS)
def test_a_launch_that_one_rank_drops_is_found(seed: int, rank: int, choice: int):
    programs = random_programs(seed, 10)
    if not programs[rank]:
        return
    programs[rank] = drop(programs[rank], random.Random(choice).choice(programs[rank]).name)
    faults = {finding.fault for finding in check_programs(programs).findings}
    assert faults & {AgreementFault.ORDER, AgreementFault.MISSING, AgreementFault.TRANSFER}


@settings(deadline=None, max_examples=NUM_EXAMPLES)
@given(seed=SEEDS, mutations=st.lists(SEEDS, max_size=4))
def test_what_is_found_is_what_the_virtual_cluster_stumbles_over(seed: int, mutations: list[int]):
    programs = random_programs(seed, 8)
    for mutation in mutations:
        programs = mutate(programs, mutation)
    found = check_programs(programs, backend="gloo")
    modules = [weft.parse(listing(program)) for program in programs]
    inputs = example_inputs(modules[0], NUM_RANKS)
    error = ""
    try:
        VirtualCluster(NUM_RANKS).run(modules, inputs, [read_groups(module) for module in modules])
    except VerificationError as raised:
        error = str(raised)
    assert found.holds == (not error), f"{found}\n{error}"
    assert {finding.fault for finding in found.findings} != {AgreementFault.CYCLE} or "deadlock" in error


@settings(deadline=None, max_examples=NUM_EXAMPLES)
@given(seed=SEEDS, mutations=st.lists(SEEDS, max_size=3))
def test_one_rank_of_a_kind_stands_for_all(seed: int, mutations: list[int]):
    """Two copies of a world side by side have the kinds of one, and what is found in them."""
    programs = random_programs(seed, 6)
    for mutation in mutations:
        programs = mutate(programs, mutation)
    texts = [listing(program) for program in programs]  # their groups tile any multiple of four ranks
    once, twice = check(texts), check([*texts, *texts])
    kinds = World.of(read_orders([*texts, *texts])).kinds()
    assert kinds[:NUM_RANKS] == kinds[NUM_RANKS:]
    circles = (AgreementFault.CYCLE, AgreementFault.INTERLEAVING)
    assert [f for f in once.findings if f.fault in circles] == [f for f in twice.findings if f.fault in circles]
