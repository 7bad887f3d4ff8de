"""The symmetric-memory lowering: torch's fused CUDA operators that multiply while they gather or scatter.

Contract: a site is lowered only if it computes exactly what these operators compute. They take a shard, the right
operands and the dim that is gathered (or scattered) of a tensor whose last dim is multiplied. The layouts of the
operands show whether the views around a site have this form. Each operator is complete when it returns, so nothing
waits for it.

    fused_all_gather_matmul(shard, [right, ...], dim, group) -> gathered, [product, ...]
    fused_matmul_reduce_scatter(left, right, reduce_op, dim, group) -> this rank's result

Several products of one gather become one operator. A product that the operator cannot take, and every other use, reads
the gathered tensor that the operator returns. Before a scatter, a sum of products is one product of operands that are
put side by side. Biases are added afterwards.

Products in fp8 have operators of their own, which also take the scales: one for the whole left operand, or one per row.
They do not split the last dim.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from operator import getitem
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from weft.compat import fake_tensor, find_op, register_operators
from weft.graph import ops
from weft.graph.collective import Collective
from weft.graph.edit import Edit
from weft.graph.metadata import contiguous_strides
from weft.graph.products import OPERANDS
from weft.plan.decision import Reason, Refusal
from weft.streaming.chunking import SCALED, Chunking, FusedForm, Operand, replaced, still_needed
from weft.streaming.layouts import Digit, Layout, Unfollowed, identity
from weft.streaming.lowerings.portable import ChunkBuilder
from weft.streaming.lowerings.protocol import Name
from weft.streaming.view_layouts import qualified, sizes_of

aten = torch.ops.aten
REDUCTIONS = ("sum", "avg")
SUM = "aten::add.Tensor"
BYTES = "aten::view.dtype"
LEFT = "self"
"""The name of the left operand of an fp8 product."""
PRODUCTS = ("aten::mm", "aten::addmm", "aten::matmul", "aten::linear", SCALED)
VIEWS = "no gather or scatter along one dim explains the views in between"


class SymmetricMemory:
    """Run the site as one of torch's fused operators."""

    @property
    def name(self) -> Name:
        return "symmetric-memory"

    def fit(self, cut: Chunking) -> Chunking:
        """The products of a gather that one operator can take; all products of a scatter."""
        found = {node: _why_not_product(cut, node) for node in cut.products} if cut.result is None else {}
        taken = tuple(node for node, what in found.items() if what is None)
        first = next(iter(taken), None)
        if first is None:
            return cut
        taken = tuple(node for node in taken if _go_together(cut, first, node))
        left = [node for node in cut.products if node not in taken]
        waits = tuple(_wait_for_all(cut, node, found[node] or "another product has another form") for node in left)
        return replace(cut.with_products(taken), dropped=(*cut.dropped, *waits))

    def why_not(self, cut: Chunking, unshared: Refusal | None) -> Refusal | None:
        """Why torch's operators cannot run a site; None if they can."""
        launch = cut.launch
        if Collective(launch).kind is ops.Kind.ALL_REDUCE:
            return self._refusal(cut, f"{launch.name} is an all-reduce, and torch has no fused operator for that")
        what = _why_not_product(cut, cut.products[0]) if cut.result is None else _why_not_sum(cut)
        if what is not None:
            return self._refusal(cut, f"torch has no fused operator for {launch.name}: {what}")
        if cut.result is not None and still_needed(cut, replaced(cut)):
            return self._refusal(
                cut, f"other nodes use the product of {launch.name}, which the fused operator does not return"
            )
        return unshared

    def _refusal(self, cut: Chunking, sentence: str) -> Refusal:
        return Refusal(Reason.NO_KERNEL, sentence, cut.launch.name)

    def fused(self, cut: Chunking) -> Chunking:
        """The site as one operator, for its price; ask `why_not` first."""
        form = _form(cut)
        return replace(cut, fused=form._replace(copied=tuple(_copied(cut, form))))

    def build(self, edit: Edit, cut: Chunking) -> dict[Node, Node]:
        """Replace a site by the fused operator."""
        form = _form(cut)
        if _is_scaled(cut.products[0]):
            made = _ScaledFusedGather(edit, cut) if cut.result is None else _ScaledFusedScatter(edit, cut)
        else:
            made = _FusedGather(edit, cut) if cut.result is None else _FusedScatter(edit, cut)
        return made.build_as(form)


