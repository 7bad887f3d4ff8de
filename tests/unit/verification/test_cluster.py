"""The virtual cluster: what collectives compute, and what it refuses. Every message is compared with its text."""

import operator
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, GraphModule

from tests.unit.verification.communication import EVERY_FORM, HEADER, PAIR, module_of, run, run_real
from tests.versions import needs_transfers
from weft.compat import storage_key
from weft.errors import VerificationError
from weft.graph.groups import Group, GroupTable, read_groups
from weft.verification.comparison import compare
from weft.verification.real_ranks.world import RealRanks
from weft.verification.virtual.cluster import VirtualCluster

FLOATS = ("f64", "f32", "bf16", "f16")
WHOLE = ("i64", "i32", "i8", "u8", "b8")


def real_ranks(test: Callable[..., None]) -> Callable[..., None]:
    return pytest.mark.distributed(pytest.mark.xdist_group("ranks")(test))


def message_of(modules: GraphModule | list[GraphModule], num_ranks: int = 2, **arguments: object) -> str:
    """The text of the error that a run ends with."""
    with pytest.raises(VerificationError) as caught:
        run(modules, num_ranks, **arguments)  # type: ignore[arg-type]
    return str(caught.value)


# Values.


@real_ranks
@pytest.mark.parametrize("name", EVERY_FORM)
def test_every_kind_and_form_gives_what_two_real_ranks_give(ranks: RealRanks, name: str):
    module = module_of(EVERY_FORM[name])
    verdict = compare(run(module), run_real(ranks, module), num_terms=2, backend="gloo")
    assert str(verdict) == "bitwise equal on 2 gloo ranks"


@real_ranks
@pytest.mark.parametrize("name", EVERY_FORM)
def test_every_kind_and_form_gives_what_a_mesh_of_two_by_two_real_ranks_gives(ranks: RealRanks, name: str):
    body = EVERY_FORM[name].replace(
        "return [", "m = all_reduce(keep, 'sum', 'tp')\n            mw = wait(m)\n            return [mw, "
    )
    body = body.replace("):\n", "):\n            keep = clone({})\n".format(body.split("(")[1].split(":")[0]), 1)
    module = module_of(body, HEADER)
    verdict = compare(run(module, 4), run_real(ranks, module, 4), num_terms=2, backend="gloo")
    assert str(verdict) == "bitwise equal on 4 gloo ranks"


def reductions(dtype: str, names: str) -> GraphModule:
    lines = [
        f"    a{k} = all_reduce(x, {name!r}, 'world')\n    w{k} = wait(a{k})" for k, name in enumerate(names.split())
    ]
    returned = ", ".join(f"w{k}" for k in range(len(lines)))
    return module_of(f"def graph(x: {dtype}[16]):\n" + "\n".join(lines) + f"\n    return [{returned}]", HEADER)


@real_ranks
@pytest.mark.parametrize("dtype", FLOATS)
def test_reductions_of_floats_give_what_real_ranks_give(ranks: RealRanks, dtype: str):
    module = reductions(dtype, "sum avg product min max")
    assert compare(run(module, 4), run_real(ranks, module, 4), num_terms=4).bitwise


@real_ranks
@pytest.mark.parametrize("dtype", WHOLE)
def test_reductions_of_whole_numbers_and_bools_give_what_real_ranks_give(ranks: RealRanks, dtype: str):
    module = reductions(dtype, "sum product min max band bor bxor")
    assert compare(run(module, 4), run_real(ranks, module, 4), num_terms=4).bitwise


def test_bfloat16_is_added_in_the_order_of_ranks_in_bfloat16():
    module = reductions("bf16", "sum")
    values = [256.0, 1.0, 1.0, 256.0]
    first = run(module, 4, [[torch.full((16,), value, dtype=torch.bfloat16)] for value in values])[0].outputs[0]
    assert first[0].item() == 512.0  # 256 + 1 rounds back to 256, twice


def uneven(rank: int) -> GraphModule:
    out_splits = ([2, 2], [1, 1])[rank]
    return module_of(f"""
        def graph(x: f32[3, 2]):
            a = all_to_all(x, {out_splits}, [2, 1], 'dp')
            w = wait(a)
            return [w]""")


