"""Effects: which pairs of nodes must keep their order, and which flights a graph holds."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, GraphModule

import weft
from tests.unit.graph.test_text import branch_that_reduces, trace
from tests.versions import needs_transfers
from weft.graph.check import validate
from weft.graph.dag import Dag
from weft.graph.operator_effects import profile
from weft.verification.symbolic.equivalence import prove


def dag_of(body: str, parameters: str = "x: f32[4], y: f32[4], z: f32[4]") -> Dag:
    lines = "".join(f"    {line.strip()}\n" for line in body.strip().splitlines())
    return Dag(weft.parse(f"group('dp', size=2)\ngroup('tp', size=2)\n\ndef graph({parameters}):\n{lines}").graph)


def effect_edges(dag: Dag) -> set[tuple[str, str]]:
    """The pairs of names that effects alone keep in order."""
    return {(dag.nodes[i].name, dag.nodes[j].name) for i, j in dag.effects.edges()}


def must_precede(dag: Dag) -> set[tuple[str, str]]:
    """All pairs of names that data or effects keep in order, directly or through others."""
    reached: list[set[int]] = []
    for i, preds in enumerate(dag.preds):
        reached.append({i}.union(*(reached[j] for j in preds)))
    return {(dag.nodes[j].name, dag.nodes[i].name) for i, before in enumerate(reached) for j in before - {i}}


def test_a_graph_without_writes_has_no_effect_edges():
    dag = dag_of("""
        a = relu(x)
        b = add(a, y)
        ar = all_reduce(b, 'sum', 'dp')
        w = wait(ar)
        return [w]
    """)
    assert effect_edges(dag) == set()


def test_a_read_stays_before_a_write_and_behind_the_one_before():
    dag = dag_of("""
        old = relu(x)
        c = copy_(x, y)
        new = relu(x)
        d = copy_(x, z)
        last = relu(x)
        return [old, new, last]
    """)
    assert effect_edges(dag) == {("old", "c"), ("c", "new"), ("new", "d"), ("d", "last")}


def test_writes_stay_in_order():
    dag = dag_of("""
        a = add_(x, 1)
        b = mul_(x, 2)
        return []
    """)
    assert effect_edges(dag) == {("a", "b")}


@pytest.mark.parametrize(
    "view",
    [
        "v = view(x, [2, 2])",
        "v = slice(x, 0, 1, 3)",
        "u = view(x, [2, 2])\nt1 = t(u)\nv = select.int(t1, 0, 0)",
        "s = split(x, 2)\nv = s[1]",
        "s = unbind.int(x)\nv = s[0]",
        "s = unsafe_split(x, 2)\nv = s[1]",
        "s = unsafe_split_with_sizes(x, [1, 3])\nv = s[1]",
        "v = reshape(x, [2, 2])",
        "v = expand(x, [3, 4])",
        "v = detach(x)",
        "v = as_strided(x, [2], [2])",
        "v = _unsafe_view(x, [2, 2])",
        "v = alias(x)",
        "v = contiguous(x)",
        "v = wait(x)",
        "v = view_as_real(c)\nv2 = relu(y)",
    ],
)
def test_a_read_through_any_view_stays_before_the_write(view: str):
    parameters = "x: f32[4], y: f32[4], c: c64[4]"
    written = "c" if "view_as_real" in view else "x"
    dag = dag_of(f"{view}\nold = neg(v)\nw = zero_({written})\nnew = neg(v)\nreturn [old, new]", parameters)
    before = must_precede(dag)
    assert {("old", "w"), ("w", "new")} <= before


@pytest.mark.parametrize("copy", ["v = clone(x)", "v = relu(x)", "t1 = t(m)\nv = reshape(t1, [4])", "v = _to_copy(x)"])
def test_a_read_of_a_copy_is_free(copy: str):
    dag = dag_of(f"{copy}\nw = zero_(x)\nw2 = zero_(m)\nnew = neg(v)\nreturn [new]", "x: f32[4], m: f32[2, 2]")
    assert ("w", "new") not in must_precede(dag)


def test_a_write_through_a_view_orders_the_base_and_its_other_views():
    dag = dag_of("""
        v = view(x, [2, 2])
        u = slice(x, 0, 0, 2)
        old = neg(v)
        c = zero_(u)
        new = neg(x)
        return [old, new]
    """)
    assert {("old", "c"), ("c", "new")} <= must_precede(dag)


def test_inputs_that_share_a_storage_are_one():
    dag = dag_of(
        """
        old = neg(b)
        c = zero_(a)
        return [old]
        """,
        "a: f32[4], b: f32[2](offset=2, base='a')",
    )
    assert effect_edges(dag) == {("old", "c")}


def test_two_reads_of_one_constant_are_one_storage():
    text = """tensor('c', f32[2], [1.0, 2.0])