def _form(cut: Chunking) -> FusedForm:
    form = _gather_form(cut, cut.products[0]) if cut.result is None else _scatter_form(cut)
    if form is None:
        raise ValueError(f"{cut.launch.name} has no fused form: ask why_not first")
    return form


def _copied(cut: Chunking, form: FusedForm) -> list[Node]:
    """The nodes of a gather that are replaced by copies of what the operator returns.

    It returns the dim of the ranks first in memory. Unless that dim is the first one, a view cannot restore the order.
    """
    if cut.result is not None or prod(form.shape[: form.dim]) == 1:
        return []
    copied = list(cut.products) if form.dim < len(form.shape) - 1 else []
    gone = replaced(cut)
    if cut.launch not in gone:
        views = [view for view in _lefts(cut) if view not in gone]
        copied += {sizes_of(view): view for view in reversed(views)}.values()
        copied += [] if cut.launch in replaced(cut, views) else [cut.launch]
    return copied


def _lefts(cut: Chunking) -> list[Node]:
    """The left operands of the products that are views of the gathered tensor."""
    operands = [cut.calls[product].get(OPERANDS[qualified(product.target)][0]) for product in cut.products]
    found = [each.node for each in operands if each is not None and each.base is cut.launch]
    return [node for node in dict.fromkeys(found) if not ops.is_wait(node.target)]


def _is_scaled(product: Node) -> bool:
    return qualified(product.target) == SCALED


def _go_together(cut: Chunking, first: Node, second: Node) -> bool:
    """Whether one operator takes both products: of one dtype and dim, in fp8 with one scale of the left operand."""
    if _is_scaled(first) != _is_scaled(second) or _gather_form(cut, first) != _gather_form(cut, second):
        return False
    return not _is_scaled(first) or ops.bind(first)["scale_a"] is ops.bind(second)["scale_a"]


def _wait_for_all(cut: Chunking, product: Node, what: str) -> Refusal:
    sentence = f"{product.name} waits for all of {cut.launch.name}: {what}"
    return Refusal(Reason.NO_KERNEL, sentence, product.name)


def _why_not_operator(product: Node) -> str | None:
    """Why the operators cannot compute a product, whatever its operands are; None if they can."""
    name, bound = qualified(product.target), ops.bind(product)
    if name not in PRODUCTS or len(sizes_of(bound[OPERANDS[name][1]]) or ()) != 2:
        return f"{product.name} is not a product by one matrix"
    if any(bound.get(scale, 1) != 1 for scale in ("alpha", "beta")):
        return f"{product.name} scales its terms"
    return None


def _why_not_product(cut: Chunking, product: Node) -> str | None:
    """Why the operators cannot take a product of a gathered tensor; None if they can."""
    what = _why_not_operator(product)
    if what is not None:
        return what
    form = _gather_form(cut, product)
    if form is None:
        between = _call_between(cut, product)
        return f"{between.name} stands between it and {product.name}" if between is not None else VIEWS
    if _is_scaled(product) and form.dim == len(form.shape) - 1:
        return "the fp8 operator splits rows, not the last dim"
    return None


def _call_between(cut: Chunking, product: Node) -> Node | None:
    """The call that changes values between a gather and a product; None if there are only views."""
    operand = cut.calls[product].get(OPERANDS[qualified(product.target)][0])
    while operand is not None and operand.base is not None and operand.base is not cut.launch:
        if not (_is_scaled(product) and qualified(operand.base.target) == BYTES):
            return operand.base
        operand = next(iter(cut.calls[operand.base].values()))
    return None


def _why_not_sum(cut: Chunking) -> str | None:
    """Why the operators cannot take what a scatter reduces; None if they can."""
    collective, terms = Collective(cut.launch), _terms(cut)
    if isinstance(terms, str):
        return terms
    what = next(filter(None, map(_why_not_operator, terms)), None)
    if what is not None:
        return what
    if collective.reduce_op not in REDUCTIONS:
        return f"the operator sums or averages, but {cut.launch.name} reduces by {collective.reduce_op}"
    if any(map(_is_scaled, terms)):
        if len(terms) > 1:
            return "the fp8 operator takes one product"
    elif any(ops.bind(node).get(OPERANDS[qualified(node.target)][2]) is not None for node in terms):
        return f"{terms[0].name} adds a tensor to its product"
    form = _scatter_form(cut)
    if form is None:
        return VIEWS
    if _is_scaled(terms[0]) and len(form.shape) == 2:
        return "the fp8 operator splits rows, not the last dim"
    return None


