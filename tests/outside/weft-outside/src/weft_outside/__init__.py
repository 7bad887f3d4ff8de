"""Remove an activation of what is activated already.

Why: `relu` of a `relu`, or `abs` of an `abs`, reads and writes a tensor and changes nothing.

Before::

    a: f32[4] = relu(x)
    b: f32[4] = relu(a)

After::

    a: f32[4] = relu(x)

Declines: nothing.
Numerics: exact.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from weft.passes.base import Numerics
from weft.passes.rewrite_pass import RewritePass
from weft.plan.context import Context
from weft.rewriting.draft import Draft
from weft.rewriting.pattern import Match, op
from weft.rewriting.rules import Replacement, Rule


@dataclass(frozen=True)
class RemoveRepeatedActivations(RewritePass):
    """Remove an activation of what is activated already."""

    numerics = Numerics.EXACT

    activation: Literal["relu", "abs"] = "relu"
    """The operator: one that gives the same when it is done twice."""

    def rules(self, context: Context) -> Iterable[Rule]:
        """One rule: the outer one goes."""
        return [Rule(op(self.activation, op(self.activation).ignoring().named("inner")), _inner)]


def _inner(draft: Draft, match: Match) -> Replacement:
    return match["inner"]
