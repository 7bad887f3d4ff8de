"""What collectives and batches become on a described cluster, and for a rank that is given."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import replace

import pytest
from torch.fx import GraphModule

import weft
from weft.cost.cluster import Cluster
from weft.cost.measured_table import Table
from weft.graph.collective import collectives
from weft.graph.groups import TABLE_KEY, Group, read_groups
from weft.graph.ops import Kind
from weft.passes.pipeline import Pipeline, Run
from weft.plan.decision import Reason
from weft.rewriting.launches import place_in
from weft.verification.agreement.agreement import check, own_parts
from weft.verification.symbolic.equivalence import prove

KINDS = (Kind.ALL_REDUCE, Kind.REDUCE_SCATTER, Kind.ALL_GATHER)
REDUCED = """group('dp', size=8)

def graph(g: f32[1024, 64]):
    ar = all_reduce(g, 'sum', 'dp')
    w = wait(ar)
    return [w]
"""
SCATTERED = """group('dp', size=8)

def graph(g: f32[1024, 64]):
    rs = reduce_scatter(g, 'sum', 8, 'dp')
    p = wait(rs)
    ag = all_gather(p, 8, 'dp')
    w = wait(ag)
    return [w]
"""


HYBRID = """group('shard', size=2{shard})
group('replicate', size=2{replicate})

def graph(g: {dtype}[4, 64]):
    ar = all_reduce(g, {first!r}, 'replicate')
    w = wait(ar)
    rs = reduce_scatter(w, {second!r}, 2, 'shard')
    part = wait(rs)
    return [part]
"""
SWAPPED = """group('shard', size=2{shard})
group('replicate', size=2{replicate})

def graph(g: {dtype}[4, 64]):
    rs = reduce_scatter(g, {second!r}, 2, 'shard')
    w = wait(rs)
    ar = all_reduce(w, {first!r}, 'replicate')
    part = wait(ar)
    return [part]
"""
MESH = {"shard": "", "replicate": ", stride=2"}


def cluster(all_reduce_us: float, other_us: float) -> Cluster:
    """A cluster on which collectives take times that are known."""
    times = (all_reduce_us, other_us, other_us)
    tables = tuple(Table(kind, 8, ((1, us), (1 << 30, us))) for kind, us in zip(KINDS, times, strict=True))
    return replace(Cluster.load("h100-8"), tables=tables)


def kinds(run: Run) -> list[Kind]:
    return [collective.kind for collective in collectives(run.module.graph)]


def newton_schulz(iterations: int) -> GraphModule:
    """The orthogonal update of Muon on a weight that is gathered by columns, of which each rank keeps its own."""
    lines = ["    ag = all_gather(x, 2, 'dp')", "    w = wait(ag)", "    parts = split(w, 16)"]
    lines += ["    p0 = parts[0]", "    p1 = parts[1]", "    y0 = cat([p0, p1], 1)"]
    for k in range(iterations):
        lines += [f"    t{k} = t(y{k})", f"    a{k} = mm(y{k}, t{k})", f"    b{k} = mm(a{k}, a{k})"]
        lines += [f"    c{k} = add(a{k}, b{k})", f"    d{k} = mm(c{k}, y{k})", f"    y{k + 1} = sub(y{k}, d{k})"]
    lines += [f"    own = slice(y{iterations}, 1, 0, 1024)", "    r = neg(own)", "    return [r]"]
    return weft.parse("group('dp', size=2)\n\ndef graph(x: f32[16, 1024]):\n" + "\n".join(lines) + "\n")


def declined(run: Run) -> tuple[Reason, tuple[str, ...]]:
    decision = run.log[0].step.declined[0]
    return decision.reason, decision.nodes


def test_an_all_reduce_that_is_slower_than_its_halves_is_taken_apart():
    module = weft.parse(REDUCED)
    slow = Pipeline.parse("decompose-all-reduces").run(module, cluster=cluster(100.0, 40.0))
    fast = Pipeline.parse("decompose-all-reduces").run(module, cluster=cluster(70.0, 40.0))
    assert kinds(slow) == [Kind.REDUCE_SCATTER, Kind.ALL_GATHER]
    assert kinds(fast) == [Kind.ALL_REDUCE]
    assert declined(fast) == (Reason.NO_GAIN, ("w",))


def test_halves_that_are_slower_than_an_all_reduce_are_put_together():
    module = weft.parse(SCATTERED)
    slow = Pipeline.parse("fuse-scattered-gathers").run(module, cluster=cluster(70.0, 40.0))
    fast = Pipeline.parse("fuse-scattered-gathers").run(module, cluster=cluster(100.0, 40.0))
    assert kinds(slow) == [Kind.ALL_REDUCE]
    assert kinds(fast) == [Kind.REDUCE_SCATTER, Kind.ALL_GATHER]
    assert declined(fast) == (Reason.NO_GAIN, ("w",))


@pytest.mark.parametrize("us", [(100.0, 40.0), (70.0, 40.0), (80.0, 40.0)])
def test_the_two_never_undo_each_other(us: tuple[float, float]):
    both = Pipeline.parse("decompose-all-reduces,fuse-scattered-gathers")
    for listing in (REDUCED, SCATTERED):
        once = both.run(weft.parse(listing), cluster=cluster(*us))
        assert not any(entry.changed for entry in both.run(once.module, cluster=cluster(*us)).log)


def test_five_gram_matrices_take_five_reductions_and_no_gather():
    assert kinds(Pipeline.parse("").run(newton_schulz(5))) == [Kind.ALL_GATHER]
    assert kinds(Pipeline.parse("sink-gathers{rank=0 own=own}").run(newton_schulz(5))) == [Kind.ALL_REDUCE] * 5


def test_the_part_of_another_rank_stays():
    listing = REDUCED.replace("    return [w]", "    part = slice(w, 0, 128, 256)\n    r = neg(part)\n    return [r]")
    run = Pipeline.parse("fuse-sliced-all-reduces{rank=0 own=part}").run(weft.parse(listing))
    assert kinds(run) == [Kind.ALL_REDUCE]
    assert declined(run) == (Reason.OTHER_RANKS, ("part",))


TAKES_A_PART = """group('dp', size=4)

