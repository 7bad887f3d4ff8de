"""The tensors that a step starts from, as fakes: parameters, buffers, optimizer state and inputs.

Contract: a leaf is a fake tensor on the device of the capture, or a subclass such as DTensor over fake ones.
`parts` are the plain tensors in it, which become the inputs of the graph; an operator on the leaf is an operator on its
parts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from weft.compat import (
    FakeTensor,
    FakeTensorMode,
    ShapeEnv,
    fake_tensor,
    fake_view,
    new_symbol,
    storage_key,
    storage_span,
    with_bits,
)
from weft.errors import CaptureError, compose
from weft.graph.aliasing import inner, parts
from weft.graph.metadata import contiguous_strides

CPU = torch.device("cpu")


class Faker:
    """Makes the leaves of one capture; tensors that share memory share it as fakes too."""

    def __init__(self, mode: FakeTensorMode, device: torch.device = CPU) -> None:
        self.mode, self.device = mode, device
        self._symbols: dict[int, Any] = {}
        self._storages: dict[int, tuple[Tensor, FakeTensor]] = {}
        """By the key of a storage: a tensor that keeps it alive, and a fake of the storage that stands for it."""

    def leaf(self, tensor: Tensor) -> Tensor:
        """A fake with the sizes, strides, dtype and subclass of a tensor; it needs a gradient if the tensor does."""
        return self._like(tensor).requires_grad_(tensor.requires_grad)

    def _like(self, tensor: Tensor) -> Tensor:
        within = inner(tensor)
        if within is None:
            sizes, strides = ([int(n) for n in numbers] for numbers in (tensor.shape, tensor.stride()))
            return self._placed(tensor, sizes, strides)
        fakes = {name: self._like(part) if isinstance(part, Tensor) else part for name, part in within.items()}
        context: Any = tensor.__tensor_flatten__()[1]  # type: ignore[attr-defined]
        kind: Any = type(tensor)
        return kind.__tensor_unflatten__(fakes, context, tensor.shape, tensor.stride())

    def _placed(self, tensor: Tensor, sizes: list[Any], strides: list[Any]) -> Tensor:
        """A fake in the storage that stands for that of a tensor, conjugated or negated as the tensor is."""
        raw = self._raw(tensor, sizes, strides)
        return with_bits(raw, conj=tensor.is_conj(), neg=tensor.is_neg())

    def _raw(self, tensor: Tensor, sizes: list[Any], strides: list[Any]) -> Tensor:
        key = self._key(tensor)
        offset = int(tensor.storage_offset())
        if key not in self._storages:
            made = fake_tensor(self.mode, sizes, strides, tensor.dtype, self.device)
            self._storages[key] = (tensor, made)
            if not offset:
                return made
        known, base = self._storages[key]
        spans = storage_span(tensor), storage_span(known)
        if spans[0] is not None and spans[1] is not None:  # of other storages of the same memory
            offset += max(0, spans[0][1] - spans[1][1]) // tensor.element_size()
        return fake_view(base, sizes, strides, offset, tensor.dtype)

    def _key(self, tensor: Tensor) -> int:
        """The key of the storage that a tensor lies in, or of one that is made of the same memory."""
        key, span = storage_key(tensor), storage_span(tensor)
        if key in self._storages or span is None:
            return key
        for other, (known, _) in self._storages.items():
            theirs = storage_span(known)
            if theirs is not None and theirs[0] == span[0] and span[1] < theirs[2] and theirs[1] < span[2]:
                return other
        return key

    def constant(self, tensor: Tensor) -> Tensor:
        """A fake of a tensor that the step finds, on its own device unless it lies in the memory of a leaf."""
        if inner(tensor) is None and self._key(tensor) in self._storages:
            return self._like(tensor)
        return tensor if isinstance(tensor, FakeTensor) else self.mode.from_tensor(tensor, static_shapes=True)

    def with_symbolic_batch(self, name: str, tensor: Tensor) -> Tensor:
        """A fake whose dim 0 is a symbol; inputs of one batch size share it."""
        if tensor.dim() == 0 or inner(tensor) is not None:
            return self.leaf(tensor)
        batch = int(tensor.shape[0])
        if batch < 2 or not tensor.is_contiguous():
            what = f"{name} of shape {list(tensor.shape)}, strides {list(tensor.stride())}, cannot have a dynamic batch"
            raise CaptureError(compose("capture", what, do="give a contiguous example with a batch of at least 2"))
        env: ShapeEnv = self.mode.shape_env  # type: ignore[assignment]
        if batch not in self._symbols:
            self._symbols[batch] = new_symbol(env, f"batch_{batch}", batch)
        sizes = [self._symbols[batch], *(int(n) for n in tensor.shape[1:])]
        made = self._placed(tensor, sizes, contiguous_strides(sizes))
        return made.requires_grad_(tensor.requires_grad)


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