def graph():
    first = attribute('c')
    second = attribute('c')
    old = neg(first)
    w = zero_(second)
    return [old]
"""
    assert ("old", "w") in effect_edges(Dag(weft.parse(text).graph))


def test_foreach_writes_order_each_of_their_tensors():
    dag = dag_of("""
        old = neg(y)
        f = _foreach_add_.Scalar([x, y], 1)
        new = neg(x)
        other = neg(z)
        return [old, new, other]
    """)
    assert effect_edges(dag) == {("old", "f"), ("f", "new")}


def test_items_of_a_node_with_several_results_are_told_apart():
    dag = dag_of("""
        both = _foreach_add.Scalar([x, y], 1)
        a = both[0]
        b = both[1]
        c = zero_(a)
        r = neg(b)
        s = neg(a)
        return [r, s]
    """)
    assert effect_edges(dag) == {("c", "s")}


def test_draws_stay_in_order():
    dag = dag_of("""
        a = rand_like(x)
        b = relu(x)
        c = bernoulli.default(y)
        return [a, b, c]
    """)
    assert effect_edges(dag) == {("a", "c")}


def test_assertions_stay_in_order_and_order_nothing_else():
    dag = dag_of(
        """
        a = _assert_async(p)
        r = relu(x)
        b = _assert_async(q)
        return [r]
        """,
        "x: f32[4], p: b8[()], q: b8[()]",
    )
    assert effect_edges(dag) == {("a", "b")}


def test_a_write_to_what_is_sent_stays_behind_the_wait():
    dag = dag_of("""
        ag = all_gather(x, 2, 'dp')
        w = wait(ag)
        c = zero_(x)
        return [w]
    """)
    assert {("ag", "c"), ("w", "c")} <= must_precede(dag)


def test_a_write_before_a_launch_stays_before_it():
    dag = dag_of("""
        c = zero_(x)
        ag = all_gather(x, 2, 'dp')
        w = wait(ag)
        return [w]
    """)
    assert ("c", "ag") in effect_edges(dag)


def test_a_read_by_another_name_stays_behind_the_wait_of_an_in_place_launch():
    dag = dag_of("""
        old = neg(x)
        ar = all_reduce_(x, 'sum', 'dp')
        w = wait(ar)
        new = neg(x)
        return [old, new]
    """)
    assert {("old", "ar"), ("w", "new"), ("ar", "w")} <= must_precede(dag)


def test_a_second_wait_completes_nothing():
    dag = dag_of("""
        ag = all_gather(x, 2, 'dp')
        w0 = wait(ag)
        w1 = wait(ag)
        return [w0, w1]
    """)
    ids = {node.name: i for i, node in enumerate(dag.nodes)}
    assert [(f.launch, f.wait) for f in dag.effects.flights] == [(ids["ag"], ids["w0"])]
    assert dag.effects.completes(ids["w0"])
    assert not dag.effects.completes(ids["w1"])


def test_each_tensor_of_a_coalesced_launch_is_a_flight_of_its_own():
    dag = dag_of("""
        ag = all_gather_coalesced([x, y], 2, 'dp')
        a0 = ag[0]
        a1 = ag[1]
        w1 = wait(a1)
        w0 = wait(a0)
        return [w0, w1]
    """)
    ids = {node.name: i for i, node in enumerate(dag.nodes)}
    flights = dag.effects.flights
    assert [f.wait for f in flights] == [ids["w0"], ids["w1"]]
    assert [f.reads for f in flights] == [dag.effects.held(ids["x"]), dag.effects.held(ids["y"])]


def test_a_launch_that_escapes_flies_to_the_end():
    dag = dag_of("ag = all_gather(x, 2, 'dp')\nreturn [ag]")
    (flight,) = dag.effects.flights
    assert flight.wait is None
    assert dag.effects.held_by_outputs == set(flight.writes)


def test_a_wait_for_an_input_completes_what_was_launched_before():
    dag = dag_of("w = wait(x)\nold = neg(x)\nreturn [w, old]")
    ids = {node.name: i for i, node in enumerate(dag.nodes)}
    assert dag.effects.completes(ids["w"])
    assert ("w", "old") in effect_edges(dag)


def test_launches_of_one_group_are_a_queue():
    dag = dag_of("""
        a = all_reduce(x, 'sum', 'dp')
        b = all_reduce(y, 'sum', 'tp')
        c = all_reduce(z, 'sum', 'dp')
        d = all_reduce(x, 'max', 'tp')
        wa = wait(a)
        wb = wait(b)
        wc = wait(c)
        wd = wait(d)
        return [wa, wb, wc, wd]
    """)
    names = [(dag.nodes[i].name, dag.nodes[j].name) for i, j in dag.queue]
    assert sorted(names) == [("a", "c"), ("b", "d")]
    assert effect_edges(dag) == set()


@pytest.mark.parametrize(
    "barrier",
    [
        "barrier: f32[2, 2] = _dtensor.shard_dim_alltoall.default(m, 0, 1, 'tp')",
        pytest.param("barrier = send(x, 1, 0, 'tp')", marks=needs_transfers),
        pytest.param("barrier = recv(x, 1, 0, 'tp')", marks=needs_transfers),
        pytest.param("barrier = batch_p2p(['isend'], [1], [0], [x], 'tp')", marks=needs_transfers),
    ],
)
def test_communication_is_ordered_by_a_barrier_of_any_group(barrier: str):
    dag = dag_of(
        f"""
        a = all_reduce(y, 'sum', 'dp')
        wa = wait(a)
        {barrier}
        b = all_reduce(z, 'sum', 'dp')
        wb = wait(b)
        return [wa, wb, barrier]
        """,
        "x: f32[4], y: f32[4], z: f32[4], m: f32[2, 2]",
    )
    assert {("a", "barrier"), ("wa", "barrier"), ("barrier", "b"), ("barrier", "wb")} <= must_precede(dag)


def test_fused_operators_order_only_the_workspace_of_their_group():
    dag = Dag(
        weft.parse("""group('tp', size=2)
