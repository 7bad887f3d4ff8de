"""Reads a launch at run time: the tensors it sends, the tensors it will fill, and the ranks it meets.

Contract: arguments are read by schema. A launch that no backend could run (a size that does not divide, an unknown
reduction, a buffer of the wrong shape) raises an error that shows the node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.fx import Node

from weft.compat import storage_key
from weft.errors import VerificationError, compose
from weft.graph import ops
from weft.graph.collective import Collective
from weft.graph.groups import GroupTable, group_argument
from weft.graph.ops import Kind, LaunchForm
from weft.verification.rank import partition_of, show
from weft.verification.rendezvous import MeetingPlace, MeetingPlaces
from weft.verification.virtual.collective_values import Post, why_not_reduce


@dataclass(frozen=True, eq=False)
class LaunchPart:
    """One rank's part in one meeting, and the tensors that the meeting fills on this rank."""

    place: MeetingPlace
    post: Post
    sent: tuple[Tensor, ...]
    """The buffers that are read until the wait; empty for a recv. `post` holds their data."""
    results: tuple[Tensor, ...]


@dataclass(frozen=True, eq=False)
class RuntimeLaunch:
    """A launch with the tensors of one rank."""

    parts: tuple[LaunchPart, ...]
    value: Any
    """The value of the node: a tensor, or a list of tensors."""
    written: tuple[Tensor, ...] = ()
    """The arguments that the launch writes, without new results."""


