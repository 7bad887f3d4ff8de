"""Origins: the module, the layer, the phase and the parameter that a collective comes from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx import GraphModule

import weft
from weft.graph.origins import (
    INPUTS_KEY,
    PHASE_KEY,
    fold_layers,
    layer_of,
    originals_of,
    origins_of,
    path_of,
    plain_path,
    tell_origins,
)
from weft.passes.pipeline import Pipeline

LISTING = """group('dp', size=2)

def graph(x: f32[4, 4], layers_0_up_weight: f32[2, 4], layers_1_up_weight: f32[2, 4], primals_3: f32[2, 4]):
    c0: f32[2, 4] = clone(layers_0_up_weight)
    a0: f32[4, 4] = all_gather(c0, 2, 'dp')
    c1: f32[2, 4] = clone(layers_1_up_weight)
    a1: f32[4, 4] = all_gather(c1, 2, 'dp')
    a2: f32[4, 4] = all_gather(primals_3, 2, 'dp')
    w0: f32[4, 4] = wait(a0)
    w1: f32[4, 4] = wait(a1)
    w2: f32[4, 4] = wait(a2)
    m: f32[4, 4] = mm(x, w0)
    r: f32[4, 4] = all_reduce(m, 'sum', 'dp')
    w3: f32[4, 4] = wait(r)
    s: f32[4, 4] = add(w1, w2)
    t: f32[4, 4] = add(s, w3)
    return [t]
"""
MODULES = {"a0": "layers.0.up", "a1": "layers.1.up", "a2": "norm", "r": "layers.0"}


def traced(key: str = "nn_module_stack") -> GraphModule:
    module = weft.parse(LISTING)
    for node in module.graph.nodes:
        if node.name in MODULES:
            node.meta[key] = {str(i): (path, object) for i, path in enumerate(["", MODULES[node.name]])}
    return module


def test_a_gather_is_of_its_parameter_and_a_reduction_is_of_its_module():
    found = originals_of(traced().graph)
    assert {name: (origin.subject, origin.layer) for name, origin in found.items()} == {
        "a0": ("layers.0.up", "layers.0"),
        "a1": ("layers.1.up", "layers.1"),
        "a2": ("norm", "norm"),
        "r": ("layers.0", "layers.0"),
    }


def test_without_modules_the_names_of_inputs_tell_the_parameter():
    found = originals_of(weft.parse(LISTING).graph)
    assert [found[name].subject for name in MODULES] == ["layers.0.up_weight", "layers.1.up_weight", "", ""]
    assert found["a1"].layer == "layers.1"


def test_a_merged_launch_has_the_origins_of_all_its_members():
    before = traced()
    after = Pipeline.parse("bucket-all-gathers").run(traced()).module
    (name,) = [name for name in origins_of(after.graph) if name.endswith("_bucket")]
    for originals in (originals_of(before.graph), None):  # without the original graph, the nodes themselves know
        found = origins_of(after.graph, originals)[name]
        assert [origin.subject for origin in found] == ["layers.0.up", "layers.1.up", "norm"]
    assert tell_origins("all_gather", 1 << 20, found) == "all-gather of layers.0-1, norm (3 tensors, 1.00 MiB)"


def test_a_collective_without_a_phase_of_its_own_has_that_of_its_graph():
    module = traced()
    assert {origin.phase for origin in originals_of(module.graph).values()} == {""}
    module.meta[PHASE_KEY] = "backward"
    next(node for node in module.graph.nodes if node.name == "a0").meta["partitioner_tag"] = "is_optimizer"
    phases = {name: origin.phase for name, origin in originals_of(module.graph).items()}
    assert phases == {"a0": "optimizer", "a1": "backward", "a2": "backward", "r": "backward"}
    after = Pipeline.parse("bucket-all-gathers").run(module).module
    assert {origin.phase for found in origins_of(after.graph).values() for origin in found} == {"optimizer", "backward"}


def test_what_backward_repeats_of_forward_belongs_to_backward():
    module = traced()
    module.meta[PHASE_KEY] = "backward"
    for node in module.graph.nodes:
        node.meta["partitioner_tag"] = "is_forward"
    assert {origin.phase for origin in originals_of(module.graph).values()} == {"backward"}


DESCRIBED = """group('dp', size=2)

def graph(primals_1: f32[4, 4], primals_2: f32[2, 4], primals_3: f32[2, 4]):
    a: f32[4, 4] = all_gather(primals_2, 2, 'dp')
    w0: f32[4, 4] = wait(a)
    b: f32[4, 4] = all_gather(primals_3, 2, 'dp')
    w1: f32[4, 4] = wait(b)
    m: f32[4, 4] = mm(w0, w1)
    r: f32[2, 4] = reduce_scatter(m, 'sum', 2, 'dp')
    w2: f32[2, 4] = wait(r)
    scaled: f32[2, 4] = mul(w2, 0.5)
    s: f32[4, 4] = all_reduce(m, 'sum', 'dp')
    w3: f32[4, 4] = wait(s)
    return [w3, primals_2, scaled]