group('dp', size=2, stride=2)

def graph(x: f32[2, 2], p: f32[2, 2], b: f32[2, 2]):
    a: f32[4, 2] = all_gather(p, 2, 'dp')
    f = symm_mem.fused_matmul_reduce_scatter.default(x, b, 'sum', 0, 'tp')
    g = symm_mem.fused_matmul_reduce_scatter.default(b, x, 'sum', 0, 'tp')
    h = symm_mem.fused_matmul_reduce_scatter.default(b, x, 'sum', 0, 'dp')
    wa: f32[4, 2] = wait(a)
    return [f, g, h, wa]
""").graph
    )
    fused = {pair for pair in must_precede(dag) if pair[0] in "afgh" and pair[1] in ("f", "g", "h", "wa")}
    assert fused == {("f", "g"), ("a", "wa")}


def test_a_nested_graph_that_communicates_is_a_barrier_for_all():
    text = """group('dp', size=2)

def graph(p: b8[()], x: f32[4], y: f32[4]):
    def yes(a: f32[4]):
        ar: f32[4] = all_reduce(a, 'sum', 'dp')
        w: f32[4] = wait(ar)
        return (w,)
    yes = attribute('yes')
    def no(a: f32[4]):
        n: f32[4] = neg(a)
        return (n,)
    no = attribute('no')
    first = all_reduce(y, 'sum', 'dp')
    w1 = wait(first)
    noise = rand_like(y)
    call: (f32[4],) = higher_order.cond(p, yes, no, (x,))
    second = all_reduce(y, 'max', 'dp')
    w2 = wait(second)
    more = rand_like(y)
    c = zero_(x)
    r: f32[4] = call[0]
    return [r, w1, w2, noise, more]
