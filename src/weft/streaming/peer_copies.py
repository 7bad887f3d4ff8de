"""`weft::copy_all_gather` and `weft::copy_reduce_scatter`: collectives that are copies between ranks that share memory.

    weft::copy_all_gather(Tensor tensor, str group_name) -> Tensor
    weft::copy_reduce_scatter(Tensor tensor, str reduce_op, str group_name) -> Tensor

Contract: launches like those of functional collectives; `wait_tensor` completes them. They copy their input into the
symmetric memory of the group before they return, on the stream that calls them, so the input's memory is free at once.
Torch's own low-contention operators read their input later, from a stream that the allocator does not know of: its
memory may be used again too early. Each rank then copies from its peers on a side stream, through copy engines. The
group's memory is in use until the wait, and the effects model keeps two uses apart.

On other devices the operators run as the functional collectives of the same meaning.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from weft.compat import copy_stream, register_copy, resolve_group, shared_memory
from weft.graph.ops import op_names

SCHEMAS = (
    "copy_all_gather(Tensor tensor, str group_name) -> Tensor",
    "copy_reduce_scatter(Tensor tensor, str reduce_op, str group_name) -> Tensor",
)
_LIBRARY = torch.library.Library("weft", "FRAGMENT")


def _gather(tensor: Tensor, group_name: str) -> Tensor:
    memory = shared_memory(group_name, tensor.nbytes)
    output = tensor.new_empty(tensor.shape[0] * memory.world_size, *tensor.shape[1:])
    parts = output.chunk(memory.world_size)
    with _Copies(memory, tensor):
        for peer in _peers(memory):
            parts[peer].copy_(memory.get_buffer(peer, tensor.shape, tensor.dtype))
        memory.barrier()
        register_copy(output)
    return output


def _scatter(tensor: Tensor, reduce_op: str, group_name: str) -> Tensor:
    memory = shared_memory(group_name, tensor.nbytes)
    ranks, rows = memory.world_size, tensor.shape[0] // memory.world_size
    shape = (rows, *tensor.shape[1:])
    output, parts = tensor.new_empty(shape), tensor.new_empty(ranks, *shape)
    with _Copies(memory, tensor) as stream:
        for peer in _peers(memory):
            parts[peer].copy_(memory.get_buffer(peer, shape, tensor.dtype, memory.rank * output.numel()))
        memory.barrier()
        parts.record_stream(stream)
        (torch.mean if reduce_op == "avg" else torch.sum)(parts, 0, out=output)
        register_copy(output)
    return output


class _Copies:
    """Puts a tensor into the group's memory, then runs the body on the side stream once all ranks have done so."""

    def __init__(self, memory: Any, tensor: Tensor) -> None:
        self.memory, self.tensor, self.stream = memory, tensor, copy_stream()

    def __enter__(self) -> torch.cuda.Stream:
        self.memory.barrier()  # every rank has completed its last use
        self.memory.get_buffer(self.memory.rank, self.tensor.shape, self.tensor.dtype).copy_(self.tensor)
        self.stream.wait_stream(torch.cuda.current_stream())
        self.outside = torch.cuda.stream(self.stream)
        self.outside.__enter__()
        self.memory.barrier()
        return self.stream

    def __exit__(self, *error: object) -> None:
        self.outside.__exit__(*error)


def _peers(memory: Any) -> list[int]:
    """All ranks, beginning with this one and going down, so that no rank is read by two at once."""
    return [(memory.rank - step) % memory.world_size for step in range(memory.world_size)]


def _gather_elsewhere(tensor: Tensor, group_name: str) -> Tensor:
    return op_names()["all_gather"](tensor, _size_of(group_name), group_name)


def _scatter_elsewhere(tensor: Tensor, reduce_op: str, group_name: str) -> Tensor:
    return op_names()["reduce_scatter"](tensor, reduce_op, _size_of(group_name), group_name)


def _size_of(group_name: str) -> int:
    group = resolve_group(group_name)
    if group is None:
        raise RuntimeError(f"this process has not created the process group {group_name!r}")
    return dist.get_world_size(group)


def _gather_fake(tensor: Tensor, group_name: str) -> Tensor:
    return tensor.new_empty(tensor.shape[0] * _size_of(group_name), *tensor.shape[1:])


def _scatter_fake(tensor: Tensor, reduce_op: str, group_name: str) -> Tensor:
    return tensor.new_empty(tensor.shape[0] // _size_of(group_name), *tensor.shape[1:])


for _schema, _on_cuda, _elsewhere, _fake in (
    (SCHEMAS[0], _gather, _gather_elsewhere, _gather_fake),
    (SCHEMAS[1], _scatter, _scatter_elsewhere, _scatter_fake),
):
    _name = _schema.partition("(")[0]
    _LIBRARY.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(_name, _on_cuda, "CUDA")
    _LIBRARY.impl(_name, _elsewhere, "CPU")
    torch.library.register_fake(f"weft::{_name}", _fake, lib=_LIBRARY)

GATHER: Any = torch.ops.weft.copy_all_gather.default
SCATTER: Any = torch.ops.weft.copy_reduce_scatter.default
