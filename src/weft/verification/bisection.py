"""Finds the first pass of a pipeline that changes values or breaks a check.

Contract: passes run one after the other. The result of each pass is compared with the graph it was given: bit by bit if
the pass is exact, within the tolerance of the dtype otherwise. A binary search over the actions of the faulty pass then
finds the first action that makes the result wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch.fx import GraphModule

from weft.errors import RefusedError, WeftError
from weft.graph import check
from weft.graph.dag import Dag
from weft.graph.edit import copy_module, recompile
from weft.graph.listings.text import render
from weft.passes.base import Numerics, Pass
from weft.plan.context import Context
from weft.plan.plan import Action, Step

Compare = Callable[[GraphModule, GraphModule, bool], str]
"""Compares two modules, bit by bit if the flag is set; returns what differs, or an empty string."""
MAX_SHOWN = 300
"""Maximum number of characters of an action that a message shows."""


@dataclass(frozen=True)
class Fault:
    """The first faulty pass of a pipeline, and evidence."""

    spec: str
    """The pass with its options."""
    position: int
    """The position of the pass in the pipeline, counted from 1."""
    num_passes: int
    what: str
    """The error that the pass raised, or how the values differ."""
    before: str
    """The listing that the pass was given; running the pass on it reproduces the fault."""
    after: str
    """The listing that the pass produced; empty if it raised an error."""
    action: Action | None = None
    """The first wrong action of the pass, if one can be found."""
    action_position: int = 0
    num_actions: int = 0

    def __str__(self) -> str:
        lines = [f"{self.spec}, pass {self.position} of {self.num_passes}: {self.what}"]
        if self.action is not None:
            shown = str(self.action)
            shown = shown if len(shown) <= MAX_SHOWN else f"{shown[:MAX_SHOWN]} ..."
            lines.append(f"    action {self.action_position} of {self.num_actions}: {shown}")
        return "\n".join(lines)

    def to_record(self) -> dict[str, Any]:
        """The fault as data for JSON."""
        return asdict(self)


def find_fault(module: GraphModule, passes: Sequence[Pass], context: Context, compare: Compare) -> Fault | None:
    """The first faulty pass, or None. The module must be valid; it is not modified."""
    check.validate(Dag(module.graph))
    before = module
    for position, rewrite in enumerate(passes, 1):
        after = copy_module(before)
        step: Step | None = None
        try:
            step = rewrite.plan(after.graph, context)
            what = _wrong(rewrite, before, after, context, step, compare)
        except RefusedError:
            raise
        except Exception as error:  # a pass may raise anything
            what = _told(error)
        if what:
            found = Fault(str(rewrite), position, len(passes), what, render(before, context.groups), "")
            if step is None:
                return found
            found = replace(found, after=_listing(after, context))
            return _with_action(found, rewrite, before, context, step, compare)
        before = after
    return None


def _wrong(
    rewrite: Pass, before: GraphModule, after: GraphModule, context: Context, step: Step, compare: Compare
) -> str:
    """Apply a step to `after`, a copy of `before`; returns what is wrong with the result, or an empty string."""
    try:
        _, changed = rewrite.run(after.graph, context, step)
        if not changed and render(after, context.groups) == render(before, context.groups):
            return ""
        recompile(after)
        check.validate(Dag(after.graph))
        difference = compare(before, after, rewrite.numerics is Numerics.EXACT)
    except RefusedError:
        raise
    except Exception as error:  # likewise
        return _told(error)
    return difference


def _told(error: Exception) -> str:
    return str(error) if isinstance(error, WeftError) else f"it raised {type(error).__name__}: {error}"


def _listing(module: GraphModule, context: Context) -> str:
    try:
        return render(module, context.groups)
    except WeftError:  # the graph may be too broken to print
        return ""


def _with_action(
    found: Fault, rewrite: Pass, before: GraphModule, context: Context, step: Step, compare: Compare
) -> Fault:
    """Add the first wrong action to the fault, if the step is correct without its actions."""

    def is_wrong(count: int) -> bool:
        part = replace(step, actions=step.actions[:count])
        return bool(_wrong(rewrite, before, copy_module(before), context, part, compare))

    well, wrong = 0, len(step.actions)
    if wrong == 0 or is_wrong(0):
        return found
    while wrong - well > 1:
        middle = (well + wrong) // 2
        well, wrong = (well, middle) if is_wrong(middle) else (middle, wrong)
    return replace(found, action=step.actions[wrong - 1], action_position=wrong, num_actions=len(step.actions))