"""
    dag = Dag(weft.parse(text).graph)
    before = must_precede(dag)
    assert {("w1", "call"), ("call", "second"), ("noise", "call"), ("call", "more"), ("call", "c")} <= before


def test_a_nested_graph_that_only_computes_is_a_plain_node():
    text = """def graph(p: b8[()], x: f32[4], y: f32[4]):
    def yes(a: f32[4]):
        n: f32[4] = relu(a)
        return (n,)
    yes = attribute('yes')
    def no(a: f32[4]):
        n: f32[4] = neg(a)
        return (n,)
    no = attribute('no')
    noise = rand_like(y)
    call: (f32[4],) = higher_order.cond(p, yes, no, (x,))
    more = rand_like(y)
    c = zero_(x)
    r: f32[4] = call[0]
    return [r, noise, more]
"""
    assert effect_edges(Dag(weft.parse(text).graph)) == {("noise", "more"), ("call", "c")}


def test_a_nested_graph_that_draws_is_ordered_with_other_draws():
    text = """def graph(p: b8[()], x: f32[4]):
    def yes(a: f32[4]):
        n: f32[4] = rand_like(a)
        return (n,)
    yes = attribute('yes')
    def no(a: f32[4]):
        n: f32[4] = neg(a)
        return (n,)
    no = attribute('no')
    noise = rand_like(x)
    call: (f32[4],) = higher_order.cond(p, yes, no, (x,))
    r: f32[4] = call[0]
    return [r, noise]
"""
    assert effect_edges(Dag(weft.parse(text).graph)) == {("noise", "call")}


NESTED = """def graph(p: b8[()], x: f32[4], y: f32[4]):
    def body({takes}):
        {body}
        return ({returns},)
    body = attribute('body')
    call: (f32[4],) = higher_order.{call}
    v: f32[4] = call[0]
    old: f32[4] = neg(v)
    {write}
    new: f32[4] = neg(v)
    return [old, new]
"""
TWO, VIEW, COPY = "a: f32[4], b: f32[4]", "r: f32[4] = view(a, [4])", "r: f32[4] = mul(a, b)"
CALLS = (
    "cond(p, body, body, (x, y))",
    "wrap_with_set_grad_enabled(False, body, x, y)",
    "wrap_with_autocast('cuda', None, True, None, body, x, y)",
    "tag_activation_checkpoint(body, x, y)",
    "invoke_subgraph(body, 'one', x, y)",
    "strict_mode(body, (x, y))",
)


@pytest.mark.parametrize("call", CALLS)
def test_a_result_of_a_nested_graph_that_is_a_view_is_the_memory_of_what_it_views(call: str):
    text = NESTED.format(takes=TWO, body=VIEW, returns="r", call=call, write="c = zero_(x)")
    assert {("old", "c"), ("c", "new")} <= effect_edges(Dag(weft.parse(text).graph))
    apart = NESTED.format(takes=TWO, body=VIEW, returns="r", call=call, write="c = zero_(y)")
    assert effect_edges(Dag(weft.parse(apart).graph)) == {("call", "c")}


@pytest.mark.parametrize("call", CALLS)
def test_a_result_that_a_nested_graph_computes_is_new(call: str):
    text = NESTED.format(takes=TWO, body=COPY, returns="r", call=call, write="c = zero_(x)")
    assert effect_edges(Dag(weft.parse(text).graph)) == {("call", "c")}


def test_a_view_deep_inside_nested_graphs_is_followed():
    text = """def graph(p: b8[()], x: f32[4]):
    def outer(a: f32[4]):
        def inner(b: f32[4]):
            r: f32[2, 2] = view(b, [2, 2])
            return (r,)
        inner = attribute('inner')
        made: (f32[2, 2],) = higher_order.invoke_subgraph(inner, 'in', a)
        r: f32[2, 2] = made[0]
        s: f32[4] = view(r, [4])
        return (s,)
    outer = attribute('outer')
    call: (f32[4],) = higher_order.cond(p, outer, outer, (x,))
    v: f32[4] = call[0]
    old: f32[4] = neg(v)
    c = zero_(x)
    return [old]
