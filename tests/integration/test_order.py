"""The order of the graph that Weft hands to Inductor is the order of the code that Inductor generates."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from operator import getitem
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.fx import GraphModule

import weft
from tests.integration import functions
from weft.compat.compilers import settings_of
from weft.frontends.session import SESSION
from weft.graph import ops
from weft.graph.collective import collectives

pytestmark = pytest.mark.needs_cpp

MATMULS = ("mm", "addmm", "bmm", "baddbmm")
CALL = re.compile(
    r"(?:(\w+) = )?(?:torch\.ops\.(_c10d_functional|aten)\.(\w+)\.\w+|extern_kernels\.(\w+))"
    r"\((?:\[)?(?:reinterpret_tensor\()?(\w+)"
)
ITEM = re.compile(r"(\w+) = (\w+)\[\d+\]$")
SLOW = Path(__file__).parents[1] / "golden" / "clusters" / "unit.toml"
"""A machine on which products of these tests take longer than their collectives."""


@pytest.fixture
def woven(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The order of each graph that Weft hands over."""
    found: list[list[str]] = []
    weave = SESSION.weave

    def spy(module: GraphModule, *args: Any, **settings: Any) -> GraphModule:
        weave(module, *args, **settings)
        found.append(list(order_of_graph(module)))
        return module

    monkeypatch.setattr(SESSION, "weave", spy)
    return found


def order_of_graph(module: GraphModule) -> Iterator[str]:
    """Launches by kind and number, waits by the number of their launch, matmuls and attention."""
    numbers = {c.launch: i for i, c in enumerate(collectives(module.graph))}
    items = {node: numbers.get(node.args[0]) for node in module.graph.nodes if node.target is getitem}
    for node in module.graph.nodes:
        if node in numbers:
            yield f"{ops.kind_of(node.target).value} {numbers[node]}"
        elif ops.is_wait(node.target):
            source = node.args[0]
            yield f"wait {numbers[source] if source in numbers else items[source]}"
        else:
            yield from compute(str(node.target).removeprefix("aten.").partition(".")[0])


def order_of_code(code: str) -> Iterator[str]:
    """The same of generated code, from its calls; an in-place launch is waited for by its argument."""
    launches: dict[str, int] = {}
    for line in code[code.index("def call(") :].splitlines():
        call, item = CALL.match(line.strip()), ITEM.match(line.strip())
        if item is not None and item[2] in launches:
            launches[item[1]] = launches[item[2]]
        if call is None:
            yield from ["matmul"] * line.strip().startswith("triton_tem_fused")  # autotuned, on a GPU
            continue
        result, namespace, name, kernel, argument = call.groups()
        if namespace == "_c10d_functional" and name.startswith("wait"):
            yield f"wait {launches[argument]}"
        elif namespace == "_c10d_functional":
            number = len({*launches.values()})
            launches[result or argument] = number
            kind = ops.kind_of(getattr(torch.ops._c10d_functional, name).default)
            yield f"{kind.value} {number}"
        else:
            yield from compute(name or kernel)


def compute(name: str) -> Iterator[str]:
    if "scaled_dot_product" in name:
        yield "attention"
    elif name in MATMULS:
        yield "matmul"


def code_of(function: Callable[[], Any]) -> list[list[str]]:
    from torch._inductor.utils import run_and_get_code

    _, codes = run_and_get_code(function)
    return [list(order_of_code(code)) for code in codes]


def compiled(
    function: Callable[..., Any], how: str, pipeline: str = "auto", cluster: Path | None = None
) -> Callable[..., Any]:
    if how == "backend":
        options = {"weft.pipeline": pipeline, **({"weft.cluster": str(cluster)} if cluster else {})}
        return torch.compile(function, backend="weft", options=options)
    hook = weft.inductor_pass(pipeline=pipeline)
    return torch.compile(function, options={"post_grad_custom_post_pass": hook})


