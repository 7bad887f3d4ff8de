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
            "capture: the step communicates in group 'tp', the mesh has axis 'dp'\n"
            "name an axis of the mesh in the step, or add 'tp' to the mesh",
        ),
        (
            {"dp": 2, "cp": 2},
            "capture: the step communicates in group 'tp', the mesh has axes 'dp', 'cp'\n"
            "name an axis of the mesh in the step, or add 'tp' to the mesh",
        ),
        (
            None,
            "capture: the step communicates in group 'tp', there is no mesh\n"
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