"""
    assert ("old", "c") in effect_edges(Dag(weft.parse(text).graph))


def test_results_of_a_nested_graph_that_share_memory_with_each_other_are_one():
    text = """def graph(x: f32[4]):
    def body(a: f32[4]):
        r: f32[4] = neg(a)
        v: f32[2, 2] = view(r, [2, 2])
        return (r, v)
    body = attribute('body')
    call: (f32[4], f32[2, 2]) = higher_order.wrap_with_set_grad_enabled(False, body, x)
    r: f32[4] = call[0]
    v: f32[2, 2] = call[1]
    old: f32[2, 2] = neg(v)
    c = zero_(r)
    return [old]
"""
    assert effect_edges(Dag(weft.parse(text).graph)) == {("old", "c")}


@pytest.mark.parametrize(
    "call", ["while_loop(body, body, (x,), (y,))", "associative_scan(body, [x], (y,))", "scan(body, [x], [], (y,))"]
)
def test_a_loop_that_may_run_no_round_may_return_what_it_was_given(call: str):
    text = NESTED.format(takes=TWO, body=COPY, returns="r", call=call, write="c = zero_(x)")
    assert {("old", "c"), ("c", "new")} <= effect_edges(Dag(weft.parse(text).graph))


def test_a_call_that_is_not_known_to_return_what_its_graph_returns_is_opaque():
    text = NESTED.format(takes=TWO, body=COPY, returns="r", call="flat_apply(body, x, y)", write="c = zero_(x)")
    dag = Dag(weft.parse(text).graph)
    call = next(i for i, node in enumerate(dag.nodes) if node.name == "call")
    assert dict(dag.effects.special)[call].opaque


def test_a_storage_that_is_resized_is_written_with_everything_that_shares_it():
    torch.ops.inductor.resize_storage_bytes_  # noqa: B018  # registers it
    dag = dag_of(
        """
        v = view(w, [2, 2])
        r0 = inductor.resize_storage_bytes_.default(w, 16)
        c = copy_(w, x)
        y = neg(v)
        r1 = inductor.resize_storage_bytes_.default(v, 0)
        return [y]
        """,
        "w: f32[4], x: f32[4]",
    )
    assert {("r0", "c"), ("c", "y"), ("y", "r1")} <= effect_edges(dag)


@pytest.mark.parametrize("written", ["m", "v"])
def test_what_is_written_without_a_word_in_the_schema_keeps_its_readers_in_order(written: str):
    norm = "b = native_batch_norm.default(x, None, None, m, v, True, 0.1, 1e-05)"
    text = f"old = neg({written})\n{norm}\nnew = neg({written})\nreturn [old, new]"
    dag = dag_of(text, "x: f32[2, 3], m: f32[3], v: f32[3]")
    assert {("old", "b"), ("b", "new")} <= effect_edges(dag)


@pytest.mark.parametrize(
    "call",
    [
        "b = dropout.default(x, 0.5, False)",
        "b = prims.device_put.default(x, device('cpu'))",
        "l = broadcast_tensors.default([x, y])\nb = l[0]",
        "b = type_as.default(x, y)",
    ],
)
def test_a_result_that_may_be_an_argument_keeps_its_readers_in_order(call: str):
    dag = dag_of(f"{call}\nold = neg(b)\nw = zero_(x)\nnew = neg(b)\nreturn [old, new]")
    assert {("old", "w"), ("w", "new")} <= must_precede(dag)


def test_a_result_that_is_a_copy_by_its_metadata_is_free():
    dag = dag_of("b = type_as.default(x, c)\nw = zero_(x)\nnew = neg(b)\nreturn [new]", "x: f32[4], c: f64[4]")
    assert ("w", "new") not in must_precede(dag)


def test_a_custom_operator_without_the_promise_of_a_true_schema_is_a_barrier():
    with torch.library._scoped_library("weft_test_belief", "FRAGMENT") as library:
        library.define("unknown(Tensor x) -> Tensor")
        library.define("promised(Tensor x) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
        library.define("silent(Tensor x) -> ()", tags=(torch.Tag.pt2_compliant_tag,))
        found = torch.ops.weft_test_belief
        assert profile(found.unknown.default).opaque
        assert profile(found.promised.default).plain
        assert profile(found.silent.default).opaque  # it returns nothing, so it must do something else


def test_an_operator_of_torchs_decorator_is_believed():
    @torch.library.custom_op("weft_test_belief::plus_one", mutates_args=())
    def plus_one(x: Tensor) -> Tensor:
        return x + 1

    @torch.library.custom_op("weft_test_belief::bump", mutates_args=("x",))
    def bump(x: Tensor, y: Tensor) -> None:
        x.add_(y)

    assert profile(torch.ops.weft_test_belief.plus_one.default).plain
    assert profile(torch.ops.weft_test_belief.bump.default).writes == ("x",)


@pytest.mark.parametrize("name", ["allreduce_", "barrier", "recv_"])
def test_communication_outside_the_functional_collectives_may_write_what_it_takes(name: str):
    found = profile(getattr(torch.ops.c10d, name).default)
    assert found.opaque
    assert found.launch


STREAMS = """def graph(x: f32[4], y: f32[4]):
    a = neg(x)
    {0}
    {1}
    {2}
    c = neg(y)
    return [a, b, c]
