"""One rank's values while its graph runs; the virtual cluster and the real ranks share this code.

Contract: the caller's inputs, the module and its constants are never modified; a rank works on copies. Tensors that
share a storage also share one in the copies, with their strides and offsets. Everything runs on the CPU. A `wide` rank
computes in f64 whatever dtype the graph asks for: a reference with very little rounding.
"""

from __future__ import annotations

import copy
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.nn import Module

from weft.compat import FakeTensor, hint_of, input_nodes, storage_key, storage_span, with_bits
from weft.errors import GraphError, VerificationError, compose, point_at
from weft.graph.dag import Dag
from weft.graph.groups import Group, GroupTable
from weft.graph.host import may_transfer, transfer_of
from weft.graph.listings.writer import excerpt
from weft.graph.operator_effects import attribute
from weft.verification.inlining import inlined_graph

T = TypeVar("T")
Partition = tuple[tuple[int, ...], ...]
SHARED_BY_DTYPES = "tensors of different dtypes share memory, so they cannot be run in f64"


@dataclass(frozen=True)
class RankResult:
    """The results of one rank."""

    outputs: Any
    """The values that the graph returns."""
    inputs: list[Any]
    """The inputs after the step; a graph may write to its inputs."""
    constants: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    """The tensors of the module that the step changed, by path."""


def substitute(value: Any, change: Callable[[Any], Any]) -> Any:
    """Rebuild nested containers with plain ones of the same kind, and apply `change` to every leaf."""
    if isinstance(value, list):
        return [substitute(item, change) for item in value]
    if isinstance(value, tuple):
        items = [substitute(item, change) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, dict):
        return {key: substitute(item, change) for key, item in value.items()}
    if isinstance(value, slice):
        return slice(*(substitute(part, change) for part in (value.start, value.stop, value.step)))
    return change(value)


