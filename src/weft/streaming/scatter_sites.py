"""Scatter sites: reduce-scatters and all-reduces whose input comes from matrix products.

Contract: as in `gather_sites`, but the walk goes from the collective back to the products. Element-wise calls between
the products and the collective, such as a cast or the sum of several products, are computed in chunks too. Any other
tensor on the way is sliced into chunks instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod

from torch.fx import Node

from weft.graph import ops
from weft.graph.collective import Collective
from weft.graph.dag import Dag
from weft.plan.decision import Reason, Refusal
from weft.streaming.chunking import (
    ChunkDim,
    Chunking,
    Operand,
    check_rows,
    chunk_dim_in,
    chunk_dim_of_argument,
    first_cut,
    stride_of,
)
from weft.streaming.gather_sites import why_not_followed
from weft.streaming.layouts import Layout, Unfollowed
from weft.streaming.rowwise import Rowwise, read_rowwise
from weft.streaming.view_layouts import back_to_base, sizes_of


@dataclass(frozen=True, eq=False)
class ScatterSite:
    """A reduce-scatter or an all-reduce, and the products that make its input."""

    collective: Collective
    num_ranks: int
    """Number of ranks that the rows are scattered over; 1 for an all-reduce."""
    shape: tuple[int, ...]
    """Shape of the tensor that one rank receives."""
    products: tuple[Node, ...]
    calls: Mapping[Node, Rowwise]
    """The products and the calls between them and the scatter. Users come before their arguments."""
    views: Mapping[Node, tuple[Node, Layout]]
    """Each tensor on the way: its base, and the tensor as a view of that base."""
    dropped: tuple[Refusal, ...] = ()
    ring_rank: int | None = None
    """This rank's index in the group, if the site is to run as a ring."""

    def with_products(self, products: tuple[Node, ...]) -> ScatterSite:
        """The site with only these products; the results of the others are sliced into chunks."""
        gone = set(self.products) - set(products)
        return replace(self, products=products, calls={n: call for n, call in self.calls.items() if n not in gone})

    def cut(self, chunks: int) -> Chunking | Refusal:
        """The site in chunks along the first dim of the result that works; a ring uses one chunk per rank."""
        if self.ring_rank is not None:
            return _cut(self, self.num_ranks, 0, ChunkDim(0, 1, self.shape[0]))
        what = f"the result of {self.collective.launch.name}"
        return first_cut(self.shape, chunks, what, partial(_cut_rows, self, chunks))


def read_scatter(collective: Collective, dag: Dag) -> ScatterSite | Refusal:
    """The site of a reduce-scatter or an all-reduce, or why it has none."""
    refusal = why_not_followed(collective)
    if refusal is None and is_chunk_of_scatter(collective.launch):
        return Refusal(Reason.ALREADY_DONE, f"{collective.launch.name} is already a chunk of a streamed scatter")
    return _ScatterReader(collective, dag).read() if refusal is None else refusal


@dataclass
class _ScatterReader:
    """One walk from a reduce-scatter or an all-reduce back to the products."""

    collective: Collective
    dag: Dag
    calls: dict[Node, Rowwise] = field(default_factory=dict[Node, Rowwise])
    views: dict[Node, tuple[Node, Layout]] = field(default_factory=dict[Node, tuple[Node, Layout]])
    broken: list[Refusal] = field(default_factory=list[Refusal])

    def read(self) -> ScatterSite | Refusal:
        launch = self.collective.launch
        front = [self.collective.inputs[0]]
        while front:
            node = front.pop(0)
            call = self._call_making(node)
            if call is None or call.node in self.calls:
                continue
            self.calls[call.node] = call
            if not call.product:
                full = prod(sizes_of(call.node) or ())
                front += [t for t in call.tensors.values() if prod(sizes_of(t) or ()) == full]
        products = tuple(node for node, call in self.calls.items() if call.product)
        if not products:
            last = next(reversed(self.calls), self.collective.inputs[0]).name
            what = f"{launch.name} reduces no matrix product: its input comes from {last}"
            return next(iter(self.broken), Refusal(Reason.NO_PRODUCT, what, last))
        size: int = ops.bind(launch).get("group_size", 1)
        return ScatterSite(self.collective, size, sizes_of(launch) or (), products, self._ordered(), self.views)

    def _call_making(self, node: Node) -> Rowwise | None:
        """The row-wise call that makes a tensor, perhaps through views; None for any other tensor."""
        name = self.collective.launch.name
        try:
            base, layout = back_to_base(node)
            if not layout.covers(prod(sizes_of(base) or ())):
                raise Unfollowed("it reorders, repeats or drops elements")
        except Unfollowed as error:
            self.broken.append(
                Refusal(Reason.OTHER_ORDER, f"{name} cannot be streamed through {node.name}: {error}", node.name)
            )
            return None
        self.views[node] = base, layout
        call = read_rowwise(base)
        if call is None:
            what = f"{name} reduces no matrix product: its input comes from {base.name}"
            self.broken.append(Refusal(Reason.NO_PRODUCT, what, base.name))
            return None
        return call

    def _ordered(self) -> dict[Node, Rowwise]:
        """The calls in reverse graph order, so each comes before the calls that make its arguments."""
        return dict(sorted(self.calls.items(), key=lambda item: -self.dag.index[item[0]]))


