"""Programs from graphs: kinds, times, waits, and whose memory is held how long."""

from __future__ import annotations

from dataclasses import replace

import pytest

import weft
from weft.bounds.bounded_simulation import simulate_modules
from weft.cost.cluster import Cluster
from weft.cost.device import Device
from weft.cost.levels import Level, Link
from weft.errors import ClusterError, GraphError
from weft.graph.groups import read_groups
from weft.simulation.build import program_of, sequence_of
from weft.simulation.program import OpKind, Program
from weft.simulation.simulator import simulate
from weft.simulation.timeline import Timeline

GROUPS = "group('dp', size=2, stride=2)\ngroup('tp', size=2)\n\n"
DEVICE = Device("test", peak_tflops=(("f32", 1.0),), memory_gbps=1.0, launch_gap_us=0.5, overlap_slowdown=0.25)
LEVELS = (Level("node", 2, Link(1.0, 0.0, 1.0)), Level("rack", 4, Link(2.0, 0.0, 0.5)))
CLUSTER = Cluster("test", 2, 2, LEVELS, DEVICE)
QUIET = Cluster("quiet", 2, 2, LEVELS)


def build(*bodies: str) -> Program:
    modules = [weft.parse(GROUPS + body) for body in bodies]
    return sequence_of([(module, read_groups(module)) for module in modules], CLUSTER)


def memory(*bodies: str) -> list[int]:
    """How many bytes are in use, each time that this changes."""
    return [num_bytes for _, num_bytes in simulate(build(*bodies)).memory]


def waits(made: Program) -> dict[str, list[str]]:
    names = made.names
    return {names[op]: [names[launch] for launch in made.waits_for[op]] for op in waits_of(made)}


def waits_of(made: Program) -> list[int]:
    return [op for op, kind in enumerate(made.kinds) if kind is OpKind.WAIT]


def test_nodes_have_sorts_times_queues_and_links():
    made = build("""def graph(x: f32[4, 4]):
    v = view(x, [16])
    a = relu(v)
    g = all_gather(a, 2, 'dp')
    t = all_reduce(a, 'sum', 'tp')
    u = wait(g)
    w = wait(t)
    return [u, w]
""")
    assert made.names == ("x", "v", "a", "g", "t", "u", "w", "output")
    nothing, compute, launch, wait = OpKind.NOTHING, OpKind.COMPUTE, OpKind.LAUNCH, OpKind.WAIT
    assert made.kinds == (nothing, nothing, compute, launch, launch, wait, wait, nothing)
    # relu reads and writes 64 bytes at 1 byte per ns. The gather sends half of 128 bytes at half a byte per ns behind
    # 2 us; the all-reduce sends 64 bytes at 1 byte per ns behind 1 us.
    assert made.duration_ns == (0, 0, 128, 2128, 1064, 0, 0, 0)
    assert made.latency_ns == (0, 0, 0, 2000, 1000, 0, 0, 0)
    assert [(queue.group, made.links[queue.link]) for queue in made.queues] == [("dp", "rack"), ("tp", "node")]
    assert made.queue == (-1, -1, -1, 0, 1, -1, -1, -1)
    assert waits(made) == {"u": ["g"], "w": ["t"]}
    assert (made.launch_gap_ns, made.slowdown_ppm, made.collective_slowdown_ppm) == (500, 250_000, 0)


def test_a_device_says_how_much_collectives_slow_beside_compute():
    cluster = replace(CLUSTER, device=replace(DEVICE, collective_slowdown=0.125))
    module = weft.parse("def graph(x: f32[4]):\n    a = relu(x)\n    return [a]\n")
    assert sequence_of([(module, read_groups(module))], cluster).collective_slowdown_ppm == 125_000


def test_a_second_wait_waits_for_the_same_and_never_stands_before_the_launch():
    made = build("""def graph(x: f32[4]):
    g = all_gather(x, 2, 'tp')
    u = wait(g)
    a = all_reduce_(u, 'sum', 'tp')
    w = wait(a)
    again = wait(g)
    return [w, again]
""")
    assert waits(made) == {"u": ["g"], "w": ["a"], "again": ["a"]}
    assert made.names.index("a") in made.preds[made.names.index("again")]


