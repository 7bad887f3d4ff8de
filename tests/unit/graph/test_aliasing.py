"""Aliasing: which inputs and constants are one memory, and what keeps its order for that."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import weft
from tests.unit.graph.test_effects import effect_edges
from weft.compat import FakeTensorMode, new_fake_mode
from weft.errors import ListingError
from weft.frontends import archive
from weft.graph.aliasing import APART_KEY, Place, may_share_inputs, places
from weft.graph.dag import Dag
from weft.graph.groups import Group, GroupTable, read_groups
from weft.graph.listings.text import digest
from weft.verification.comparison import example_inputs
from weft.verification.rank import same_bits
from weft.verification.symbolic.equivalence import prove
from weft.verification.virtual.cluster import VirtualCluster

STEP = """
group('dp', size=2)
tensor('k', f32[4], [0.0, 0.0, 0.0, 0.0])
tensor('v', f32[4], [0.0, 0.0, 0.0, 0.0])

def graph(x: f32[8, 8]):
    k = attribute('k')
    v = attribute('v')
    m = mm(x, x)
    s = sum(m)
    write = add_(k, s)
    ag = all_gather(v, 2, 'dp')
    w = wait(ag)
    return [w]
"""


class Subclass(torch.Tensor):
    """A subclass that adds nothing."""


SHARED: dict[str, Callable[[], tuple[Any, Any]]] = {
    "one tensor": lambda: (k := torch.zeros(4), k),
    "one parameter": lambda: (k := torch.nn.Parameter(torch.zeros(4), requires_grad=False), k),
    "a view": lambda: (k := torch.zeros(8), k[4:])[::-1],
    "views that overlap in part": lambda: (k := torch.zeros(6), (k[:4], k[2:]))[1],
    "a view of another dtype": lambda: (k := torch.zeros(4), k.view(torch.int32).view(torch.float32))[:2],
    "data of a parameter": lambda: (k := torch.nn.Parameter(torch.zeros(4), requires_grad=False), k.data),
    "parameters over one storage": lambda: (
        k := torch.zeros(4),
        torch.nn.Parameter(k, requires_grad=False),
    ),
    "a subclass": lambda: (k := torch.zeros(4), k.as_subclass(Subclass)),
    "arrays of one memory": lambda: tuple(map(torch.from_numpy, ((a := np.zeros(6, np.float32))[:4], a[2:]))),
    "meta tensors": lambda: (k := torch.zeros(4, device="meta"), k.view(2, 2).view(4)),
    "fake tensors": lambda: (k := new_fake_mode().from_tensor(torch.zeros(4)), k.view(4)),
}


def step_over(k: Any, v: Any, text: str = STEP) -> GraphModule:
    """The step with these constants; its metadata takes them for two memories."""
    module = weft.parse(text)
    for name, value in (("k", k), ("v", v)):
        delattr(module, name)
        setattr(module, name, value)
    return module


@pytest.mark.parametrize("case", SHARED)
def test_a_constant_stays_behind_the_write_to_another_that_shares_its_memory(case: str):
    module = step_over(*SHARED[case]())
    assert ("write", "ag") in effect_edges(Dag(module.graph))
    for pipeline in ("hoist-launches", "auto", "exact", "tp"):
        made = weft.optimize(module, "h100-8", pipeline=pipeline, verify="equivalence")
        names = [node.name for node in made.module.graph.nodes]
        assert names.index("write") < names.index("ag")


def test_constants_of_their_own_keep_no_order():
    assert effect_edges(Dag(step_over(torch.zeros(4), torch.zeros(4)).graph)) == set()


def test_a_hoist_above_a_write_to_shared_memory_is_not_proved():
    write, sent = "    write = add_(k, s)\n", "    ag = all_gather(v, 2, 'dp')\n    w = wait(ag)\n"
    hoisted = STEP.replace(write + sent, sent + write)
    assert prove(weft.parse(STEP), weft.parse(hoisted))
    k = torch.zeros(4)
    assert not prove(step_over(k, k.view(4)), step_over(k, k.view(4), hoisted))


def test_constants_that_share_memory_are_not_proved_equal_to_constants_that_do_not():
    k = torch.zeros(8)
    tied, apart = step_over(k[:4], k[:4].view(4)), step_over(torch.zeros(4), torch.zeros(4))
    assert prove(tied, step_over((c := torch.zeros(8))[:4], c[:4].view(4)))
    assert not prove(tied, apart)
    assert not prove(tied, step_over(k[:4], k[2:6]))


def nested_read(shared: bool) -> GraphModule:
    """A graph that writes a constant before a call whose nested graph has a constant of its own."""
    k = torch.zeros(4)
    inner = Graph()
    given = inner.placeholder("given")
    inner.output([inner.call_function(torch.ops.aten.add.Tensor, (given, inner.get_attr("own")))])
    body = GraphModule({"own": k.view(4) if shared else torch.zeros(4)}, inner)
    graph = Graph()
    x, read, held = graph.placeholder("x"), graph.get_attr("body"), graph.get_attr("k")
    graph.call_function(torch.ops.aten.add_.Tensor, (held, x), name="write")
    call = graph.call_function(torch.ops.higher_order.invoke_subgraph, (read, "body", x), name="call")
    graph.output([call])
    x.meta["val"] = torch.zeros(4, device="meta")
    module = GraphModule({"body": body, "k": k}, graph)
    module.meta[APART_KEY] = True
    return module


@pytest.mark.parametrize("shared", [True, False])
def test_a_call_stays_behind_a_write_to_a_constant_of_its_nested_graph(shared: bool):
    assert (("write", "call") in effect_edges(Dag(nested_read(shared).graph))) == shared


class Buffers(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("flat", torch.zeros(4))
        self.inner = torch.nn.Module()
        self.inner.register_buffer("head", self.flat[:2])
        self.listed = torch.nn.ParameterList([torch.nn.Parameter(self.flat[2:], requires_grad=False)])


@pytest.mark.parametrize("path", ["inner.head", "listed.0"])
def test_buffers_of_other_modules_share_memory_too(path: str):
    graph = Graph()
    x, flat, other = graph.placeholder("x"), graph.get_attr("flat"), graph.get_attr(path)
    write = graph.call_function(torch.ops.aten.add_.Tensor, (flat, x), name="write")
    graph.output([graph.call_function(torch.ops.aten.neg.default, (other,), name="read"), write])
    module = GraphModule(Buffers(), graph)
    assert ("write", "read") in effect_edges(Dag(module.graph))


def test_a_module_that_is_called_may_write_what_it_shares():
    graph = Graph()
    x, flat = graph.placeholder("x"), graph.get_attr("flat")
    before = graph.call_function(torch.ops.aten.neg.default, (flat,), name="before")
    call = graph.call_module("inner", (x,))
    graph.output([before, call, graph.call_function(torch.ops.aten.neg.default, (flat,), name="after")])
    module = GraphModule(Buffers(), graph)
    assert {("before", "inner"), ("inner", "after")} <= effect_edges(Dag(module.graph))


# Inputs.


def write_and_read(flat: Tensor, head: Tensor) -> list[Tensor]:
    flat.add_(1)
    return [head * 2]


def traced_on_fakes(function: Any, *inputs: Tensor) -> GraphModule:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        return make_fx(function)(*(mode.from_tensor(x) for x in inputs))


TRACES: dict[str, Any] = {
    "real": make_fx,
    "fake": lambda function: make_fx(function, tracing_mode="fake"),
    "symbolic": lambda function: make_fx(function, tracing_mode="symbolic"),
    "on fakes": lambda function: lambda *inputs: traced_on_fakes(function, *inputs),
}


@pytest.mark.parametrize("trace", TRACES)
def test_inputs_that_were_traced_as_views_of_one_memory_keep_their_order(trace: str):
    flat = torch.zeros(8)
    module = TRACES[trace](write_and_read)(flat, flat[:4])
    assert ("add_", "mul") in effect_edges(Dag(module.graph))


@pytest.mark.parametrize("trace", TRACES)
def test_inputs_that_were_traced_apart_are_apart_where_the_trace_tells(trace: str):
    """With real tensors `make_fx` gives each input metadata of its own, shared or not: nothing is known then."""
    module = TRACES[trace](write_and_read)(torch.zeros(8), torch.zeros(4))
    assert may_share_inputs(module) == (trace == "real")
    assert (("add_", "mul") in effect_edges(Dag(module.graph))) == (trace == "real")


def test_an_input_may_be_a_constant_where_the_trace_does_not_tell():
    flat = torch.zeros(8)

    def step(head: Tensor) -> list[Tensor]:
        flat.add_(1)
        return [head * 2]

    for trace, head, keeps in (
        ("real", torch.zeros(4), True),
        ("on fakes", torch.zeros(4), False),
        ("on fakes", flat[:4], True),
    ):
        module = TRACES[trace](step)(head)
        assert (("add_", "mul") in effect_edges(Dag(module.graph))) == keeps, (trace, keeps)


def test_real_inputs_inside_a_fake_mode_are_not_taken_for_apart():
    flat = torch.zeros(8)
    with FakeTensorMode(allow_non_fake_inputs=True):
        module = make_fx(write_and_read)(flat, flat[:4])
    assert ("add_", "mul") in effect_edges(Dag(module.graph))


def test_inputs_on_other_devices_and_inputs_without_memory_are_apart():
    module = make_fx(lambda x, y, n: [x.add_(1) * 2, y * n])(torch.zeros(4), torch.zeros(4, device="meta"), 2)
    (y,) = [node for node in module.graph.nodes if node.name.startswith("y")]
    with new_fake_mode():
        y.meta["val"] = torch.empty(4, device="cuda")
    assert effect_edges(Dag(module.graph)) == {("add_", "mul")}


def test_inputs_that_only_may_be_one_are_two_for_memory_and_for_what_is_in_flight():
    module = weft.parse("""
