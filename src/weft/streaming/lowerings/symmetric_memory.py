"""The symmetric-memory lowering: torch's fused CUDA operators that multiply while they gather or scatter.

Contract: a site is lowered only if it computes exactly what these operators compute. They take a shard, the right
operands and the dim that is gathered (or scattered) of a tensor whose last dim is multiplied. The layouts of the
operands show whether the views around a site have this form. Each operator is complete when it returns, so nothing
waits for it.

    fused_all_gather_matmul(shard, [right, ...], dim, group) -> gathered, [product, ...]
    fused_matmul_reduce_scatter(left, right, reduce_op, dim, group) -> this rank's result

Products in fp8 have operators of their own, which also take the scales. All products share one left operand, with one
scale for all of it or one per row. These operators do not split the last dim.
"""

from __future__ import annotations

from math import prod
from operator import getitem
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Node

from weft.compat import fake_tensor, find_op, has_symmetric_memory, register_operators
from weft.graph import ops
from weft.graph.collective import Collective
from weft.graph.edit import Edit
from weft.graph.metadata import contiguous_strides
from weft.graph.products import OPERANDS
from weft.plan.decision import Reason, Refusal
from weft.streaming.chunking import Chunking, Operand, replaced, still_needed
from weft.streaming.layouts import Digit, Layout, Unfollowed, identity
from weft.streaming.lowerings.portable import ChunkBuilder
from weft.streaming.lowerings.protocol import Name
from weft.streaming.view_layouts import qualified, sizes_of

aten = torch.ops.aten
REDUCTIONS = ("sum", "avg")
SCALED = "aten::_scaled_mm"
LEFT = "self"
"""The name of the left operand in all of these products."""


class _OperatorForm(NamedTuple):
    """A site as the operators take it: the shape of the left operand over all ranks, and the dim of the ranks."""

    shape: tuple[int, ...]
    dim: int

    def is_by_rows(self, scatters: bool) -> bool:
        """Whether the dim of the ranks is a row dim; for a scatter, whether it is the first one."""
        if scatters:
            return self.dim == 1 and len(self.shape) > 2 and self.shape[0] == 1
        return self.dim < len(self.shape) - 1


class SymmetricMemory:
    """Run the site as one of torch's fused operators."""

    @property
    def name(self) -> Name:
        return "symmetric-memory"

    def why_not(self, cut: Chunking, *, asked_for: bool) -> Refusal | None:
        """Why torch's operators cannot run a site; None if they can."""
        launch = cut.launch
        value: Any = ops.value_of(launch)
        if value.device.type != "cuda":
            return self._refusal(cut, f"{launch.name} is on {value.device.type}, but symmetric memory needs cuda")
        if Collective(launch).kind is ops.Kind.ALL_REDUCE:
            return self._refusal(cut, f"{launch.name} is an all-reduce, and torch has no fused operator for that")
        what = _why_not_products(cut)
        if what is not None:
            return self._refusal(cut, what)
        if cut.result is not None and (len(cut.products) > 1 or Collective(launch).reduce_op not in REDUCTIONS):
            return self._refusal(
                cut, f"the fused operator takes one product and sums or averages it, unlike {launch.name}"
            )
        if cut.result is not None and still_needed(cut, replaced(cut)):
            return self._refusal(
                cut, f"other nodes use the product of {launch.name}, which the fused operator does not return"
            )
        form = _form(cut)
        if form is None:
            return self._refusal(cut, f"the fused operators cannot express the views around {launch.name}")
        if _is_scaled(cut) and not form.is_by_rows(cut.result is not None):
            return self._refusal(cut, f"the fused fp8 operators split rows, but {launch.name} uses another dim")
        if not has_symmetric_memory(Collective(launch).group, enabled=not asked_for):
            return self._refusal(cut, f"symmetric memory is not available for the group of {launch.name}")
        return None

    def _refusal(self, cut: Chunking, sentence: str) -> Refusal:
        return Refusal(Reason.NO_KERNEL, sentence, cut.launch.name)

    def build(self, edit: Edit, cut: Chunking) -> dict[Node, Node]:
        """Replace a site by the fused operator."""
        form = _form(cut)
        if form is None:
            raise ValueError(f"{cut.launch.name} was built without asking why_not first")
        if _is_scaled(cut):
            made = _ScaledFusedGather(edit, cut) if cut.result is None else _ScaledFusedScatter(edit, cut)
        else:
            made = _FusedGather(edit, cut) if cut.result is None else _FusedScatter(edit, cut)
        return made.build_as(form)


def _is_scaled(cut: Chunking) -> bool:
    return all(qualified(node.target) == SCALED for node in cut.products)


