"""Semantics of collectives: computes the tensors that each member of a group receives from those that all members sent.

Contract: exact and deterministic. Reductions add in the order of the group's ranks, in the dtype of the data. Values
are flat; the receiver gives them their shape. `src` counts within the group, as in torch (seen with gloo, torch 2.13).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Node

from weft.graph.ops import Kind

REDUCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}
INTEGERS_ONLY = frozenset({"band", "bor", "bxor"})


@dataclass(frozen=True, eq=False)
class Post:
    """One rank's part in a collective, or its end of a transfer."""

    rank: int
    node: Node
    kind: Kind
    tensors: tuple[Tensor, ...]
    """The data that is sent; for a recv the buffer, where only dtype and size matter."""
    reduce_op: str | None = None
    src: int | None = None
    in_splits: tuple[int, ...] = ()
    out_splits: tuple[int, ...] = ()
    reshards: tuple[int, int] | None = None
    """(gather_dim, shard_dim) of an all-to-all that moves a shard from one dim to another."""
    coalesced: bool = False


@functools.cache
def why_not_reduce(reduce_op: str | None, dtype: torch.dtype) -> str | None:
    """The reason why this reduction does not exist for a dtype, or None."""
    if reduce_op not in REDUCTIONS:
        return f"no reduction is called {reduce_op!r}"
    is_whole = not (dtype.is_floating_point or dtype.is_complex)
    if reduce_op == "avg" and is_whole:
        return f"the average of {dtype} numbers is not a {dtype} number"
    if reduce_op in INTEGERS_ONLY and not is_whole:
        return f"{reduce_op} needs integers, found {dtype}"
    try:
        REDUCTIONS[reduce_op](torch.zeros(1, dtype=dtype), torch.zeros(1, dtype=dtype))
    except RuntimeError:
        return f"torch has no CPU kernel for {reduce_op} of {dtype}"
    return None


def receive(posts: Mapping[int, Post], members: Sequence[int]) -> dict[int, list[Tensor]]:
    """The results of each member, one flat tensor per tensor of its launch."""
    first = posts[members[0]]
    if first.kind in (Kind.SEND, Kind.RECV):
        return _transfer(posts)
    received: dict[int, list[Tensor]] = {member: [] for member in members}
    for k in range(len(first.tensors)):
        sent = [posts[member].tensors[k] for member in members]
        for member, value in zip(members, _exchange(first, [posts[m] for m in members], sent), strict=True):
            received[member].append(value)
    return received


def _transfer(posts: Mapping[int, Post]) -> dict[int, list[Tensor]]:
    send = next(post for post in posts.values() if post.kind is Kind.SEND)
    data = send.tensors[0]
    return {rank: [data.new_empty(0) if post is send else data.reshape(-1).clone()] for rank, post in posts.items()}


def _exchange(first: Post, posts: Sequence[Post], sent: Sequence[Tensor]) -> list[Tensor]:
    size = len(sent)
    if first.kind is Kind.ALL_TO_ALL:
        return _all_to_all(posts, sent) if first.reshards is None else _reshard(first.reshards, sent)
    flat = [tensor.reshape(-1) for tensor in sent]
    if first.kind is Kind.ALL_GATHER:
        return [torch.cat(flat)] * size
    if first.kind is Kind.BROADCAST:
        return [flat[first.src or 0].clone()] * size
    whole = _reduce(str(first.reduce_op), flat)
    if first.kind is Kind.ALL_REDUCE:
        return [whole] * size
    return list(whole.chunk(size)) if whole.numel() else [whole] * size


def _reduce(reduce_op: str, flat: Sequence[Tensor]) -> Tensor:
    whole = functools.reduce(REDUCTIONS[reduce_op], flat[1:], flat[0].clone())
    return whole / len(flat) if reduce_op == "avg" else whole


def _all_to_all(posts: Sequence[Post], sent: Sequence[Tensor]) -> list[Tensor]:
    pieces = [tensor.split(list(post.in_splits)) for tensor, post in zip(sent, posts, strict=True)]
    return [torch.cat([piece[j].reshape(-1) for piece in pieces]) for j in range(len(sent))]


def _reshard(dims: tuple[int, int], sent: Sequence[Tensor]) -> list[Tensor]:
    gather_dim, shard_dim = dims
    pieces = [tensor.chunk(len(sent), shard_dim) for tensor in sent]
    return [torch.cat([piece[j] for piece in pieces], gather_dim).reshape(-1) for j in range(len(sent))]