@real_ranks
def test_an_all_to_all_with_uneven_splits_gives_what_real_ranks_give(ranks: RealRanks):
    modules = [uneven(0), uneven(1)]
    virtual = run(modules)
    assert [result.outputs[0].shape[0] for result in virtual] == [4, 2]
    assert compare(virtual, run_real(ranks, modules), num_terms=1).bitwise


SENDER = """
    def graph(x: f32[3]):
        a = send(x, 1, 7, 'dp')
        y = neg(x)
        b = send(y, 1, 8, 'dp')
        wa = wait(a)
        wb = wait(b)
        return [wa]"""
RECEIVER = """
    def graph(x: f32[3]):
        z = clone(x)
        b = recv(x, 0, 8, 'dp')
        a = recv(z, 0, 7, 'dp')
        wb = wait(b)
        wa = wait(a)
        return [wa]"""
EXCHANGE = """
    def graph(x: f32[3], y: f32[3]):
        p = batch_p2p(['isend', 'irecv'], [{peer}, {peer}], [0, 0], [x, y], 'dp')
        p0 = p[0]
        p1 = p[1]
        w0 = wait(p0)
        w1 = wait(p1)
        return [w1]"""


@needs_transfers
@real_ranks
@pytest.mark.parametrize("texts", [(SENDER, RECEIVER), (EXCHANGE.format(peer=1), EXCHANGE.format(peer=0))])
def test_transfers_give_what_real_ranks_give(ranks: RealRanks, texts: tuple[str, str]):
    modules = [module_of(text) for text in texts]
    assert compare(run(modules), run_real(ranks, modules), num_terms=1).bitwise


@needs_transfers
@real_ranks
def test_peers_count_within_the_group(ranks: RealRanks):
    modules = [module_of((SENDER, SENDER, RECEIVER, RECEIVER)[r], HEADER) for r in range(4)]  # dp is [0, 2], [1, 3]
    virtual = run(modules, 4)
    assert torch.equal(virtual[3].outputs[0], virtual[1].inputs[0])
    assert compare(virtual, run_real(ranks, modules, 4), num_terms=1).bitwise


def test_eight_bit_floats_are_gathered_and_broadcast():
    module = module_of("""
        def graph(x: f8e4m3fn[2]):
            a = all_gather(x, 2, 'dp')
            b = broadcast(x, 1, 'dp')
            wa = wait(a)
            wb = wait(b)
            return [wa, wb]""")
    first, second = run(module)
    assert (
        first.outputs[0].tolist()
        == second.outputs[0].tolist()
        == [*first.inputs[0].tolist(), *second.inputs[0].tolist()]
    )
    assert first.outputs[1].tolist() == second.inputs[0].tolist()


def test_a_group_may_part_the_ranks_unevenly():
    module = module_of(
        """
        def graph(x: f32[2]):
            a = all_reduce(x, 'sum', 'odd')
            w = wait(a)
            return [w]""",
        "group('odd', ranks=[[0, 2, 1], [3]])\n",
    )
    results = run(module, 4, [[torch.full((2,), 10.0**rank)] for rank in range(4)])
    assert [result.outputs[0][0].item() for result in results] == [111.0, 111.0, 111.0, 1000.0]


def test_ranks_may_call_one_group_by_different_run_time_names():
    text = """
        def graph(x: f32[2]):
            a = all_reduce(x, 'sum', '{name}')
            w = wait(a)
            return [w]"""
    modules = [module_of(text.format(name=name), f"group('{name}', size=2)\n") for name in ("n7", "n8")]
    tables = [GroupTable({"dp": Group("dp", 2)}, {"dp": name}) for name in ("n7", "n8")]
    results = VirtualCluster(2).run(modules, [[torch.ones(2)], [torch.ones(2)]], tables)
    assert results[0].outputs[0].tolist() == [2.0, 2.0]


