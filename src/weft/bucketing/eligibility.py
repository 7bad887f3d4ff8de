"""Eligibility: which collectives may share a bucket, and why the others may not.

Contract: two members may share a bucket only if their keys are equal. A collective that no bucket can take gets a
refusal with its reason. Nothing here changes the graph.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from operator import getitem
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.fx import Node

from weft.compat import OpOverload
from weft.graph import ops, understated
from weft.graph.collective import Collective
from weft.graph.dag import Dag
from weft.graph.edit import MEMBERS_KEY
from weft.graph.metadata import contiguous_strides
from weft.graph.operator_effects import is_alias, waited_inside
from weft.graph.ops import Kind
from weft.plan.decision import Reason, Refusal

Strategy = Literal["concat", "coalesced", "pack"]
MOVES_DATA = frozenset({Kind.ALL_GATHER, Kind.ALL_TO_ALL, Kind.BROADCAST})
"""Kinds that only move bytes, so one buffer may mix dtypes."""
COALESCED = frozenset({Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.ALL_REDUCE})
"""Kinds with an operator for lists of tensors."""
BY_ROWS = frozenset({Kind.REDUCE_SCATTER, Kind.ALL_TO_ALL})
"""Kinds whose send buffer holds one row for each destination rank."""
FROM_ROWS = frozenset({Kind.ALL_GATHER, Kind.ALL_TO_ALL})
"""Kinds whose result holds one row from each source rank."""


class Key(NamedTuple):
    """Properties that all members of one bucket share."""

    kind: Kind
    group: str
    """The name that the graph uses at run time."""
    group_size: int
    """1 for kinds whose layout does not depend on the size."""
    reduce_op: str | None
    root: int | None
    """The rank that sends a broadcast."""
    device: str
    dtype: torch.dtype | None
    """None if dtypes may mix."""


class Payload(NamedTuple):
    """One tensor of a collective: the node that is sent, and the nodes that hold the received tensor."""

    source: Node
    results: tuple[Node, ...]


@dataclass(frozen=True, eq=False)
class Member:
    """A collective that may join a bucket."""

    collective: Collective
    index: int
    """Position of the launch in the graph."""
    key: Key
    num_bytes: int
    """The larger of the sent and the received size."""

    @property
    def name(self) -> str:
        return self.collective.launch.name


def is_bucket(collective: Collective) -> bool:
    """Whether an earlier pass merged this launch from several."""
    return len(collective.launch.meta.get(MEMBERS_KEY, ())) > 1


def payloads_of(collective: Collective) -> list[Payload]:
    """The tensors of a collective, in order."""
    if not collective.form.coalesced:
        return [Payload(collective.inputs[0], (collective.launch,))]
    items = [user for user in collective.launch.users if user.target is getitem]
    count = len(collective.inputs)
    return [
        Payload(source, tuple(item for item in items if item.args[1] in (number, number - count)))
        for number, source in enumerate(collective.inputs)
    ]


def written_buffer(collective: Collective, payload: Payload) -> Node | None:
    """The buffer that a collective writes this tensor to; None if no other node can see the write."""
    form = collective.form
    if form.written is None or form.written == form.tensors:
        return payload.source if form.written is not None else None
    buffer: Node = ops.bind(collective.launch)[form.written]
    fresh = isinstance(buffer.target, OpOverload) and buffer.target.name().startswith("aten::empty")
    return None if fresh and len(buffer.users) == 1 else buffer


def read_member(collective: Collective, dag: Dag, strategy: Strategy) -> Member | Refusal:
    """The collective as a member, or why no bucket can take it."""
    refusal = _why_not(collective, dag, strategy)
    if refusal is not None:
        return refusal
    bound = ops.bind(collective.launch)
    kind = collective.kind
    values: list[Tensor] = [ops.value_of(source) for source in collective.inputs]
    # Not with `coalesced`: gloo (torch 2.13) returns wrong values when it gathers a list of tensors of several dtypes.
    mixes = kind in MOVES_DATA and strategy == "pack"
    size = bound.get("group_size")
    if kind is Kind.ALL_TO_ALL:
        size = len(bound["input_split_sizes"])
    key = Key(
        kind,
        collective.group,
        size if isinstance(size, int) else 1,
        collective.reduce_op,
        bound.get("src"),
        str(values[0].device),
        None if mixes else values[0].dtype,
    )
    sizes = (collective.input_bytes, collective.output_bytes)
    return Member(collective, dag.index[collective.launch], key, max(s for s in sizes if s is not None))


def _why_not(collective: Collective, dag: Dag, strategy: Strategy) -> Refusal | None:
    launch, kind, name = collective.launch, collective.kind, collective.launch.name
    if isinstance(launch.target, OpOverload) and "autograd" in launch.target.namespace:
        return Refusal(Reason.UNSUPPORTED_FORM, f"{name} stays: it is differentiable, and a bucket is not")
    if collective.form.copied:
        return Refusal(Reason.UNSUPPORTED_FORM, f"{name} stays: it copies through symmetric memory", name)
    if strategy == "coalesced" and kind not in COALESCED:
        return Refusal(Reason.UNSUPPORTED_FORM, f"{name} stays: torch has no {kind.phrase} for lists of tensors")
    if collective.escapes:
        return Refusal(Reason.ESCAPES, f"{name} stays: the graph returns the launch, not just the result of its wait")
    group = ops.bind(launch)[collective.form.group]
    if isinstance(group, Node) and group.op == "call_function":
        return Refusal(
            Reason.UNSUPPORTED_FORM, f"{name} stays: the graph computes its group, so Weft does not know it", group.name
        )
    return _why_not_by_values(collective, strategy) or _why_not_by_waits(collective)


def _why_not_by_values(collective: Collective, strategy: Strategy) -> Refusal | None:
    name, kind = collective.launch.name, collective.kind
    values = [ops.value_of(source) for source in collective.inputs]
    results = ops.value_of(collective.launch)
    received = results if isinstance(results, list | tuple) else [results]
    if not values or not all(isinstance(v, Tensor) and v.layout is torch.strided for v in [*values, *received]):
        return Refusal(Reason.UNSUPPORTED_FORM, f"{name} stays: its tensors are not all dense")
    if collective.input_bytes is None or collective.output_bytes is None:
        return Refusal(Reason.UNKNOWN_SIZE, f"{name} stays: its tensors have a symbolic size without a hint")
    needs_numbers = strategy == "pack" or kind is Kind.ALL_TO_ALL
    if needs_numbers and any(type(size) is not int for value in values for size in value.shape):
        return Refusal(
            Reason.UNKNOWN_SIZE, f"{name} stays: its tensors have a symbolic size, and packing needs fixed sizes"
        )
    if len({value.dtype for value in values}) > 1 and (strategy != "pack" or kind not in MOVES_DATA):
        return Refusal(Reason.UNSUPPORTED_FORM, f"{name} stays: only strategy=pack merges several dtypes")
    if not all(_is_contiguous(value) for value in received):
        return Refusal(Reason.UNSUPPORTED_FORM, f"{name} stays: its result is not contiguous, but a bucket's is")
    if strategy == "coalesced" and kind is Kind.ALL_REDUCE and not all(_is_contiguous(value) for value in values):
        what = "it sends a tensor that is not contiguous, and the coalesced result would not be contiguous either"
        return Refusal(Reason.UNSUPPORTED_FORM, f"{name} stays: {what}")
    if kind is Kind.ALL_TO_ALL and not _has_equal_splits(collective):
        return Refusal(Reason.UNSUPPORTED_FORM, f"{name} stays: its split sizes are not equal constants")
    return None


def _why_not_by_waits(collective: Collective) -> Refusal | None:
    waits = collective.waits
    several = next((wait for wait in waits if len(wait.all_input_nodes) > 1), None)
    if several is not None:
        sentence = f"{collective.launch.name} stays: {several.name} waits for several launches at once"
        return Refusal(Reason.UNSUPPORTED_FORM, sentence, several.name)
    items = [user for user in collective.launch.users if user.target is getitem] if collective.form.coalesced else []
    computed = next((item for item in items if not isinstance(item.args[1], int)), None)
    if computed is not None:
        sentence = f"{collective.launch.name} stays: {computed.name} selects one of its results by a computed index"
        return Refusal(Reason.UNSUPPORTED_FORM, sentence, computed.name)
    if not waits:
        taker = next((user for user in collective.launch.users if waited_inside(user)), None)
        what = f"{taker.name} waits for it in a nested graph" if taker is not None else "nothing waits for it"
        blocking = taker.name if taker is not None else None
        return Refusal(Reason.UNSUPPORTED_FORM, f"{collective.launch.name} stays: {what}", blocking)
    return None


def _is_contiguous(value: Tensor) -> bool:
    return value.is_contiguous() and list(value.stride()) == contiguous_strides(value.shape)


def _has_equal_splits(collective: Collective) -> bool:
    bound = ops.bind(collective.launch)
    splits: list[Any] = [*bound["input_split_sizes"], *bound["output_split_sizes"]]
    return all(isinstance(split, int) for split in splits) and len(set(splits)) == 1


# The results of these operators depend on the storage offset, which is not 0 for a slice of a bucket.
_OFFSET_SENSITIVE = frozenset(
    {
        "aten::as_strided",
        "aten::as_strided_",
        "aten::set_.source_Tensor",
        "aten::sym_storage_offset",
        "aten::view.dtype",
        "aten::view_as_complex",
        "inductor::_alloc_from_pool",
        "inductor::_reinterpret_tensor",
        "inductor::resize_storage_bytes_",
    }
)

# Kernels of these operators demand or expect pointers that are multiples of 16 bytes. The result of a collective has
# such a pointer, a slice of a bucket need not.
_ALIGNED = ("scaled_mm", "grouped_mm", "pack_mm", "attention")


def _sees_offset(target: Any) -> bool:
    if not isinstance(target, OpOverload):
        return False
    is_foreign = target.namespace not in understated.BELIEVED  # its kernels may expect aligned pointers too
    return is_foreign or target.name() in _OFFSET_SENSITIVE or any(word in target.name() for word in _ALIGNED)


def depends_on_offset(results: Iterable[Node]) -> bool:
    """Whether an operator that depends on the storage offset uses a result or a view of it."""
    seen = dict.fromkeys(results)
    stack = list(seen)
    while stack:
        for user in stack.pop().users:
            if _sees_offset(user.target):
                return True
            if user not in seen and is_alias(user):
                seen[user] = None
                stack.append(user)
    return False


class Touches:
    """Reads and writes of storages that the graph writes. They decide whether a member may be read later."""

    def __init__(self, dag: Dag) -> None:
        self.dag = dag
        self.memory = dag.effects.memory

    def is_written(self, node: Node) -> bool:
        """Whether something writes to memory that the node holds."""
        return any(True for _ in self._writers(node))

    def is_overwritten(self, result: Node, launch: Node) -> bool:
        """Whether something other than its launch and its waits writes to a result."""
        return any(writer is not launch and not ops.is_wait(writer.target) for writer in self._writers(result))

    def _writers(self, node: Node) -> Iterable[Node]:
        for storage in self._held([node]):
            yield from (self.dag.nodes[i] for i in self.memory.writes.get(storage, ()))

    def is_touched(self, collective: Collective, first: int, last: int) -> bool:
        """Whether anything but its waits accesses the collective's buffers between two positions."""
        if not self.memory.by_storage:
            return False
        own = {self.dag.index[node] for node in (collective.launch, *collective.waits)}
        results = [result for payload in payloads_of(collective) for result in payload.results]
        held = self._held([*collective.inputs, *results])
        return any(i not in own for storage in held for i in self.memory.accesses_after(storage, first, last))

    def _held(self, nodes: list[Node]) -> list[int]:
        return sorted({s for node in nodes for s in self.dag.effects.held(self.dag.index[node])})


def uses_of(collective: Collective) -> list[Node]:
    """The nodes that use a result, directly or through waits and views."""
    seen = {collective.launch: None}
    stack, found = [collective.launch], dict[Node, None]()
    while stack:
        for user in stack.pop().users:
            if user not in seen and is_alias(user):
                seen[user] = None
                stack.append(user)
            elif user not in seen:
                found[user] = None
    return list(found)