@dataclass(frozen=True)
class LaunchReader:
    """Reads the launches of one rank."""

    rank: int
    num_ranks: int
    groups: GroupTable
    places: MeetingPlaces

    def read(self, node: Node, bound: dict[str, Any]) -> RuntimeLaunch:
        """Read the launch of a node; `bound` holds its arguments by name."""
        form = ops.launch_form(node.target)
        members = self._members(node)
        group = self.groups.canonical(group_argument(node))
        place = self.places.of(self.groups.group(group_argument(node)), members)
        if form is None:
            return self._reshard(node, bound, place)
        if form.kind in ops.POINT_TO_POINT:
            return self._transfers(node, bound, form, place)
        size = bound.get("group_size", len(members))
        if size != len(members):
            self.refuse(node, f"{node.name} has group_size {size}, group {group!r} has {len(members)} ranks")
        sent: tuple[Tensor, ...] = tuple(bound[form.tensors]) if form.coalesced else (bound[form.tensors],)
        written: tuple[Tensor, ...] = ()
        if form.written is not None:
            written = tuple(bound[form.written]) if form.coalesced else (bound[form.written],)
        expected = [self._received_shape(node, form.kind, tensor, bound, len(members)) for tensor in sent]
        for tensor, buffer, shape in zip(sent, written, expected, strict=False):
            if tuple(buffer.shape) != shape or buffer.dtype != tensor.dtype:
                found = f"{tuple(buffer.shape)} of {buffer.dtype}"
                self.refuse(node, f"{node.name} needs a buffer {shape} of {tensor.dtype}, found {found}")
        results = written or tuple(t.new_empty(shape) for t, shape in zip(sent, expected, strict=True))
        # Inputs are read when the launch completes, so that a write in between gives a wrong value. An input that the
        # launch itself overwrites must be copied now.
        overwritten = {storage_key(buffer) for buffer in written}
        data = tuple(t.clone() if storage_key(t) in overwritten else t for t in sent)
        post = self._post(node, form, bound, data, members)
        value = list(results) if form.coalesced else results[0]
        return RuntimeLaunch((LaunchPart(place, post, sent, results),), value, written)

    def _members(self, node: Node) -> tuple[int, ...]:
        """The ranks of the group that this rank belongs to."""
        group = self.groups.group(group_argument(node))
        mine = next((part for part in partition_of(group, self.num_ranks) if self.rank in part), None)
        if mine is None:
            self.refuse(node, f"group {group.name!r} does not contain this rank")
        return mine

    def _received_shape(
        self, node: Node, kind: Kind, tensor: Tensor, bound: dict[str, Any], size: int
    ) -> tuple[int, ...]:
        if kind in (Kind.ALL_REDUCE, Kind.BROADCAST):
            return tuple(tensor.shape)
        if tensor.dim() == 0:
            self.refuse(node, f"{node.name} needs a tensor with at least one dim, found a scalar")
        first, *rest = tensor.shape
        if kind is Kind.ALL_GATHER:
            return (first * size, *rest)
        if kind is Kind.REDUCE_SCATTER:
            if first % size:
                self.refuse(node, f"dim 0 of size {first} does not split over {size} ranks")
            return (first // size, *rest)
        out_splits, in_splits = bound["output_split_sizes"], bound["input_split_sizes"]
        if len(out_splits) != size or len(in_splits) != size:
            found = f"found {len(in_splits)} for the input and {len(out_splits)} for the output"
            self.refuse(node, f"{node.name} needs {size} splits, {found}")
        if sum(in_splits) != first:
            self.refuse(node, f"the splits {list(in_splits)} do not add up to the {first} rows of the input")
        return (sum(out_splits), *rest)

    def _post(
        self, node: Node, form: LaunchForm, bound: dict[str, Any], sent: tuple[Tensor, ...], members: Sequence[int]
    ) -> Post:
        reduce_op = Collective(node).reduce_op
        if form.kind in ops.REDUCTIONS:
            reason = next((why for t in sent if (why := why_not_reduce(reduce_op, t.dtype))), None)
            if reason is not None:
                self.refuse(node, reason)
        src = bound.get("src")
        if src is not None and not 0 <= src < len(members):
            self.refuse(
                node,
                f"src {src} is not a rank within the group, which has {len(members)} ranks",
            )
        return Post(
            rank=self.rank,
            node=node,
            kind=form.kind,
            tensors=sent,
            reduce_op=reduce_op,
            src=src,
            in_splits=tuple(bound.get("input_split_sizes", ())),
            out_splits=tuple(bound.get("output_split_sizes", ())),
            coalesced=form.coalesced,
        )

    def _transfers(self, node: Node, bound: dict[str, Any], form: LaunchForm, place: MeetingPlace) -> RuntimeLaunch:
        members = place.members
        if form.kind is Kind.BATCH_P2P:
            names, peers, tags = bound["op_list"], bound["peer_list"], bound["tag_list"]
            tensors: list[Tensor] = list(bound[form.tensors])
            sends = [name == "isend" for name in names]
        else:
            sends, tags, tensors = [form.kind is Kind.SEND], [bound["tag"]], [bound[form.tensors]]
            peers = [bound["dst" if sends[0] else "src"]]
        parts: list[LaunchPart] = []
        for is_send, peer, tag, tensor in zip(sends, peers, tags, tensors, strict=True):
            if not 0 <= peer < len(members) or members[peer] == self.rank:
                self.refuse(
                    node,
                    f"peer {peer} is not another rank within the group, which has {len(members)} ranks",
                )
            if not tensor.is_contiguous():
                self.refuse(node, f"{node.name} needs contiguous tensors")
            ends = (self.rank, members[peer]) if is_send else (members[peer], self.rank)
            post = Post(self.rank, node, Kind.SEND if is_send else Kind.RECV, (tensor,))
            sent, result = ((tensor,), tensor.new_empty(0)) if is_send else ((), tensor)
            parts.append(LaunchPart(replace(place, members=ends, tag=tag), post, sent, (result,)))
        results = [part.results[0] for part in parts]
        written = tuple(part.results[0] for part in parts if not part.sent)
        return RuntimeLaunch(tuple(parts), results if form.coalesced else results[0], written)

    def _reshard(self, node: Node, bound: dict[str, Any], place: MeetingPlace) -> RuntimeLaunch:
        tensor: Tensor = bound["input"]
        gather_dim, shard_dim = (bound[name] % tensor.dim() for name in ("gather_dim", "shard_dim"))
        shape, size = list(tensor.shape), len(place.members)
        if shape[shard_dim] % size:
            self.refuse(node, f"dim {shard_dim} of size {shape[shard_dim]} does not split over {size} ranks")
        shape[shard_dim] //= size
        shape[gather_dim] *= size
        result = tensor.new_empty(shape)
        post = Post(self.rank, node, Kind.ALL_TO_ALL, (tensor,), reshards=(gather_dim, shard_dim))
        return RuntimeLaunch((LaunchPart(place, post, (tensor,), (result,)),), result)

    def refuse(self, node: Node, what: str, do: str = "") -> NoReturn:
        """Raise an error that shows the node."""
        where = show(node, self.groups)
        raise VerificationError(compose("virtual cluster", f"{what} (rank {self.rank})", where=where, do=do))


def poison(tensor: Tensor) -> None:
    """Fill a tensor that has not arrived with garbage, so that an early read gives a wrong value."""
    if tensor.dtype == torch.bool:
        tensor.fill_(True)
    elif tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        tensor.fill_(float("nan"))
    else:
        tensor.fill_(torch.iinfo(tensor.dtype).max)