inputs('may share memory')
group('dp', size=2)

def graph(x: f32[256], y: f32[256]):
    ag = all_gather(x, 2, 'dp')
    write = add_(y, 1.0)
    w = wait(ag)
    return [w]
""")
    dag = Dag(module.graph)
    assert {("ag", "write"), ("write", "w")} <= effect_edges(dag)
    apart = weft.parse(weft.listing(module).replace("inputs('may share memory')\n", ""))
    assert effect_edges(Dag(apart.graph)) == set()
    assert weft.simulate(module, "h100-8").peak_bytes == weft.simulate(apart, "h100-8").peak_bytes


def test_what_is_not_known_of_inputs_travels_with_the_listing():
    module = make_fx(write_and_read)(torch.zeros(8), torch.zeros(4))
    text = weft.listing(module)
    assert text.startswith("inputs('may share memory')\n")
    again = weft.parse(text)
    assert weft.listing(again) == text
    assert effect_edges(Dag(again.graph)) == effect_edges(Dag(module.graph))


def test_a_write_moved_into_a_flight_that_may_send_it_is_not_proved():
    text = """
inputs('may share memory')
group('dp', size=2)

def graph(x: f32[4], y: f32[4]):
    ag = all_gather(x, 2, 'dp')
    w = wait(ag)
    write = add_(y, 1.0)
    return [w]