def _cut_rows(site: ScatterSite, chunks: int, dim: int) -> Chunking | Refusal:
    return _cut(site, chunks, dim, ChunkDim(dim, 1 if dim else site.num_ranks, site.shape[dim] // chunks))


def _cut(site: ScatterSite, chunks: int, dim: int, sent: ChunkDim) -> Chunking | Refusal:
    """The site in chunks, with the sent tensor split at `sent`."""
    launch, source = site.collective.launch, site.collective.inputs[0]
    chunk_dims: dict[Node, ChunkDim] = {}
    calls: dict[Node, Mapping[str, Operand]] = {}
    blamed = source
    try:
        result = _operand(site, source, sent, chunks, chunk_dims)
        for node, call in site.calls.items():
            blamed = node
            if node not in chunk_dims:  # reached only through a tensor that is sliced
                continue
            chunk_dim = chunk_dims[node]
            if call.product and chunk_dim.dim == len(sizes_of(node) or ()) - 1 > 0:
                raise Unfollowed("its chunks would be columns of its result")
            check_rows(node, chunks)
            operands: dict[str, Operand] = {}
            for name, tensor in call.tensors.items():
                before = chunk_dim_of_argument(call, name, chunk_dim)
                if before is not None:
                    follow = not call.product and tensor in site.views
                    operands[name] = (
                        _operand(site, tensor, before, chunks, chunk_dims) if follow else Operand(tensor, before)
                    )
            calls[node] = operands
    except Unfollowed as error:
        sentence = f"{launch.name} waits for all of {blamed.name}: {error}"
        return Refusal(Reason.NOT_BY_ROWS, sentence, blamed.name)
    products = tuple(node for node in site.products if node in calls)
    ordered = dict(reversed(calls.items()))
    return Chunking(
        launch, site.num_ranks, chunks, dim, products, chunk_dims, ordered, result=result, ring_rank=site.ring_rank
    )


def _operand(
    site: ScatterSite, node: Node, chunk_dim: ChunkDim, chunks: int, chunk_dims: dict[Node, ChunkDim]
) -> Operand:
    """A tensor as a view of its base. Records where the base is split."""
    base, layout = site.views[node]
    stride = stride_of(chunk_dim, sizes_of(node) or ())
    found = chunk_dim_in(layout.inverse(sizes_of(base) or ()), stride, chunks)
    if chunk_dims.setdefault(base, found) != found:
        raise Unfollowed("its users split it in two different ways")
    return Operand(node, chunk_dim, base, layout)


def is_chunk_of_scatter(launch: Node) -> bool:
    """Whether an earlier pass streamed this scatter: its result, perhaps gathered, is joined with others like it."""
    joins = [user for wait in launch.users for user in wait.users if ops.is_wait(wait.target)]
    if len(joins) == 1 and ops.kind_of(joins[0].target) is ops.Kind.ALL_GATHER:
        return is_chunk_of_scatter(joins[0])
    return len(joins) == 1 and ops.name_of(joins[0].target) == "cat" and _all_from(joins[0].all_input_nodes, launch)


def _all_from(waits: Iterable[Node], launch: Node) -> bool:
    sources = [wait.all_input_nodes[0] for wait in waits if ops.is_wait(wait.target)]
    return len(sources) > 1 and all(source.target is launch.target for source in sources)