def _terms(cut: Chunking) -> list[Node] | str:
    """The products whose sum is scattered, or which call on the way is not a sum of products."""
    found: list[Node] = []
    stack = [cut.result]
    while stack:
        operand = stack.pop()
        if operand is None or operand.base is None or operand.layout is None:
            return f"{operand.node.name if operand else cut.launch.name} is not a product"
        node = operand.base
        if node in cut.products:
            found.append(node)
        elif qualified(node.target) != SUM or ops.bind(node).get("alpha", 1) != 1:
            return f"{node.name} stands between it and the product"
        else:
            terms = [cut.calls[node].get(name) for name in ("self", "other")]
            if any(term is None or term.base not in cut.calls or not _keeps_order(term) for term in terms):
                return f"{node.name} adds another tensor"
            stack += reversed(terms)
    return found


def _keeps_order(operand: Operand) -> bool:
    """Whether a view of a base has its elements in the same order."""
    if operand.base is None or operand.layout is None:
        return False
    return operand.layout == identity(sizes_of(operand.base) or ()).reshaped(operand.layout.shape)


def _gather_form(cut: Chunking, product: Node) -> FusedForm | None:
    """A product of a gathered tensor as torch's operators take it; None if it has another form."""
    try:
        left = _over_gathered(cut, cut.calls[product].get(OPERANDS[qualified(product.target)][0]), _is_scaled(product))
        for dim in range(len(cut.shape) if left is not None else 0):
            whole = _gathered(cut.shape, cut.num_ranks, dim)
            if left is not None and whole.shape[-1] == left.shape[-1] and left == whole.reshaped(left.shape):
                return FusedForm(whole.shape, dim)
    except Unfollowed:
        return None
    return None


def _over_gathered(cut: Chunking, operand: Operand | None, is_scaled: bool) -> Layout | None:
    """An operand as a view of the gathered tensor; fp8 operands also through casts of its bytes to another dtype."""
    if operand is None or operand.layout is None or operand.base is None or operand.base is cut.launch:
        return operand.layout if operand is not None else None
    if not is_scaled or qualified(operand.base.target) != BYTES or not _keeps_order(operand):
        return None
    before = _over_gathered(cut, next(iter(cut.calls[operand.base].values())), is_scaled)
    return before.reshaped(operand.layout.shape) if before is not None else None


def _gathered(shard: tuple[int, ...], num_ranks: int, dim: int) -> Layout:
    """The tensor gathered along a dim, as a view of the concatenated shards."""
    dims = list(identity(shard).dims)
    ranks = Digit(num_ranks, prod(shard))
    inside = dims[dim]
    follows = bool(inside) and inside[0].size * inside[0].stride == ranks.stride
    dims[dim] = (Digit(num_ranks * inside[0].size, inside[0].stride),) if follows else (ranks, *inside)
    return Layout(tuple(dims))


def _scatter_form(cut: Chunking) -> FusedForm | None:
    """The sum of products that is scattered as torch's operators take it; None if it has another form."""
    try:
        return _scattered(cut)
    except Unfollowed:
        return None


def _scattered(cut: Chunking) -> FusedForm | None:
    result = cut.result
    if result is None or result.layout is None:
        return None
    *outer, columns = sizes_of(cut.products[0]) or (0, 0)
    rows, local = prod(outer), prod(cut.shape)
    found = result.layout.inverse((rows, columns)).refined((local,))
    digits = [digit for dim in found.dims for digit in dim]
    ranks = [k for k, digit in enumerate(digits) if digit.stride >= local]
    rest = [digit for digit in digits if digit.stride < local]
    if len(ranks) != 1 or rest != sorted(rest, key=lambda digit: -digit.stride):
        return None
    place = ranks[0]
    in_rows = len(found.dims[0])
    if place >= in_rows:
        return FusedForm((rows, columns), 1) if place == in_rows else None
    before = prod(digit.size for digit in digits[:place])
    inner = prod(digit.size for digit in digits[place + 1 : in_rows])
    return FusedForm((before, cut.num_ranks * inner, columns), 1)