def test_random_numbers_differ_by_rank_repeat_by_seed_and_leave_the_callers_alone():
    module = module_of("""
        def graph(x: f32[4]):
            r = rand_like(x)
            s = rand_like(x)
            return [r, s]""")
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    first, again, other = run(module, seed=1), run(module, seed=1), run(module, seed=2)
    assert torch.equal(torch.rand(1), expected)
    assert torch.equal(first[0].outputs[0], again[0].outputs[0])
    assert not torch.equal(first[0].outputs[0], first[1].outputs[0])
    assert torch.equal(first[1].outputs[0], other[0].outputs[0])
    assert not torch.equal(first[0].outputs[0], first[0].outputs[1])


@real_ranks
def test_random_numbers_are_those_of_real_ranks(ranks: RealRanks):
    module = module_of("""
        def graph(x: f32[4]):
            r = rand_like(x)
            s = bernoulli.default(r)
            return [r, s]""")
    assert compare(run(module, seed=3), run_real(ranks, module, seed=3), num_terms=1).bitwise


# Inputs, constants, nested calls.


def test_inputs_are_never_modified_and_their_final_state_is_returned():
    module = module_of("""
        def graph(x: f32[2]):
            a = all_reduce_(x, 'sum', 'dp')
            w = wait(a)
            y = add_(w, 1)
            return []""")
    given = [[torch.tensor([1.0, 2.0])], [torch.tensor([3.0, 4.0])]]
    results = run(module, inputs=given)
    assert given[0][0].tolist() == [1.0, 2.0]
    assert [result.inputs[0].tolist() for result in results] == [[5.0, 7.0], [5.0, 7.0]]


def test_inputs_that_share_a_storage_share_one_in_the_run():
    module = module_of("""
        def graph(x: f32[4], y: f32[2](strides=(2,), offset=1, base='x')):
            z = fill_.Scalar(y, 9.0)
            return [x]""")
    whole = torch.arange(4.0)
    results = run(module, inputs=[[whole, whole[1::2]]] * 2)
    assert results[0].outputs[0].tolist() == results[0].inputs[0].tolist() == [0.0, 9.0, 2.0, 9.0]
    assert results[0].inputs[1].stride() == (2,)
    assert storage_key(results[0].inputs[0]) == storage_key(results[0].inputs[1])
    assert storage_key(results[0].inputs[0]) != storage_key(results[1].inputs[0])
    assert whole.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_a_step_that_writes_a_constant_reports_it_and_leaves_the_module_alone():
    module = module_of(
        """
        def graph(x: f32[2]):
            c = attribute('count')
            y = add_(c, x)
            return [y]""",
        PAIR + "tensor('count', f32[2], [1.0, 1.0])\ntensor('other', f32[1], [1.0])\n",
    )
    results = run(module, inputs=[[torch.ones(2)], [torch.zeros(2)]])
    assert {name: value.tolist() for name, value in results[0].constants.items()} == {"count": [2.0, 2.0]}
    assert results[1].constants == {}
    assert module.count.tolist() == [1.0, 1.0]


