"""Sites: gathers whose result is multiplied, and products whose result is scattered.

Contract: found by meaning. Where each element of an operand comes from is computed through every view between it and
the collective; a chain that takes the parts of ranks in another order, twice or not at all is no gather. What is no
site is told with its reason and the node that breaks it. Nothing here changes the graph.
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
from weft.plan.decision import Reason, Refusal
from weft.streaming.chunking import (
    Chunking,
    Operand,
    Place,
    check_rows,
    first_cut,
    place_before,
    place_behind,
    place_in,
    stride_of,
)
from weft.streaming.layouts import Layout, Unfollowed, identity
from weft.streaming.rowwise import Rowwise, left_operand, read_rowwise
from weft.streaming.view_layouts import Laid, is_view, sizes_of, view_of
from weft.streaming.writes import is_chunk_of_gather


@dataclass(frozen=True, eq=False)
class GatherSite:
    """A gather and the products that its result goes to, through views and calls that work by rows."""

    collective: Collective
    num_ranks: int
    shape: tuple[int, ...]
    """Of the shard."""
    products: tuple[Node, ...]
    dropped: tuple[Refusal, ...]
    """Why other products take what was gathered as a whole."""
    views: Mapping[Node, tuple[Node, Layout]]
    """What is known of each tensor behind the gather: a base, and the tensor as a view of it."""
    bases: Mapping[Node, Rowwise | None]
    """What was gathered (None), and the calls between, in order."""
    own: int | None = None
    """The place of this rank in the group, if it is to be a ring."""

    def with_products(self, products: tuple[Node, ...]) -> GatherSite:
        """The site with some of its products only."""
        return replace(self, products=products)

    def cut(self, chunks: int) -> Chunking | Refusal:
        """The site in chunks, along the first dim of the shard that can be cut so, never the last; a ring by ranks."""
        if self.own is not None:
            return _cut(self, self.num_ranks, 0, Place(0, 1, self.shape[0]))
        return first_cut(
            self.shape, chunks, f"the shard of {self.collective.launch.name}", partial(_cut_shard, self, chunks)
        )


def why_not_followed(collective: Collective) -> Refusal | None:
    """What keeps a collective from being cut, whatever is beside it."""
    name, form = collective.launch.name, collective.form
    if form.coalesced or not collective.is_functional:
        what = "takes a list of tensors" if form.coalesced else "writes to memory that it is given"
        return Refusal(Reason.UNSUPPORTED_FORM, f"{name} {what}", name)
    if sizes_of(collective.launch) is None or sizes_of(collective.inputs[0]) is None:
        return Refusal(Reason.UNKNOWN_SIZE, f"the sizes of {name} are not all numbers", name)
    if 0 in (sizes_of(collective.launch) or ()):
        return Refusal(Reason.UNSUPPORTED_FORM, f"{name} moves nothing", name)
    stray = next((u for u in collective.launch.users if not ops.is_wait(u.target) and u.op != "output"), None)
    if stray is not None:
        return Refusal(Reason.UNSUPPORTED_FORM, f"{stray.name} takes {name} before it is waited for", stray.name)
    return None


# Gathers.


def read_gather(collective: Collective, dag: Dag) -> GatherSite | Refusal:
    """The site of a gather, or why it is none."""
    refusal = why_not_followed(collective)
    if refusal is not None:
        return refusal
    if is_chunk_of_gather(collective.launch):
        return Refusal(Reason.ALREADY_DONE, f"{collective.launch.name} is a chunk already")
    return _GatherReader(collective, dag).read()


class _GatherReader:
    """One walk forward from a gather."""

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
        what = "nobody takes what it gathers" if not any(w.users for w in self.collective.waits) else "it is returned"
        return Refusal(Reason.NO_PRODUCT, f"{name} feeds no product: {what}")

    def _take(self, node: Node) -> bool:
        """Follow one user of what is known; whether to go on behind it."""
        name = self.collective.launch.name
        if node.op == "output":
            return False
        if is_view(node):
            return self._view(node)
        call = read_rowwise(node)
        if call is None:
            what = f"{name} feeds no product: {node.name} takes what it gathers"
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
                raise Unfollowed("it joins tensors that come from elsewhere")
            origin = origins.pop()
            found = view_of(node, self.known)
            numel = prod(sizes_of(origin) or ())
            whole = isinstance(found, Layout) and prod(found.shape) == numel
            if whole and isinstance(found, Layout) and not found.covers(numel):
                raise Unfollowed("it takes parts of what was gathered in another order, or more than once")
            self.known[node], self.origin[node] = found, origin
        except Unfollowed as error:
            sentence = f"{name} is not gathered along one dim: {node.name}: {error}"
            self.broken.append(Refusal(Reason.OTHER_ORDER, sentence, node.name))
            return False
        return True

    def _why_not(self, call: Rowwise) -> Refusal | None:
        name, node = self.collective.launch.name, call.node
        for argument, source in call.tensors.items():
            laid = self.known.get(source)
            if laid is None:
                if self.dag.before[self.dag.index[source]] >> self.bit & 1:
                    what = f"{node.name} stays behind {name}: its {argument} {source.name} needs what was gathered"
                    return Refusal(Reason.DEPENDENCY, what, source.name)
            elif not isinstance(laid, Layout) or prod(laid.shape) != prod(sizes_of(self.origin[source]) or ()):
                what = f"{name} feeds no product as a whole: {node.name} takes a part of what was gathered"
                return Refusal(Reason.OTHER_ORDER, what, source.name)
        if call.product and left_operand(node) not in self.known:
            return self._why_not_right(call)
        return None

    def _why_not_right(self, call: Rowwise) -> Refusal | None:
        rank = len(sizes_of(call.node) or ())
        right = next(n for n, source in call.tensors.items() if source in self.known)
        if rank > 2 and any(dim is not None and dim < rank - 2 for dim in call.dims[right]):
            return None
        name = self.collective.launch.name
        what = f"{call.node.name} stays behind {name}: it takes what was gathered as its {right}, not by rows"
        return Refusal(Reason.NOT_BY_ROWS, what, call.node.name)


def _cut_shard(site: GatherSite, chunks: int, dim: int) -> Chunking | Refusal:
    return _cut(site, chunks, dim, Place(dim, 1 if dim else site.num_ranks, site.shape[dim] // chunks))


def _cut(site: GatherSite, chunks: int, dim: int, place: Place) -> Chunking | Refusal:
    """The site in chunks if what is gathered is cut at a place."""
    launch = site.collective.launch
    places = {launch: place}
    calls: dict[Node, Mapping[str, Operand]] = {}
    lost: dict[Node, Refusal] = {}
    for call in site.bases.values():
        if call is not None:
            _cut_call(call, site, chunks, places, calls, lost)
    for node in site.products:
        call = read_rowwise(node)
        if call is not None:
            _cut_call(call, site, chunks, places, calls, lost)
    products = tuple(node for node in site.products if node in calls)
    if not products:
        return lost[site.products[0]]
    needed = _needed(products, calls)
    kept = {node: operands for node, operands in calls.items() if node in needed}
    where = {node: place for node, place in places.items() if node in needed or node is launch}
    whole = tuple(lost[node] for node in site.products if node in lost)
    return Chunking(launch, site.num_ranks, chunks, dim, products, where, kept, whole, own=site.own)


def _cut_call(
    call: Rowwise,
    site: GatherSite,
    chunks: int,
    places: dict[Node, Place],
    calls: dict[Node, Mapping[str, Operand]],
    lost: dict[Node, Refusal],
) -> None:
    """Cut one call of a gather's site, or note why it takes what was gathered as a whole."""
    node = call.node
    operands: dict[str, Operand] = {}
    found: set[Place] = set()
    try:
        for name, source in call.tensors.items():
            if source not in site.views:
                continue
            base, layout = site.views[source]
            if base not in places:
                raise Unfollowed(f"its {name} {source.name} needs all of what was gathered")
            stride = stride_of(places[base], sizes_of(base) or ())
            place = place_in(layout, stride, chunks)
            operands[name] = Operand(source, place, base, layout)
            found.add(place_behind(call, name, place))
        if len(found) != 1:
            raise Unfollowed("it takes chunks of different dims")
        place = found.pop()
        if call.product and place.dim == len(sizes_of(node) or ()) - 1 and len(sizes_of(node) or ()) > 1:
            raise Unfollowed("chunks would be columns of its result")
        check_rows(node, chunks)
        for name, source in call.tensors.items():
            before = place_before(call, name, place)
            if name not in operands and before is not None:
                operands[name] = Operand(source, before)
    except Unfollowed as error:
        sentence = f"{node.name} stays behind {site.collective.launch.name}: {error}"
        lost[node] = Refusal(Reason.NOT_BY_ROWS, sentence, node.name)
        return
    places[node], calls[node] = place, operands


def _needed(products: Iterable[Node], calls: Mapping[Node, Mapping[str, Operand]]) -> set[Node]:
    """The calls whose chunks the products need."""
    needed: set[Node] = set()
    stack = list(products)
    while stack:
        node = stack.pop()
        if node not in needed and node in calls:
            needed.add(node)
            stack += [operand.base for operand in calls[node].values() if operand.base is not None]
    return needed