"""


def test_every_call_stays_between_the_streams_that_it_stands_between():
    first, call, last = "f = streams.fork.default(0, 1)", "b = relu(y)", "j = streams.join.default(1, 0)"
    right = weft.parse(STREAMS.format(first, call, last))
    assert {("a", "f"), ("f", "b"), ("b", "j"), ("j", "c")} <= effect_edges(Dag(right.graph))
    assert prove(right, right)
    assert not prove(right, weft.parse(STREAMS.format(call, first, last)))


def test_an_opaque_call_keeps_its_place_among_everything_that_has_an_effect():
    graph = Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    first = graph.call_function(torch.ops.aten.rand_like.default, (x,))
    opaque = graph.call_method("unknown", (x,))
    write = graph.call_function(torch.ops.aten.copy_.default, (x, y))
    graph.output([first, opaque])
    module = GraphModule({}, graph)
    dag = Dag(module.graph)
    assert {(first.name, opaque.name), (opaque.name, write.name)} <= effect_edges(dag)


def test_a_branch_traced_by_torch_that_reduces_is_a_barrier():
    module = trace(branch_that_reduces("dp"), torch.tensor(True), torch.zeros(4))
    dag = Dag(module.graph)
    call = next(i for i, node in enumerate(dag.nodes) if str(node.target) == "cond")
    assert dict(dag.effects.special)[call].opaque


def test_reads_of_shapes_do_not_wait_for_the_data():
    dag = dag_of("""
        ar = all_reduce_(x, 'sum', 'dp')
        n = sym_size.int(ar, 0)
        w = wait(ar)
        return [w, n]
    """)
    accesses = [dag.nodes[i].name for _, i, _, _ in dag.effects.accesses_in_flight()]
    assert accesses == []


def test_what_only_reads_is_not_among_what_is_written():
    dag = dag_of("""
        ag = all_gather(x, 2, 'dp')
        w = wait(ag)
        c = copy_(y, z)
        return [w]
    """)
    ids = {node.name: i for i, node in enumerate(dag.nodes)}
    assert dag.effects.memory.written == set(dag.effects.held(ids["y"]))


@needs_transfers
def test_a_batch_writes_what_it_receives_and_not_what_it_sends():
    dag = dag_of("""
        batch = batch_p2p(['isend', 'irecv'], [1, 1], [0, 0], [x, y], 'dp')
        sent = batch[0]
        got = batch[1]
        ws = wait(sent)
        wg = wait(got)
        return [wg]
    """)
    ids = {node.name: i for i, node in enumerate(dag.nodes)}
    held = {name: dag.effects.held(i)[0] for name, i in ids.items() if name in ("x", "y")}
    writes = {storage for flight in dag.effects.flights for storage in flight.writes}
    assert held["y"] in writes
    assert held["x"] not in writes


# Waits inside nested graphs.

WAITED_INSIDE = """group('dp', size=2)