"""
    late = text.replace("    w = wait(ag)\n    write = add_(y, 1.0)\n", "    write = add_(y, 1.0)\n    w = wait(ag)\n")
    proof = prove(weft.parse(text), weft.parse(late))
    assert str(proof) == "not proved equal: write may touch memory that ag has in flight"
    assert prove(weft.parse(late), weft.parse(late))
    assert prove(weft.parse(late), weft.parse(text))


def test_two_waits_for_inputs_that_may_be_one_both_count():
    text = """
inputs('may share memory')

def graph(x: f32[4], y: f32[4]):
    a = wait(x)
    b = wait(y)
    c = add(a, b)
    return [c]
"""
    effects = Dag(weft.parse(text).graph).effects
    assert [effects.completes(i) for i in (2, 3)] == [True, True]
    assert not prove(weft.parse(text), weft.parse(text.replace("    b = wait(y)\n", "").replace("(a, b)", "(a, y)")))


def test_places_tell_where_constants_lie_in_memory_that_they_share():
    flat = torch.zeros(8)
    array = np.zeros(4, np.float32)
    found = places(
        {
            "tail": flat[4:],
            "alone": torch.zeros(4),
            "bytes": flat.view(torch.uint8)[2:],
            "array": torch.from_numpy(array),
            "slice": torch.from_numpy(array[1:]),
            "meta": (m := torch.zeros(4, device="meta")),
            "part": m[3:],
        }
    )
    assert found == {
        "tail": Place("tail", 16),
        "bytes": Place("tail", 2),
        "array": Place("array", 0),
        "slice": Place("array", 4),
        "meta": Place("meta", 0),
        "part": Place("meta", 12),
    }


# Listings.


def shared_views() -> GraphModule:
    """A graph that writes one of several views that overlap, of other types too; none of them covers all."""
    flat = torch.arange(12.0)
    views = {"b": flat[2:8].view(2, 3).T, "c": flat.view(torch.int32)[6:9], "a": flat[:4], "e": torch.zeros(2)}
    views["d"] = torch.view_as_complex(flat[4:8].view(2, 2))
    graph = Graph()
    x = graph.placeholder("x")
    x.meta["val"] = new_fake_mode().from_tensor(torch.zeros(()))
    held = {name: graph.get_attr(name) for name in views}
    graph.call_function(torch.ops.aten.add_.Tensor, (held["b"], x))
    read = [graph.call_function(torch.ops.aten.clone.default, (node,)) for node in held.values()]
    graph.output(read)
    module = GraphModule(views, graph)
    module.meta[APART_KEY] = True
    return module


def run_once(module: GraphModule, *inputs: Tensor) -> list[Any]:
    return [result.tolist() for result in module(*inputs)]


def test_a_listing_tells_which_constants_share_memory():
    module = shared_views()
    text = weft.listing(module)
    assert text.splitlines()[:5] == [
        "tensor('b', f32[3, 2](strides=(1, 3), offset=2), [[2.0, 5.0], [3.0, 6.0], [4.0, 7.0]])",
        f"tensor('c', i32[3](offset=6, base='b'), {module.c.tolist()})",
        "tensor('a', f32[4](base='b'), [0.0, 1.0, 2.0, 3.0])",
        "tensor('e', f32[2], [0.0, 0.0])",
        "tensor('d', c64[2](offset=2, base='b'), [complex(4.0, 5.0), complex(6.0, 7.0)])",
    ]
    again = weft.parse(text)
    assert weft.listing(again).startswith(text.partition("def")[0])
    assert run_once(again, torch.tensor(1.0)) == run_once(module, torch.tensor(1.0))


def test_what_constants_share_is_part_of_the_digest_and_their_values_are_not():
    text = weft.listing(shared_views())
    assert digest(text) == digest(text.replace("[0.0, 1.0, 2.0, 3.0]", "[9.0, 1.0, 2.0, 3.0]"))
    assert digest(text) != digest(text.replace("i32[3](offset=6, base='b')", "i32[3](offset=7, base='b')"))
    assert digest(text) != digest(text.replace("strides=(1, 3), offset=2", "strides=(1, 3), offset=3"))


def test_constants_without_values_share_memory_too():
    flat = torch.zeros(100)
    module = step_over(flat[:4], flat[2:6])
    module.register_buffer("big", flat)
    with module.graph.inserting_before(module.graph.find_nodes(op="output")[0]):
        module.graph.get_attr("big")
    text = weft.listing(module)
    assert "tensor('v', f32[4](offset=2, base='k'))\n" in text
    assert "tensor('big', f32[100](base='k'))\n" in text
    again = weft.parse(text)
    assert weft.listing(again).startswith(text.partition("def")[0])
    assert again.k.untyped_storage().nbytes() == 400
    assert ("write", "ag") in effect_edges(Dag(again.graph))


def test_a_listing_tells_which_inputs_lie_in_the_memory_of_a_constant():
    flat = torch.zeros(8)

    def step(head: Tensor) -> list[Tensor]:
        flat[1:5].add_(1)
        return [head * 2]

    module = traced_on_fakes(step, flat[2:6])
    text = weft.listing(module)
    assert "def graph(head_1: f32[4](offset=2, constant='_tensor_constant0'))" in text
    again = weft.parse(text)
    assert weft.listing(again) == text
    (given,) = example_inputs(again, 1)[0]
    (result,) = VirtualCluster(1).run(again, [[given]], GroupTable())
    assert result.outputs[0].tolist() == [2.0, 2.0, 2.0, 0.0]
    assert given.tolist() == [0.0] * 4


def test_inputs_of_other_types_share_memory_in_a_listing():
    text = (
        "def graph(x: f32[4](offset=2), y: u8[40](base='x')):\n    z = add_(x, 1)\n    w = clone(y)\n    return [w]\n"
    )
    module = weft.parse(text)
    assert "y: u8[40](base='x')" in weft.listing(module)
    assert ("z", "w") in effect_edges(Dag(module.graph))
    x, y = example_inputs(module, 1)[0]
    assert torch.equal(y[8:24].view(torch.float32), x)


REFUSED = {
    "base of a constant that is not there": (
        "tensor('v', f32[4](base='k'), [0.0])",
        "listing line 1: no constant above is called 'k'",
    ),
    "constant that is not there": (
        "def graph(x: f32[4](constant='k')):\n    return [x]",
        "listing line 1: no constant above is called 'k'",
    ),
    "base that is no tensor": (
        "def graph(n: int[2], x: f32[4](base='n')):\n    return [x]",
        "listing line 1: 'n' is not a tensor, so its memory cannot be shared",
    ),
    "another device": (
        "def graph(n: f32[4], x: f32[4](device='cuda', base='n')):\n    return [x]",
        "listing line 1: no tensor has this type: it is on cuda, but shares memory with a tensor on cpu",
    ),
    "values that differ": (
        "tensor('k', f32[2], [0.0, 1.0])\ntensor('v', f32[1](offset=1, base='k'), [2.0])",
        "listing line 1: the values of 'k' differ from those of a constant in the same memory",
    ),
    "values of one only": (
        "tensor('k', f32[2], [0.0, 1.0])\ntensor('v', f32[1](offset=1, base='k'))",
        "listing line 1: 'k' has values, but 'v', which shares its memory, has none",
    ),
    "too much memory": (
        "tensor('k', f32[2], [0.0, 1.0])\ntensor('v', f32[1](offset=1000000000000, base='k'), [2.0])",
        "listing line 1: the memory of 'k' has 4000000000004 bytes, a listing may have at most 1048576",
    ),
    "an offset before the beginning": (
        "tensor('k', f32[2], [0.0, 1.0])\ntensor('v', f32[1](offset=-1, base='k'), [2.0])",
        "listing line 2: no tensor has this type: ",
    ),
    "words that mean nothing": ("inputs('lie apart')", "listing line 1: inputs('lie apart') has no meaning"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_memory_that_cannot_be_is_refused(case: str):
    text, message = REFUSED[case]
    with pytest.raises(ListingError) as error:
        weft.parse(text if "def graph" in text else f"{text}\n\ndef graph(x: f32[2]):\n    return [x]\n")
    assert str(error.value).startswith(message)


def test_constants_that_are_given_must_share_memory_as_the_listing_says():
    text = weft.listing(step_over((k := torch.zeros(8))[:4], k[2:6]))
    weft.parse(text, {"k": (k := torch.ones(9))[1:5], "v": k[3:7]})
    for given in ({"k": k[:4], "v": k[1:5]}, {"k": k[:4], "v": torch.zeros(4)}, {"k": k[:4]}):
        with pytest.raises(ListingError, match="is given"):
            weft.parse(text, given)


def test_a_nested_graph_with_constants_runs_on_copies_that_share_memory():
    module = nested_read(shared=True)
    (result,) = VirtualCluster(1).run(module, [[torch.ones(4)]], GroupTable())
    assert result.outputs[0][0].tolist() == [2.0] * 4
    assert sorted(result.constants) == ["body.own", "k"]
    assert module.k.tolist() == module.body.own.tolist() == [0.0] * 4


def test_storages_made_of_one_memory_are_one_in_a_virtual_run():
    array = np.zeros(6, np.float32)
    module = step_over(torch.from_numpy(array), torch.from_numpy(array[2:]))
    results = VirtualCluster(2).run(module, [[torch.ones(8, 8)]] * 2, GroupTable({"dp": Group("dp", 2)}))
    assert results[0].outputs[0].tolist() == [512.0] * 8


def test_a_report_says_that_inputs_may_share_memory_and_what_to_do():
    def step(written: torch.Tensor, read: torch.Tensor) -> list[torch.Tensor]:
        written.add_(1)
        return [read * 2]

    inputs = (torch.zeros(4), torch.zeros(4))
    unknown, known = (make_fx(step, tracing_mode=mode)(*inputs) for mode in ("real", "fake"))
    assert len(weft.optimize(unknown).report.notes) == 1
    assert weft.optimize(known).report.notes == ()


def test_a_listing_states_shared_constants_and_inputs_and_is_read_back():
    text = """tensor('flat', f32[4], [0.0, 0.0, 0.0, 0.0])