def graph(x: f32[8, 2]):
    ar = all_reduce(x, 'sum', 'dp')
    w = wait(ar)
    part = slice(w, 0, START, END)
    out = add(part, 1)
    return [out]
"""
GATHERS_AND_TAKES_A_PART = """group('dp', size=4)

def graph(x: f32[2, 2]):
    ag = all_gather(x, 4, 'dp')
    w = wait(ag)
    big = exp(w)
    part = slice(big, 0, START, END)
    out = add(part, 1)
    return [out]
"""


def ranks_of(listing: str, starts: Sequence[int]) -> list[GraphModule]:
    return [weft.parse(listing.replace("START", str(k)).replace("END", str(k + 2))) for k in starts]


def by_rank(name: str, graphs: list[GraphModule]) -> list[GraphModule]:
    """What the ranks make of their graphs, each told its own rank."""
    own = "/".join(own_parts(graphs))
    specs = [f"{name}{{rank={rank}{f' own={own}' if own else ''}}}" for rank in range(len(graphs))]
    return [Pipeline.parse(spec).run(graph).module for spec, graph in zip(specs, graphs, strict=True)]


@pytest.mark.parametrize(
    ("name", "listing"),
    [("fuse-sliced-all-reduces", TAKES_A_PART), ("sink-gathers", GATHERS_AND_TAKES_A_PART)],
)
@pytest.mark.parametrize("starts", [(0, 0, 0, 0), (2, 2, 2, 2), (0, 2, 4, 4), (6, 4, 2, 0), (0, 2, 4, 6)])
def test_ranks_never_part_over_whose_part_is_taken(name: str, listing: str, starts: Sequence[int]):
    before = ranks_of(listing, starts)
    after = by_rank(name, before)
    assert check(after).holds
    assert weft.verify(before, after, ranks=4).equal
    changed = [weft.listing(old) != weft.listing(new) for old, new in zip(before, after, strict=True)]
    assert changed == [starts == (0, 2, 4, 6)] * 4


def test_own_parts_are_found_only_in_graphs_that_differ_in_nothing_else():
    graphs = ranks_of(TAKES_A_PART, (0, 2, 4, 6))
    assert own_parts(graphs) == ("part",)
    other = ranks_of(TAKES_A_PART.replace("add(part, 1)", "add(part, 2)"), (6,))
    assert own_parts([*graphs[:3], *other]) == ()
    longer = ranks_of(TAKES_A_PART.replace("    return [out]", "    more = neg(out)\n    return [more]"), (6,))
    assert own_parts([*graphs[:3], *longer]) == ()


def test_a_part_by_the_place_in_another_group_of_the_same_size_is_not_taken_for_the_own():
    mesh = "group('dp', size=2, stride=2)\ngroup('tp', size=2)\n"
    listing = TAKES_A_PART.replace("group('dp', size=4)\n", mesh).replace("f32[8, 2]", "f32[4, 2]")
    for starts in ((0, 0, 2, 2), (0, 2, 0, 2)):
        before = ranks_of(listing, starts)
        after = by_rank("fuse-sliced-all-reduces", before)
        assert check(after).holds
        assert weft.verify(before, after, ranks=4).equal


def test_the_place_of_a_rank_in_its_group_is_by_size_and_stride():
    assert [place_in(Group("tp", 2), rank) for rank in range(4)] == [0, 1, 0, 1]
    assert [place_in(Group("dp", 2, 2), rank) for rank in range(4)] == [0, 0, 1, 1]
    assert place_in(Group("odd", 2, 1, ((0, 2), (1,))), 2) == 1


def test_small_layers_are_batched_where_gaps_cost_more_than_copies():
    inputs = ", ".join(f"x{k}: bf16[8, 32], w{k}: bf16[32, 32]" for k in range(8))
    lines = [f"    m{k} = mm(x{k}, w{k})\n    r{k} = relu(m{k})\n" for k in range(8)]
    returned = ", ".join(f"r{k}" for k in range(8))
    module = weft.parse(f"def graph({inputs}):\n{''.join(lines)}    return [{returned}]\n")
    device = replace(Cluster.load("h100-8").device, launch_gap_us=2.0)
    gaps = replace(Cluster.load("h100-8"), device=device)
    none = replace(gaps, device=replace(device, launch_gap_us=0.0))
    batched = Pipeline.parse("batch-linears").run(module, cluster=gaps)
    assert weft.listing(batched.module).count(" = bmm(") == 1
    assert not Pipeline.parse("batch-linears").run(module, cluster=none).log[0].changed


# Sums over one axis that are scattered over another.


@pytest.mark.parametrize(
    ("dtype", "first", "second", "commute"),
    [
        ("f32", "avg", "avg", True),
        ("bf16", "sum", "avg", True),
        ("i64", "sum", "sum", True),
        ("f32", "max", "max", True),
        ("f32", "max", "sum", False),
        ("f32", "sum", "max", False),
        ("i64", "sum", "avg", False),
        ("i64", "avg", "avg", False),
    ],
)
def test_a_sum_sinks_below_a_scatter_exactly_where_the_two_commute(dtype: str, first: str, second: str, commute: bool):
    texts = [text.format(dtype=dtype, first=first, second=second, **MESH) for text in (HYBRID, SWAPPED)]
    before, swapped = map(weft.parse, texts)
    run = Pipeline.parse("sink-all-reduces").run(before)
    order = [Kind.REDUCE_SCATTER, Kind.ALL_REDUCE]
    assert kinds(run) == (order if commute else order[::-1])
    assert bool(prove(before, swapped, reassociates=True)) is commute
    assert not prove(before, swapped)  # bits may differ


@pytest.mark.parametrize(
    ("shard", "replicate"),
    [
        ("", ""),
        (", stride=2", ", stride=2"),
        (", ranks=[[0, 1], [2, 3]]", ", ranks=[[0, 3], [1, 2]]"),
        (", ranks=[[0, 1], [3, 2]]", ", ranks=[[0, 2], [1, 3]]"),
    ],
)
def test_groups_that_are_not_axes_of_one_mesh_are_never_swapped(shard: str, replicate: str):
    texts = [
        text.format(dtype="f32", first="sum", second="sum", shard=shard, replicate=replicate)
        for text in (HYBRID, SWAPPED)
    ]
    before, swapped = map(weft.parse, texts)
    run = Pipeline.parse("sink-all-reduces").run(before)
    assert kinds(run) == [Kind.ALL_REDUCE, Kind.REDUCE_SCATTER]
    assert [d.reason for entry in run.log for d in entry.step.declined] == [Reason.UNSUPPORTED_FORM]
    assert not prove(before, swapped, reassociates=True)


def test_a_mesh_whose_ranks_are_listed_is_recognised():
    ranks = {"shard": ", ranks=[[0, 1], [2, 3]]", "replicate": ", ranks=[[0, 2], [1, 3]]"}
    before = weft.parse(HYBRID.format(dtype="f32", first="sum", second="sum", **ranks))
    run = Pipeline.parse("sink-all-reduces").run(before)
    assert kinds(run) == [Kind.REDUCE_SCATTER, Kind.ALL_REDUCE]
    assert prove(before, run.module, reassociates=True)


@pytest.mark.parametrize("pad", [0.0, 1.0])
def test_only_padding_with_zeros_is_its_own_sum(pad: float):
    head = "group('shard', size=2)\ngroup('replicate', size=2, stride=2)\n\ndef graph(g: f32[3, 4]):\n"
    first, last = "    ar = all_reduce({}, 'sum', 'replicate')\n    w = wait(ar)\n", "    return [{}]\n"
    filled = f"    p = constant_pad_nd({{}}, [0, 0, 0, 1], {pad})\n"
    scatter = "    rs = reduce_scatter(p, 'sum', 2, 'shard')\n    r = wait(rs)\n"
    before = head + first.format("g") + filled.format("w") + scatter + last.format("r")
    after = head + filled.format("g") + scatter + first.format("r") + last.format("w")
    assert bool(prove(weft.parse(before), weft.parse(after), reassociates=True)) is (pad == 0.0)


def test_a_graph_whose_ranks_differ_is_not_swapped():
    before = weft.parse(HYBRID.format(dtype="f32", first="sum", second="sum", **MESH))
    run = Pipeline.parse("sink-all-reduces").run(before, withheld={"shard": "its ranks hold different graphs"})
    assert kinds(run) == [Kind.ALL_REDUCE, Kind.REDUCE_SCATTER]
    assert [d.reason for entry in run.log for d in entry.step.declined] == [Reason.OTHER_RANKS]


def test_a_group_whose_ranks_are_not_known_is_not_taken_for_an_axis():
    texts = [text.format(dtype="f32", first="sum", second="sum", **MESH) for text in (HYBRID, SWAPPED)]
    before, swapped = map(weft.parse, texts)
    assert prove(before, swapped, reassociates=True)
    for module in (before, swapped):
        module.meta[TABLE_KEY] = replace(module.meta[TABLE_KEY], unplaced=frozenset({"shard"}))
    run = Pipeline.parse("sink-all-reduces").run(before)
    assert kinds(run) == [Kind.ALL_REDUCE, Kind.REDUCE_SCATTER]
    assert [d.reason for entry in run.log for d in entry.step.declined] == [Reason.UNSUPPORTED_FORM]
    assert not prove(before, swapped, reassociates=True)


def test_a_sum_over_two_other_axes_sinks_below_a_scatter():
    text = f"""{CUBE}
