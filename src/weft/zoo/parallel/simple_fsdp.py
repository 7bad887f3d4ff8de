"""Fully sharded data parallelism inside the graph, for models that would otherwise be wrapped by `fully_shard`.

`fully_shard` communicates from hooks, which compiled graphs do not contain. `simple_fsdp` shards the same parameters in
the same way, but gathers each of them where a module reads it. Parameters keep the names, placements and dtypes that
`fully_shard` gives them, so checkpoints and optimizer states load both ways.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from weft.compat import tree_map
from weft.errors import CaptureError, compose
from weft.zoo.parallel.parameters import ParameterLayout, Precision, spread

WHERE = "weft.simple_fsdp"


def simple_fsdp(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    reshard_after_forward: bool | Callable[[str], bool] = True,
) -> nn.Module:
    """Shard the parameters of a model over a mesh, and gather each one where a module reads it. Returns the model.

    Call it instead of `fully_shard`, on the whole model, before the optimizer is made. A mesh with one dim shards; with
    two dims, parameters are replicated over the first and sharded over the second. `param_dtype` and `reduce_dtype` are
    those of FSDP2's `MixedPrecisionPolicy`: the dtype to compute in, to which floating-point inputs of the model are
    cast too, and the dtype in which gradients are averaged. `reshard_after_forward` says, for all modules or by a
    module's path, whether backward gathers the weights again. Parameters whose first dim the ranks do not divide are
    replicated.
    """
    axes = _axes(mesh)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    _check(parameters, mesh)
    if param_dtype is None:
        dtypes = sorted({str(parameter.dtype) for parameter in parameters.values()})
        if len(dtypes) > 1:
            what = f"the parameters have several dtypes: {', '.join(dtypes)}"
            raise CaptureError(compose(WHERE, what, do="give param_dtype, the dtype to compute in"))
    compute = param_dtype or next(parameter.dtype for parameter in parameters.values())
    layout = ParameterLayout(shard=axes[-1:], replicate=axes[:-1])
    again = reshard_after_forward if callable(reshard_after_forward) else lambda _path: bool(reshard_after_forward)
    precision = Precision(compute, reduce_dtype or compute)
    spread(model, dict.fromkeys(parameters, layout), mesh, precision, again)
    if param_dtype is not None:
        model.register_forward_pre_hook(_cast_inputs(param_dtype), with_kwargs=True)
    return model


def _axes(mesh: DeviceMesh) -> tuple[str, ...]:
    names = tuple(mesh.mesh_dim_names or ())
    if len(names) in (1, 2):
        return names
    what = f"the mesh has {mesh.ndim} dims with the names {list(names)}, expected one or two named dims"
    do = 'make it by init_device_mesh(device, (ranks,), mesh_dim_names=("dp",))'
    raise CaptureError(compose(WHERE, what, do=do))


def _check(parameters: dict[str, nn.Parameter], mesh: DeviceMesh) -> None:
    if not parameters:
        raise CaptureError(compose(WHERE, "the model has no parameters"))
    sharded = next((name for name, parameter in parameters.items() if isinstance(parameter, DTensor)), None)
    if sharded is not None:
        what = f"{sharded} is sharded already"
        raise CaptureError(compose(WHERE, what, do="call it on the plain model, instead of fully_shard"))
    if mesh.size() != dist.get_world_size():
        what = f"the mesh has {mesh.size()} ranks, the world {dist.get_world_size()}"
        raise CaptureError(compose(WHERE, what, do="use a mesh of all ranks"))


def _cast_inputs(dtype: torch.dtype) -> Any:
    def cast(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        return tree_map(cast, args), tree_map(cast, kwargs)

    return hook
