"""Nested graphs whose body is lost: scripts that reproduce a compilation name them without their nodes."""

from __future__ import annotations

from typing import Any, NoReturn

from torch.nn import Module

from weft.errors import GraphError, compose


class UnknownGraph(Module):
    """Stands for a nested graph without a body. A graph that calls it can be planned and listed, not run."""

    def forward(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        do = "read the graph from a TORCH_TRACE log, which prints nested graphs"
        raise GraphError(compose("nested graph", "its body is not known, so it cannot be run", do=do))
