"""Agreement of all ranks: what passes, what is found, and how it is named."""

from __future__ import annotations

import time

import pytest
import torch.distributed as dist

import weft
from tests.unit.conftest import fake_mesh
from tests.unit.graph.test_groups import trace, trace_without_groups
from tests.unit.verification.pipelines import pipeline
from tests.versions import needs_transfers
from weft.errors import VerificationError
from weft.graph.groups import Group, read_groups
from weft.passes.pipeline import Pipeline
from weft.plan.decision import Reason
from weft.verification.agreement.agreement import AgreementFault, Finding, check, read_orders, withheld
from weft.verification.agreement.issue_order import (
    IssuedLaunch,
    IssuedTransfer,
    IssuedWait,
    IssueOrder,
    LaunchSignature,
    Splits,
)
from weft.verification.agreement.world import World
from weft.verification.comparison import compare, example_inputs
from weft.verification.symbolic.equivalence import prove
from weft.verification.virtual.cluster import VirtualCluster

PAIR = "group('dp', size=2)\ngroup('tp', size=2)\n"


def graph(*lines: str, head: str = PAIR, inputs: str = "x: f32[4], y: f32[8]") -> str:
    body = "".join(f"    {line}\n" for line in lines)
    return f"{head}\ndef graph({inputs}):\n{body}    return [x]\n"


def only(*texts: str, backend: str = "nccl") -> Finding:
    (finding,) = check(texts, backend=backend).findings  # type: ignore[arg-type]
    return finding


REDUCE = ("a = all_reduce(x, 'sum', 'dp')", "wa = wait(a)")
GATHER = ("b = all_gather(y, 2, 'dp')", "wb = wait(b)")

# A pipeline.


@needs_transfers
@pytest.mark.parametrize("microbatches", [1, 2, 3, 4, 9])
def test_a_pipeline_of_four_stages_with_a_graph_each_agrees(microbatches: int):
    found = check(pipeline(4, microbatches))
    assert (found.holds, found.num_ranks, found.num_graphs) == (True, 16, 4)
    assert str(found) == f"16 ranks agree: 4 graphs, {found.num_launches} launches"


@needs_transfers
def test_the_pipeline_that_agrees_runs_on_the_virtual_cluster():
    modules = [weft.parse(text) for text in pipeline(4, 5)]
    inputs = example_inputs(modules[0], 16)
    VirtualCluster(16).run(modules, inputs, [read_groups(module) for module in modules])


@needs_transfers
def test_sends_and_receives_that_cross_unbatched_are_named_for_nccl_alone():
    texts = pipeline(4, 6, batched=False)
    assert check(texts, backend="gloo").holds
    (finding,) = check(texts).findings
    assert finding.fault is AgreementFault.INTERLEAVING
    assert finding.sentence == (
        "launches that may deadlock on NCCL: rank 8 launches isend_f1 of group 'pp', which rank 12 launches "
        "after isend_b0 of group 'pp'; rank 12 launches isend_b0 of group 'pp', which rank 8 launches after isend_f1 "
        "of group 'pp'"
    )


@needs_transfers
def test_a_send_that_is_dropped_on_one_rank_is_named():
    texts = pipeline(4, 4)
    texts[1] = "".join(
        line for line in texts[1].splitlines(keepends=True) if "isend_f0 " not in line and "isend_f0)" not in line
    )
    (finding,) = (f for f in check(texts).findings if f.fault is AgreementFault.TRANSFER)
    # The last receive is the one that is left over, since transfers of a tag match in order.
    assert finding.sentence.startswith(
        "rank 1 sends 3 times to rank 5 with tag 0 in group 'pp', which receives 4 times"
    )
    assert finding.rank == 5


def reduces_early(text: str) -> str:
    """The graph of a stage that reduces its gradients before its first backward."""
    lines = text.splitlines(keepends=True)
    moved = [line for line in lines if line.startswith(("    grad", "    done"))]
    first = next(i for i, line in enumerate(lines) if line.startswith("    tp_b0"))
    return "".join([*lines[:first], *moved, *(line for line in lines[first:] if line not in moved)])


@needs_transfers
def test_a_circle_through_two_replicas_of_a_pipeline_is_named():
    texts = pipeline(4, 8)
    texts[2] = reduces_early(texts[2])
    assert check(texts).holds  # the other replica needs nothing of this one before it reduces
    texts[12] = reduces_early(texts[12])
    findings = check(texts).findings
    assert [finding.fault for finding in findings] == [AgreementFault.CYCLE]
    ranks = [at.rank for at in findings[0].where]
    assert {2, 12} < set(ranks)
    assert "rank 2 at done waits for grad of group 'dp', which rank 0 launches after in_b0" in findings[0].sentence