tensor('tail', f32[2](offset=2, base='flat'), [0.0, 0.0])

def graph(x: f32[8], head: f32[4](base='x'), part: f32[2](constant='flat')):
    flat: f32[4] = attribute('flat')
    tail: f32[2] = attribute('tail')
    y: f32[4] = add(flat, head)
    z: f32[2] = add(tail, part)
    return [y, z]
"""
    module = weft.parse(text)
    again = weft.parse(weft.listing(module))
    assert weft.listing(again) == weft.listing(module)
    assert weft.listing(module).partition("    flat")[0] == text.partition("    flat")[0]


# Views that torch conjugates or negates when it reads them.

MIRRORED = """inputs('may share memory')
tensor('c', c64[2], [complex(0.0, 1.0), complex(2.0, 3.0)])
tensor('k', c64[2](base='c', conj=True), [complex(0.0, -1.0), complex(2.0, -3.0)])
tensor('n', f32[2](strides=(2,), offset=1, base='c', neg=True), [-1.0, -3.0])

def graph(x: c64[2]):
    c: c64[2] = attribute('c')
    w: c64[2] = mul_(c, 2)
    k: c64[2] = attribute('k')
    n: f32[2] = attribute('n')
    a: c64[2] = add(k, x)
    b: f32[2] = add(n, 1)
    return [a, b]