@pytest.mark.slow
def test_forward_and_backward_with_attention_keep_the_order_that_the_passes_made(
    mesh: DeviceMesh, woven: list[list[str]]
):
    function = compiled(functions.attend, "backend", pipeline="hoist-launches,sink-waits")
    arguments = functions.attend_arguments(mesh.get_group().group_name)
    codes = code_of(lambda: function(*arguments).backward())
    counters = torch._dynamo.utils.counters["weft"]
    assert counters["graphs changed"] == 2
    assert codes == woven
    forward, backward = codes
    assert forward[:4] == ["all_gather 0", "all_gather 1", "all_gather 2", "all_gather 3"]  # hoisted to the top
    assert forward[4:] == [
        *("wait 0", "matmul", "wait 1", "matmul", "wait 2", "matmul"),
        *("attention", "wait 3", "matmul"),
    ]
    assert backward.count("attention") == 1
    assert backward[-4:] == ["wait 0", "wait 1", "wait 2", "wait 3"]  # sunk to the end


def test_buckets_keep_the_order_that_the_passes_made(mesh: DeviceMesh, woven: list[list[str]]):
    pipeline = "bucket-all-gathers,bucket-reduce-scatters,hoist-launches,sink-waits"
    function = compiled(functions.attend, "backend", pipeline)
    arguments = functions.attend_arguments(mesh.get_group().group_name)
    codes = code_of(lambda: function(*arguments).backward())
    assert codes == woven
    forward, backward = codes
    assert forward == ["all_gather 0", "wait 0", *["matmul"] * 3, "attention", "matmul"]
    assert [step for step in backward if "reduce_scatter" in step] == ["reduce_scatter 0"]


def test_the_planned_order_with_what_runs_between_each_launch_and_its_wait_is_kept(
    mesh: DeviceMesh, woven: list[list[str]]
):
    """Every gather but the first is in flight during a matmul or attention; every reduce-scatter but the last too."""
    function = compiled(functions.attend, "backend", "schedule-overlap{merge=none}", cluster=SLOW)
    arguments = functions.attend_arguments(mesh.get_group().group_name)
    codes = code_of(lambda: function(*arguments).backward())
    assert codes == woven
    forward, backward = codes
    assert between(forward, "all_gather")[1:] == [["matmul"], ["matmul"], ["attention"]]
    assert all(found for found in between(backward, "reduce_scatter")[:-1])


def test_the_planned_order_of_buckets_is_kept(mesh: DeviceMesh, woven: list[list[str]]):
    function = compiled(functions.attend, "backend", "schedule-overlap", cluster=SLOW)
    arguments = functions.attend_arguments(mesh.get_group().group_name)
    codes = code_of(lambda: function(*arguments).backward())
    assert codes == woven


def between(order: list[str], kind: str) -> list[list[str]]:
    """What is computed between each launch of a kind and its first wait."""
    launches = [(place, step.split()[1]) for place, step in enumerate(order) if step.startswith(kind)]
    return [
        [step for step in order[place : order.index(f"wait {number}")] if step in ("matmul", "attention")]
        for place, number in launches
    ]


@pytest.mark.parametrize("how", ["backend", "hook"])
def test_fusion_does_not_pull_a_wait_up(mesh: DeviceMesh, woven: list[list[str]], how: str):
    function = compiled(functions.share_a_read, how, pipeline="sink-waits")
    arguments = functions.share_a_read_arguments(mesh.get_group().group_name)
    (code,) = code_of(lambda: function(*arguments))
    assert [code] == woven
    assert code.index("matmul") < code.index("wait 0")


def test_without_weft_inductor_does_pull_it_up(mesh: DeviceMesh):
    function = torch.compile(functions.share_a_read)
    (code,) = code_of(lambda: function(*functions.share_a_read_arguments(mesh.get_group().group_name)))
    assert code.index("wait 0") < code.index("matmul")


@pytest.mark.parametrize("how", ["backend", "hook"])
def test_the_settings_of_inductor_are_as_before(mesh: DeviceMesh, how: str):
    config = settings_of("inductor")
    before = config.get_config_copy()
    function = compiled(functions.gather_and_multiply, how)
    function(*functions.gather_and_multiply_arguments(mesh.get_group().group_name))
    assert config.get_config_copy() == before
