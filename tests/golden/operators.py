"""Operators that write their arguments, for golden files: torch has none of its own that its wrappers take."""

from __future__ import annotations

import torch
from torch import Tensor

NAMESPACE = "weft_test"
LIBRARY = torch.library.Library(NAMESPACE, "DEF")
TRUE = (torch.Tag.pt2_compliant_tag,)
"""Their schemas say all that they do."""
LIBRARY.define("bump_(Tensor(a!) x, Tensor y) -> ()", tags=TRUE)
LIBRARY.define("exchange_(Tensor(a!) x, Tensor(b!) z, Tensor y) -> Tensor", tags=TRUE)
LIBRARY.define("bump_all_(Tensor(a!)[] xs, float by) -> ()", tags=TRUE)


def _bump(x: Tensor, y: Tensor) -> None:
    x.add_(y)


def _exchange(x: Tensor, z: Tensor, y: Tensor) -> Tensor:
    total = x + y
    x.copy_(z)
    z.copy_(y)
    return total


def _bump_all(xs: list[Tensor], by: float) -> None:
    for x in xs:
        x.add_(by)


LIBRARY.impl("bump_", _bump, "CompositeExplicitAutograd")
LIBRARY.impl("exchange_", _exchange, "CompositeExplicitAutograd")
LIBRARY.impl("bump_all_", _bump_all, "CompositeExplicitAutograd")
LIBRARY.impl("bump_", lambda x, y: None, "Meta")
LIBRARY.impl("exchange_", lambda x, z, y: torch.empty_like(x), "Meta")
LIBRARY.impl("bump_all_", lambda xs, by: None, "Meta")
