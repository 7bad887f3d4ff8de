"""Programs whose compilation is logged: `python trace_programs.py NAME BACKEND FOLDER` with TORCH_TRACE set.

Each runs as one rank of a fake world. The graphs that the compiler had in hand are written to FOLDER as listings, one
file each, in the order of their compilation: what a log of the same run must give back.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.fx import GraphModule
from torch.testing._internal.distributed.fake_pg import FakeStore


class Gather(torch.autograd.Function):
    """An all-gather whose gradient is a reduce-scatter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: DeviceMesh) -> Tensor:
        ctx.group = mesh.get_group("dp")
        return funcol.all_gather_tensor(x, 0, ctx.group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return funcol.reduce_scatter_tensor(grad, "sum", 0, ctx.group), None


class Layer(nn.Module):
    """A linear layer with gathered weights, dropout, a maximum and a reduction over `tp`."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.mesh = mesh
        self.weight = nn.Parameter(torch.randn(4, 16))
        self.bias = nn.Parameter(torch.randn(16))
        self.register_buffer("scale", torch.arange(16.0))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(x @ Gather.apply(self.weight, self.mesh) + self.bias)
        h = nn.functional.dropout(h, 0.1)
        top, place = torch.max(h, dim=1, keepdim=True)
        h = top.expand(top.shape[0], 16) + h * torch.tensor([1.0, 2.0])[place[0, 0] * 0]
        h = funcol.all_reduce(h * self.scale, "sum", self.mesh.get_group("tp"))
        left, right = torch.split(h, 8, dim=1)
        return left.sum() + right.to(torch.bfloat16).float().mean()


def train(mesh: DeviceMesh, backend: Any, dynamic: bool = False) -> None:
    torch.compile(Layer(mesh), backend=backend, dynamic=dynamic, fullgraph=False)(torch.randn(8, 16)).backward()


def linear(mesh: DeviceMesh, backend: Any, dynamic: bool = False) -> None:
    """Matrix products and communication alone, for which Inductor writes no C++."""
    weight = torch.randn(4, 16, requires_grad=True)

    def step(x: Tensor) -> Tensor:
        return funcol.all_reduce(x @ Gather.apply(weight, mesh), "sum", mesh.get_group("tp"))

    x = torch.randn(8, 16, requires_grad=True)
    torch.compile(step, backend=backend, dynamic=dynamic)(x).backward(torch.ones(8, 16))


def branches(_mesh: DeviceMesh, backend: Any) -> None:
    def step(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda t: t.sin() + 1, lambda t: t.cos(), (x,)) * 2

    torch.compile(step, backend=backend)(torch.randn(8, 16))


def numbers(_mesh: DeviceMesh, backend: Any) -> None:
    """Sizes that data decides, and arithmetic on sizes."""
    torch._dynamo.config.capture_scalar_outputs = True
    torch._dynamo.config.capture_dynamic_output_shape_ops = True

    def step(x: Tensor, n: Tensor) -> tuple[Tensor, ...]:
        count = n.item()
        torch._check(count >= 0)
        torch._check(count < 100)
        rows = x.shape[0]
        return torch.zeros(count, 4) + 1, torch.nonzero(x), x.view(rows // 2, 2 * x.shape[1]) * (rows * 3 - 1)

    torch._dynamo.config.specialize_int = False
    x = torch.randn(8, 6)
    torch._dynamo.mark_dynamic(x, 0)
    torch._dynamo.mark_dynamic(x, 1)
    torch.compile(step, backend=backend)(x, torch.tensor(3))


def kinds(mesh: DeviceMesh, backend: Any) -> None:
    """Every kind of functional collective, coalesced forms and strided inputs too."""
    dp, tp = mesh.get_group("dp"), mesh.get_group("tp")

    def step(x: Tensor, strided: Tensor) -> list[Tensor]:
        y = strided.contiguous()
        gathered = funcol.all_gather_into_tensor_coalesced([x, y], dp)
        scattered = funcol.reduce_scatter_tensor_coalesced([x, y], "sum", [0, 0], dp)
        reduced = funcol.all_reduce_coalesced([x, y], "avg", tp)
        moved = funcol.all_to_all_single(x.t().contiguous(), [1, 3], [2, 2], tp)
        return [*gathered, *scattered, *reduced, moved, funcol.broadcast(y * 2, 1, dp), x.t() @ strided]

    torch.compile(step, backend=backend)(torch.randn(8, 4), torch.randn(4, 8).t())


def experts(_mesh: DeviceMesh, backend: Any) -> None:
    """A mixture of experts whose exchanges have sizes that the host reads."""
    from weft import zoo

    torch._dynamo.config.capture_scalar_outputs = True
    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "ep"))
    model, batch = zoo.build("dropless-debug", "ep-fsdp", mesh, layers=1, num_experts=4)
    with contextlib.suppress(RuntimeError):  # a fake world returns what was in memory for the counts
        torch.compile(model, backend=backend)(*batch()).backward()


PROGRAMS: dict[str, Callable[[DeviceMesh, Any], None]] = {
    "linear": linear,
    "linear_dynamic": lambda mesh, backend: linear(mesh, backend, dynamic=True),
    "train": train,
    "train_dynamic": lambda mesh, backend: train(mesh, backend, dynamic=True),
    "branches": branches,
    "numbers": numbers,
    "kinds": kinds,
    "experts": experts,
}


class Folder:
    """Writes listings, numbered, each named after the event under which the log has the graph."""

    def __init__(self, path: Path) -> None:
        self.path, self.count = path, 0

    def write(self, kind: str, module: GraphModule) -> None:
        import weft

        (self.path / f"{self.count:03} {kind}.txt").write_text(weft.listing(module))
        self.count += 1


def eager_backend(folder: Folder) -> Any:
    """As torch's `aot_eager`, and each graph is written."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import default_partition

    def compiler(kind: str) -> Callable[[GraphModule, Any], GraphModule]:
        def compile_(module: GraphModule, _inputs: Any) -> GraphModule:
            folder.write(kind, module)
            return module

        return compile_

    def partition(joint: GraphModule, inputs: Any, **options: Any) -> Any:
        folder.write("aot_joint_graph", joint)
        return default_partition(joint, inputs, **options)

    return aot_autograd(
        fw_compiler=compiler("aot_forward_graph"),
        bw_compiler=compiler("aot_backward_graph"),
        inference_compiler=compiler("aot_inference_graph"),
        partition_fn=partition,
    )


def inductor_backend(folder: Folder) -> str:
    """Inductor, and each graph is written behind its post-grad passes."""
    from torch._inductor import compile_fx

    passes = compile_fx._recursive_post_grad_passes
    depth = 0

    def then_write(module: GraphModule, *args: Any, **options: Any) -> None:
        nonlocal depth
        depth += 1
        passes(module, *args, **options)
        depth -= 1
        if depth == 0:  # a nested graph stands in the text of the graph around it
            folder.write("inductor_post_grad_graph", module)

    compile_fx._recursive_post_grad_passes = then_write
    return "inductor"


def main(names: str, backend: str, path: str) -> None:
    warnings.simplefilter("ignore")
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
    folder = Folder(Path(path))
    made = eager_backend(folder) if backend == "eager" else inductor_backend(folder)
    for name in names.split(","):
        torch._dynamo.reset()
        PROGRAMS[name](mesh, made)


if __name__ == "__main__":
    main(*sys.argv[1:])
