"""Compute a full reduction from a partial one instead of reading the whole tensor again.

Why: scaling for fp8 needs the maximum of each row and of the whole tensor; the second reduction reads the whole tensor
again.

Before::

    rows: f32[512, 1] = amax(x, [1], True)
    all_: f32[()] = amax(x)

After::

    rows: f32[512, 1] = amax(x, [1], True)
    all__amax: f32[()] = amax(rows)

The maximum of the row maxima is the maximum of the tensor, and likewise for minima. 0.0 and -0.0 compare equal, so
which of the two is returned depends on the order of the reduction.

Declines: tensors below `min-numel` elements or of unknown size; a partial reduction that comes later.
Numerics: reassociates; only the sign of a zero may differ.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from weft.passes.base import Numerics
from weft.passes.rewrite_pass import RewritePass
from weft.plan.context import Context
from weft.plan.decision import Reason, Refusal
from weft.rewriting.draft import Draft
from weft.rewriting.pattern import Match, Var, op
from weft.rewriting.rules import Replacement, Rule

X = Var("x")
PAIRS = (
    *(("amax", full) for full in (op("amax", X), op("max", X))),
    *(("amin", full) for full in (op("amin", X), op("min", X))),
)


@dataclass(frozen=True)
class ReusePartialReductions(RewritePass):
    """Compute a full reduction from a partial one."""

    numerics = Numerics.REASSOCIATES

    min_numel: int = 4096
    """Minimum number of elements; reading a smaller tensor again costs next to nothing."""

    def rules(self, context: Context) -> Iterable[Rule]:
        return [
            Rule((op(name, X, Var("dims").where(_is_some, "some dims")).ignoring("keepdim"), full), self._reused)
            for name, full in PAIRS
        ]

    def _reused(self, draft: Draft, match: Match) -> Replacement:
        partial, full = match.roots
        value = draft.value(match["x"])
        if not isinstance(value, Tensor) or any(type(size) is not int for size in value.shape):
            return Refusal(Reason.UNKNOWN_SIZE, f"{full.name} stays: not all sizes of its input are known")
        if value.numel() < self.min_numel:
            return Refusal(Reason.NO_GAIN, f"{full.name} stays: its input has only {value.numel()} elements")
        if draft.position(partial) > draft.position(full):
            return Refusal(Reason.DEPENDENCY, f"{full.name} stays: {partial.name} comes later", partial.name)
        return [partial, draft.call("amax" if "max" in str(full.target) else "amin", partial, before=full)]


def _is_some(draft: Draft, dims: object) -> bool:
    return isinstance(dims, list | tuple) and bool(dims)