class Scale(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return x * 2


def by_hand(build: Callable[[Graph], object], **attributes: torch.nn.Module) -> GraphModule:
    """A module from a graph that no listing describes."""
    graph = Graph()
    graph.output(build(graph))
    return GraphModule(attributes, graph)


def table() -> GroupTable:
    return GroupTable({"dp": Group("dp", 2)})


def gather(graph: Graph, x: object) -> object:
    return graph.call_function(torch.ops._c10d_functional.all_gather_into_tensor.default, (x, 2, "dp"))


def test_submodules_methods_and_functions_run_as_in_an_interpreter():
    def build(graph: Graph) -> object:
        x = graph.placeholder("x")
        doubled = graph.call_module("scale", (x,))
        summed = graph.call_function(operator.add, (doubled, 1))
        return {"y": graph.call_method("reshape", (summed, (2, 1))), "n": graph.call_function(torch.relu, (x,))}

    module = by_hand(build, scale=Scale())
    results = VirtualCluster(2).run(module, [[torch.tensor([1.0, -1.0])]] * 2, table())
    assert results[0].outputs["y"].tolist() == [[3.0], [-1.0]]
    assert results[0].outputs["n"].tolist() == [1.0, 0.0]
    assert module.scale.calls.item() == 0


def test_nested_graphs_without_communication_run_as_they_are():
    module = module_of("""
        def graph(p: b8[()], x: f32[2]):
            def yes(x: f32[2]):
                r = neg(x)
                return (r,)
            def no(x: f32[2]):
                r = abs(x)
                return (r,)
            y = attribute('yes')
            n = attribute('no')
            c: (f32[2],) = higher_order.cond(p, y, n, (x,))
            i = c[0]
            return [i]""")
    given = [[torch.tensor(rank == 0), torch.tensor([1.0, -2.0])] for rank in range(2)]
    first, second = run(module, inputs=given)
    assert first.outputs[0].tolist() == [-1.0, 2.0]
    assert second.outputs[0].tolist() == [1.0, 2.0]


def test_tensors_made_on_another_device_are_made_on_the_cpu():
    module = module_of(
        """
        def graph(x: f32[2]):
            z = zeros([2], device=device('cuda'))
            y = add(x, z)
            return [y]""".replace("f32[2])", "f32[2](device='cuda'))")
    )
    assert run(module, inputs=[[torch.ones(2)]] * 2)[0].outputs[0].tolist() == [1.0, 1.0]


# Hazards.


def test_a_write_to_what_a_gather_still_reads_is_refused():
    module = module_of("""
        def graph(x: f32[2]):
            ag0 = all_gather(x, 2, 'dp')
            v = view(x, [2, 1])
            mul_ = mul_(v, 2)
            w0 = wait(ag0)
            return [w0]""")
    assert message_of(module) == (
        "virtual cluster: mul_ writes v, which ag0 still reads (rank 0)\n"
        "    mul_: f32[2, 1] = mul_(v, 2)\n"
        "    ^^^^\n"
        "wait for ag0 first"
    )


def test_a_write_to_what_a_launch_still_writes_is_refused():
    module = module_of("""
        def graph(x: f32[2]):
            ar = all_reduce(x, 'sum', 'dp')
            fill = fill_.Scalar(ar, 0.0)
            w = wait(ar)
            return [w]""")
    assert message_of(module) == (
        "virtual cluster: fill writes ar before its wait (rank 0)\n"
        "    fill: f32[2] = fill_.Scalar(ar, 0.0)\n"
        "    ^^^^\n"
        "wait for ar first"
    )


def test_a_read_before_the_wait_is_refused_through_any_chain_of_views():
    module = module_of("""
        def graph(x: f32[2]):
            ag = all_gather(x, 2, 'dp')
            v = view(ag, [2, 2])
            t = permute(v, [1, 0])
            s = select.int(t, 0, 1)
            n = neg(s)
            w = wait(ag)
            return [n]""")
    assert message_of(module) == (
        "virtual cluster: n reads s, which ag still writes (rank 0)\n    n: f32[2] = neg(s)\n    ^\nwait for ag first"
    )


@pytest.mark.parametrize(
    "line",
    [
        "r = reshape(t, [4])",  # of a transposed tensor: a copy
        "r = contiguous(t)",
        "r = add_(y, t)",
        "r = all_reduce(t, 'sum', 'other')",
        "r = all_gather_out(t, 2, 'other', out=z)",
        "r = index.Tensor(t, [i])",
        "r = item(q)",
    ],
)
def test_whatever_looks_at_a_value_before_its_wait_is_refused(line: str):
    module = module_of(f"""
        def graph(x: f32[2], y: f32[2, 2], z: f32[4, 2], i: i64[1]):
            ag = all_gather(x, 2, 'dp')
            v = view(ag, [2, 2])
            t = permute(v, [1, 0])
            u = select.int(v, 0, 0)
            q = select.int(u, 0, 0)
            {line}
            w = wait(ag)
            return [w]""")
    assert message_of(module).startswith(
        ("virtual cluster: r reads t, which ag still", "virtual cluster: r reads q, which")
    )


@pytest.mark.parametrize(
    "line",
    [
        "r = reshape(v, [4])",  # of a contiguous tensor: a view
        "r = contiguous(v)",
        "r = zeros_like(t)",
        "r = sym_size.int(t, 0)",
        "r = split.Tensor(t, 1)",
        "r = expand(u, [3, 2])",
        "r = wait(t)",
    ],
)
def test_whatever_only_renames_a_result_or_asks_for_its_shape_is_fine_before_its_wait(line: str):
    module = module_of(f"""
        def graph(x: f32[2]):
            ag = all_gather(x, 2, 'dp')
            v = view(ag, [2, 2])
            t = permute(v, [1, 0])
            u = select.int(v, 0, 0)
            {line}
            w = wait(ag)
            return [w]""")
    assert len(run(module)) == 2


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("b = all_reduce_(x, 'sum', 'other')", "b writes x, which a still reads (rank 0)"),
        ("b = all_gather_out(y, 2, 'other', out=z)", "b writes z, which a still reads (rank 0)"),
        pytest.param("b = recv(x, 1, 0, 'other')", "b writes x, which a still reads (rank 0)", marks=needs_transfers),
    ],
)
def test_a_launch_that_writes_what_another_still_reads_is_refused(line: str, found: str):
    sent = "z" if "out=z" in line else "x"
    text = f"""
        def graph(x: f32[2], y: f32[2], z: f32[4]):
            a = all_gather({sent}, 2, 'dp')
            {line}
            w = wait(a)
            return [w]"""
    assert message_of(module_of(text)).splitlines()[0] == f"virtual cluster: {found}"


