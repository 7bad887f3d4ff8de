"""The tensors that a step starts from, as fakes: parameters, buffers, optimizer state and inputs.

Contract: a leaf is a fake tensor of the device that is captured for, or a subclass such as DTensor over fake ones.
`parts` are the plain tensors in it, which become the inputs of the graph; an operator on the leaf is an operator on its
parts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from weft.compat import FakeTensorMode, ShapeEnv, fake_tensor, new_symbol
from weft.errors import CaptureError, compose
from weft.graph.metadata import contiguous_strides

CPU = torch.device("cpu")


class Faker:
    """Makes the leaves of one capture."""

    def __init__(self, mode: FakeTensorMode, device: torch.device = CPU) -> None:
        self.mode, self.device = mode, device
        self._symbols: dict[int, Any] = {}

    def leaf(self, tensor: Tensor) -> Tensor:
        """A fake with the sizes, strides, dtype and subclass of a tensor; it needs a gradient if the tensor does."""
        return self._like(tensor).requires_grad_(tensor.requires_grad)

    def _like(self, tensor: Tensor) -> Tensor:
        inner = _inner(tensor)
        if inner is None:
            sizes, strides = ([int(n) for n in numbers] for numbers in (tensor.shape, tensor.stride()))
            return fake_tensor(self.mode, sizes, strides, tensor.dtype, self.device)
        fakes = {name: self._like(part) if isinstance(part, Tensor) else part for name, part in inner.items()}
        context: Any = tensor.__tensor_flatten__()[1]  # type: ignore[attr-defined]
        kind: Any = type(tensor)
        return kind.__tensor_unflatten__(fakes, context, tensor.shape, tensor.stride())

    def with_symbolic_batch(self, name: str, tensor: Tensor) -> Tensor:
        """A fake whose dim 0 is a symbol; inputs of one batch size share it."""
        if tensor.dim() == 0 or _inner(tensor) is not None:
            return self.leaf(tensor)
        batch = int(tensor.shape[0])
        if batch < 2 or not tensor.is_contiguous():
            what = f"{name} of shape {list(tensor.shape)}, strides {list(tensor.stride())}, gives no dynamic batch"
            raise CaptureError(compose("capture", what, do="give a contiguous example with a batch of at least 2"))
        env: ShapeEnv = self.mode.shape_env  # type: ignore[assignment]
        if batch not in self._symbols:
            self._symbols[batch] = new_symbol(env, f"batch_{batch}", batch)
        sizes = [self._symbols[batch], *(int(n) for n in tensor.shape[1:])]
        made = fake_tensor(self.mode, sizes, contiguous_strides(sizes), tensor.dtype, self.device)
        return made.requires_grad_(tensor.requires_grad)


def _inner(tensor: Tensor) -> dict[str, Any] | None:
    """What is inside a wrapper subclass, tensors and (from 2.13) others, by attribute; None for a plain tensor."""
    if not hasattr(type(tensor), "__tensor_flatten__"):
        return None
    names: list[str] = tensor.__tensor_flatten__()[0]  # type: ignore[attr-defined]
    return {name: getattr(tensor, name) for name in names}


def parts(tensor: Tensor) -> list[Tensor]:
    """The plain tensors in a leaf."""
    inner = _inner(tensor)
    if inner is None:
        return [tensor]
    return [part for value in inner.values() if isinstance(value, Tensor) for part in parts(value)]


def plain(value: Any) -> Any:
    """The same containers with the plain tensor of each subclass in them."""
    if isinstance(value, Tensor):
        found = parts(value)
        return found[0] if len(found) == 1 else found
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    return value
