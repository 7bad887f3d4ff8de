"""Steps of the zoo as runtimes execute them: how many collectives, where, how fast, and with which values."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
from torch.fx import GraphModule

import weft
import weft.zoo
from tests.tiers import quick_first
from weft.errors import PipelineError
from weft.graph import ops
from weft.graph.collective import collectives
from weft.graph.groups import read_groups
from weft.graph.ops import Kind
from weft.passes.runtimes import RUNTIMES, notes_on, run_as
from weft.verification.symbolic.equivalence import prove

LAYERS = 2


def kinds(module: GraphModule) -> dict[str, int]:
    """Number of collectives of each kind."""
    return dict(Counter(each.kind.name for each in collectives(module.graph)))


def launches(module: GraphModule, group: str, kind: Kind) -> list[int]:
    """Sizes of the collectives of a kind and a group."""
    table = read_groups(module)
    found = [each for each in collectives(module.graph) if each.kind is kind]
    return [each.output_bytes or 0 for each in found if table.group(each.group).name == group]


STEPS: list[tuple[str, dict[str, Any], str, dict[str, int]]] = [
    # Units: embedding, two blocks, norm with head. Backward gathers all but the embedding again.
    ("fsdp", {"ranks": 4}, "fsdp2", {"ALL_GATHER": 4 + 3, "REDUCE_SCATTER": 4}),
    ("fsdp", {"ranks": 4, "part": "step"}, "fsdp2", {"ALL_GATHER": 4 + 3, "REDUCE_SCATTER": 4}),
    ("fsdp", {"ranks": 4, "reshard": False}, "fsdp2", {"ALL_GATHER": 4, "REDUCE_SCATTER": 4}),
    ("fsdp", {"ranks": 4, "checkpoint": "full"}, "fsdp2", {"ALL_GATHER": 4 + 3, "REDUCE_SCATTER": 4}),
    ("ddp", {"ranks": 4}, "ddp", {"ALL_REDUCE": 1}),
    (
        "hsdp",
        {"mesh": {"replicate": 2, "shard": 2}},
        "hsdp",
        {"ALL_GATHER": 7, "REDUCE_SCATTER": 4, "ALL_REDUCE": 4},
    ),
    # Tensor parallelism: 10 gathers, 10 scatters and 8 small sums of its own stay.
    ("tp", {"ranks": 4}, "tp", {"ALL_GATHER": 10, "REDUCE_SCATTER": 10, "ALL_REDUCE": 8}),
    (
        "fsdp-tp",
        {"mesh": {"dp": 2, "tp": 2}},
        "fsdp2",
        {"ALL_GATHER": 10 + 7, "REDUCE_SCATTER": 10 + 4, "ALL_REDUCE": 8},
    ),
]


@pytest.mark.parametrize(("parallel", "options", "runtime", "expected"), STEPS)
def test_a_step_runs_with_the_collectives_of_its_runtime_and_keeps_its_values(
    parallel: str, options: dict[str, Any], runtime: str, expected: dict[str, int]
):
    captured = weft.zoo.load("llama-debug", parallel, layers=LAYERS, **options)
    before = weft.listing(captured)
    run = run_as(captured, runtime)
    assert weft.listing(captured) == before
    assert kinds(run.module) == expected
    assert prove(captured, run.module).proved
    assert weft.verify(captured, run.module).equal


def test_one_root_is_gathered_at_the_start_and_reduced_at_the_end():
    captured = weft.zoo.load("llama-debug", "fsdp", 4, layers=LAYERS)
    module = run_as(captured, "fsdp2", root="one").module
    assert kinds(module) == {"ALL_GATHER": 3 + 3, "REDUCE_SCATTER": 3}
    found = list(collectives(module.graph))
    first = next(each for each in found if each.kind is Kind.ALL_GATHER)
    last = [each for each in found if each.kind is Kind.REDUCE_SCATTER][-1]
    whole = (2 * 256 * 64 + 64) * 2  # embedding, head and norm in bf16
    assert first.output_bytes in range(whole, whole + 256)  # parts of a pack are aligned
    assert last.input_bytes == 2 * whole
    assert prove(captured, module).proved


def test_compute_keeps_its_order():
    captured = weft.zoo.load("llama-debug", "fsdp-tp", mesh={"dp": 2, "tp": 2}, layers=LAYERS)

    def products(module: GraphModule) -> list[str]:
        return [node.name for node in module.graph.nodes if ops.qualified_name(node.target) == "aten::mm"]

    assert products(run_as(captured, "fsdp2").module) == products(captured)


def test_backward_gathers_exactly_one_unit_ahead_and_waits_for_the_scatter_before():
    captured = weft.zoo.load("llama-debug", "fsdp", 4, layers=4)
    module = run_as(captured, "fsdp2").module
    place = {node: k for k, node in enumerate(module.graph.nodes)}
    gathers = [each for each in collectives(module.graph) if each.kind is Kind.ALL_GATHER]
    scatters = [each for each in collectives(module.graph) if each.kind is Kind.REDUCE_SCATTER]
    waits = [place[each.waits[0]] for each in gathers]
    forward = 6
    for k, each in enumerate(gathers):
        ahead = 2 if k < forward else 1
        behind = waits[k - ahead] if k >= ahead else -1
        assert behind < place[each.launch] < waits[max(k - ahead + 1, 0)]
    for each, following in pairwise(scatters):
        assert place[each.launch] < place[each.waits[0]] < place[following.launch]


@pytest.mark.parametrize(
    ("parallel", "ranks", "runtime"), quick_first([("fsdp", 8, "fsdp2"), ("fsdp", 64, "fsdp2"), ("ddp", 16, "ddp")])
)
def test_a_runtime_lies_between_the_captured_order_and_the_plan(parallel: str, ranks: int, runtime: str):
    captured = weft.zoo.load("llama-1b", parallel, ranks, layers=3, sequence=2048)
    cluster = "h100-8" if ranks == 8 else "h100-8x8"
    steps = [
        weft.simulate(module, cluster).step_us
        for module in (weft.optimize(captured, cluster).module, run_as(captured, runtime).module, captured)
    ]
    assert steps == sorted(steps)
    assert steps[1] < 0.95 * steps[2]


def test_activations_are_streamed_and_parameters_run_as_fsdp2():
    # As large as the published steps: torch splits small collectives too, which then take longer.
    shape = {"layers": 2, "batch": 12, "sequence": 8192}
    captured = weft.zoo.load("llama-8b", "fsdp-tp", mesh={"dp": 2, "tp": 8}, **shape)
    module = run_as(captured, "async-tp", cluster="a100-8x8").module  # lists no symmetric memory
    plain = run_as(captured, "fsdp2").module
    whole, split = (Counter(launches(each, "tp", Kind.ALL_GATHER)) for each in (plain, module))
    ((size, _),) = whole.most_common(1)
    assert split[size // 8] >= 8 * 2 * 2  # one chunk for each rank, in forward alone
    assert prove(captured, module, reassociates=True).proved
    steps = [weft.simulate(each, "a100-8x8").step_us for each in (module, plain, captured)]
    assert steps == sorted(steps)


@pytest.mark.slow
def test_ranks_that_share_memory_run_the_fused_operators_and_leave_scatters_of_sums():
    captured = weft.zoo.load("llama-8b", "fsdp-tp", mesh={"dp": 2, "tp": 8}, layers=2, batch=12, sequence=8192)
    run = run_as(captured, "async-tp", cluster="h100-8x8")
    plain = run_as(captured, "fsdp2").module
    names = Counter(str(node.target) for node in run.module.graph.nodes)
    gathers, scatters = (len(launches(plain, "tp", kind)) for kind in (Kind.ALL_GATHER, Kind.REDUCE_SCATTER))
    sums = [each for step in run.steps for each in step.decisions if "scatters a sum of" in each.sentence]
    # Three products of each attention and two of each feed-forward make one gradient; the embedding has no product.
    assert len(sums) == 2 * 2
    assert names["symm_mem.fused_all_gather_matmul.default"] == gathers - 1
    assert names["symm_mem.fused_matmul_reduce_scatter.default"] == scatters - len(sums) - 1
    assert prove(captured, run.module, reassociates=True).proved
    memory = weft.predict(captured, "h100-8x8", runtime="async-tp", execution="eager").memory
    assert memory.outside["symmetric memory"] > 0


def test_a_listing_without_modules_is_grouped_by_size_and_says_so():
    captured = weft.zoo.load("llama-debug", "fsdp", 4, layers=LAYERS)
    bare = weft.parse(weft.listing(captured))
    module = run_as(bare, "fsdp2").module
    assert kinds(module) == {"ALL_GATHER": 2, "REDUCE_SCATTER": 1}
    assert len(notes_on(bare, "fsdp2")) == 1
    assert notes_on(captured, "fsdp2") == notes_on(bare, "ddp") == []
    assert prove(bare, module).proved


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_every_runtime_takes_a_graph_without_collectives(runtime: str):
    module = weft.parse("def graph(x: f32[4, 4]):\n    y: f32[4, 4] = mm(x, x)\n    return [y]\n")
    assert weft.listing(run_as(module, runtime).module) == weft.listing(module)


def test_an_unknown_runtime_is_refused():
    module = weft.parse("def graph(x: f32[4, 4]):\n    return [x]\n")
    with pytest.raises(PipelineError, match="fsdp2"):
        run_as(module, "fsdp")