@needs_transfers
def test_stages_that_are_planned_each_by_itself_agree_and_compute_the_same():
    reduced = "    done = wait(grad)\n"
    more = f"    more = all_reduce(v, 'sum', 'dp')\n{reduced}    also = wait(more)\n"
    texts = [
        text.replace("w: f32[4, 4]):", "w: f32[4, 4], v: f32[2, 4]):")
        .replace(reduced, more)
        .replace("[done]", "[done, also]")
        for text in pipeline(4, 4)
    ]
    held = withheld(texts)
    assert all(groups.keys() == {"pp"} for groups in held)
    before = {text: weft.parse(text) for text in texts}
    passes = Pipeline.parse("bucket-all-reduces,hoist-launches,sink-waits")
    runs = {text: passes.run(module, withheld=held[texts.index(text)]) for text, module in before.items()}
    assert all("of group 'dp'" in run.log[0].step.applied[-1].sentence for run in runs.values())
    sides = [[before[text] for text in texts], [runs[text].module for text in texts]]
    found = [check(side) for side in sides]
    assert [agreement.holds for agreement in found] == [True, True]
    assert found[1].num_launches == found[0].num_launches - 16
    inputs = example_inputs(sides[0][0], 16)
    results = [VirtualCluster(16).run(side, inputs, [read_groups(module) for module in side]) for side in sides]
    assert compare(*results, num_terms=2).bitwise


# Orders of one group.


def test_two_launches_that_are_swapped_on_one_rank():
    finding = only(graph(*REDUCE, *GATHER), graph(*GATHER, *REDUCE))
    assert finding == Finding(
        AgreementFault.ORDER,
        "dp",
        ((1, "b"), (0, "a")),  # type: ignore[arg-type]
        "the ranks of group 'dp' disagree on launch 1: the kind is all_reduce on rank 0, all_gather on rank 1",
    )
    assert str(finding).endswith("\n    launch the collectives of a group in the same order on every rank")


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("a = all_reduce(x, 'max', 'dp')", "the reduction is sum on rank 0, max on rank 1"),
        ("a = all_reduce(y, 'sum', 'dp')", "the number of elements is 4 on rank 0, 8 on rank 1"),
        ("a = all_gather(x, 2, 'dp')", "the kind is all_reduce on rank 0, all_gather on rank 1"),
        ("a = broadcast(x, 1, 'dp')", "the kind is all_reduce on rank 0, broadcast on rank 1"),
    ],
)
def test_a_launch_that_differs_on_one_rank(line: str, what: str):
    finding = only(graph(*REDUCE), graph(line, "wa = wait(a)"))
    assert finding.sentence == f"the ranks of group 'dp' disagree on launch 1: {what}"


def test_another_dtype_form_or_source():
    plain, half = graph(*REDUCE), graph(*REDUCE, inputs="x: bf16[4], y: f32[8]")
    assert "the dtype is f32 on rank 0, bf16 on rank 1" in only(plain, half).sentence
    listed = graph("l = all_reduce_coalesced([x], 'sum', 'dp')", "a = l[0]", "wa = wait(a)")
    assert "the form is plain on rank 0, coalesced on rank 1" in only(plain, listed).sentence
    roots = [graph(f"a = broadcast(x, {root}, 'dp')", "wa = wait(a)") for root in (0, 1)]
    assert "the source is 0 on rank 0, 1 on rank 1" in only(*roots).sentence


def test_the_rank_that_stands_alone_is_the_one_that_is_named():
    head = "group('dp', size=4)\n"
    texts = [graph(*REDUCE, head=head)] * 4
    texts[0] = texts[0].replace("'sum'", "'max'")
    finding = only(*texts)
    assert (finding.rank, finding.node, finding.group) == (0, "a", "dp")
    assert "the reduction is max on rank 0, sum on rank 1" in finding.sentence


def test_a_launch_that_a_rank_has_not():
    finding = only(graph(*REDUCE, *GATHER), graph(*REDUCE))
    assert finding.fault is AgreementFault.MISSING
    counts = "rank 1 launches 1 collective and rank 0 launches 2 collectives"
    assert finding.sentence == f"in group 'dp', {counts}: b has no partner"
    assert (finding.rank, finding.node) == (1, "a")