def test_two_launches_may_read_one_tensor_and_its_readers_go_on():
    module = module_of("""
        def graph(x: f32[2]):
            a = all_gather(x, 2, 'dp')
            b = all_reduce(x, 'sum', 'dp')
            n = neg(x)
            wb = wait(b)
            wa = wait(a)
            m = mul_(x, 2)
            return [wa, wb, n]""")
    assert len(run(module)) == 2


def test_each_tensor_of_a_coalesced_launch_is_in_flight_until_its_own_wait():
    text = """
        def graph(x: f32[2], y: f32[2]):
            a = all_gather_coalesced([x, y], 2, 'dp')
            a0 = a[0]
            a1 = a[1]
            w0 = wait(a0)
            m = mul_({}, 2)
            w1 = wait(a1)
            return [w0, w1]"""
    run(module_of(text.format("x")))
    assert message_of(module_of(text.format("y"))).startswith(
        "virtual cluster: m writes y, which a still reads (rank 1)"
    )


@needs_transfers
def test_a_send_reads_its_tensor_until_its_wait():
    sender = SENDER.replace("y = neg(x)", "y = neg_(x)")
    modules = [module_of(sender), module_of(RECEIVER)]
    assert message_of(modules).startswith("virtual cluster: y writes x, which a still reads (rank 0)")


@needs_transfers
def test_a_received_tensor_may_not_be_read_before_its_wait():
    modules = [module_of(SENDER), module_of(RECEIVER.replace("a = recv(z", "n = neg(x)\n        a = recv(z"))]
    assert message_of(modules).startswith("virtual cluster: n reads x, which b still writes (rank 1)")


def test_an_opaque_call_that_reads_or_writes_what_is_in_flight_is_refused():
    def reads(graph: Graph) -> object:
        return graph.call_module("called", (gather(graph, graph.placeholder("x")),))

    def writes(graph: Graph) -> object:
        x = graph.placeholder("x")
        gather(graph, x)
        return graph.call_method("mul_", (x, 2))

    for build, found in (
        (reads, "called reads all_gather_into_tensor_default before its wait (rank 0)"),
        (writes, "mul_ writes x, which all_gather_into_tensor_default still reads (rank 0)"),
    ):
        module = by_hand(build, called=torch.nn.ReLU())
        with pytest.raises(VerificationError) as caught:
            VirtualCluster(2).run(module, [[torch.ones(2)]] * 2, table())
        assert str(caught.value).splitlines()[0] == f"virtual cluster: {found}"


