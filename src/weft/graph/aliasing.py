"""Which inputs and constants of a graph lie in the same memory.

Contract: two tensors of the module share memory if their real storages say so or if their metadata says so. An input
has only its metadata. That is reliable only if the tracer kept track of storages (`make_fx` does with fake tensors but
not with real ones), or if the module states that its inputs do not overlap. Any other input may lie in the memory of
any other tensor on the same device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.nn import Module

from weft.compat import FakeTensor, FakeTensorMode, fake_storage_key, keys_of_real_storages, storage_key, storage_span
from weft.graph import ops
from weft.graph.operator_effects import profile

APART_KEY = "weft.inputs_apart"
"""In `GraphModule.meta`: True if inputs with different storages in their metadata overlap neither each other nor
constants; False if any two may share memory. Without this key the metadata decides. AOTAutograd guarantees True: where
an input that is written overlaps another, it derives both from one input."""


@dataclass(frozen=True, slots=True)
class Part:
    """One plain tensor."""

    keys: tuple[int, ...]
    """Tensors with a common key share a storage. Empty if nothing is known about the storage."""
    span: tuple[str, int, int] | None = None
    """Device, first address and end address of a real storage; two storages may cover the same addresses."""


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory of the tensors in one input, or in one attribute of the module."""

    parts: tuple[Part, ...]
    is_known: bool
    """Whether the parts are complete. If not, this memory may overlap that of any other tensor."""
    devices: frozenset[str]
    """Types of its devices; empty if they are unknown."""
    is_container: bool = False
    """Whether calls take tensors out of it without saying which."""


def memories(nodes: Sequence[Node]) -> dict[Node, Memory]:
    """The memory of each input, attribute and called module that holds tensors."""
    inputs = {node: list(_tensors(ops.value_of(node))) for node in nodes if node.op == "placeholder"}
    owner = nodes[0].graph.owning_module if nodes else None
    modes = Counter(mode for found in inputs.values() for mode in {_mode(t) for t in found} if mode is not None)
    located = _Located(modes, owner.meta.get(APART_KEY) if isinstance(owner, GraphModule) else None)
    found: dict[Node, Memory] = {}
    for node in nodes:
        if node.op == "placeholder":
            memory = _memory_of_input(node, inputs[node], located)
        elif node.op in ("get_attr", "call_module"):
            memory = _memory_of_attribute(node, owner, modes)
        else:
            continue
        if memory is not None:
            found[node] = memory
    return found


def may_share_inputs(module: GraphModule) -> bool:
    """Whether the order of the writes depends on which inputs share memory, and this is unknown."""
    nodes = list(module.graph.nodes)
    if not any(map(_writes, nodes)):
        return False
    found = memories(nodes)
    return len(found) > 1 and not all(memory.is_known for memory in found.values())


def _writes(node: Node) -> bool:
    if node.op != "call_function":
        return node.op in ("call_module", "call_method")
    found = profile(node.target)
    arrives = found.wait and any(source.op == "placeholder" for source in node.all_input_nodes)
    return bool(found.writes) or found.opaque or arrives


class _Located:
    """The inputs whose metadata is known to describe their memory."""

    def __init__(self, modes: Mapping[FakeTensorMode, int], stated: bool | None) -> None:
        self.modes, self.stated = modes, stated
        self._real = {mode: keys_of_real_storages(mode) for mode in modes} if stated is None else {}

    def knows(self, tensor: Tensor) -> bool:
        """A fake tensor converted from a real one has its storage. A mode that never saw a real tensor is reliable too.

        `make_fx` with real tensors makes a separate mode and storage for the metadata of each tensor.
        """
        if self.stated is not None:
            return self.stated
        mode = _mode(tensor)
        if mode is None:
            return False
        real = self._real[mode]
        return self.modes[mode] > 1 if real is None else storage_key(tensor) in real


def _memory_of_input(node: Node, tensors: Sequence[Tensor], located: _Located) -> Memory | None:
    value = ops.value_of(node)
    if not tensors:
        unknown = value is None and located.stated is not True
        return Memory((), is_known=False, devices=frozenset()) if unknown else None
    parts = tuple(Part(keys) for tensor in tensors if (keys := _keys(tensor)))
    is_known = len(parts) == len(tensors) and all(map(located.knows, tensors))
    return Memory(parts, is_known, _devices(tensors), is_container=not isinstance(value, Tensor))


def _memory_of_attribute(node: Node, owner: Module | None, modes: Iterable[FakeTensorMode]) -> Memory | None:
    held = ops.attribute(owner, str(node.target)) if owner is not None else None
    real, traced = list(_tensors(held)), list(_tensors(ops.value_of(node)))
    if not real:
        if held is not None and not traced:
            return None
        parts = tuple(Part(keys) for tensor in traced if (keys := _keys(tensor)))
        return Memory(parts, is_known=False, devices=_devices(traced))
    also = tuple(key for tensor in traced for key in _keys(tensor)) if len(real) == 1 else ()
    parts = tuple(
        Part((*keys, *also, *(k for mode in modes if (k := fake_storage_key(mode, tensor)) is not None)), span)
        for tensor in real
        if (keys := _keys(tensor))
        for span in [storage_span(tensor)]
    )
    is_container = not isinstance(held, Tensor | GraphModule)
    return Memory(parts, len(parts) == len(real), _devices([*real, *traced]), is_container)