def test_a_rank_that_launches_nothing_at_all():
    finding = only(graph(*REDUCE), graph("z = neg(x)"))
    assert finding.fault is AgreementFault.MISSING
    assert finding.where == ((1, "no launch"), (0, "a"))


def test_splits_that_do_not_fit_are_named_and_uneven_ones_that_fit_are_not():
    def exchange(out: list[int], into: list[int]) -> str:
        return graph(f"a = all_to_all(y, {out}, {into}, 'dp')", "wa = wait(a)")

    assert check([exchange([6, 6], [6, 2]), exchange([2, 2], [6, 2])]).holds
    finding = only(exchange([6, 5], [6, 2]), exchange([2, 2], [6, 2]))
    assert finding.sentence == (
        "the ranks of group 'dp' disagree on launch 1: rank 1 sends 6 elements to rank 0, which expects 5"
    )
    same = exchange([6, 2], [6, 2])
    assert "rank 0 sends 2 elements to rank 1, which expects 6" in only(same, same).sentence


def test_one_graph_for_all_ranks_agrees():
    assert check([weft.parse(graph(*REDUCE, *GATHER))] * 8).holds


# Transfers.

SEND = ("s = send(x, 1, 0, 'dp')", "ws = wait(s)")
RECEIVE = ("v = clone(x)", "r = recv(v, 0, 0, 'dp')", "wr = wait(r)")


@needs_transfers
@pytest.mark.parametrize(
    ("sender", "receiver", "sentence"),
    [
        (SEND, (), "rank 0 sends once to rank 1 with tag 0 in group 'dp', which receives never: s has no partner"),
        ((), RECEIVE, "rank 0 sends never to rank 1 with tag 0 in group 'dp', which receives once: r has no partner"),
        (
            SEND,
            (RECEIVE[0], "r = recv(v, 0, 3, 'dp')", RECEIVE[2]),
            "rank 0 sends once to rank 1 with tag 0 in group 'dp', which receives never: s has no partner",
        ),
        (
            SEND,
            ("v = clone(y)", *RECEIVE[1:]),
            "transfer 1 of group 'dp' from rank 0 to rank 1 with tag 0: s sends 4 elements of f32, "
            "r expects 8 elements of f32",
        ),
        (
            ("s = send(x, 4, 0, 'dp')", "ws = wait(s)"),
            (),
            "s of rank 0 names peer 4, which is not another rank within the group, which has 2 ranks",
        ),
    ],
)
def test_a_transfer_without_its_other_end(sender: tuple[str, ...], receiver: tuple[str, ...], sentence: str):
    findings = check([graph(*sender), graph(*receiver)]).findings
    assert findings[0].fault is AgreementFault.TRANSFER
    assert findings[0].sentence == sentence


@needs_transfers
def test_tags_in_two_orders_are_for_gloo_only():
    first = graph("s = send(x, 1, 7, 'dp')", "t = send(x, 1, 8, 'dp')", "ws = wait(s)", "wt = wait(t)")
    second = graph(
        "v = clone(x)",
        "u = clone(x)",
        "r = recv(v, 0, 8, 'dp')",
        "q = recv(u, 0, 7, 'dp')",
        "wr = wait(r)",
        "wq = wait(q)",
    )
    assert check([first, second], backend="gloo").holds
    finding = next(f for f in check([first, second]).findings if f.fault is AgreementFault.TAGS)
    assert finding.sentence == (
        "transfer 1 in group 'dp' from rank 0 to rank 1 is sent with tag 7 and received with tag 8, "
        "but NCCL ignores tags"
    )


@needs_transfers
def test_a_wait_for_one_transfer_of_a_batch_waits_for_no_other():
    def batch(first: str, second: str, peer: int) -> str:
        return graph(
            "v = clone(x)",
            f"p = batch_p2p(['isend', 'irecv'], [{peer}, {peer}], [0, 0], [x, v], 'dp')",
            "p0 = p[0]",
            "p1 = p[1]",
            first,
            second,
        )

    waits = ("w1 = wait(p1)", "w0 = wait(p0)")
    assert check([batch(*waits, 1), batch(*waits, 0)]).holds
    late = graph(
        "v = clone(x)",
        "r = recv(v, 0, 0, 'dp')",
        "wr = wait(r)",
        "s = send(x, 0, 0, 'dp')",
        "ws = wait(s)",
    )
    # Rank 0 has sent when rank 1 receives, and only then does rank 1 send: no circle.
    assert check([batch(*waits, 1), late]).holds