def test_a_coalesced_launch_is_completed_by_the_wait_of_each_result():
    made = build("""def graph(x: f32[4], y: f32[6]):
    c = all_gather_coalesced([x, y], 2, 'tp')
    c0 = c[0]
    c1 = c[1]
    u = wait(c0)
    w = wait(c1)
    return [u, w]
""")
    assert waits(made) == {"u": ["c"], "w": ["c"]}
    assert sum(size for storages in made.allocates for _, size in storages) == 16 + 24 + 32 + 48


def test_reads_on_the_host_drain():
    made = build("""def graph(x: f32[()]):
    i = _local_scalar_dense(x)
    r = relu(x)
    return [r, i]
""")
    assert made.drains == (False, True, False, False)


CUDA = "device=device('cuda')"


@pytest.mark.parametrize(
    ("call", "drains"),
    [
        ("_to_copy(x, device=device('cpu'))", True),
        ("_to_copy(x, device=device('cpu'), non_blocking=True)", False),
        ("_to_copy(x, dtype=f64)", False),
        ("_to_copy(h, device=device('cuda'))", False),
        ("prims.device_put.default(x, device('cpu'))", True),
        ("prims.device_put.default(x, device('cpu'), True)", False),
        ("to.device(x, device('cpu'), f32)", True),
        ("to.device(x, device('cpu'), f32, True)", False),
        ("copy_(h, x)", True),
        ("copy_(h, x, True)", False),
        ("copy_(x, h)", False),
        ("copy_(h, h)", False),
        ("copy(h, x)", True),
        ("_local_scalar_dense(n)", True),
        ("nonzero(x)", True),
        ("nonzero(h)", True),  # the CPU may stand for the device
        ("index.Tensor(x, [m])", True),
        ("index.Tensor(x, [i])", False),
        ("index_put_(x, [m], n)", True),
        ("index_put_(x, [i], n)", False),
        ("relu(x)", False),
    ],
)
def test_blocking_copies_to_the_host_and_sizes_that_depend_on_data_drain(call: str, drains: bool):
    made = build(f"""def graph(x: f32[4]({CUDA}), n: f32[()]({CUDA}), m: b8[4]({CUDA}), i: i64[4]({CUDA}), h: f32[4]):
    y = {call}
    return [y]
""")
    assert made.drains == (*(False,) * 5, drains, False)


def test_a_storage_that_is_resized_counts_with_its_largest_size():
    body = """def graph(x: f32[4]):
    a = relu(x)
    r = inductor.resize_storage_bytes_.default({}, 64)
    s = inductor.resize_storage_bytes_.default({}, 0)
    b = relu(x)
    return [b]
"""
    assert max(memory(body.format("a", "a"))) == 16 + 64
    assert max(memory(body.format("x", "x"))) == 64 + 16


def test_memory_follows_storages_through_views_and_writes():
    # x is 64; a comes (+64); its view and the write to it bring nothing; b comes (+64) and a goes
    body = """def graph(x: f32[4, 4]):
    a = relu(x)
    v = view(a, [16])
    m = mul_(v, 0.5)
    b = neg(m)
    return [b]
"""
    assert memory(body) == [64, 128, 192, 128]


def test_inputs_that_are_expanded_or_views_count_what_they_span():
    assert memory("def graph(x: f32[4, 4](strides=(0, 1))):\n    return [x]\n") == [16]
    assert memory("def graph(x: f32[4, 4](strides=(8, 1))):\n    return [x]\n") == [112]


def test_an_expanded_view_of_an_intermediate_brings_nothing():
    body = """def graph(x: f32[4]):
    a = relu(x)
    e = expand(a, [1000, 4])
    return [e]
"""
    assert memory(body) == [16, 32]


def test_a_launch_holds_what_it_sends_until_its_wait():
    body = """def graph(x: f32[4]):
    a = relu(x)
    g = all_gather(a, 2, 'tp')
    b = neg(x)
    {}
    return [b]
"""
    # x 16, a +16, g +32, b +16; then the wait frees a and g, which nobody uses
    assert memory(body.format("w = wait(g)")) == [16, 32, 64, 80, 32]


def test_a_launch_that_escapes_holds_what_it_sends_to_the_end():
    body = """def graph(x: f32[4]):
    a = relu(x)
    g = all_gather(a, 2, 'tp')
    return [g]
"""
    assert memory(body) == [16, 32, 64]