# Constants.


def span_bytes(size: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> int:
    """The bytes of memory from the first to the last element of a tensor."""
    extent = 0 if 0 in size else 1 + sum((n - 1) * step for n, step in zip(size, strides, strict=True))
    return extent * dtype.itemsize


def memory_of(tensor: Tensor) -> tuple[Any, ...]:
    """The storages of a tensor and its offsets in them. This distinguishes it from any copy while both are alive."""
    return tuple((*_keys(part), int(part.storage_offset()) if _keys(part) else id(part)) for part in parts(tensor))


@dataclass(frozen=True, slots=True)
class Place:
    """The position of a constant in memory that it shares with others."""

    base: str
    """The path of the first constant in that memory."""
    start: int
    """Offset in bytes from the start of the first storage in that memory."""


def places(constants: Mapping[str, Tensor]) -> dict[str, Place]:
    """The positions of the constants that share memory with another constant, by path."""
    roots: dict[Any, str] = {}
    found: dict[str, str] = {}
    spans = {path: span for path, tensor in constants.items() if _keys(tensor) and (span := storage_span(tensor))}
    first, end = "", 0
    for path in sorted(spans, key=lambda path: (spans[path], path)):
        device, start, stop = spans[path]
        is_new = not first or spans[first][0] != device or start >= end
        first, end = (path, stop) if is_new else (first, max(end, stop))
        found[path] = first
    for path, tensor in constants.items():
        if path not in found:
            found[path] = roots.setdefault(_keys(tensor) or path, path)
    groups: dict[str, list[str]] = {}
    for path in constants:
        groups.setdefault(found[path], []).append(path)
    made: dict[str, Place] = {}
    for root, members in groups.items():
        for path in members if len(members) > 1 else ():
            tensor, before = constants[path], spans[path][1] - spans[root][1] if path in spans else 0
            made[path] = Place(members[0], before + int(tensor.storage_offset()) * tensor.element_size())
    return made


def constants_of_inputs(module: GraphModule) -> dict[Node, str]:
    """The inputs that share memory with a constant, each with the path of the first such constant."""
    nodes = list(module.graph.nodes)
    if not any(node.op == "get_attr" for node in nodes):
        return {}
    found = memories(nodes)
    paths: dict[int, str] = {}
    for node, memory in found.items():
        if node.op == "get_attr" and isinstance(ops.attribute(module, str(node.target)), Tensor):
            for key in (key for part in memory.parts for key in part.keys):
                paths.setdefault(key, str(node.target))
    inputs = [(node, memory) for node, memory in found.items() if node.op == "placeholder"] if paths else []
    keys = {node: [key for part in memory.parts for key in part.keys if key in paths] for node, memory in inputs}
    return {node: paths[mine[0]] for node, mine in keys.items() if mine}


def placed(module: GraphModule, constants: Mapping[str, Tensor]) -> dict[str, Place]:
    """The positions of the constants that share memory with a constant or an input, by path."""
    found = places(constants)
    for path in dict.fromkeys(constants_of_inputs(module).values()):
        if path in constants and path not in found:
            found[path] = place_of(path, constants[path])
    return found


def place_of(path: str, tensor: Tensor) -> Place:
    """The position of a constant that shares no memory with another."""
    return Place(path, int(tensor.storage_offset()) * tensor.element_size())


def _mode(tensor: Tensor) -> FakeTensorMode | None:
    return tensor.fake_mode if isinstance(tensor, FakeTensor) else None


def _keys(tensor: Tensor) -> tuple[int, ...]:
    try:
        return (storage_key(tensor),)
    except (NotImplementedError, RuntimeError):  # sparse tensors, and others without a storage
        return ()


def _devices(tensors: Iterable[Tensor]) -> frozenset[str]:
    """The devices of tensors. Tensors on the meta device have none yet."""
    found = {tensor.device.type for tensor in tensors}
    return frozenset(found - {"meta"})


def _tensors(value: Any) -> Iterator[Tensor]:
    """The plain tensors in a value: in containers, in modules with the graphs inside them, in subclasses of tensors."""
    if isinstance(value, Tensor):
        yield from parts(value)
    elif isinstance(value, Module):
        for module in value.modules():
            yield from _tensors([*module.parameters(recurse=False), *module.buffers(recurse=False)])
            yield from _tensors([held for held in vars(module).values() if isinstance(held, Tensor | list | tuple)])
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, Mapping):
        yield from _tensors(list(value.values()))


# Subclasses.


def inner(tensor: Tensor) -> dict[str, Any] | None:
    """The contents of a wrapper subclass by attribute: tensors and, from 2.13, others. None for a plain tensor."""
    if not hasattr(type(tensor), "__tensor_flatten__"):
        return None
    names: list[str] = tensor.__tensor_flatten__()[0]  # type: ignore[attr-defined]
    return {name: getattr(tensor, name) for name in names}


def parts(tensor: Tensor) -> list[Tensor]:
    """The plain tensors in a tensor."""
    found = inner(tensor)
    if found is None:
        return [tensor]
    return [part for value in found.values() if isinstance(value, Tensor) for part in parts(value)]