# Circles.


def test_a_cyclic_wait_of_two_groups():
    first = graph(*REDUCE, "c = all_reduce(y, 'sum', 'tp')", "wc = wait(c)")
    second = graph("c = all_reduce(y, 'sum', 'tp')", "wc = wait(c)", *REDUCE)
    finding = only(first, second)
    assert finding.fault is AgreementFault.CYCLE
    assert finding.where == ((0, "wa"), (1, "wc"))
    assert finding.sentence == (
        "cyclic wait: rank 0 at wa waits for a of group 'dp', which rank 1 launches after wc; "
        "rank 1 at wc waits for c of group 'tp', which rank 0 launches after wa"
    )


def test_two_groups_that_share_two_ranks_launched_in_opposite_order():
    both = ("a = all_reduce(x, 'sum', 'dp')", "c = all_reduce(y, 'sum', 'tp')")
    waits = ("wa = wait(a)", "wc = wait(c)")
    texts = [graph(*both, *waits), graph(*reversed(both), *waits)]
    assert check(texts, backend="gloo").holds
    finding = only(*texts)
    assert finding.fault is AgreementFault.INTERLEAVING
    assert finding.where == ((0, "a"), (1, "c"))
    assert finding.sentence == (
        "launches that may deadlock on NCCL: rank 0 launches a of group 'dp', which rank 1 launches after "
        "c of group 'tp'; rank 1 launches c of group 'tp', which rank 0 launches after a of group 'dp'"
    )


@needs_transfers
def test_a_circle_of_four_ranks_that_all_receive_first():
    head = "group('ring', size=4)\n"
    texts = [
        graph(
            "v = clone(x)",
            f"r = recv(v, {(rank - 1) % 4}, 0, 'ring')",
            "wr = wait(r)",
            f"s = send(x, {(rank + 1) % 4}, 0, 'ring')",
            "ws = wait(s)",
            head=head,
        )
        for rank in range(4)
    ]
    finding = only(*texts)
    assert finding.fault is AgreementFault.CYCLE
    assert sorted(at.rank for at in finding.where) == [0, 1, 2, 3]
    assert "rank 0 at wr waits for r of group 'ring', which rank 3 launches after wr" in finding.sentence


def test_a_launch_that_is_returned_unwaited_is_complete_at_the_end():
    text = graph("a = all_reduce(x, 'sum', 'dp')").replace("return [x]", "return [a]")
    (order,) = read_orders([text])
    assert order.events[-1] == IssuedWait("the end of the graph", ((0, 0),))
    assert check([text] * 2).holds


def test_waits_for_views_and_for_buffers_in_place_are_found():
    text = graph(
        "v = clone(x)",
        "a = all_reduce_(v, 'sum', 'dp')",
        "f = view(v, [2, 2])",
        "w = wait(f)",
        "l = all_gather_coalesced([x, y], 2, 'tp')",
        "l1 = l[1]",
        "w1 = wait(l1)",
    )
    (order,) = read_orders([text])
    waits = [event for event in order.events if isinstance(event, IssuedWait)]
    assert waits[:2] == [IssuedWait("w", ((0, 0),)), IssuedWait("w1", ((1, 0),))]


def test_an_operator_without_a_wait_is_complete_when_it_returns():
    line = "r = _dtensor.shard_dim_alltoall.default(z, {}, {}, 'dp')"
    texts = [graph("z = view(y, [2, 4])", line.format(*dims)) for dims in ((0, 1), (1, 0))]
    (order,) = read_orders(texts[:1])
    assert [type(event) for event in order.events] == [IssuedLaunch, IssuedWait]
    assert check([texts[0]] * 2).holds
    assert "the pair of dims is 0, 1 on rank 0, 1, 0 on rank 1" in only(*texts).sentence


# Groups.


def test_groups_that_ranks_name_differently_are_told_by_their_ranks():
    texts = [graph(*REDUCE, head=f"group({name!r}, size=2)\n").replace("'dp'", repr(name)) for name in ("g0", "g1")]
    assert check(texts).holds