FORWARD = """def graph(p: f32[4], x: f32[4]):
    a = mul(p, x)
    s = relu(a)
    g = all_gather(s, 2, 'tp')
    loss = sum.default(s)
    return [loss, a, g, p]
"""
BACKWARD = """def graph(a: f32[4], g: f32[8], p: f32[4], tangent: f32[()]):
    w = wait(g)
    d = mul(a, tangent)
    e = sum.default(w)
    return [d, e]
"""


def test_in_a_sequence_what_is_taken_is_counted_once_and_goes_behind_its_last_use():
    # p and x 32 and tangent 4 are there; a, s +16, g +32, loss +4; s is held by the launch until its wait in the second
    # graph (-16); d +16, then a goes (-16); e +4, then g goes (-32). Left: p, x, tangent, loss, d, e.
    assert memory(FORWARD, BACKWARD) == [36, 52, 68, 100, 104, 88, 104, 88, 92, 60]


def test_in_a_sequence_a_wait_completes_the_launch_of_an_earlier_graph():
    assert waits(build(FORWARD, BACKWARD)) == {"w": ["g"]}


def test_in_a_sequence_another_type_under_the_same_name_is_another_value():
    other = BACKWARD.replace("a: f32[4]", "a: f32[5]")
    assert memory(FORWARD, other)[0] == 36 + 20


def test_a_module_is_simulated_on_a_cluster_by_name():
    module = weft.parse(GROUPS + FORWARD)
    found = simulate_modules(module, "h100-8x8")
    assert isinstance(found, Timeline)
    assert found.step_us > 0
    assert 0 < found.lower_bound_us <= found.step_us
    assert found.gap == pytest.approx(found.step_us / found.lower_bound_us - 1)
    assert simulate_modules([module], "h100-8x8", bound=True).lower_bound_us == found.lower_bound_us


def test_a_cluster_without_a_device_prices_communication_alone():
    module = weft.parse(GROUPS + FORWARD)
    found = simulate(program_of(module, read_groups(module), QUIET))
    assert (found.compute_us, found.step_us) == (0, 1.016)


def test_nothing_to_simulate_and_too_few_ranks_are_errors():
    with pytest.raises(GraphError, match="there is no graph to simulate"):
        simulate_modules([])
    with pytest.raises(ClusterError, match="it has 2 ranks, group 'dp' needs 4"):
        simulate_modules(weft.parse(GROUPS + FORWARD.replace("'tp'", "'dp'")), "h100-1x2")


HIDDEN_BY_A_CHAIN = """def graph(x: f32[1000], p: f32[500]):
    g = all_gather(p, 2, 'tp')
    a = relu(x)
    b = neg(a)
    c = mul(b, b)
    w = wait(g)
    return [c, w]
"""


def test_a_chain_of_pointwise_operators_hides_a_collective():
    # One kernel that reads and writes 4000 bytes at 1 byte per ns: 8 us. The gather sends 2000 bytes behind 1 us: 3 us.
    # It is launched at 0, the kernel a gap of 0.5 us later, and all the rest of the gather is beside it.
    (span,) = simulate(build(HIDDEN_BY_A_CHAIN)).collectives
    assert (span.end_ns - span.start_ns, span.hidden_ns, span.exposed_ns) == (3000, 2500, 0)
    assert set(span.hidden_by) <= {"a", "b", "c"}


def test_times_that_are_known_come_before_every_estimate():
    module = weft.parse(GROUPS + HIDDEN_BY_A_CHAIN)
    found = weft.simulate(module, QUIET, overrides={"g": 7.0, "a": 2.0})
    assert [(span.name, span.end_ns - span.start_ns) for span in found.collectives] == [("g", 7000)]
    assert [(span.name, span.end_ns - span.start_ns) for span in found.compute] == [("a", 2000)]


def test_overrides_of_a_sequence_find_their_graph_and_what_none_knows_is_refused():
    first = weft.parse(GROUPS + "def graph(x: f32[4]):\n    a = relu(x)\n    return [a]\n")
    second = weft.parse(GROUPS + "def graph(a: f32[4]):\n    b = neg(a)\n    return [b]\n")
    found = weft.simulate([first, second], QUIET, overrides={"b": 2.0, "x": 0.0})
    assert [span.name for span in found.compute] == ["b"]
    with pytest.raises(ClusterError, match="c: no node has this name"):
        weft.simulate([first, second], QUIET, overrides={"c": 2.0})