def test_an_exception_from_nonsense_names_the_read_that_caused_it():
    module = module_of("""
        def graph(x: i64[1], y: f32[4]):
            ag = all_gather(x, 2, 'dp')
            r = index.Tensor(y, [ag])
            w = wait(ag)
            return [r]""")
    assert message_of(module).startswith("virtual cluster: r reads ag before its wait (rank 0)")


# Ranks that do not meet.

GATHER_THEN_REDUCE = """
    def graph(x: f32[2]):
        ag = all_gather(x, 2, 'dp')
        ar = all_reduce(x, 'sum', 'dp')
        w = wait(ag)
        v = wait(ar)
        return [w]"""
REDUCE_THEN_GATHER = """
    def graph(x: f32[2]):
        ar = all_reduce(x, 'sum', 'dp')
        ag = all_gather(x, 2, 'dp')
        w = wait(ag)
        v = wait(ar)
        return [w]"""


def test_ranks_whose_order_of_a_group_differs_are_named_with_their_nodes():
    assert message_of([module_of(GATHER_THEN_REDUCE), module_of(REDUCE_THEN_GATHER)]) == (
        "virtual cluster: the ranks of group 'dp' disagree on launch 1: "
        "the kind is all_gather on rank 0, all_reduce on rank 1\n"
        "    rank 0: ag: f32[4] = all_gather(x, 2, 'dp')\n"
        "    rank 1: ar: f32[2] = all_reduce(x, 'sum', 'dp')\n"
        "launch the collectives of 'dp' in one order on every rank"
    )


@pytest.mark.parametrize(
    ("first", "second", "found"),
    [
        ("all_reduce(x, 'sum', 'dp')", "all_reduce(x, 'max', 'dp')", "the reduction is sum on rank 0, max on rank 1"),
        ("all_reduce(x, 'sum', 'dp')", "all_reduce(y, 'sum', 'dp')", "the dtype is f32 on rank 0, bf16 on rank 1"),
        (
            "all_reduce(x, 'sum', 'dp')",
            "all_reduce(z, 'sum', 'dp')",
            "the number of elements is 2 on rank 0, 4 on rank 1",
        ),
        ("broadcast(x, 0, 'dp')", "broadcast(x, 1, 'dp')", "the source is 0 on rank 0, 1 on rank 1"),
        (
            "all_reduce(x, 'sum', 'dp')",
            "all_reduce_coalesced([x], 'sum', 'dp')",
            "the form is plain on rank 0, coalesced on rank 1",
        ),
        (
            "all_reduce_coalesced([x], 'sum', 'dp')",
            "all_reduce_coalesced([x, x], 'sum', 'dp')",
            "the number of tensors is 1 on rank 0, 2 on rank 1",
        ),
        (
            "all_to_all(x, [1, 1], [1, 1], 'dp')",
            "all_to_all(x, [2, 1], [1, 1], 'dp')",
            "rank 0 sends 1 elements to rank 1, which expects 2",
        ),
    ],
)
def test_a_difference_in_what_ranks_launch_is_named(first: str, second: str, found: str):
    text = """
        def graph(x: f32[2], y: bf16[2], z: f32[4]):
            a = {}
            return [a]"""
    message = message_of([module_of(text.format(first)), module_of(text.format(second))])
    assert message.splitlines()[0] == f"virtual cluster: the ranks of group 'dp' disagree on launch 1: {found}"


def test_an_in_place_form_on_one_rank_meets_the_functional_form_on_another():
    text = """
        def graph(x: f32[2]):
            a = {}(x, 'sum', 'dp')
            w = wait(a)
            return [w]"""
    first, second = run([module_of(text.format(name)) for name in ("all_reduce", "all_reduce_")])
    assert torch.equal(first.outputs[0], second.outputs[0])


def test_a_deadlock_names_each_rank_what_it_waits_for_and_who_is_missing():
    text = """
        def graph(x: f32[2]):
            a = all_reduce(x, 'sum', '{}')
            wa = wait(a)
            b = all_reduce(x, 'max', '{}')
            wb = wait(b)
            return [wa, wb]"""
    modules = [module_of(text.format(*names)) for names in (("dp", "other"), ("other", "dp"))]
    assert message_of(modules) == (
        "virtual cluster: deadlock: no rank can continue\n"
        "    rank 0: wa waits for a of group 'dp'; not launched by rank 1 (at wa)\n"
        "    rank 1: wa waits for a of group 'other'; not launched by rank 0 (at wa)\n"
        "launch the collectives of every group in one order on all its ranks"
    )