def test_groups_of_the_same_ranks_are_told_by_their_names():
    finding = only(graph(*REDUCE), graph(*REDUCE, "c = all_reduce(x, 'sum', 'tp')", "wc = wait(c)"))
    assert (finding.fault, finding.group) == (AgreementFault.MISSING, "tp")
    assert finding.where == ((0, "no launch"), (1, "c"))


SAME_RANKS = "group('g0', size=2)\ngroup('g1', size=2, id='#1')\n"


def in_groups(*groups: str, head: str = SAME_RANKS) -> str:
    """An all-reduce in each group in turn, waited for at once."""
    lines = [
        line for k, g in enumerate(groups) for line in (f"a{k} = all_reduce(x, 'sum', {g!r})", f"w{k} = wait(a{k})")
    ]
    return graph(*lines, head=head)


def test_two_groups_of_the_same_ranks_in_opposite_order_are_a_deadlock():
    finding = only(in_groups("g0", "g1"), in_groups("g1", "g0"))
    assert finding.fault is AgreementFault.CYCLE
    assert finding.where == ((0, "w0"), (1, "w0"))
    assert check([in_groups("g0", "g1")] * 2).holds


def test_groups_of_the_same_ranks_are_told_by_what_they_are_where_names_differ():
    renamed = in_groups("g1", "g0", head="group('g1', size=2)\ngroup('g0', size=2, id='#1')\n")
    assert check([in_groups("g0", "g1"), renamed]).holds
    alone = in_groups("g0", head="group('g0', size=2, id='#1')\n")
    assert AgreementFault.MISSING in {finding.fault for finding in check([in_groups("g0"), alone]).findings}


def test_groups_that_nothing_tells_apart_are_refused():
    texts = [in_groups("g0", "g1", head="group('g0', size=2)\ngroup('g1', size=2)\n")] * 2
    with pytest.raises(VerificationError) as error:
        check(texts)
    assert str(error.value) == (
        "groups: 'g0' and 'g1' have the same ranks, so they cannot be matched with the groups of other ranks\n"
        "name them by mesh axis, or say which was created first: group('g1', ..., id='#1')"
    )
    modules = [weft.parse(text) for text in texts]
    inputs = example_inputs(modules[0], 2)
    with pytest.raises(VerificationError, match="cannot be matched"):
        VirtualCluster(2).run(modules, inputs, [read_groups(module) for module in modules])
    VirtualCluster(2).run(modules[0], inputs, read_groups(modules[0]))  # one graph for all ranks: its names tell


def test_live_groups_of_the_same_ranks_in_opposite_order_are_a_deadlock():
    with fake_mesh():
        first, second = (dist.new_group([0, 1]).group_name for _ in range(2))
        modules = [trace(first, second), trace(second, first)]
        world = [modules[0], modules[1], *[modules[0]] * 6]
        assert [finding.fault for finding in check(world).findings] == [AgreementFault.CYCLE]
        assert not prove(*modules).proved
        assert not prove(*(weft.parse(weft.listing(module)) for module in modules)).proved


def test_groups_of_unknown_ranks_have_those_that_use_the_same_run_time_name():
    names = [("1", "3"), ("1", "4"), ("2", "3"), ("2", "4")]  # rows and columns of a mesh of two by two
    assert check([trace_without_groups(*mine) for mine in names]).holds
    swapped = [trace_without_groups(*mine) for mine in [("1", "3"), ("4", "1"), ("3", "2"), ("2", "4")]]
    assert [finding.fault for finding in check(swapped, backend="gloo").findings] == []
    assert [finding.fault for finding in check(swapped).findings] == [AgreementFault.INTERLEAVING]
    assert not check([trace_without_groups("1", "1"), trace_without_groups("1")]).holds
    with pytest.raises(VerificationError) as error:
        check([trace_without_groups("1"), trace_without_groups("2")])
    assert str(error.value) == (
        "agreement: the ranks of group '1' are unknown: it has 2 ranks, and ranks 0 launch in it\n"
        "give one graph for each rank"
    )


def test_a_rank_may_have_several_graphs_that_run_after_each_other():
    texts = [in_groups("g0"), in_groups("g1", head="group('g1', size=2, id='#1')\n")]
    assert check([texts, texts]).num_launches == 4
    assert check([texts, texts]).holds
    assert [finding.fault for finding in check([texts, texts[::-1]]).findings] == [AgreementFault.CYCLE]


