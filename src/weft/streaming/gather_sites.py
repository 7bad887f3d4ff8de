"""Gather sites: all-gathers whose result feeds matrix products.

Contract: a site is recognised by what the operations compute, not by how the graph spells it. Layouts say, through
every view in between, which gathered element each element of an operand is. A chain of views that reorders, repeats or
drops the shards of some ranks is not a gather along one dim. A collective without a site gets a refusal with its
reason and the node that causes it. Nothing here changes the graph.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import prod

from torch.fx import Node

from weft.graph import ops
from weft.graph.collective import Collective
from weft.graph.dag import Dag
from weft.graph.products import operands_of
from weft.plan.decision import Reason, Refusal
from weft.streaming.chunking import (
    ChunkDim,
    Chunking,
    Operand,
    check_rows,
    chunk_dim_in,
    chunk_dim_of_argument,
    chunk_dim_of_result,
    first_cut,
    stride_of,
)
from weft.streaming.layouts import Layout, Unfollowed, identity
from weft.streaming.rowwise import Rowwise, read_rowwise
from weft.streaming.view_layouts import Laid, is_view, qualified, sizes_of, view_of

BYTES = "aten::view.dtype"


@dataclass(frozen=True, eq=False)
class GatherSite:
    """An all-gather and the products that its result reaches through views and row-wise calls."""

    collective: Collective
    num_ranks: int
    shape: tuple[int, ...]
    """Shape of one rank's shard."""
    products: tuple[Node, ...]
    dropped: tuple[Refusal, ...]
    """Why other products wait for the whole gathered tensor."""
    views: Mapping[Node, tuple[Node, Layout]]
    """Each tensor derived from the gather: its base, and the tensor as a view of that base."""
    bases: Mapping[Node, Rowwise | None]
    """The launch, with None, and then the row-wise calls before the products, in order."""
    ring_rank: int | None = None
    """This rank's index in the group, if the site is to run as a ring."""

    def with_products(self, products: tuple[Node, ...]) -> GatherSite:
        """The site with only these products."""
        return replace(self, products=products)

    def cut(self, chunks: int) -> Chunking | Refusal:
        """The site in chunks along the first dim of the shard that works, not the last; a ring has a chunk per rank."""
        if self.ring_rank is not None:
            return _cut(self, self.num_ranks, 0, ChunkDim(0, 1, self.shape[0]))
        return first_cut(
            self.shape, chunks, f"the shard of {self.collective.launch.name}", partial(_cut_shard, self, chunks)
        )


def why_not_followed(collective: Collective) -> Refusal | None:
    """Why a collective cannot be streamed, whatever its neighbours are; None if it can."""
    name, form = collective.launch.name, collective.form
    if form.copied:
        return Refusal(Reason.ALREADY_DONE, f"{name} is already copied through symmetric memory", name)
    if form.coalesced or not collective.is_functional:
        what = "sends a list of tensors" if form.coalesced else "writes into a given buffer"
        return Refusal(Reason.UNSUPPORTED_FORM, f"{name} {what}", name)
    if sizes_of(collective.launch) is None or sizes_of(collective.inputs[0]) is None:
        return Refusal(Reason.UNKNOWN_SIZE, f"{name} has symbolic sizes", name)
    if 0 in (sizes_of(collective.launch) or ()):
        return Refusal(Reason.UNSUPPORTED_FORM, f"{name} moves 0 bytes", name)
    stray = next((u for u in collective.launch.users if not ops.is_wait(u.target) and u.op != "output"), None)
    if stray is not None:
        return Refusal(Reason.UNSUPPORTED_FORM, f"{stray.name} uses {name} before its wait", stray.name)
    return None


def read_gather(collective: Collective, dag: Dag) -> GatherSite | Refusal:
    """The site of an all-gather, or why it has none."""
    refusal = why_not_followed(collective)
    if refusal is not None:
        return refusal
    if is_chunk_of_gather(collective.launch):
        return Refusal(Reason.ALREADY_DONE, f"{collective.launch.name} is already a chunk of a streamed gather")
    return _GatherReader(collective, dag).read()


