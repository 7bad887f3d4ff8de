"""What capture refuses before and after it traces: wrong arguments, and groups that nothing describes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import weft
from weft.compat import fake_store
from weft.errors import CaptureError
from weft.graph.dag import Dag

X = torch.ones(4)
COLLECTIVES = torch.ops._c10d_functional


def reduced(x: Tensor) -> Tensor:
    return COLLECTIVES.wait_tensor(COLLECTIVES.all_reduce(x, "sum", "tp"))


def gathered(x: Tensor) -> Tensor:
    """Its launch says how many ranks there are, but not which."""
    return COLLECTIVES.wait_tensor(COLLECTIVES.all_gather_into_tensor(x, 4, "tp"))


@pytest.mark.parametrize("step", [reduced, gathered])
@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        (
            {"dp": 4},
            "capture: the step communicates in group 'tp', but the mesh has axis 'dp'\n"
            "name an axis of the mesh in the step, or add 'tp' to the mesh",
        ),
        (
            {"dp": 2, "cp": 2},
            "capture: the step communicates in group 'tp', but the mesh has axes 'dp', 'cp'\n"
            "name an axis of the mesh in the step, or add 'tp' to the mesh",
        ),
        (
            None,
            "capture: the step communicates in group 'tp', but no mesh was given\n"
            "give the axis and its size: mesh={'tp': 8}",
        ),
    ],
)
def test_a_group_that_is_no_axis_of_the_mesh_is_refused(step: Any, mesh: dict[str, int] | None, message: str):
    with pytest.raises(CaptureError) as error:
        weft.capture(step, [X], mesh)
    assert str(error.value) == message
    assert not dist.is_initialized()


def test_a_live_group_needs_no_mesh():
    dist.init_process_group("fake", rank=0, world_size=4, store=fake_store())
    try:
        name = dist.group.WORLD.group_name  # type: ignore[union-attr]
        module = weft.capture(lambda x: COLLECTIVES.wait_tensor(COLLECTIVES.all_reduce(x, "sum", name)), [X])
    finally:
        dist.destroy_process_group()
    assert weft.listing(module).startswith("group('world', size=4)\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            (3, [X]),
            "capture: step is 3, a function or a TrainingStep is needed\n"
            "pass a function of tensors, a module, or weft.TrainingStep(model, loss, optimizer='adamw')",
        ),
        (
            (torch.relu, X),
            "capture: example_inputs is of type Tensor, a list of arguments is needed\n"
            "give the arguments of one call: [inputs, targets]",
        ),
        (
            (torch.relu, [X], [4]),
            "capture: mesh is of type list, a mapping of axes or a DeviceMesh is needed\n"
            "give axes and sizes: mesh={'dp': 8}",
        ),
    ],
)
def test_an_argument_of_a_wrong_type_is_refused(arguments: tuple[Any, ...], message: str):
    with pytest.raises(CaptureError) as error:
        weft.capture(*arguments)
    assert str(error.value) == message


# Memory that tensors share outside the graph.


class Flat(torch.nn.Module):
    """A buffer and a view of it, two parameters over one storage, and a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("flat", torch.zeros(8))
        self.register_buffer("tail", self.flat[4:])
        self.weight = torch.nn.Parameter(torch.ones(4))
        self.tied = torch.nn.Parameter(self.weight.data[1:])

    def forward(self, x: Tensor) -> Tensor:
        self.flat.add_(x.sum())
        return (self.tail * self.weight).sum() + self.tied.sum()


def inputs_of(module: torch.fx.GraphModule) -> str:
    return weft.listing(module).partition("def graph(")[2].partition("):\n")[0]


def test_tensors_of_a_module_that_share_memory_are_captured_so():
    module = weft.capture(weft.TrainingStep(Flat(), optimizer="sgd"), (torch.ones(4),))
    assert inputs_of(module).startswith(
        "weight: f32[4], tied: f32[3](offset=1, base='weight'), flat: f32[8], tail: f32[4](offset=4, base='flat'), "
    )


@pytest.mark.parametrize("dynamic", [False, True])
def test_example_inputs_that_share_memory_are_captured_so(dynamic: bool):
    def step(x: Tensor, y: Tensor) -> Tensor:
        x.add_(1)
        return y * 2

    x = torch.zeros(4, 4)
    module = weft.capture(step, (x, x[2:].T.T), dynamic=dynamic)
    assert "base='x'" in inputs_of(module)
    result = weft.optimize(module, "h100-8", verify="equivalence")
    assert [node.name for node in result.module.graph.nodes][2:4] == ["add_", "mul"]


def test_a_constant_that_lies_in_the_memory_of_an_input_is_captured_so():
    x = torch.zeros(4)
    view = x[2:]

    def step(x: Tensor) -> Tensor:
        x.add_(1)
        return view * 2

    module = weft.capture(step, (x,))
    assert module.graph.find_nodes(op="get_attr")[0].meta["val"].storage_offset() == 2
    (write,), (read,) = (
        module.graph.find_nodes(op="call_function", target=target)
        for target in (torch.ops.aten.add_.Tensor, torch.ops.aten.mul.Tensor)
    )
    assert Dag(module.graph, register=[write]).reaches(write, read)