class _FusedBuilder(ChunkBuilder):
    def fused(self, name: str, args: tuple[Any, ...], value: Any, **kwargs: Any) -> Node:
        register_operators("symm_mem")
        target = find_op("symm_mem", name, "default")
        if target is None:
            raise ValueError(f"this torch has no symm_mem::{name}")
        named = f"{self.launch.name}_fused"
        return self.edit.call(
            target,
            args,
            kwargs,
            before=self.anchor,
            name=named,
            like=[self.launch, *self.chunking.products],
            value=value,
        )

    def new(self, like: Tensor, shape: tuple[int, ...], dim: int = 0) -> Tensor:
        """A fake result; the operators compute with the dim of the ranks first, and return a view of that."""
        inner = contiguous_strides((shape[dim], *shape[:dim], *shape[dim + 1 :]))
        strides = (*inner[1 : dim + 1], inner[0], *inner[dim + 1 :])
        return fake_tensor(self.edit.mode, shape, strides, like.dtype, like.device)

    @property
    def group(self) -> str:
        return self.collective.group

    def right(self, product: Node) -> Node:
        name = qualified(product.target)
        right: Node = ops.bind(product)[OPERANDS[name][1]]
        return self.call(aten.t.default, (right,), f"{right.name}_t", right) if name == "aten::linear" else right


class _FusedGather(_FusedBuilder):
    def build_as(self, form: FusedForm) -> dict[Node, Node]:
        cut = self.chunking
        gone = replaced(cut)
        self.anchor = cut.products[-1]
        needed = self.launch not in gone
        node = self.multiplied(form, needed)
        items = self.call(getitem, (node, 1), f"{self.launch.name}_products", self.launch)
        replacements: dict[Node, Node] = {}
        rows: dict[tuple[int, ...] | None, Node] = {}
        """The gathered tensor by the shape in which products read it."""
        for k, product in enumerate(cut.products):
            item = self.call(getitem, (items, k), f"{product.name}_fused", product)
            replacements[product] = self.with_bias(self.shaped(item, product, product.name), product)
        if needed:
            whole = self.as_sent(self.call(getitem, (node, 0), f"{self.launch.name}_gathered", self.launch))
            views = [view for view in _lefts(cut) if view not in gone]
            for view in views:
                if (shape := sizes_of(view)) not in rows:
                    rows[shape] = self.shaped(whole, view, f"{self.launch.name}_rows")
                replacements[view] = rows[shape]
            gone = replaced(cut, views)
            if self.launch not in gone:
                back = _gathered(cut.shape, cut.num_ranks, form.dim).inverse(sizes_of(self.launch) or ())
                sent = self.viewed(whole, back, self.launch)
                replacements |= dict.fromkeys([self.launch, *self.collective.waits], sent)
                gone |= {self.launch, *self.collective.waits}
        for old in gone:
            self.edit.erase(old)
        return replacements

    def multiplied(self, form: FusedForm, needed: bool) -> Node:
        """The node of the fused operator."""
        source = self.collective.inputs[0]
        value = (self.new(ops.value_of(source), form.shape, form.dim) if needed else None, self.results(form))
        rights = [self.right(node) for node in self.chunking.products]
        return self.fused("fused_all_gather_matmul", (source, rights, form.dim, self.group), value, return_A=needed)

    def with_bias(self, node: Node, product: Node) -> Node:
        """The result of a product with the tensor that it adds; the fp8 operator adds that itself."""
        bias = ops.bind(product).get(OPERANDS[qualified(product.target)][2])
        if bias is None or _is_scaled(product):
            return node
        return self.call(aten.add.Tensor, (bias, node), f"{product.name}_sum", product)

    def results(self, form: FusedForm) -> list[Tensor]:
        """Fake values of the products, in the dims of the operator."""
        products: list[Tensor] = [ops.value_of(node) for node in self.chunking.products]
        return [self.new(value, (*form.shape[:-1], int(value.shape[-1])), form.dim) for value in products]

    def as_sent(self, whole: Node) -> Node:
        """The gathered tensor in the dtype that was sent."""
        sent: Tensor = ops.value_of(self.launch)
        if ops.value_of(whole).dtype == sent.dtype:
            return whole
        return self.call(aten.view.dtype, (whole, sent.dtype), f"{self.launch.name}_bytes", self.launch)

    def shaped(self, node: Node, like: Node, name: str) -> Node:
        """A result in the shape and, as far as views need it, in the order of the node that it replaces."""
        shape = list(sizes_of(like) or ())
        if list(sizes_of(node) or ()) == shape:
            return self.contiguous(node)
        return self.call(aten.reshape.default, (node, shape), name, like)


