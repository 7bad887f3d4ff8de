"""`weft::offload` and `weft::fetch`: copies of tensors to host memory and back, each launched and then waited for.

    weft::offload(Tensor value) -> Tensor                            a copy in host memory
    weft::fetch(Tensor copy, Device device) -> Tensor                the value on the device again
    weft::wait_copy(Tensor(a) copy, Tensor source) -> Tensor(a)      the copy, complete
    weft::copy_to_host(Tensor[] tensors) -> Tensor                   all elements as one vector in host memory

Contract: a copy that was launched may be read only after its wait. The wait takes the source as well: its memory must
stay as it is until then, and a compiler that reuses memory sees this from the argument. Strides are kept, and the host
never waits. The host waits for `copy_to_host`, as for `.item()`; that operator takes tensors of one dtype.

On CUDA, `offload` and `fetch` use pinned host memory and a stream of their own for each direction. Copies inside a CUDA
graph are refused: the graph would write to the host memory of its capture in every replay. On other devices the
operators copy at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

SCHEMAS = (
    "offload(Tensor value) -> Tensor",
    "fetch(Tensor copy, Device device) -> Tensor",
    "wait_copy(Tensor(a) copy, Tensor source) -> Tensor(a)",
    "copy_to_host(Tensor[] tensors) -> Tensor",
)
_LIBRARY = torch.library.Library("weft", "FRAGMENT")
_STREAMS: dict[tuple[str, torch.device], torch.cuda.Stream] = {}
"""By operator and device."""
_ENDS: dict[int, tuple[torch.cuda.Event, torch.device]] = {}
"""By address of the copy: the event after it, and the device whose stream waits for it."""


def _offload(value: Tensor) -> Tensor:
    if value.device.type != "cuda":
        return value.clone()
    copy = torch.empty_like(value, device="cpu", pin_memory=True)
    _launch("offload", copy, value, value.device)
    return copy


def _fetch(copy: Tensor, device: torch.device) -> Tensor:
    value = torch.empty_like(copy, device=device)
    if value.device.type != "cuda":
        return value.copy_(copy)
    _launch("fetch", value, copy, value.device)
    return value


def _launch(name: str, copy: Tensor, source: Tensor, device: torch.device) -> None:
    """Copy on the stream of a direction, once the current stream has come to this place."""
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(f"weft::{name} cannot run inside a CUDA graph: capture the graph without offloading")
    if (name, device) not in _STREAMS:
        _STREAMS[name, device] = torch.cuda.Stream(device)
    stream = _STREAMS[name, device]
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        copy.copy_(source, non_blocking=True)
    end = torch.cuda.Event()
    end.record(stream)
    _ENDS[copy.data_ptr()] = end, device


def _wait_copy(copy: Tensor, source: Tensor) -> Tensor:
    end = _ENDS.pop(copy.data_ptr(), None)
    if end is not None:
        torch.cuda.current_stream(end[1]).wait_event(end[0])
    return copy.view_as(copy)  # the dispatcher wants another object than the argument


def _copy_to_host(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors]).cpu()


def _offload_fake(value: Tensor) -> Tensor:
    return torch.empty_like(value, device="cpu")


def _fetch_fake(copy: Tensor, device: torch.device) -> Tensor:
    return torch.empty_like(copy, device=device)


def _wait_copy_fake(copy: Tensor, source: Tensor) -> Tensor:
    return copy.view_as(copy)


def _copy_to_host_fake(tensors: Sequence[Tensor]) -> Tensor:
    return torch.empty(sum(tensor.numel() for tensor in tensors), dtype=tensors[0].dtype, device="cpu")


for _schema, _kernel, _fake in zip(
    SCHEMAS,
    (_offload, _fetch, _wait_copy, _copy_to_host),
    (_offload_fake, _fetch_fake, _wait_copy_fake, _copy_to_host_fake),
    strict=True,
):
    _name = _schema.partition("(")[0]
    _LIBRARY.define(_schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.cudagraph_unsafe))
    _LIBRARY.impl(_name, _kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"weft::{_name}", _fake, lib=_LIBRARY)

OFFLOAD: Any = torch.ops.weft.offload.default
FETCH: Any = torch.ops.weft.fetch.default
WAIT_COPY: Any = torch.ops.weft.wait_copy.default
COPY_TO_HOST: Any = torch.ops.weft.copy_to_host.default