def test_graphs_after_each_other_that_call_other_groups_by_one_name_stay_apart():
    head = "group('g0', size=2, id='#1')\n"
    forward, backward = read_orders([in_groups("g0"), in_groups("g0", head=head)])
    both = forward.then(backward)
    assert both.groups == {"g0": Group("g0", 2), "g0_1": Group("g0_1", 2, id="#1")}
    assert [launch.group for launch in both.launches] == ["g0", "g0_1"]
    assert [f.fault for f in check([both, backward.then(forward)]).findings] == [AgreementFault.CYCLE]


def test_ranks_that_do_not_tile_are_refused():
    with pytest.raises(VerificationError, match="groups of 2 ranks with stride 1 do not tile 3 ranks"):
        check([graph(*REDUCE)] * 3)
    text = graph(*REDUCE, head="group('dp', ranks=[[0, 1]])\n")
    with pytest.raises(VerificationError, match="rank 2 launches in group 'dp', which does not contain it"):
        check([text] * 3)


def test_a_rank_that_is_in_no_part_of_a_group_need_not_launch_in_it():
    text = graph(*REDUCE, head="group('dp', ranks=[[0, 1]])\n")
    assert check([text, text, graph("z = neg(x)")]).holds


def test_communication_in_a_nested_graph_is_refused():
    module = weft.parse("""group('dp', size=2)

def graph(p: b8[()], x: f32[2]):
    def y(z: f32[2]):
        a: f32[2] = all_reduce(z, 'sum', 'dp')
        w: f32[2] = wait(a)
        return [w]
    yes = attribute('y')
    def n(z: f32[2]):
        w: f32[2] = neg(z)
        return [w]
    no = attribute('n')
    c: (f32[2],) = higher_order.cond(p, yes, no, (x,))
    return [x]
""")
    with pytest.raises(VerificationError, match="c communicates inside a nested call, by all_reduce"):
        check([module] * 2)


# Orders as values.


@needs_transfers
def test_an_order_comes_back_from_its_text():
    orders = read_orders([*pipeline(4, 3)[::4], graph("a = all_to_all(y, [6, 2], [6, 2], 'dp')", "w = wait(a)")])
    assert [IssueOrder.from_json(order.to_json()) for order in orders] == orders
    assert len({order.digest for order in orders}) == 5
    for broken in ("", "[]", '{"groups": [], "events": [["launch", "a"]]}', '{"events": []}'):
        with pytest.raises(VerificationError, match="this is not an issue order"):
            IssueOrder.from_json(broken)


def test_orders_behind_each_other_are_one_order():
    forward, backward = read_orders([graph(*REDUCE), graph(*GATHER)])
    both = read_orders([graph(*REDUCE, *GATHER)])[0]
    assert forward.then(backward) == both


@needs_transfers
def test_ranks_that_cannot_be_told_apart_are_one_kind():
    world = World.of(read_orders(pipeline(4, 3)))
    assert len(set(world.kinds())) == 4
    assert len(set(World.of(read_orders([graph(*REDUCE)] * 64)).kinds())) == 1


def test_ranks_that_meet_different_kinds_are_of_different_kinds():
    texts = [graph(*REDUCE)] * 4
    texts[3] = texts[3].replace("a = ", "c = ").replace("wait(a)", "wait(c)")
    assert World.of(read_orders(texts)).kinds() == (0, 0, 1, 2)


# Time.


def order_of_many(rank: int, num_launches: int, *, transfers: bool = True) -> IssueOrder:
    """A rank of 64 in groups of eight and over all; every rank's names differ, so that no two orders are equal."""
    groups = {"tp": Group("tp", 8), "dp": Group("dp", 8, 8), "pp": Group("pp", 64)}
    sorts = [
        LaunchSignature("all_reduce", reduction="sum", dtype="f32", number_of_elements=(size,)) for size in range(4)
    ]
    events: list[IssuedLaunch | IssuedWait] = []
    for number in range(num_launches):
        if transfers and number % 10 == 0:  # a ring: all send to the next and receive from the one before
            ends = (
                IssuedTransfer(True, (rank + 1) % 64, 0, "f32", 8),
                IssuedTransfer(False, (rank - 1) % 64, 0, "f32", 8),
            )
            events.append(
                IssuedLaunch(f"p{number}r{rank}", "pp", LaunchSignature("batch_p2p", number_of_tensors=2), None, ends)
            )
            events.append(IssuedWait(f"w{number}", ((number, 0), (number, 1))))
            continue
        events.append(IssuedLaunch(f"c{number}r{rank}", ("tp", "dp")[number % 2], sorts[number % 4]))
        events.append(IssuedWait(f"w{number}", ((number, 0),)))
    return IssueOrder(tuple(events), groups)