class _GatherReader:
    """One walk from a gather to its users, in graph order."""

    def __init__(self, collective: Collective, dag: Dag) -> None:
        self.collective, self.dag = collective, dag
        launch = collective.launch
        self.bit = dag.bits[dag.index[launch]]
        self.known: dict[Node, Laid] = {}
        self.origin: dict[Node, Node] = {}
        self.bases: dict[Node, Rowwise | None] = {}
        self.products: list[Node] = []
        self.dropped: list[Refusal] = []
        self.broken: list[Refusal] = []
        whole = identity(sizes_of(launch) or ())
        for node in (launch, *collective.waits):
            self.known[node], self.origin[node] = whole, launch
        self.bases[launch] = None

    def read(self) -> GatherSite | Refusal:
        launch = self.collective.launch
        heap = [self.dag.index[user] for wait in self.collective.waits for user in wait.users]
        heapq.heapify(heap)
        seen: set[int] = set()
        while heap:
            i = heapq.heappop(heap)
            if i in seen:
                continue
            seen.add(i)
            if self._take(self.dag.nodes[i]):
                for user in self.dag.nodes[i].users:
                    heapq.heappush(heap, self.dag.index[user])
        if not self.products:
            return self._refusal()
        views = {node: (self.origin[node], laid) for node, laid in self.known.items() if isinstance(laid, Layout)}
        size: int = ops.bind(launch)["group_size"]
        shape = sizes_of(self.collective.inputs[0]) or ()
        return GatherSite(self.collective, size, shape, tuple(self.products), tuple(self.dropped), views, self.bases)

    def _refusal(self) -> Refusal:
        name = self.collective.launch.name
        if self.dropped:
            return self.dropped[0]
        if self.broken:
            return self.broken[0]
        what = "the graph returns it" if any(w.users for w in self.collective.waits) else "nothing uses its result"
        return Refusal(Reason.NO_PRODUCT, f"{name} feeds no matrix product: {what}")

    def _take(self, node: Node) -> bool:
        """Follow one user of a known tensor. Returns whether to follow its own users too."""
        name = self.collective.launch.name
        if node.op == "output":
            return False
        if is_view(node):
            return self._view(node)
        call = read_rowwise(node)
        if call is not None and self._is_part_as_bytes(node):
            source = node.all_input_nodes[0]
            self.known[node], self.origin[node] = self.known[source], self.origin[source]
            return True
        if call is None:
            what = f"{name} feeds no matrix product: {node.name} uses its result"
            self.broken.append(Refusal(Reason.NO_PRODUCT, what, node.name))
            return False
        refusal = self._why_not(call)
        if refusal is not None:
            (self.dropped if call.product else self.broken).append(refusal)
            return False
        if call.product:
            self.products.append(node)
            return False
        self.bases[node] = call
        self.known[node], self.origin[node] = identity(sizes_of(node) or ()), node
        return True

    def _view(self, node: Node) -> bool:
        name = self.collective.launch.name
        try:
            origins = {self.origin[source] for source in node.all_input_nodes if source in self.origin}
            if len(origins) > 1 or any(source not in self.origin for source in node.all_input_nodes):
                raise Unfollowed("it joins the gathered tensor with others")
            origin = origins.pop()
            found = view_of(node, self.known)
            numel = prod(sizes_of(origin) or ())
            whole = isinstance(found, Layout) and prod(found.shape) == numel
            if whole and isinstance(found, Layout) and not found.covers(numel):
                raise Unfollowed("it reorders or repeats parts of the gathered tensor")
            self.known[node], self.origin[node] = found, origin
        except Unfollowed as error:
            sentence = f"{name} cannot be streamed through {node.name}: {error}"
            self.broken.append(Refusal(Reason.OTHER_ORDER, sentence, node.name))
            return False
        return True

    def _is_part_as_bytes(self, node: Node) -> bool:
        """Whether a node reads the bytes of a part of the gathered tensor as another dtype, as DTensor does in fp8."""
        laid = self.known.get(node.all_input_nodes[0])
        if qualified(node.target) != BYTES or not isinstance(laid, Layout):
            return False
        return prod(laid.shape) != prod(sizes_of(self.origin[node.all_input_nodes[0]]) or ())

    def _has_sent_dtype(self, node: Node) -> bool:
        return ops.value_of(node).dtype == ops.value_of(self.origin[node]).dtype

    def _why_not(self, call: Rowwise) -> Refusal | None:
        name, node = self.collective.launch.name, call.node
        for argument, source in call.tensors.items():
            laid = self.known.get(source)
            if laid is not None and qualified(node.target) != BYTES and not self._has_sent_dtype(source):
                what = f"{name} stays whole: {node.name} takes its bytes as another dtype"
                return Refusal(Reason.OTHER_ORDER, what, source.name)
            if laid is None:
                if self.dag.before[self.dag.index[source]] >> self.bit & 1:
                    what = f"{node.name} waits for all of {name}: its {argument} {source.name} depends on {name} too"
                    return Refusal(Reason.DEPENDENCY, what, source.name)
            elif not isinstance(laid, Layout) or prod(laid.shape) != prod(sizes_of(self.origin[source]) or ()):
                what = f"{name} stays whole: {node.name} uses only a part of the gathered tensor"
                return Refusal(Reason.OTHER_ORDER, what, source.name)
        if call.product and operands_of(node)[0] not in self.known:
            return self._why_not_right(call)
        return None

    def _why_not_right(self, call: Rowwise) -> Refusal | None:
        rank = len(sizes_of(call.node) or ())
        right = next(n for n, source in call.tensors.items() if source in self.known)
        if rank > 2 and any(dim is not None and dim < rank - 2 for dim in call.dims[right]):
            return None
        name = self.collective.launch.name
        what = f"{call.node.name} waits for all of {name}: the gathered tensor is its {right}, not its left operand"
        return Refusal(Reason.NOT_BY_ROWS, what, call.node.name)