def tensors_in(value: Any) -> Iterable[Tensor]:
    """All tensors in a value, including those in nested containers."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, Mapping):
        yield from tensors_in(list(value.values()))


def same_bits(first: Tensor, second: Tensor) -> bool:
    """Whether dtype, shape and every bit are equal; NaNs are compared by their bits too."""
    if first.dtype != second.dtype or first.shape != second.shape:
        return False
    return torch.equal(as_bytes(first), as_bytes(second))


def as_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, one row for each element."""
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
    packed = flat.contiguous().as_strided(flat.shape, (1,))  # torch calls one element contiguous whatever its stride is
    rows = packed.view(torch.uint8).reshape(flat.numel(), flat.element_size())
    # gloo adds bools as bytes, so that True may be stored as 2 (seen with torch 2.13).
    return rows.ne(0).to(torch.uint8) if tensor.dtype == torch.bool else rows


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The widest dtype of the same kind."""
    if dtype.is_complex:
        return torch.complex128
    return torch.float64 if dtype.is_floating_point else dtype


def widen(value: Any) -> Any:
    """A tensor of real or complex numbers in the widest dtype; any other value is returned unchanged."""
    return value.to(wide_dtype(value.dtype)) if isinstance(value, Tensor) else value


class Copies:
    """Copies of tensors on the CPU that share storages exactly where the originals do; `wide` copies are in f64."""

    def __init__(self, *, wide: bool = False) -> None:
        self._wide = wide
        self._storages: dict[int, tuple[Tensor, int]] = {}
        """By storage key: the copy, and the byte offset in it at which the original storage begins."""
        self._originals: dict[int, Tensor] = {}
        self._spans: list[tuple[str, int, int, int]] = []
        """Device, first address, end address and key of the storages that were copied, sorted."""

    def of(self, value: Any) -> Any:
        """The value with a copy of each tensor in it."""
        return substitute(value, lambda leaf: self._copy(leaf) if isinstance(leaf, Tensor) else leaf)

    def _copy(self, tensor: Tensor) -> Tensor:
        if isinstance(tensor, FakeTensor) or tensor.device.type == "meta":
            what = "an input or constant has no values (it is a fake or meta tensor)"
            raise VerificationError(compose("verification", what, do="give real tensors, as example_inputs makes them"))
        key = storage_key(tensor)
        if key not in self._storages:
            self._originals[key] = tensor  # a key is valid only while its storage is alive
            self._storages[key] = self._inside_another(tensor, key) or (self._storage(tensor), 0)
        if self._wide and self._originals[key].dtype != tensor.dtype:
            raise VerificationError(compose("verification", SHARED_BY_DTYPES))
        dtype = wide_dtype(tensor.dtype) if self._wide else tensor.dtype
        made, start = self._storages[key]
        offset = start // tensor.element_size() + int(tensor.storage_offset())
        view = view_of(made, dtype, offset, tensor.shape, tensor.stride())
        return with_bits(view, conj=tensor.is_conj(), neg=tensor.is_neg())

    def knows(self, tensor: Tensor) -> bool:
        """Whether the storage of this tensor was copied."""
        return tensor.layout == torch.strided and storage_key(tensor) in self._storages

    def _storage(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        raw = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage).to("cpu", copy=True)
        if not self._wide:
            return raw
        count = storage.nbytes() // tensor.element_size()
        return widen(view_of(raw, tensor.dtype, 0, (count,), (1,)))

    def _inside_another(self, tensor: Tensor, key: int) -> tuple[Tensor, int] | None:
        """The copy of another storage over the same memory, and the byte offset at which this storage begins in it."""
        span = storage_span(tensor)
        if span is None:
            return None
        place = bisect_right(self._spans, (*span, key))
        for device, start, end, other in self._spans[max(0, place - 1) : place + 1]:
            if device != span[0] or start >= span[2] or span[1] >= end:
                continue
            if start > span[1] or span[2] > end or (span[1] - start) % tensor.element_size():
                what = "two inputs or constants have separate storages that partly overlap in memory"
                raise VerificationError(
                    compose("verification", what, do="copy one of them, or make it a view of the other")
                )
            if self._wide and self._originals[other].dtype != tensor.dtype:
                raise VerificationError(compose("verification", SHARED_BY_DTYPES))
            made, begin = self._storages[other]
            return made, begin + span[1] - start
        self._spans.insert(place, (*span, key))
        return None


def view_of(raw: Tensor, dtype: torch.dtype, offset: int, size: Sequence[int], stride: Sequence[int]) -> Tensor:
    """A tensor on the storage of `raw`."""
    return torch.empty(0, dtype=dtype).set_(raw.untyped_storage(), offset, tuple(size), tuple(stride))


class RankProgram:
    """A graph module as a list of nodes, and the values whose last use each node is.

    Nested graphs that communicate are inlined: their launches and waits are nodes of the list.
    """

    def __init__(self, module: GraphModule) -> None:
        self.module = module
        self.nodes: list[Node] = list(inlined_graph(module).nodes)
        self.placeholders = [node for node in self.nodes if node.op == "placeholder"]
        self.last_uses: dict[Node, list[Node]] = {}
        seen: set[Node] = set()
        for node in reversed(self.nodes):
            ending = [n for n in (node, *input_nodes(node)) if n not in seen]
            seen.update(ending)
            self.last_uses[node] = ending
        self.landings: dict[Node, tuple[Node, ...]] = {}
        """Asynchronous copies to the host, each with the nodes that hold its destination."""
        self.syncs: frozenset[Node] = frozenset()
        """Nodes at which the host waits for the device, or may wait."""
        if any(node.op == "call_function" and may_transfer(node.target) for node in self.nodes):
            self._find_landings(Dag(self.nodes))

    def _find_landings(self, dag: Dag) -> None:
        for i in dag.effects.landings:
            transfer = transfer_of(self.nodes[i])
            self.landings[self.nodes[i]] = transfer.destinations if transfer else ()
        if self.landings:
            unknown = [i for i, profile in dag.effects.special if profile.opaque]
            self.syncs = frozenset(self.nodes[i] for i in (*dag.effects.syncs, *dag.effects.may_sync, *unknown))


class Rank:
    """The values of one rank, and how it evaluates the nodes that do not communicate."""

    def __init__(self, number: int, program: RankProgram, inputs: Sequence[Any], *, wide: bool = False) -> None:
        self.number, self.program = number, program
        self._wide = wide
        self._copies = Copies(wide=wide)
        self.inputs: list[Any] = [self._copies.of(value) for value in inputs]
        self.values: dict[Node, Any] = dict(zip(program.placeholders, self.inputs, strict=True))
        self._attributes: dict[str, Any] = {}

    def resolve(self, argument: Any) -> Any:
        """An argument with each node replaced by its value. Devices become the CPU, where all values are."""
        return substitute(argument, self._resolve_leaf)

    def _resolve_leaf(self, leaf: Any) -> Any:
        if isinstance(leaf, Node):
            return self.values[leaf]
        if isinstance(leaf, torch.SymInt):
            return hint_of(leaf)
        if self._wide and isinstance(leaf, torch.dtype):
            return wide_dtype(leaf)
        return torch.device("cpu") if isinstance(leaf, torch.device) else leaf

    def _widened(self, value: Any) -> Any:
        return substitute(value, widen) if self._wide else value

    def evaluate(self, node: Node) -> Any:
        """The value of a node that does not communicate."""
        return self._widened(self._evaluate(node))

    def _evaluate(self, node: Node) -> Any:
        if node.op == "placeholder":
            return self.values[node]
        if node.op == "get_attr":
            return self.attribute(str(node.target))
        args: tuple[Any, ...] = self.resolve(tuple(node.args))
        kwargs: dict[str, Any] = self.resolve(dict(node.kwargs))
        if node.op == "call_module":
            return self.attribute(str(node.target))(*args, **kwargs)
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        target: Any = node.target
        return target(*args, **kwargs)

    def attribute(self, path: str) -> Any:
        """This rank's copy of an attribute of the module; a nested graph without tensors is not copied."""
        if path not in self._attributes:
            value = attribute(self.program.module, path)
            if isinstance(value, Tensor):
                value = self._copies.of(value)
            elif isinstance(value, Module) and (not isinstance(value, GraphModule) or _own_tensors(value)):
                value = copy.deepcopy(value, {id(t): self._copies.of(t) for t in _own_tensors(value).values()})
            self._attributes[path] = value
        return self._attributes[path]

    def release(self, node: Node) -> None:
        """Drop the values that no later node uses."""
        for ended in self.program.last_uses[node]:
            self.values.pop(ended, None)

    def result(self, outputs: Any) -> RankResult:
        """The results of this rank, given the outputs of its graph."""
        changed: dict[str, Tensor] = {}
        inside = {
            f"{path}.{name}": tensor
            for path, value in self._attributes.items()
            if isinstance(value, Module)
            for name, tensor in _own_tensors(value).items()
        }
        # The graph may write to a tensor that it never names, through another one in the same memory.
        copied = {path: t for path, t in _own_tensors(self.program.module).items() if self._copies.knows(t)}
        beside = {path: self._copies.of(tensor) for path, tensor in copied.items()}
        for path, value in sorted({**beside, **self._attributes, **inside}.items()):
            original = attribute(self.program.module, path)
            if isinstance(value, Tensor) and not same_bits(value, self._widened(original.to("cpu"))):
                changed[path] = value
        return RankResult(outputs, self.inputs, changed)