def seconds_for(orders: list[IssueOrder]) -> float:
    start = time.process_time()
    assert check(orders).holds
    return time.process_time() - start


def test_ten_thousand_launches_of_64_ranks_with_one_graph_take_no_longer_than_one_rank():
    order = order_of_many(0, 10000, transfers=False)
    assert set(World.of([order] * 64).kinds()) == {0}
    assert seconds_for([order] * 64) < 5


@pytest.mark.slow
def test_time_grows_linearly_where_no_two_of_64_ranks_are_alike():
    times = [seconds_for([order_of_many(rank, num) for rank in range(64)]) for num in (500, 2000)]
    assert times[1] < 10 * times[0]


def test_even_splits_are_those_of_one_number():
    assert Splits((2, 2), (2, 2)).are_even
    assert not Splits((2, 1), (2, 2)).are_even


# What may be merged.


def test_a_group_whose_ranks_show_different_sequences_is_withheld_from_merging():
    two = ("a = all_gather(x, 2, 'dp')", "wa = wait(a)", "b = all_gather(y, 2, 'dp')", "wb = wait(b)")
    apart = ("a = all_gather(x, 2, 'dp')", "b = all_gather(y, 2, 'dp')", "wa = wait(a)", "wb = wait(b)")
    other = ("c = all_gather(x, 2, 'tp')", "wc = wait(c)", "d = all_gather(y, 2, 'tp')", "wd = wait(d)")
    texts = [graph(*two, *other), graph(*apart, *other)]
    assert check(texts).holds
    found = withheld(texts)
    why = "rank 0 and rank 1 have different sequences of launches and waits in group 'dp'"
    assert found == [{"dp": why}, {"dp": why}]
    run = Pipeline.parse("bucket-all-gathers").run(weft.parse(texts[0]), withheld=found[0])
    decisions = {d.nodes[0]: d for d in run.log[0].step.decisions}
    assert decisions["a"].reason is decisions["b"].reason is Reason.OTHER_RANKS
    assert decisions["a"].sentence == f"a stays: {why}"
    assert decisions["c"].applied
    with pytest.raises(weft.WeftError, match="a stays: rank 0 and rank 1 have different sequences"):
        Pipeline.parse("bucket-all-gathers").run(weft.parse(texts[0]), withheld=found[0], strict=True)


@needs_transfers
def test_a_group_whose_ranks_show_one_sequence_in_different_graphs_is_not_withheld():
    assert withheld([graph(*REDUCE), graph("z = neg(x)", *REDUCE)]) == [{}, {}]
    assert withheld(pipeline(4, 3))[0].keys() == {"pp"}


def test_the_planner_says_that_withheld_launches_stay_apart():
    launches = ("a = all_reduce(x, 'sum', 'dp')", "b = all_reduce(x2, 'sum', 'dp')", "wa = wait(a)", "wb = wait(b)")
    text = graph("x2 = neg(x)", *launches, "z = add(wa, wb)").replace("return [x]", "return [z]")
    planner = Pipeline.parse("schedule-overlap")
    run = planner.run(weft.parse(text), withheld={"dp": "another rank has one of them"})
    (decision,) = (each for each in run.log[0].step.decisions if each.reason is Reason.OTHER_RANKS)
    assert decision.nodes == ("a", "b")
    assert not any(each.reason is Reason.OTHER_RANKS for each in planner.run(weft.parse(text)).log[0].step.decisions)


def test_withheld_collectives_are_not_deduped_either():
    again = ("a = all_reduce(x, 'sum', 'dp')", "b = all_reduce(x, 'sum', 'dp')", "wa = wait(a)", "wb = wait(b)")
    added = (*again, "z = add(wa, wb)")
    why = {"dp": "another rank has one of them"}
    for spec in ("dedupe-collectives", "dedupe-reduce-scatters"):
        text = graph(*added).replace("return [x]", "return [z]")
        assert Pipeline.parse(spec).run(weft.parse(text)).log[0].changed
        run = Pipeline.parse(spec).run(weft.parse(text), withheld=why)
        assert not run.log[0].changed
        (decision,) = run.log[0].step.decisions
        assert decision.reason is Reason.OTHER_RANKS
        assert decision.sentence.endswith(": another rank has one of them")