def _why_not_products(cut: Chunking) -> str | None:
    """Why the operators cannot take the products of a site; None if they can."""
    name = cut.launch.name
    targets = {qualified(node.target) for node in cut.products}
    between = {qualified(node.target) for node in cut.calls if node not in cut.products}
    lefts = {cut.calls[node][LEFT].node for node in cut.products if LEFT in cut.calls[node]}
    if targets == {SCALED}:
        if len({ops.bind(node)["scale_a"] for node in cut.products}) > 1:
            return (
                f"the fused fp8 operator takes one scale of the left operand, but the products of {name} have several"
            )
        between -= {"aten::view.dtype"}
    if targets not in ({"aten::mm"}, {SCALED}) or between or len(lefts) > 1:
        return f"the fused operators take plain products of one tensor, unlike those of {name}"
    return None


def _form(cut: Chunking) -> _OperatorForm | None:
    """The site as torch's operators take it; None if it has another form."""
    try:
        return _gather_form(cut) if cut.result is None else _scatter_form(cut)
    except Unfollowed:
        return None


def _gather_form(cut: Chunking) -> _OperatorForm | None:
    left = _over_gathered(cut, cut.calls[cut.products[0]].get(LEFT))
    if left is None:
        return None
    shard = cut.shape
    for dim in range(len(shard)):
        whole = _gathered(shard, cut.num_ranks, dim)
        if left == whole.reshaped(left.shape):
            return _OperatorForm(whole.shape, dim)
    return None


def _over_gathered(cut: Chunking, operand: Operand | None) -> Layout | None:
    """An operand as a view of the gathered tensor, seen through casts of its bytes to another dtype."""
    if operand is None or operand.layout is None or operand.base is None or operand.base is cut.launch:
        return operand.layout if operand is not None else None
    before = _over_gathered(cut, next(iter(cut.calls[operand.base].values())))
    is_same = operand.layout == identity(sizes_of(operand.base) or ()).reshaped(operand.layout.shape)
    return before.reshaped(operand.layout.shape) if before is not None and is_same else None


def _gathered(shard: tuple[int, ...], num_ranks: int, dim: int) -> Layout:
    """The tensor gathered along a dim, as a view of the concatenated shards."""
    dims = list(identity(shard).dims)
    ranks = Digit(num_ranks, prod(shard))
    inside = dims[dim]
    follows = bool(inside) and inside[0].size * inside[0].stride == ranks.stride
    dims[dim] = (Digit(num_ranks * inside[0].size, inside[0].stride),) if follows else (ranks, *inside)
    return Layout(tuple(dims))


def _scatter_form(cut: Chunking) -> _OperatorForm | None:
    product = cut.products[0]
    result = cut.result
    if result is None or result.base is not product or result.layout is None:
        return None
    rows, columns = sizes_of(product) or (0, 0)
    local = prod(cut.shape)
    found = result.layout.inverse((rows, columns)).refined((local,))
    digits = [digit for dim in found.dims for digit in dim]
    ranks = [k for k, digit in enumerate(digits) if digit.stride >= local]
    rest = [digit for digit in digits if digit.stride < local]
    if len(ranks) != 1 or rest != sorted(rest, key=lambda digit: -digit.stride):
        return None
    place = ranks[0]
    in_rows = len(found.dims[0])
    if place >= in_rows:
        return _OperatorForm((rows, columns), 1) if place == in_rows else None
    outer = prod(digit.size for digit in digits[:place])
    inner = prod(digit.size for digit in digits[place + 1 : in_rows])
    return _OperatorForm((outer, cut.num_ranks * inner, columns), 1)


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

    def new(self, like: Tensor, shape: tuple[int, ...]) -> Tensor:
        return fake_tensor(self.edit.mode, shape, contiguous_strides(shape), like.dtype, like.device)

    @property
    def group(self) -> str:
        return self.collective.group

    def right(self, product: Node) -> Node:
        return ops.bind(product)[OPERANDS[qualified(product.target)][1]]


