"""Remove calls whose result equals one of their arguments.

Why: tracing, sharding and other rewrites leave copies, casts and views that change nothing. Each copy is a kernel, and
each of them hides patterns from later rewrites.

Before::

    v: f32[4, 4] = view(h, [4, 4])
    c: f32[4, 4] = clone(v)
    r: f32[4, 4] = relu(c)

After::

    r: f32[4, 4] = relu(h)

A call is removed if a row of `NOOPS` allows it and its result has the type and strides of the argument. A copy stays if
it or its source is written later, or if the graph returns both.

Declines: a copy that is written later, or whose source is; a result that the graph returns, if its replacement is an
input or shares memory with another result.
Numerics: exact.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from weft.graph import metadata
from weft.passes.base import Numerics
from weft.passes.rewrite_pass import RewritePass
from weft.plan.context import Context
from weft.rewriting.draft import AnyNode, Draft
from weft.rewriting.pattern import Match, op
from weft.rewriting.rules import Replacement, Rule

Arguments = Mapping[str, Any]
Condition = Callable[[Draft, Arguments], bool]


def _always(draft: Draft, given: Arguments) -> bool:
    return True


def _is_whole_number(draft: Draft, given: Arguments) -> bool:
    value = draft.value(given["self"])
    return isinstance(value, Tensor) and not (value.dtype.is_floating_point or value.dtype.is_complex)


def _is_plain_copy(draft: Draft, given: Arguments) -> bool:
    """A copy into pinned memory is not a no-op although its type is the same."""
    return not given.get("pin_memory")


# Operators, the argument that the result may equal, and the condition for it; type and strides are compared as well.
VIEWS = (
    "view reshape _unsafe_view expand permute transpose.int t alias detach contiguous slice narrow as_strided squeeze"
)
NOOPS: tuple[tuple[str, str, Condition], ...] = (
    (f"{VIEWS} squeeze squeeze.dim squeeze.dims view.dtype flatten.using_ints _reshape_alias view_as", "self", _always),
    ("clone lift_fresh_copy", "self", _always),
    ("_to_copy", "self", _is_plain_copy),
    ("prims.convert_element_type.default prims.device_put.default", "a", _always),
    ("copy", "src", _always),
    ("slice_scatter", "src", _always),
    ("repeat", "self", lambda _, given: all(n == 1 for n in given["repeats"])),
    ("constant_pad_nd", "self", lambda _, given: all(n == 0 for n in given["pad"])),
    ("ceil floor round trunc", "self", _is_whole_number),
    ("pow.Tensor_Scalar", "self", lambda _, given: type(given["exponent"]) in (int, float) and given["exponent"] == 1),
    ("cat", "tensors", lambda _, given: len(given["tensors"]) == 1),
)


@dataclass(frozen=True)
class RemoveNoops(RewritePass):
    """Remove calls whose result equals one of their arguments."""

    numerics = Numerics.EXACT

    def rules(self, context: Context) -> Iterable[Rule]:
        return [
            Rule(op(tuple(names.split())).ignoring(), _by_row(argument, condition))
            for names, argument, condition in NOOPS
        ]


def _by_row(argument: str, condition: Condition) -> Callable[[Draft, Match], Replacement]:
    def source(draft: Draft, match: Match) -> Replacement:
        given = draft.bind(match.root)
        found = given[argument]
        found = found[0] if isinstance(found, list | tuple) and len(found) == 1 else found
        if not isinstance(found, AnyNode) or not condition(draft, given):
            return None
        return found if is_same(draft.value(match.root), draft.value(found)) else None

    return source


def is_same(first: Any, second: Any) -> bool:
    """Whether two fake values have the same type, memory layout, and lazy conjugate and negative bits."""
    if not isinstance(first, Tensor) or not isinstance(second, Tensor) or first.dtype != second.dtype:
        return False
    return layout_of(first) == layout_of(second)


def layout_of(value: Any) -> Hashable | None:
    """A tensor's type, memory layout, and lazy conjugate and negative bits; None for anything else."""
    if not isinstance(value, Tensor):
        return None
    return value.layout, value.is_conj(), value.is_neg(), value.dtype, value.device, *metadata.numbers(value)
