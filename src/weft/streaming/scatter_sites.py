"""Products whose result is scattered: the calls behind a reduce-scatter, walked back to products and other tensors.

Contract: as in `sites`. A sum of several products, a cast or any other call that works element by element between the
products and the scatter is computed chunk by chunk too; a tensor that is no product is taken apart instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod

from torch.fx import Node

from weft.graph import ops
from weft.graph.collective import Collective
from weft.graph.dag import Dag
from weft.plan.decision import Reason, Refusal
from weft.streaming.chunking import Chunking, Operand, Place, check_rows, first_cut, place_before, place_in, stride_of
from weft.streaming.gather_sites import why_not_followed
from weft.streaming.layouts import Layout, Unfollowed
from weft.streaming.rowwise import Rowwise, read_rowwise
from weft.streaming.view_layouts import back_to_base, sizes_of
from weft.streaming.writes import is_chunk_of_scatter


@dataclass(frozen=True, eq=False)
class ScatterSite:
    """A reduce-scatter, or an all-reduce, and the products whose results it takes."""

    collective: Collective
    num_ranks: int
    """Over which rows are scattered: one where all of them are summed."""
    shape: tuple[int, ...]
    """Of what one rank receives."""
    products: tuple[Node, ...]
    calls: Mapping[Node, Rowwise]
    """The products, and the calls between them and the scatter; those behind others come first."""
    views: Mapping[Node, tuple[Node, Layout]]
    """The base of each tensor on the way, and the tensor as a view of it."""
    dropped: tuple[Refusal, ...] = ()
    own: int | None = None
    """The place of this rank in the group, if it is to be a ring."""

    def with_products(self, products: tuple[Node, ...]) -> ScatterSite:
        """The site with some of its products only; the results of the others are taken apart."""
        gone = set(self.products) - set(products)
        return replace(self, products=products, calls={n: call for n, call in self.calls.items() if n not in gone})

    def cut(self, chunks: int) -> Chunking | Refusal:
        """The site in chunks, along the first dim of what is received that can be cut so; a ring by ranks."""
        if self.own is not None:
            return _cut(self, self.num_ranks, 0, Place(0, 1, self.shape[0]))
        what = f"what {self.collective.launch.name} scatters"
        return first_cut(self.shape, chunks, what, partial(_cut_rows, self, chunks))


def read_scatter(collective: Collective, dag: Dag) -> ScatterSite | Refusal:
    """The site of a reduce-scatter or of an all-reduce, or why it is none."""
    refusal = why_not_followed(collective)
    if refusal is None and is_chunk_of_scatter(collective.launch):
        return Refusal(Reason.ALREADY_DONE, f"{collective.launch.name} is a chunk already")
    return _ScatterReader(collective, dag).read() if refusal is None else refusal


@dataclass
class _ScatterReader:
    """One walk back from a reduce-scatter."""

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
            call = self._call_behind(node)
            if call is None or call.node in self.calls:
                continue
            self.calls[call.node] = call
            if not call.product:
                full = prod(sizes_of(call.node) or ())
                front += [t for t in call.tensors.values() if prod(sizes_of(t) or ()) == full]
        products = tuple(node for node, call in self.calls.items() if call.product)
        if not products:
            last = next(reversed(self.calls), self.collective.inputs[0]).name
            what = f"{launch.name} scatters no product: {last} makes what it takes"
            return next(iter(self.broken), Refusal(Reason.NO_PRODUCT, what, last))
        size: int = ops.bind(launch).get("group_size", 1)
        return ScatterSite(self.collective, size, sizes_of(launch) or (), products, self._ordered(), self.views)

    def _call_behind(self, node: Node) -> Rowwise | None:
        """The call that makes a tensor, views aside, if it can be cut."""
        name = self.collective.launch.name
        try:
            base, layout = back_to_base(node)
            if not layout.covers(prod(sizes_of(base) or ())):
                raise Unfollowed("it takes parts in another order, or more than once")
        except Unfollowed as error:
            self.broken.append(
                Refusal(Reason.OTHER_ORDER, f"{name} scatters along no one dim: {node.name}: {error}", node.name)
            )
            return None
        self.views[node] = base, layout
        call = read_rowwise(base)
        if call is None:
            what = f"{name} scatters no product: {base.name} makes what it takes"
            self.broken.append(Refusal(Reason.NO_PRODUCT, what, base.name))
            return None
        return call

    def _ordered(self) -> dict[Node, Rowwise]:
        """The calls so that each comes before those that make what it takes."""
        return dict(sorted(self.calls.items(), key=lambda item: -self.dag.index[item[0]]))


def _cut_rows(site: ScatterSite, chunks: int, dim: int) -> Chunking | Refusal:
    return _cut(site, chunks, dim, Place(dim, 1 if dim else site.num_ranks, site.shape[dim] // chunks))


def _cut(site: ScatterSite, chunks: int, dim: int, sent: Place) -> Chunking | Refusal:
    """The site in chunks if what is scattered is cut at a place."""
    launch, source = site.collective.launch, site.collective.inputs[0]
    places: dict[Node, Place] = {}
    calls: dict[Node, Mapping[str, Operand]] = {}
    blamed = source
    try:
        result = _operand(site, source, sent, chunks, places)
        for node, call in site.calls.items():
            blamed = node
            if node not in places:  # only behind what is taken apart
                continue
            place = places[node]
            if call.product and place.dim == len(sizes_of(node) or ()) - 1 > 0:
                raise Unfollowed("chunks would be columns of its result")
            check_rows(node, chunks)
            operands: dict[str, Operand] = {}
            for name, tensor in call.tensors.items():
                before = place_before(call, name, place)
                if before is not None:
                    follow = not call.product and tensor in site.views
                    operands[name] = (
                        _operand(site, tensor, before, chunks, places) if follow else Operand(tensor, before)
                    )
            calls[node] = operands
    except Unfollowed as error:
        sentence = f"{launch.name} stays behind {blamed.name}: {error}"
        return Refusal(Reason.NOT_BY_ROWS, sentence, blamed.name)
    products = tuple(node for node in site.products if node in calls)
    ordered = dict(reversed(calls.items()))
    return Chunking(launch, site.num_ranks, chunks, dim, products, places, ordered, result=result, own=site.own)


def _operand(site: ScatterSite, node: Node, place: Place, chunks: int, places: dict[Node, Place]) -> Operand:
    """A tensor as a view of its base, whose place is noted."""
    base, layout = site.views[node]
    stride = stride_of(place, sizes_of(node) or ())
    found = place_in(layout.inverse(sizes_of(base) or ()), stride, chunks)
    if places.setdefault(base, found) != found:
        raise Unfollowed("it is needed in chunks of two kinds")
    return Operand(node, place, base, layout)