class _FusedGather(_FusedBuilder):
    def build_as(self, form: _OperatorForm) -> dict[Node, Node]:
        cut = self.chunking
        gone = replaced(cut)
        self.anchor = cut.products[-1]
        needed = self.launch not in gone
        node = self.multiplied(form, needed)
        items = self.call(getitem, (node, 1), f"{self.launch.name}_products", self.launch)
        replacements: dict[Node, Node] = {}
        for k, product in enumerate(cut.products):
            item = self.call(getitem, (items, k), f"{product.name}_fused", product)
            replacements[product] = self.shaped(item, product)
        if needed:
            whole = self.as_sent(self.call(getitem, (node, 0), f"{self.launch.name}_gathered", self.launch))
            back = _gathered(cut.shape, cut.num_ranks, form.dim).inverse(sizes_of(self.launch) or ())
            replacements |= dict.fromkeys([self.launch, *self.collective.waits], self.viewed(whole, back, self.launch))
            gone |= {self.launch, *self.collective.waits}
        for old in gone:
            self.edit.erase(old)
        return replacements

    def multiplied(self, form: _OperatorForm, needed: bool) -> Node:
        """The node of the fused operator."""
        source = self.collective.inputs[0]
        value = (self.new(ops.value_of(source), form.shape) if needed else None, self.results(form))
        rights = [self.right(node) for node in self.chunking.products]
        return self.fused("fused_all_gather_matmul", (source, rights, form.dim, self.group), value, return_A=needed)

    def results(self, form: _OperatorForm) -> list[Tensor]:
        """Fake values of the products, in the dims of the operator."""
        products: list[Tensor] = [ops.value_of(node) for node in self.chunking.products]
        return [self.new(value, (*form.shape[:-1], int(value.shape[-1]))) for value in products]

    def as_sent(self, whole: Node) -> Node:
        """The gathered tensor in the dtype that was sent."""
        sent: Tensor = ops.value_of(self.launch)
        if ops.value_of(whole).dtype == sent.dtype:
            return whole
        return self.call(aten.view.dtype, (whole, sent.dtype), f"{self.launch.name}_bytes", self.launch)

    def shaped(self, node: Node, like: Node) -> Node:
        """A result in the shape of the product that it replaces."""
        shape = list(sizes_of(like) or ())
        return (
            node
            if list(sizes_of(node) or ()) == shape
            else self.call(
                aten.reshape.default, (node, shape), like.name, like
            )  # reshape: the operator chooses the strides
        )


class _FusedScatter(_FusedBuilder):
    def build_as(self, form: _OperatorForm) -> dict[Node, Node]:
        cut = self.chunking
        gone = replaced(cut)
        product = cut.products[0]
        left: Node = ops.bind(product)[OPERANDS[qualified(product.target)][0]]
        if len(form.shape) > 2:
            rows = [*form.shape[:-1], -1]
            left = self.call(aten.reshape.default, (left, rows), f"{left.name}_rows", left)
        shape = tuple(n // cut.num_ranks if d == form.dim else n for d, n in enumerate(form.shape))
        value = self.new(ops.value_of(product), shape)
        args = (left, self.right(product), self.collective.reduce_op, form.dim, self.group)
        result = self.fused("fused_matmul_reduce_scatter", args, value)
        result = self.call(aten.view.default, (result, list(cut.shape)), f"{self.launch.name}_done", self.launch)
        for old in gone:
            self.edit.erase(old)
        return dict.fromkeys([self.launch, *self.collective.waits], result)


class _ScaledFusedGather(_FusedGather):
    def multiplied(self, form: _OperatorForm, needed: bool) -> Node:
        products = [ops.bind(node) for node in self.chunking.products]
        source, dtype = self.collective.inputs[0], ops.value_of(products[0][LEFT]).dtype
        if ops.value_of(source).dtype != dtype:
            source = self.call(aten.view.dtype, (source, dtype), f"{source.name}_read", source)
        value = (self.new(ops.value_of(source), form.shape), self.results(form))
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

    def by_rows(self, scale: Node, form: _OperatorForm) -> Node:
        """The scale of the left operand. Row scales get the dims of the operand."""
        shape = [*form.shape[:-1], 1]
        if prod(sizes_of(scale) or ()) == 1 or list(sizes_of(scale) or ()) == shape:
            return scale
        return self.call(aten.reshape.default, (scale, shape), f"{scale.name}_rows", scale)


class _ScaledFusedScatter(_FusedBuilder):
    def build_as(self, form: _OperatorForm) -> dict[Node, Node]:
        cut = self.chunking
        gone = replaced(cut)
        product = cut.products[0]
        bound = ops.bind(product)
        rows, columns = sizes_of(product) or (0, 0)
        value = self.new(ops.value_of(product), (rows // cut.num_ranks, columns))
        scales = (bound["scale_a"], bound["scale_b"])
        places = (self.collective.reduce_op, 0, 0, self.group, [rows, columns])
        last = (bound["bias"], bound["scale_result"], bound["out_dtype"], bound["use_fast_accum"])
        args = (bound[LEFT], bound["mat2"], *scales, *places, *last)
        result = self.fused("fused_scaled_matmul_reduce_scatter", args, value)
        result = self.call(aten.view.default, (result, list(cut.shape)), f"{self.launch.name}_done", self.launch)
        for old in gone:
            self.edit.erase(old)
        return dict.fromkeys([self.launch, *self.collective.waits], result)
