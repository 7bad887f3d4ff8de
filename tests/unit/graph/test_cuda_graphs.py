"""What keeps a graph out of a CUDA graph, node by node."""

from __future__ import annotations

import pytest
import torch

import weft
from weft.graph.cuda_graphs import why_not_captured
from weft.graph.host_copies import FETCH, OFFLOAD, WAIT_COPY

CUDA = "device=device('cuda')"


def obstacles(body: str, inputs: str = f"x: f32[4]({CUDA})") -> dict[str, str]:
    return {node.name: why for node, why in why_not_captured(weft.parse(f"def graph({inputs}):\n{body}").graph)}


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("y = nonzero(x)", "the host waits for data of the device"),
        ("y = _to_copy(x, device=device('cpu'))", "the host waits for data of the device"),
        ("y = weft.offload.default(x)", "it copies to or from host memory on a stream of its own"),
        ("y = ones([4])", "it computes on the host"),
    ],
)
def test_a_node_that_needs_the_host_is_named(line: str, why: str):
    assert obstacles(f"    a = neg(x)\n    {line}\n    return [a, y]\n") == {"y": why}


def test_an_input_in_host_memory_is_named():
    found = obstacles("    y = neg(x)\n    return [y, h]\n", f"x: f32[4]({CUDA}), h: f32[()]")
    assert found == {"h": "this input is in host memory"}


def test_device_work_and_graphs_without_a_gpu_have_no_obstacles():
    assert obstacles("    y = neg(x)\n    return [y]\n") == {}
    assert obstacles("    y = nonzero(x)\n    return [y]\n", "x: f32[4]") == {}


def test_copies_to_host_memory_tell_compilers_to_leave_them_out():
    for operator in (OFFLOAD, FETCH, WAIT_COPY):
        assert torch.Tag.cudagraph_unsafe in operator.tags