def test_a_rank_that_ended_without_a_launch_is_named_too():
    once = "def graph(x: f32[2]):\n    a = all_reduce(x, 'sum', 'dp')\n    return [a]"
    twice = once.replace("return [a]", "b = all_reduce(x, 'sum', 'dp')\n    return [b]")
    message = message_of([module_of(once), module_of(twice)])
    assert message.splitlines()[1] == "    rank 1: output waits for b of group 'dp'; not launched by rank 0 (ended)"


@needs_transfers
def test_a_receive_that_nobody_sends_is_a_deadlock():
    silent = "def graph(x: f32[3]):\n    return [x]"
    message = message_of([module_of(silent), module_of(RECEIVER)])
    assert message.splitlines()[1] == (
        "    rank 1: wb waits for b of group 'dp' from rank 0 to rank 1 with tag 8; not launched by rank 0 (ended)"
    )


@needs_transfers
def test_two_ranks_that_both_send_and_wait_first_are_stuck():
    text = """
        def graph(x: f32[2], y: f32[2]):
            s = send(x, {peer}, 0, 'dp')
            ws = wait(s)
            r = recv(y, {peer}, 0, 'dp')
            wr = wait(r)
            return [wr]"""
    assert "deadlock" in message_of([module_of(text.format(peer=peer)) for peer in (1, 0)])


def test_ranks_that_disagree_are_reported_before_a_third_that_never_comes():
    header = "group('dp', size=3)\n"
    texts = ["all_reduce(x, 'sum', 'dp')", "all_reduce(x, 'max', 'dp')", "neg(x)"]
    modules = [module_of(f"def graph(x: f32[2]):\n    a = {text}\n    return [a]", header) for text in texts]
    assert "the reduction is sum on rank 0, max on rank 1" in message_of(modules, 3)


# What it cannot run.


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("all_gather(x, 4, 'dp')", "a has group_size 4, group 'dp' has 2 ranks (rank 0)"),
        ("all_reduce(i, 'avg', 'dp')", "the average of torch.int64 numbers is not a torch.int64 number (rank 0)"),
        ("all_reduce(x, 'bxor', 'dp')", "bxor needs integers, found torch.float32 (rank 0)"),
        ("all_reduce(x, 'premul_sum', 'dp')", "no reduction is called 'premul_sum' (rank 0)"),
        ("all_reduce(e, 'sum', 'dp')", "torch has no CPU kernel for sum of torch.float8_e4m3fn (rank 0)"),
        ("broadcast(x, 2, 'dp')", "src 2 is not a rank within the group, which has 2 ranks (rank 0)"),
        pytest.param(
            "send(x, 0, 0, 'dp')",
            "peer 0 is not another rank within the group, which has 2 ranks (rank 0)",
            marks=needs_transfers,
        ),
        ("all_to_all(x, [1, 2], [1, 2], 'dp')", "the splits [1, 2] do not add up to the 2 rows of the input (rank 0)"),
        ("all_to_all(x, [], [], 'dp')", "a needs 2 splits, found 0 for the input and 0 for the output (rank 0)"),
        (
            "all_gather_out(x, 2, 'dp', out=x)",
            "a needs a buffer (4, 3) of torch.float32, found (2, 3) of torch.float32 (rank 0)",
        ),
    ],
)
def test_a_launch_that_no_backend_could_run_is_refused(line: str, found: str):
    module = module_of(f"""
        def graph(x: f32[2, 3], i: i64[2], e: f8e4m3fn[2]):
            a = {line}
            return [a]""")
    message = message_of(module)
    assert message.splitlines()[0] == f"virtual cluster: {found}"
    assert message.splitlines()[1].endswith(f"= {line}")