def graph(x: f32[4], y: f32[4, 4]):
    def done(a: f32[8]):
        v: f32[8] = view(a, [8])
        w: f32[8] = wait(v)
        return w
    def product(a: f32[4, 4]):
        m: f32[4, 4] = mm(a, a)
        return m
    ag: f32[8] = all_gather(x, 2, 'dp')
    product = attribute('product')
    m: f32[4, 4] = higher_order.control_deps((ag,), product, y)
    r: f32[4, 4] = relu(m)
    done = attribute('done')
    w: f32[8] = higher_order.control_deps((m,), done, ag)
    s: f32[8] = relu(w)
    return [s, r]
"""


def test_a_wait_inside_control_deps_ends_the_flight():
    module = weft.parse(WAITED_INSIDE)
    dag = Dag(module.graph)
    (flight,) = dag.effects.flights
    assert flight.wait is not None
    assert dag.nodes[flight.wait].name == "w"
    validate(dag)
    assert weft.listing(weft.parse(weft.listing(module))) == weft.listing(module)


def test_what_control_deps_only_come_after_is_not_read_by_them():
    """`m` comes after the launch and reads nothing of it; `w` and what it holds are none of `m`'s."""
    dag = Dag(weft.parse(WAITED_INSIDE).graph)
    held = {node.name: set(dag.effects.held(i)) for i, node in enumerate(dag.nodes)}
    assert not held["m"] & held["ag"]
    assert held["w"] == held["ag"]
    assert ("ag", "m") in must_precede(dag)
    assert ("w", "r") not in must_precede(dag)


def test_nothing_moves_across_a_wait_inside_control_deps_and_its_launch_is_left_alone():
    module = weft.parse(
        WAITED_INSIDE.replace("x: f32[4]", "x: f32[4], z: f32[4]").replace(
            "return [s, r]",
            """\
b: f32[8] = all_gather(z, 2, 'dp')
    c: f32[8] = wait(b)
    return [s, r, c]""",
        )
    )
    for spec in ("auto", "bucket-all-gathers", "hoist-launches,sink-waits"):
        result = weft.optimize(module, cluster="h100-8", pipeline=spec)
        names = [node.name for node in result.module.graph.nodes]
        assert names.index("ag") < names.index("m") < names.index("w") < names.index("s")
    declined = weft.optimize(module, pipeline="bucket-all-gathers").report.declined
    assert "ag stays: w waits for it in a nested graph" in [decision.sentence for decision in declined]


def test_a_launch_is_simulated_until_the_wait_inside_control_deps():
    plain = WAITED_INSIDE.replace("w: f32[8] = higher_order.control_deps((m,), done, ag)", "w: f32[8] = wait(ag)")
    steps = [weft.simulate(weft.parse(text), cluster="h100-8").step_us for text in (WAITED_INSIDE, plain)]
    assert steps[0] == pytest.approx(steps[1])