def graph(g: f32[4, 4]):
    ar = all_reduce(g, 'sum', 'node')
    w = wait(ar)
    ar1 = all_reduce(w, 'avg', 'pod')
    w1 = wait(ar1)
    rs = reduce_scatter(w1, 'avg', 2, 'gpu')
    part = wait(rs)
    return [part]
"""
    before = weft.parse(text)
    run = Pipeline.parse("sink-all-reduces").run(before)
    assert kinds(run) == [Kind.REDUCE_SCATTER, Kind.ALL_REDUCE, Kind.ALL_REDUCE]
    assert weft.verify(before, run.module, ranks=8).equal
    assert prove(before, run.module, reassociates=True)


# Sums over several axes.


CUBE = "group('gpu', size=2)\ngroup('node', size=2, stride=2)\ngroup('pod', size=2, stride=4)\n"
NODES = "group('inner', size=8)\ngroup('outer', size=4, stride=8)\n"
WITH_ALL = f"{NODES}group('all', size=32)\n"
DECOMPOSE = "decompose-mesh-all-reduces"
THREE_LAUNCHES = [(Kind.REDUCE_SCATTER, "inner"), (Kind.ALL_REDUCE, "outer"), (Kind.ALL_GATHER, "inner")]


def sum_over(*groups: str, given: str, elements: int = 64, dtype: str = "f32", reduce_op: str = "sum") -> GraphModule:
    """All-reduces over groups in turn; a gather over each of the other groups, so that the graph knows them."""
    lines, value = [f"{given}\ndef graph(g: {dtype}[{elements}], x: f32[4]):"], "g"
    for k, group in enumerate(groups):
        lines += [f"    ar{k} = all_reduce({value}, {reduce_op!r}, {group!r})", f"    w{k} = wait(ar{k})"]
        value = f"w{k}"
    others = [found for found in re.findall(r"group\('(\w+)', size=(\d+)", given) if found[0] not in groups]
    for name, size in others:
        lines += [f"    of_{name} = all_gather(x, {size}, {name!r})", f"    from_{name} = wait(of_{name})"]
    return weft.parse(
        "\n".join([*lines, f"    return [{', '.join([value, *(f'from_{name}' for name, _ in others)])}]", ""])
    )


def launches(run: Run) -> list[tuple[Kind, str]]:
    """The launches that are not one of the gathers of `sum_over`."""
    table = read_groups(run.module)
    found = [each for each in collectives(run.module.graph) if not each.launch.name.startswith("of_")]
    return [(each.kind, table.canonical(each.group)) for each in found]


@pytest.mark.parametrize("order", list(itertools.permutations(("gpu", "node", "pod"))))
@pytest.mark.parametrize(("elements", "num_scatters"), [(64, 2), (4, 2), (2, 1)])
def test_a_sum_over_three_axes_is_scattered_over_as_many_as_split(
    order: tuple[str, ...], elements: int, num_scatters: int
):
    before = sum_over(*order, given=CUBE, elements=elements)
    run = Pipeline.parse(f"{DECOMPOSE}{{always=true}}").run(before)
    ends = [Kind.REDUCE_SCATTER] * num_scatters, [Kind.ALL_GATHER] * num_scatters
    assert kinds(run) == [*ends[0], *[Kind.ALL_REDUCE] * (3 - num_scatters), *ends[1]]
    assert weft.verify(before, run.module, ranks=8).equal
    assert prove(before, run.module, reassociates=True)
    assert not prove(before, run.module)  # bits may differ


@pytest.mark.parametrize("reduce_op", ["sum", "avg", "max"])
@pytest.mark.parametrize(
    ("groups", "whole", "is_same"),
    [
        (("gpu", "node"), "size=4", True),
        (("pod", "node"), "size=4, stride=2", True),
        (("pod", "gpu"), "size=4, ranks=[[0, 1, 4, 5], [2, 3, 6, 7]]", True),
        (("node", "gpu", "pod"), "size=8", True),
        (("gpu", "node"), "size=8", False),
        (("gpu", "pod"), "size=4", False),
        (("gpu", "gpu"), "size=2", False),
    ],
)
def test_sums_over_axes_are_proved_equal_to_the_sum_over_just_their_ranks(
    groups: tuple[str, ...], whole: str, is_same: bool, reduce_op: str
):
    text = f"{CUBE}group('all', {whole})\n\ndef graph(g: f32[8]):\n    ar = all_reduce(g, {reduce_op!r}, 'all')\n"
    lines, value = [f"{CUBE}group('all', {whole})\n\ndef graph(g: f32[8]):"], "g"
    for k, group in enumerate(groups):
        lines += [f"    ar{k} = all_reduce({value}, {reduce_op!r}, {group!r})", f"    w{k} = wait(ar{k})"]
        value = f"w{k}"
    at_once = weft.parse(f"{text}    w = wait(ar)\n    return [w]\n")
    in_turn = weft.parse("\n".join([*lines, f"    return [{value}]\n"]))
    assert bool(prove(in_turn, at_once, reassociates=True)) is is_same
    if reduce_op == "sum":
        assert weft.verify(in_turn, at_once, ranks=8).equal is is_same


@pytest.mark.parametrize(
    ("groups", "given", "cluster_name", "elements", "expected"),
    [
        # A chain sends whole tensors between nodes. Three launches of a small one take longer than two.
        (("outer", "inner"), NODES, "h100-4x8", 1 << 22, THREE_LAUNCHES),
        (("outer", "inner"), NODES, "h100-4x8", 256, [(Kind.ALL_REDUCE, "outer"), (Kind.ALL_REDUCE, "inner")]),
        # NCCL's all-reduce of all ranks is the fastest on rails, and the slower one where nodes share a link.
        (("outer", "inner"), WITH_ALL, "h100-4x8", 1 << 22, [(Kind.ALL_REDUCE, "all")]),
        (("all",), WITH_ALL, "h100-4x8", 1 << 22, [(Kind.ALL_REDUCE, "all")]),
        (("all",), WITH_ALL, "ethernet-h100-4x8", 1 << 22, THREE_LAUNCHES),
        # Three launches of 1 MiB would be faster alone, but not in a bucket.
        (("all",), WITH_ALL, "h100-4x8", 1 << 18, [(Kind.ALL_REDUCE, "all")]),
    ],
)
def test_a_sum_takes_the_form_that_is_fastest_on_the_cluster(
    groups: tuple[str, ...], given: str, cluster_name: str, elements: int, expected: list[tuple[Kind, str]]
):
    before = sum_over(*groups, given=given, elements=elements)
    run = Pipeline.parse(DECOMPOSE).run(before, cluster=cluster_name)
    assert launches(run) == expected
    assert prove(before, run.module, reassociates=True)
    assert not Pipeline.parse(DECOMPOSE).run(run.module, cluster=cluster_name).log[0].changed


def test_a_sum_whose_ranks_differ_or_are_not_known_or_that_rounds_stays():
    pipeline, groups = Pipeline.parse(f"{DECOMPOSE}{{always=true}}"), ("gpu", "node")
    withheld = pipeline.run(sum_over(*groups, given=CUBE), withheld={"gpu": "its ranks hold different graphs"})
    assert [d.reason for d in withheld.log[0].step.declined] == [Reason.OTHER_RANKS]
    module = sum_over(*groups, given=CUBE)
    module.meta[TABLE_KEY] = replace(module.meta[TABLE_KEY], unplaced=frozenset({"gpu"}))
    assert [d.reason for d in pipeline.run(module).log[0].step.declined] == [Reason.UNSUPPORTED_FORM]
    rounded = pipeline.run(sum_over(*groups, given=CUBE, dtype="i64", reduce_op="avg"))
    assert [d.reason for d in rounded.log[0].step.declined] == [Reason.UNSUPPORTED_FORM]


def test_axes_of_which_one_is_withheld_do_not_stand_for_their_product():
    module = sum_over("all", given="group('a', size=2)\ngroup('b', size=2, stride=2)\ngroup('all', size=4)\n")
    always = Pipeline.parse(f"{DECOMPOSE}{{always=true}}")
    assert always.run(module).log[0].changed
    assert not always.run(module, withheld={"b": "its ranks hold different graphs"}).log[0].changed


@pytest.mark.slow
def test_gradients_averaged_over_two_axes_are_planned_nearly_as_fast_as_over_all_ranks_at_once():
    meshes = {"ddp-dtensor": {"outer": 4, "inner": 8}, "ddp": {"dp": 32}}
    steps = {}
    for parallel, mesh in meshes.items():
        module = weft.zoo.load("llama-1b", parallel=parallel, mesh=mesh, layers=2, part="step")
        result = weft.optimize(module, cluster="h100-4x8", verify="equivalence")
        steps[parallel] = weft.simulate(result.module, "h100-4x8").step_us
    assert steps["ddp-dtensor"] < 1.15 * steps["ddp"]


@pytest.mark.slow
def test_hybrid_sharding_as_dtensor_writes_it_is_planned_as_the_form_that_scatters_first():
    steps = []
    for parallel in ("hsdp-dtensor", "hsdp"):
        module = weft.zoo.load("llama-1b", parallel=parallel, mesh={"replicate": 32, "shard": 8}, layers=2, part="step")
        result = weft.optimize(module, cluster="h100-32x8", verify="equivalence")
        steps.append(weft.simulate(result.module, "h100-32x8").step_us)
        assert result.plan.evidence is not None
        assert result.plan.evidence.gap >= 0
    assert steps[0] <= 1.001 * steps[1]