def _own_tensors(module: Module) -> dict[str, Tensor]:
    """The parameters and buffers of a module and its submodules, by path."""
    named = module.named_parameters, module.named_buffers
    return {path: tensor for found in named for path, tensor in found(remove_duplicate=False)}


def show(node: Node, groups: GroupTable) -> list[str]:
    """The lines that an error shows for a node, even if its arguments have no text form."""
    try:
        return excerpt(node, groups)
    except GraphError:  # an argument without a text form
        return point_at(str(node.format_node()), node.name)


def one_per_rank(given: T | Sequence[T], kind: type[T], num_ranks: int, what: str) -> list[T]:
    """One item per rank: a single item is repeated, a sequence must have one for each rank."""
    if isinstance(given, kind):
        return [given] * num_ranks
    listed: list[T] = list(given)  # type: ignore[arg-type]
    if len(listed) != num_ranks:
        found = f"{len(listed)} {what} for {num_ranks} ranks"
        raise VerificationError(compose("verification", found, do="give one for all ranks, or one per rank"))
    return listed


def partition_of(group: Group, num_ranks: int) -> Partition:
    """The partition of the ranks of a run into the instances of a group."""
    if not group.size and group.ranks is None:
        do = "give it: groups={" + repr(group.name) + ": 8}"
        raise VerificationError(compose("verification", f"the size of group {group.name!r} is unknown", do=do))
    parts = group.partition(num_ranks)
    largest = max((rank for part in parts for rank in part), default=0)
    if largest >= num_ranks:
        what = f"group {group.name!r} contains rank {largest}, but only {num_ranks} ranks run"
        raise VerificationError(compose("verification", what, do=f"run at least {largest + 1} ranks"))
    return parts


def check_inputs(inputs: Sequence[Sequence[Any]], num_inputs: Sequence[int]) -> None:
    """Raise unless every rank has one value per placeholder of its graph."""
    if len(inputs) != len(num_inputs):
        what = f"inputs were given for {len(inputs)} ranks, but {len(num_inputs)} ranks run"
        raise VerificationError(compose("verification", what, do="give one list of inputs per rank"))
    for rank, (given, expected) in enumerate(zip(inputs, num_inputs, strict=True)):
        if len(given) != expected:
            what = f"the graph takes {expected} inputs, rank {rank} was given {len(given)}"
            raise VerificationError(compose("verification", what, do="give one value per placeholder"))