def _cut_shard(site: GatherSite, chunks: int, dim: int) -> Chunking | Refusal:
    return _cut(site, chunks, dim, ChunkDim(dim, 1 if dim else site.num_ranks, site.shape[dim] // chunks))


def _cut(site: GatherSite, chunks: int, dim: int, chunk_dim: ChunkDim) -> Chunking | Refusal:
    """The site in chunks, with the gathered tensor split at `chunk_dim`."""
    launch = site.collective.launch
    chunk_dims = {launch: chunk_dim}
    calls: dict[Node, Mapping[str, Operand]] = {}
    dropped: dict[Node, Refusal] = {}
    for call in site.bases.values():
        if call is not None:
            _cut_call(call, site, chunks, chunk_dims, calls, dropped)
    for node in site.products:
        call = read_rowwise(node)
        if call is not None:
            _cut_call(call, site, chunks, chunk_dims, calls, dropped)
    products = tuple(node for node in site.products if node in calls)
    if not products:
        return dropped[site.products[0]]
    whole = tuple(dropped[node] for node in site.products if node in dropped)
    found = Chunking(launch, site.num_ranks, chunks, dim, products, chunk_dims, calls, whole, ring_rank=site.ring_rank)
    return found.with_products(products)


def _cut_call(
    call: Rowwise,
    site: GatherSite,
    chunks: int,
    chunk_dims: dict[Node, ChunkDim],
    calls: dict[Node, Mapping[str, Operand]],
    dropped: dict[Node, Refusal],
) -> None:
    """Split one call of a site into chunks, or record why it waits for the whole gathered tensor."""
    node = call.node
    operands: dict[str, Operand] = {}
    found: set[ChunkDim] = set()
    try:
        for name, source in call.tensors.items():
            if source not in site.views:
                continue
            base, layout = site.views[source]
            if base not in chunk_dims:
                raise Unfollowed(f"its {name} {source.name} needs the whole gathered tensor")
            stride = stride_of(chunk_dims[base], sizes_of(base) or ())
            chunk_dim = chunk_dim_in(layout, stride, chunks)
            operands[name] = Operand(source, chunk_dim, base, layout)
            found.add(chunk_dim_of_result(call, name, chunk_dim))
        if len(found) != 1:
            raise Unfollowed("its arguments are split along different dims")
        chunk_dim = found.pop()
        if call.product and chunk_dim.dim == len(sizes_of(node) or ()) - 1 and len(sizes_of(node) or ()) > 1:
            raise Unfollowed("its chunks would be columns of its result")
        check_rows(node, chunks)
        for name, source in call.tensors.items():
            before = chunk_dim_of_argument(call, name, chunk_dim)
            if name not in operands and before is not None:
                operands[name] = Operand(source, before)
    except Unfollowed as error:
        sentence = f"{node.name} waits for all of {site.collective.launch.name}: {error}"
        dropped[node] = Refusal(Reason.NOT_BY_ROWS, sentence, node.name)
        return
    chunk_dims[node], calls[node] = chunk_dim, operands


def is_chunk_of_gather(launch: Node) -> bool:
    """Whether an earlier pass streamed this gather: several slices of one tensor are gathered separately."""
    part = _copied(launch.all_input_nodes[0])
    if ops.name_of(part.target) != "slice":
        return False
    dim = part.args[1] if len(part.args) > 1 else 0
    others = [
        user
        for user in part.all_input_nodes[0].users
        if ops.name_of(user.target) == "slice" and (user.args[1] if len(user.args) > 1 else 0) == dim
    ]
    sent = [user for other in others for user in _users_of_copies(other) if user.target is launch.target]
    return len(sent) > 1


def _copied(node: Node) -> Node:
    return node.all_input_nodes[0] if ops.name_of(node.target) == "clone" else node


def _users_of_copies(node: Node) -> Iterable[Node]:
    for user in node.users:
        if ops.name_of(user.target) == "clone":
            yield from user.users
        else:
            yield user