def test_communication_without_a_row_is_refused_by_name():
    def build(graph: Graph) -> object:
        return graph.call_function(
            torch.ops.symm_mem.one_shot_all_reduce.default, (graph.placeholder("x"), "sum", "dp")
        )

    with pytest.raises(VerificationError) as caught:
        VirtualCluster(2).run(by_hand(build), [[torch.ones(2)]] * 2, table())
    assert str(caught.value) == (
        "virtual cluster: cannot run symm_mem.one_shot_all_reduce.default (rank 0)\n"
        "    one_shot_all_reduce_default = symm_mem.one_shot_all_reduce.default(x, 'sum', 'dp')\n"
        "    ^^^^^^^^^^^^^^^^^^^^^^^^^^^\n"
        "verify on real ranks, or replace the operator"
    )


def reduce_inside(x: Tensor) -> Tensor:
    return torch.ops._c10d_functional.wait_tensor(torch.ops._c10d_functional.all_reduce(x, "sum", "dp"))


def test_communication_inside_a_call_never_reaches_the_kernels_of_torch():
    inner = by_hand(lambda graph: gather(graph, graph.placeholder("x")))
    function = by_hand(lambda graph: graph.call_function(reduce_inside, (graph.placeholder("x"),)))
    nested = by_hand(lambda graph: graph.call_module("inner", (graph.placeholder("x"),)), inner=inner)
    for module, name, by in ((function, "reduce_inside", "all_reduce"), (nested, "inner", "all_gather")):
        with pytest.raises(VerificationError) as caught:
            VirtualCluster(2).run(module, [[torch.ones(2)]] * 2, table())
        first, *_, last = str(caught.value).splitlines()
        assert first == f"virtual cluster: {name} communicates inside a nested call, by {by} (rank 0)"
        assert last == "inline the call into the graph"


def test_an_operator_that_fails_is_named_with_its_rank():
    module = module_of("""
        def graph(x: f32[2], i: i64[1]):
            y = index.Tensor(x, [i])
            return [y]""")
    message = message_of(module, inputs=[[torch.ones(2), torch.tensor([rank * 5])] for rank in range(2)])
    assert message == (
        "virtual cluster: y failed with IndexError: index 5 is out of bounds for dimension 0 with size 2 (rank 1)\n"
        "    y: f32[1] = index(x, [i])\n"
        "    ^"
    )


@pytest.mark.parametrize(
    ("groups", "inputs", "found"),
    [
        ({"dp": Group("dp", 2)}, [[1]], "verification: inputs were given for 1 ranks, but 2 ranks run"),
        ({"dp": Group("dp", 2)}, [[1], []], "verification: the graph takes 1 inputs, rank 1 was given 0"),
        ({"dp": Group("dp", 0)}, [[torch.ones(2)]] * 2, "verification: the size of group 'dp' is unknown"),
        (
            {"dp": Group("dp", 3, 1, ((0, 1, 2),))},
            [[torch.ones(2)]] * 2,
            "verification: group 'dp' contains rank 2, but only 2 ranks run",
        ),
        (
            {"dp": Group("dp", 2, 1, ((1, 1),))},
            [[torch.ones(2)]] * 2,
            "virtual cluster: group 'dp' does not contain this rank (rank 0)",
        ),
        (
            {"dp": Group("dp", 2)},
            [[torch.ones(2, device="meta")]] * 2,
            "verification: an input or constant has no values",
        ),
    ],
)
def test_a_run_that_cannot_start_says_why(groups: dict[str, Group], inputs: list[list[object]], found: str):
    module = module_of(REDUCE_THEN_GATHER)
    with pytest.raises(VerificationError) as caught:
        VirtualCluster(2).run(module, inputs, GroupTable(groups))
    assert str(caught.value).startswith(found)


def test_one_module_per_rank_means_as_many_modules_as_ranks():
    module = module_of(REDUCE_THEN_GATHER)
    with pytest.raises(VerificationError) as caught:
        VirtualCluster(2).run([module], [[torch.ones(2)]] * 2, read_groups(module))
    assert str(caught.value) == "verification: 1 modules for 2 ranks\ngive one for all ranks, or one per rank"