class _FusedScatter(_FusedBuilder):
    def build_as(self, form: FusedForm) -> dict[Node, Node]:
        cut = self.chunking
        gone = replaced(cut)
        terms = _terms(cut)
        products = terms if not isinstance(terms, str) else []
        left, right = self.joined_operands(products)
        left = self.as_rows(left, form)
        shape = tuple(n // cut.num_ranks if d == form.dim else n for d, n in enumerate(form.shape))
        value = self.new(ops.value_of(products[0]), shape)
        result = self.scattered(left, right, form, value)
        result = self.call(aten.view.default, (result, list(cut.shape)), f"{self.launch.name}_done", self.launch)
        for old in gone:
            self.edit.erase(old)
        return dict.fromkeys([self.launch, *self.collective.waits], result)

    def joined_operands(self, products: list[Node]) -> tuple[Node, Node]:
        """The operands of the only product, or those of a sum of products, side by side: their product is the sum."""
        lefts: list[Node] = [ops.bind(node)[OPERANDS[qualified(node.target)][0]] for node in products]
        rights = [self.right(node) for node in products]
        if len(products) == 1:
            return lefts[0], rights[0]
        name = self.launch.name
        last = len(sizes_of(lefts[0]) or ()) - 1
        left = self.call(aten.cat.default, (lefts, last), f"{name}_left", products[0])
        return left, self.call(aten.cat.default, (rights,), f"{name}_right", products[0])

    def as_rows(self, left: Node, form: FusedForm) -> Node:
        """A left operand, or its scales by row, with the dims of the operator."""
        shape = [*form.shape[:-1], (sizes_of(left) or (0,))[-1]]
        if len(form.shape) == 2 or list(sizes_of(left) or ()) == shape:
            return left
        return self.call(aten.reshape.default, (left, shape), f"{left.name}_rows", left)

    def scattered(self, left: Node, right: Node, form: FusedForm, value: Tensor) -> Node:
        """The node of the fused operator."""
        args = (left, right, self.collective.reduce_op, form.dim, self.group)
        return self.fused("fused_matmul_reduce_scatter", args, value)


class _ScaledFusedGather(_FusedGather):
    def multiplied(self, form: FusedForm, needed: bool) -> Node:
        products = [ops.bind(node) for node in self.chunking.products]
        source, dtype = self.collective.inputs[0], ops.value_of(products[0][LEFT]).dtype
        if ops.value_of(source).dtype != dtype:
            source = self.call(aten.view.dtype, (source, dtype), f"{source.name}_read", source)
        value = (self.new(ops.value_of(source), form.shape, form.dim), self.results(form))
        args = (
            source,
            [bound["mat2"] for bound in products],
            self.by_rows(products[0]["scale_a"], form),
            [bound["scale_b"] for bound in products],
            form.dim,
            self.group,
            *([bound[name] for bound in products] for name in ("bias", "scale_result", "out_dtype", "use_fast_accum")),
        )
        return self.fused("fused_all_gather_scaled_matmul", args, value)

    def by_rows(self, scale: Node, form: FusedForm) -> Node:
        """The scale of the left operand. Row scales get the dims of the operand."""
        shape = [*form.shape[:-1], 1]
        if prod(sizes_of(scale) or ()) == 1 or list(sizes_of(scale) or ()) == shape:
            return scale
        return self.call(aten.reshape.default, (scale, shape), f"{scale.name}_rows", scale)


class _ScaledFusedScatter(_FusedScatter):
    def scattered(self, left: Node, right: Node, form: FusedForm, value: Tensor) -> Node:
        bound = ops.bind(self.chunking.products[0])
        scale: Node = bound["scale_a"]
        scale = scale if prod(sizes_of(scale) or ()) == 1 else self.as_rows(scale, form)
        places = (self.collective.reduce_op, form.dim, form.dim, self.group, list(form.shape))
        last = (bound["bias"], bound["scale_result"], bound["out_dtype"], bound["use_fast_accum"])
        args = (left, right, scale, bound["scale_b"], *places, *last)
        return self.fused("fused_scaled_matmul_reduce_scatter", args, value)
