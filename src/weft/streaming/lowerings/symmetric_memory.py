"""The kernel of symmetric memory: torch's operators that multiply while they gather or scatter, on CUDA.

Contract: only what these operators mean is given to them. They take a shard, the right operands and the dim that is
gathered (or scattered) of a tensor whose last dim is multiplied; so the views around a site must be just that, which is
computed from the layouts of its operands. Each operator is complete when it returns: there is nothing to wait for.

    fused_all_gather_matmul(shard, [right, ...], dim, group) -> gathered, [product, ...]
    fused_matmul_reduce_scatter(left, right, reduce_op, dim, group) -> what the rank receives

Products of fp8 have operators of their own, which take the scales too: one for the whole left operand or one for each
of its rows, and one left operand with its scale for all products. Theirs do not cut the last dim.
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
from weft.plan.decision import Reason, Refusal
from weft.streaming.chunking import Chunking, Operand, replaced, still_needed
from weft.streaming.layouts import Digit, Layout, Unfollowed, identity
from weft.streaming.lowerings.portable import Builder
from weft.streaming.lowerings.protocol import Name
from weft.streaming.rowwise import OPERANDS
from weft.streaming.view_layouts import qualified, sizes_of

aten = torch.ops.aten
REDUCTIONS = ("sum", "avg")
SCALED = "aten::_scaled_mm"
LEFT = "self"
"""What all of these products call their left operand."""


class _Form(NamedTuple):
    """A site as the operators take it: the shape of the left operand on all ranks, and the dim of the ranks."""

    shape: tuple[int, ...]
    dim: int

    def is_by_rows(self, scatters: bool) -> bool:
        """Whether the dim of the ranks is not multiplied; of a scatter, whether it is the first of the rows."""
        if scatters:
            return self.dim == 1 and len(self.shape) > 2 and self.shape[0] == 1
        return self.dim < len(self.shape) - 1


class SymmetricMemory:
    """Torch's fused operators."""

    @property
    def name(self) -> Name:
        return "symmetric-memory"

    def why_not(self, cut: Chunking, *, asked_for: bool) -> Refusal | None:
        """What keeps torch's operators from running a site."""
        launch = cut.launch
        value: Any = ops.value_of(launch)
        if value.device.type != "cuda":
            return self._refusal(cut, f"{launch.name} is on {value.device.type}, symmetric memory is on cuda")
        if Collective(launch).kind is ops.Kind.ALL_REDUCE:
            return self._refusal(cut, f"no fused operator gives every rank the sum, as {launch.name} does")
        what = _why_not_products(cut)
        if what is not None:
            return self._refusal(cut, what)
        if cut.result is not None and (len(cut.products) > 1 or Collective(launch).reduce_op not in REDUCTIONS):
            return self._refusal(cut, f"the fused operator takes one product, and sums or averages it: {launch.name}")
        if cut.result is not None and still_needed(cut, replaced(cut)):
            return self._refusal(cut, f"the fused operator gives no product, and more than {launch.name} needs it")
        form = _form(cut)
        if form is None:
            return self._refusal(cut, f"the fused operators take no views such as those around {launch.name}")
        if _is_scaled(cut) and not form.is_by_rows(cut.result is not None):
            return self._refusal(cut, f"the fused operators of fp8 cut rows, {launch.name} is along another dim")
        if not has_symmetric_memory(Collective(launch).group, enabled=not asked_for):
            return self._refusal(cut, f"the group of {launch.name} has no symmetric memory here")
        return None

    def _refusal(self, cut: Chunking, sentence: str) -> Refusal:
        return Refusal(Reason.NO_KERNEL, sentence, cut.launch.name)

    def build(self, edit: Edit, cut: Chunking) -> dict[Node, Node]:
        """Put the fused operator in the place of a site."""
        form = _form(cut)
        if form is None:
            raise ValueError(f"{cut.launch.name} was not asked about")
        if _is_scaled(cut):
            made = _ScaledGather(edit, cut) if cut.result is None else _ScaledScatter(edit, cut)
        else:
            made = _Gather(edit, cut) if cut.result is None else _Scatter(edit, cut)
        return made.build_as(form)


def _is_scaled(cut: Chunking) -> bool:
    return all(qualified(node.target) == SCALED for node in cut.products)


def _why_not_products(cut: Chunking) -> str | None:
    """Why the products of a site are none that the operators take."""
    name = cut.launch.name
    targets = {qualified(node.target) for node in cut.products}
    between = {qualified(node.target) for node in cut.calls if node not in cut.products}
    lefts = {cut.calls[node][LEFT].node for node in cut.products if LEFT in cut.calls[node]}
    if targets == {SCALED}:
        if len({ops.bind(node)["scale_a"] for node in cut.products}) > 1:
            return f"the fused operator of fp8 takes one scale of the left operand, those beside {name} have several"
        between -= {"aten::view.dtype"}
    if targets not in ({"aten::mm"}, {SCALED}) or between or len(lefts) > 1:
        return f"the fused operators take plain products of one tensor beside {name}"
    return None


