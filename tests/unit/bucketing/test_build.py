"""Merging: the fake values of a bucket are those of a full computation, and its nodes say where they come from."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule, Node

import weft
from tests.unit.plan.listings import gathers, graph, node
from weft.compat import storage_key
from weft.graph import metadata, ops
from weft.graph.edit import Edit
from weft.passes.pipeline import Pipeline

LAUNCHES = {
    "bucket-all-gathers": "all_gather({}, 2, 'dp')",
    "bucket-reduce-scatters": "reduce_scatter({}, 'sum', 2, 'dp')",
    "bucket-all-reduces": "all_reduce({}, 'sum', 'dp')",
    "fuse-ddp-all-reduces": "all_reduce({}, 'sum', 'dp')",
}
STRATEGIES = ["concat", "coalesced", "pack"]
INPUTS = {
    "plain": "x: f32[2, 3], y: f32[4], z: f32[2, 1, 5]",
    "odd bf16": "x: bf16[2, 3], y: bf16[2], z: bf16[4, 1]",
    "one row each": "x: f32[2, 4], y: f32[2], z: f32[2, 2, 2]",
    "without elements": "x: f32[0, 3], y: f32[4], z: f32[2, 0]",
    "strided": "x: f32[4, 3](strides=(1, 4)), y: f32[4](strides=(2,)), z: f32[2, 2](offset=3)",
}


def merged(
    launch: str, spec: str, inputs: str, head: str = "group('dp', size=2)", returned: bool = False
) -> GraphModule:
    lines = [
        line
        for i, name in enumerate("xyz")
        for line in (f"c{i} = {launch.format(name)}", f"w{i} = wait(c{i})", f"r{i} = neg(w{i})")
    ]
    returns = ", ".join(f"{'w' if returned else 'r'}{i}" for i in range(3))
    return Pipeline.parse(spec).run(graph(inputs, *lines, returns=returns, head=head)).module


def assert_values_are_those_of_a_full_computation(module: GraphModule) -> list[str]:
    """Compare sizes, strides, offsets, dtypes and devices node by node, and who shares a storage with whom."""
    mode = metadata.mode_of(module.graph.nodes)
    calls = [n for n in module.graph.nodes if n.op == "call_function"]
    wrong = [n.name for n in calls if not metadata.same(ops.value_of(n), metadata.of_node(n, mode))]
    assert wrong == []
    for n in calls:
        value, fresh = ops.value_of(n), metadata.of_node(n, mode)
        for source in n.all_input_nodes:
            assert shares(value, ops.value_of(source)) == shares(fresh, ops.value_of(source)), (n.name, source.name)
    return [n.name for n in calls]


def shares(value: Any, other: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(shares(item, other) for item in value)
    if isinstance(other, list | tuple):
        return any(shares(value, item) for item in other)
    return isinstance(value, Tensor) and isinstance(other, Tensor) and storage_key(value) == storage_key(other)


@pytest.mark.parametrize("returned", [False, True], ids=["used", "returned"])
@pytest.mark.parametrize("inputs", list(INPUTS))
@pytest.mark.parametrize(("name", "strategy"), list(itertools.product(LAUNCHES, STRATEGIES)))
def test_values_of_new_nodes(name: str, strategy: str, inputs: str, returned: bool):
    module = merged(LAUNCHES[name], f"{name}{{strategy={strategy}}}", INPUTS[inputs], returned=returned)
    stays = inputs == "strided" and strategy == "coalesced" and "all-reduces" in name  # c0 and c1
    assert ("c2" if stays else "c0_bucket") in assert_values_are_those_of_a_full_computation(module)


@pytest.mark.parametrize("strategy", ["concat", "pack"])
@pytest.mark.parametrize("launch", ["broadcast({}, 0, 'dp')", "all_to_all({}, [2, 2], [2, 2], 'dp')"])
def test_values_of_transfers(launch: str, strategy: str):
    inputs = "x: f32[4, 3](strides=(8, 1)), y: f32[4], z: f32[4, 1]"
    module = merged(launch, f"bucket-transfers{{strategy={strategy}}}", inputs)
    assert "c0_bucket" in assert_values_are_those_of_a_full_computation(module)


@pytest.mark.parametrize("name", ["bucket-all-gathers", "bucket-transfers"])
def test_values_of_a_pack_of_several_dtypes(name: str):
    launch = LAUNCHES.get(name, "broadcast({}, 0, 'dp')")
    inputs = "x: bf16[2, 3], y: f32[4], z: i64[1]"
    module = merged(launch, f"{name}{{strategy=pack}}", inputs, returned=True)
    names = assert_values_are_those_of_a_full_computation(module)
    assert "c2_bytes" in names
    results = [ops.value_of(n) for n in module.graph.output_node().args[0]]  # type: ignore[union-attr]
    assert [value.dtype for value in results] == [torch.bfloat16, torch.float32, torch.int64]


def test_values_of_a_pack_of_eight_bit_floats():
    """Gloo cannot send them, so no golden file can hold this."""
    inputs = "x: f8e4m3fn[3], y: f8e5m2[2, 2], z: f32[1]"
    module = merged(LAUNCHES["bucket-all-gathers"], "bucket-all-gathers{strategy=pack}", inputs)
    assert "packed" in assert_values_are_those_of_a_full_computation(module)


@pytest.mark.parametrize(("name", "strategy"), list(itertools.product(LAUNCHES, ["concat", "coalesced"])))
def test_values_of_symbolic_sizes(name: str, strategy: str):
    head = "group('dp', size=2)\nsymbol('s0', hint=6)\nsymbol('s1', hint=4)"
    inputs = "n: int[s0], x: f32[2*s0, 3], y: f32[4, s1], z: f32[2]"
    module = merged(LAUNCHES[name], f"{name}{{strategy={strategy}}}", inputs, head)
    assert "c0_bucket" in assert_values_are_those_of_a_full_computation(module)


def test_values_of_what_folds():
    lines = [
        line
        for i, name in enumerate("xy")
        for line in (
            f"a{i} = _to_copy({name}, dtype=f32)",
            f"b{i} = div(a{i}, 2)",
            f"c{i} = all_reduce(b{i}, 'sum', 'dp')",
            f"w{i} = wait(c{i})",
        )
    ]
    module = graph("x: bf16[3], y: bf16[2, 2]", *lines, returns="w0, w1")
    names = assert_values_are_those_of_a_full_computation(Pipeline.parse("fuse-ddp-all-reduces").run(module).module)
    assert names[:5] == ["b1_flat", "packed", "a0_packed", "b0_packed", "c0_bucket"]


def test_a_split_of_more_elements_than_parts_are_possible_is_read_back():
    module = merged(LAUNCHES["bucket-all-reduces"], "bucket-all-reduces", "x: f32[5000], y: f32[3], z: f32[1]")
    assert weft.listing(weft.parse(weft.listing(module))) == weft.listing(module)


# Provenance.


def traced() -> GraphModule:
    module = graph(
        "x: f32[2], y: f32[3]",
        "c0 = all_gather(x, 2, 'dp')",
        "w0 = wait(c0)",
        "c1 = all_gather(y, 2, 'dp')",
        "w1 = wait(c1)",
        returns="w0, w1",
    )
    for i in range(2):
        launch = node(module, f"c{i}")
        launch.meta["nn_module_stack"] = {"L__m": (f"layers.{i}", object)}
        launch.meta["stack_trace"] = f'File "model.py", line {i + 1}, in forward'
    return module


def meta(module: GraphModule, name: str) -> dict[str, Any]:
    found: Node = node(module, name)
    return found.meta


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_bucket_stands_for_its_members_and_comes_from_the_first(strategy: str):
    module = Pipeline.parse(f"bucket-all-gathers{{strategy={strategy}}}").run(traced()).module
    bucket = meta(module, "c0_bucket")
    assert bucket["weft.members"] == ("c0", "c1")
    assert bucket["stack_trace"] == 'File "model.py", line 1, in forward'
    assert bucket["nn_module_stack"] == {"L__m": ("layers.0", object)}


def test_what_comes_out_for_a_member_comes_from_it():
    module = Pipeline.parse("bucket-all-gathers").run(traced()).module
    for name in ("c1_part", "c1_out"):
        found = meta(module, name)
        assert found["weft.members"] == ("c1",)
        assert found["stack_trace"] == 'File "model.py", line 2, in forward'
        assert found["nn_module_stack"] == {"L__m": ("layers.1", object)}


def test_every_new_node_says_what_it_stands_for():
    module = Pipeline.parse("bucket-all-gathers").run(traced()).module
    calls = [n for n in module.graph.nodes if n.op == "call_function"]
    assert [n.name for n in calls if "weft.members" not in n.meta] == []


@pytest.mark.parametrize(
    "spec", [*(f"bucket-all-gathers{{strategy={strategy}}}" for strategy in STRATEGIES), "schedule-overlap"]
)
def test_every_new_node_carries_the_annotations_of_what_it_stands_for(spec: str):
    module = traced()
    annotate(module, {"c0": "send", "c1": "send", "w0": "use", "w1": "use"})
    made = Pipeline.parse(spec).run(module).module
    calls = [n for n in made.graph.nodes if n.op == "call_function"]
    assert "c0_bucket" in [n.name for n in calls]
    first_wait = next(i for i, n in enumerate(calls) if ops.is_wait(n.target))
    parts = [n.meta["custom"]["part"] for n in calls]
    assert parts == ["send"] * first_wait + ["use"] * (len(calls) - first_wait)


def test_where_members_disagree_a_bucket_has_the_annotations_of_the_first():
    module = traced()
    node(module, "c0").meta["custom"] = {"layer": 0, "stage": "a"}
    node(module, "c1").meta["custom"] = {"layer": 1, "stage": "a", "last": True}
    made = Pipeline.parse("bucket-all-gathers").run(module).module
    assert meta(made, "c0_bucket")["custom"] == {"layer": 0, "stage": "a", "last": True}
    assert meta(made, "c1_out")["custom"] == {"layer": 1, "stage": "a", "last": True}
    assert node(module, "c0").meta["custom"] == {"layer": 0, "stage": "a"}


def annotate(module: GraphModule, parts: dict[str, str]) -> None:
    for name, part in parts.items():
        node(module, name).meta["custom"] = {"part": part}


def test_members_of_members_are_kept():
    """What stands for a bucket and for another node names the first launches of both."""
    module = Pipeline.parse("bucket-all-gathers").run(traced()).module
    bucket, other = node(module, "c0_bucket"), node(module, "x")
    with Edit(module.graph) as edit:
        made = edit.call(bucket.target, bucket.args, before=bucket, like=[bucket, other])  # type: ignore[arg-type]
        edit.replace(bucket, made)
        edit.erase(bucket)
    assert made.meta["weft.members"] == ("c0", "c1", "x")


def test_a_plan_made_from_a_listing_keeps_the_annotations_that_the_listing_leaves_out():
    module = gathers(2)
    text = weft.listing(module)
    for each in module.graph.nodes:
        each.meta["custom"] = {"owner": object()}
    assert weft.listing(module) == text
    plan = weft.optimize(weft.parse(text), pipeline="bucket-all-gathers").plan
    made = weft.apply(module, plan)
    assert all("owner" in n.meta.get("custom", {}) for n in made.graph.nodes if n.op == "call_function")