"""


def test_constants_that_are_conjugated_views_keep_their_values_in_listings_archives_and_virtual_ranks(tmp_path: Path):
    module = weft.parse(MIRRORED)
    assert weft.listing(module) == MIRRORED
    archive.save(module, tmp_path / "a.weft")
    loaded = archive.load(tmp_path / "a.weft")
    assert weft.listing(loaded) == MIRRORED
    zero = torch.zeros(2, dtype=torch.complex64)
    (virtual,) = VirtualCluster(1).run(module, [[zero]], read_groups(module))
    for a, b in (virtual.outputs, loaded(zero), module(zero)):
        assert a.tolist() == [-2j, 4 - 6j]
        assert b.tolist() == [-1.0, -5.0]


def test_an_input_that_is_a_conjugated_view_says_so():
    z = torch.tensor([1 + 2j, 3 + 4j])
    module = weft.capture(lambda a, b: [a.mul_(2), b * 2], [z, z.conj()])
    text = weft.listing(module)
    assert "b: c64[2](base='a', conj=True)" in text
    assert weft.listing(weft.parse(text)) == text


def test_a_resolved_conjugate_is_a_copy_that_a_later_write_does_not_reach():
    z = torch.tensor([1 + 2j, 3 + 4j])

    def step(a: Tensor, b: Tensor) -> list[Tensor]:
        resolved = b.resolve_conj()
        a.mul_(2)
        return [resolved * 1.0]

    module = weft.capture(step, [z, z.conj()])
    for each in (module, weft.optimize(module).module):
        given = z.clone()
        assert each(given, given.conj())[0].tolist() == [1 - 2j, 3 - 4j]


@pytest.mark.parametrize("wrong", ["f32[2](conj=True)", "c64[2](conj=1)", "f32[2](neg='yes')"])
def test_a_type_that_no_tensor_has_is_refused(wrong: str):
    with pytest.raises(ListingError, match="no tensor has this type"):
        weft.parse(f"def graph(x: {wrong}):\n    return [x]\n")


# Constants that are views of one tensor, in every way that torch makes views.

VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "as_strided": lambda base: base.as_strided((2, 3), (1, 2), 1),
    "diagonal": lambda base: base.view(4, 2).diagonal(),
    "unbind": lambda base: base.view(2, 4).unbind(0)[1],
    "transpose": lambda base: base.view(2, 4).t(),
    "expand": lambda base: base.expand(3, 8),
    "view_as_complex": lambda base: torch.view_as_complex(base.view(4, 2)),
    "conj": lambda base: torch.view_as_complex(base.view(4, 2)).conj(),
    "imag": lambda base: torch.view_as_complex(base.view(4, 2)).imag,
    "negated": lambda base: torch.view_as_complex(base.view(4, 2)).conj().imag,
    "u8": lambda base: base.view(torch.uint8)[3:9],
    "u16": lambda base: base.view(torch.uint16)[1:4],
}


@pytest.mark.parametrize("view", VIEWS)
def test_reads_of_a_view_stay_on_their_side_of_a_write_to_its_base(view: str):
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            base = torch.arange(8.0)
            self.register_buffer("base", base)
            self.register_buffer("seen", VIEWS[view](base))

        def forward(self, x: Tensor) -> list[Tensor]:
            first = self.seen.clone()  # type: ignore[operator]
            self.base.add_(x)  # type: ignore[operator]
            second = self.seen.clone()  # type: ignore[operator]
            return [first.contiguous(), second.contiguous(), x * 2]

    module = make_fx(Tied())(torch.ones(8))
    text = weft.listing(module)
    assert weft.listing(weft.parse(text)) == text
    groups = read_groups(module)
    (before,) = VirtualCluster(1).run(module, [[torch.ones(8)]], groups)
    for pipeline in ("auto", "clean", "reuse-buffers,move-producers"):
        after = weft.optimize(module, pipeline=pipeline).module
        (found,) = VirtualCluster(1).run(after, [[torch.ones(8)]], groups)
        assert all(map(same_bits, before.outputs, found.outputs))
        assert prove(module, after)