def _form(cut: Chunking) -> _Form | None:
    """The site as torch's operators take it, if it is that."""
    try:
        return _gather_form(cut) if cut.result is None else _scatter_form(cut)
    except Unfollowed:
        return None


def _gather_form(cut: Chunking) -> _Form | None:
    left = _over_gathered(cut, cut.calls[cut.products[0]].get(LEFT))
    if left is None:
        return None
    shard = cut.shape
    for dim in range(len(shard)):
        whole = _gathered(shard, cut.num_ranks, dim)
        if left == whole.reshaped(left.shape):
            return _Form(whole.shape, dim)
    return None


def _over_gathered(cut: Chunking, operand: Operand | None) -> Layout | None:
    """An operand as a view of what was gathered, through bytes that are read anew."""
    if operand is None or operand.layout is None or operand.base is None or operand.base is cut.launch:
        return operand.layout if operand is not None else None
    before = _over_gathered(cut, next(iter(cut.calls[operand.base].values())))
    is_same = operand.layout == identity(sizes_of(operand.base) or ()).reshaped(operand.layout.shape)
    return before.reshaped(operand.layout.shape) if before is not None and is_same else None


def _gathered(shard: tuple[int, ...], num_ranks: int, dim: int) -> Layout:
    """What was gathered along a dim, over the parts of the ranks one behind the other."""
    dims = list(identity(shard).dims)
    ranks = Digit(num_ranks, prod(shard))
    inside = dims[dim]
    follows = bool(inside) and inside[0].size * inside[0].stride == ranks.stride
    dims[dim] = (Digit(num_ranks * inside[0].size, inside[0].stride),) if follows else (ranks, *inside)
    return Layout(tuple(dims))


def _scatter_form(cut: Chunking) -> _Form | None:
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
        return _Form((rows, columns), 1) if place == in_rows else None
    outer = prod(digit.size for digit in digits[:place])
    inner = prod(digit.size for digit in digits[place + 1 : in_rows])
    return _Form((outer, cut.num_ranks * inner, columns), 1)


class _Fused(Builder):
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


class _Gather(_Fused):
    def build_as(self, form: _Form) -> dict[Node, Node]:
        cut = self.chunking
        gone = replaced(cut)
        self.anchor = cut.products[-1]
        needed = self.launch not in gone
        node = self.multiplied(form, needed)
        items = self.call(getitem, (node, 1), f"{self.launch.name}_products", self.launch)
        heirs: dict[Node, Node] = {}
        for k, product in enumerate(cut.products):
            item = self.call(getitem, (items, k), f"{product.name}_fused", product)
            heirs[product] = self.shaped(item, product)
        if needed:
            whole = self.as_sent(self.call(getitem, (node, 0), f"{self.launch.name}_gathered", self.launch))
            back = _gathered(cut.shape, cut.num_ranks, form.dim).inverse(sizes_of(self.launch) or ())
            heirs |= dict.fromkeys([self.launch, *self.collective.waits], self.viewed(whole, back, self.launch))
            gone |= {self.launch, *self.collective.waits}
        for old in gone:
            self.edit.erase(old)
        return heirs

    def multiplied(self, form: _Form, needed: bool) -> Node:
        """The fused operator."""
        source = self.collective.inputs[0]
        value = (self.new(ops.value_of(source), form.shape) if needed else None, self.results(form))
        rights = [self.right(node) for node in self.chunking.products]
        return self.fused("fused_all_gather_matmul", (source, rights, form.dim, self.group), value, return_A=needed)

    def results(self, form: _Form) -> list[Tensor]:
        """What the products are, in the dims of the operator."""
        products: list[Tensor] = [ops.value_of(node) for node in self.chunking.products]
        return [self.new(value, (*form.shape[:-1], int(value.shape[-1]))) for value in products]

    def as_sent(self, whole: Node) -> Node:
        """What was gathered, in the dtype that was sent."""
        sent: Tensor = ops.value_of(self.launch)
        if ops.value_of(whole).dtype == sent.dtype:
            return whole
        return self.call(aten.view.dtype, (whole, sent.dtype), f"{self.launch.name}_bytes", self.launch)

    def shaped(self, node: Node, like: Node) -> Node:
        """A result in the shape of the product that it stands for."""
        shape = list(sizes_of(like) or ())
        return (
            node
            if list(sizes_of(node) or ()) == shape
            else self.call(aten.reshape.default, (node, shape), like.name, like)  # its strides are the kernel's
        )


class _Scatter(_Fused):
    def build_as(self, form: _Form) -> dict[Node, Node]:
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


class _ScaledGather(_Gather):
    def multiplied(self, form: _Form, needed: bool) -> Node:
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

    def by_rows(self, scale: Node, form: _Form) -> Node:
        """The scale of the left operand; one for each row has its dims."""
        shape = [*form.shape[:-1], 1]
        if prod(sizes_of(scale) or ()) == 1 or list(sizes_of(scale) or ()) == shape:
            return scale
        return self.call(aten.reshape.default, (scale, shape), f"{scale.name}_rows", scale)


class _ScaledScatter(_Fused):
    def build_as(self, form: _Form) -> dict[Node, Node]:
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
