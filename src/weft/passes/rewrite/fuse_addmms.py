"""Fuse a matmul and the addition of a bias into one addmm.

Why: the addmm kernel adds the bias while it writes the product; a separate addition reads and writes the product again.

Before::

    m: f32[8, 4] = mm(x, w)
    s: f32[8, 4] = add(m, bias)

After::

    s_addmm: f32[8, 4] = addmm(bias, x, w)

Where a compiler fuses pointwise operators (on tensors of a GPU, and on any tensor if a cluster is given), an addition
that only pointwise operators use is left to it: see decompose-addmms.

In a sum of two products either one may become the bias of the other; the pass prefers to keep the first as the product.

Declines: a bias that is not a tensor of the result's dtype, that is scaled, or that broadcasts the product to a larger
shape; a product with other users.
Numerics: reassociates; the sum is rounded once instead of twice.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from weft.graph import metadata
from weft.passes.base import Numerics
from weft.passes.rewrite_pass import RewritePass
from weft.plan.context import Context
from weft.plan.decision import Reason, Refusal
from weft.rewriting.draft import AnyNode, Draft
from weft.rewriting.pattern import Match, Var, op
from weft.rewriting.rules import Replacement, Rule
from weft.rewriting.uses import is_on_gpu, only_pointwise_users

PRODUCT = op("mm", Var("x"), Var("w")).named("product")
PATTERN = op("add", PRODUCT, Var("bias"), alpha=Var("alpha")).either_way()


@dataclass(frozen=True)
class FuseAddmms(RewritePass):
    """Fuse a matmul and the addition of a bias into one addmm."""

    numerics = Numerics.REASSOCIATES

    def rules(self, context: Context) -> Iterable[Rule]:
        def fused(draft: Draft, match: Match) -> Replacement:
            product, bias, root = match["product"], match["bias"], match.root
            if match["alpha"] != 1:
                return Refusal(Reason.UNSUPPORTED_FORM, f"{root.name} stays: it scales the tensor that it adds")
            refusal = _why_not_fuse(draft, product, bias, root)
            if refusal is not None and isinstance(bias, AnyNode) and bias.target in PRODUCT.targets:  # the other way
                product, bias = bias, product
                match.nodes.append(product)
                refusal = refusal if _why_not_fuse(draft, product, bias, root) else None
            given = draft.bind(product)
            return (
                refusal
                or _why_not_here(draft, root, context)
                or draft.call("addmm", bias, given["self"], given["mat2"], before=root)
            )

        return [Rule(PATTERN, fused)]


def _why_not_fuse(draft: Draft, product: AnyNode, bias: object, root: AnyNode) -> Refusal | None:
    value, result = draft.value(product), draft.value(root)
    added = draft.value(bias) if isinstance(bias, AnyNode) else bias
    if not isinstance(added, Tensor):
        return Refusal(Reason.UNSUPPORTED_FORM, f"{root.name} stays: it adds a number, not a tensor")
    if result.dtype != value.dtype or added.dtype != value.dtype:
        return Refusal(Reason.UNSUPPORTED_FORM, f"{root.name} stays: {product.name} and the bias differ in dtype")
    if not metadata.same(list(result.shape), list(value.shape)):
        return Refusal(Reason.UNSUPPORTED_FORM, f"{root.name} stays: it broadcasts {product.name} to a larger shape")
    if bias is product:
        return Refusal(Reason.HOLDS_MEMORY, f"{root.name} stays: it adds {product.name} to itself")
    if draft.num_users(product) > 1:
        return Refusal(Reason.HOLDS_MEMORY, f"{root.name} stays: {product.name} has other users")
    return None


def _why_not_here(draft: Draft, root: AnyNode, context: Context) -> Refusal | None:
    if is_on_gpu(draft.value(root), context) and only_pointwise_users(draft, root):
        return Refusal(Reason.NO_GAIN, f"{root.name} stays: it fuses with the pointwise operators that use it")
    return None