"""


@pytest.mark.parametrize(
    "by_index",
    [pytest.param(False, id="AOT export: by path"), pytest.param(True, id="torch.compile: by index")],
)
def test_descriptions_of_inputs_and_outputs_tell_parameters_and_their_gradients(by_index: bool):
    descriptors = pytest.importorskip("torch._functorch._aot_autograd.descriptors")
    paths = ("", "layers.0.experts.w1", "layers.0.experts.w2")

    def described(index: int) -> Any:
        return descriptors.PlainAOTInput(index) if by_index else descriptors.ParamAOTInput(paths[index])

    module = weft.parse(DESCRIBED)
    nodes = {node.name: node for node in module.graph.nodes}
    nodes["primals_2"].meta["desc"] = descriptors.SubclassGetAttrAOTInput(described(1), "_local_tensor")
    nodes["primals_3"].meta["desc"] = described(2)
    gradient = descriptors.GradAOTOutput(described(2))
    results = [descriptors.PlainAOTOutput(0), descriptors.PlainAOTOutput(1), gradient]
    nodes["output"].meta["desc"] = results
    if by_index:
        module.meta[INPUTS_KEY] = paths
    expected = {"a": paths[1], "b": paths[2], "r": paths[2], "s": ""}
    assert {name: origin.subject for name, origin in originals_of(module.graph).items()} == expected
    after = Pipeline.parse("bucket-all-gathers").run(module).module
    merged = origins_of(after.graph, originals_of(module.graph))
    assert sorted(tuple(o.subject for o in each) for each in merged.values()) == [("",), paths[1:], paths[2:]]


def test_the_line_of_a_collective_is_the_first_outside_of_torch_around_it():
    def line(file: str, number: int) -> str:
        return f'  File "{file}", line {number}, in forward\n    code\n'

    module = traced()
    nodes = {node.name: node for node in module.graph.nodes}
    in_torch = line("site-packages/torch/distributed/_functional_collectives.py", 209)
    nodes["a0"].meta["stack_trace"] = line("model.py", 1) + in_torch
    nodes["a1"].meta["stack_trace"] = in_torch
    nodes["s"].meta["stack_trace"] = line("model.py", 2)  # uses what a1 gathers
    nodes["r"].meta["stack_trace"] = line(f"{Path(torch.__file__).parent}/functional.py", 5)
    nodes["m"].meta["stack_trace"] = line("torch/model.py", 3)  # a folder of the user's
    sources = {name: origin.source for name, origin in originals_of(module.graph).items()}
    assert sources == {
        "a0": "model.py:1 in forward: code",
        "a1": "model.py:2 in forward: code",
        "a2": "model.py:2 in forward: code",
        "r": "model.py:3 in forward: code",
    }


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("layers.7.up", "layers.7.up"),
        ("L['self'].layers.7.up", "layers.7.up"),
        ("L['self'].layers[7].up", "layers.7.up"),
        ("L['self']._modules['layers']._modules['7'].up", "layers.7.up"),
        ("layers.7.up.parametrizations.weight.0", "layers.7.up"),
        ("layers.7.up.parametrizations.bias.original", "layers.7.up.bias"),
        ("L['model']", ""),
    ],
)
def test_a_path_is_told_as_named_modules_writes_it(path: str, told: str):
    assert plain_path(path) == told


@pytest.mark.parametrize(
    ("meta", "path"),
    [
        ({"nn_module_stack": {"a": ("a", object), "b": ("a.b", object)}}, "a.b"),
        ({"fwd_nn_module_stack": {"b": ("L['s'].a.b", object)}}, "a.b"),
        ({"custom": {"module_fqn": "a.b"}}, "a.b"),
        ({"nn_module_stack": {"m": 1}}, ""),
        ({"nn_module_stack": {}, "custom": {"module_fqn": 3}}, ""),
        ({}, ""),
    ],
)
def test_the_module_of_a_node_comes_from_any_record(meta: dict[str, Any], path: str):
    assert path_of(meta) == path


def test_layers_with_consecutive_numbers_are_told_as_one():
    layers = ["tokens", *(f"layers.{i}" for i in (0, 2, 1, 5)), "norm", "layers.6"]
    assert fold_layers(layers) == ["tokens", "layers.0-2", "layers.5-6", "norm"]
    assert fold_layers(["0", "1"]) == ["0-1"]
    assert [*map(layer_of, ("model.layers.3.mlp.0", "model.norm", ""))] == ["model.layers.3", "model.norm", ""]
