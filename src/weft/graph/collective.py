"""Collective: a live view of one launch and its waits.

It stores only the launch node and reads inputs, waits and sizes from the graph each time. So it cannot go stale when an
edit replaces a node.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from operator import getitem
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from weft.compat import hint_of
from weft.graph import ops
from weft.graph.groups import runtime_name
from weft.graph.operator_effects import is_alias
from weft.graph.ops import Kind, LaunchForm


@dataclass(frozen=True)
class Collective:
    """One launch of a known kind, in any of its forms, with the waits that complete it."""

    launch: Node

    @property
    def form(self) -> LaunchForm:
        form = ops.launch_form(self.launch.target)
        if form is None:
            raise ValueError(f"{self.launch.name} is not a launch of a known kind")
        return form

    @property
    def kind(self) -> Kind:
        return self.form.kind

    @property
    def group(self) -> str:
        """The run-time name of the group."""
        return runtime_name(self.group_argument)

    @property
    def group_argument(self) -> Any:
        """The group as the node holds it: a str, a ProcessGroup or a node."""
        return ops.bind(self.launch)[self.form.group]

    @property
    def reduce_op(self) -> str | None:
        """`sum`, `avg`, ...; None for kinds that do not reduce."""
        op = ops.bind(self.launch).get("reduce_op")
        return None if op is None else str(op).rpartition(".")[2].lower()

    @property
    def inputs(self) -> list[Node]:
        """The tensors sent; the buffers, for a recv."""
        tensors = ops.bind(self.launch)[self.form.tensors]
        return [tensors] if isinstance(tensors, Node) else list(tensors)

    @property
    def is_functional(self) -> bool:
        """Whether the launch leaves its arguments as they are and returns new tensors."""
        return self.form.written is None

    @property
    def results(self) -> list[Node]:
        """The nodes that hold the results before any wait: the launch, or the items taken from a coalesced one."""
        if not self.form.coalesced:
            return [self.launch]
        return [user for user in self.launch.users if user.target is getitem]

    @property
    def waits(self) -> list[Node]:
        """The waits that complete the launch, in the order of its users; waits on views of a result included."""
        found: dict[Node, None] = {}
        for node in _alias_closure(self.launch):
            found.update((user, None) for user in node.users if ops.is_wait(user.target))
        return list(found)

    @property
    def escapes(self) -> bool:
        """Whether a result leaves the graph without a wait, as a result saved for backward may."""
        return any(user.op == "output" for node in _alias_closure(self.launch) for user in node.users)

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype of the first tensor sent."""
        value = ops.value_of(self.inputs[0]) if self.inputs else None
        return value.dtype if isinstance(value, Tensor) else None

    @property
    def input_bytes(self) -> int | None:
        """Bytes of the tensors sent; None if a size has no hint or metadata is missing."""
        return _sum_bytes(ops.value_of(node) for node in self.inputs)

    @property
    def output_bytes(self) -> int | None:
        """Bytes of the tensors received."""
        value = ops.value_of(self.launch)
        return _sum_bytes(value if isinstance(value, list | tuple) else [value])


def collectives(graph: Graph) -> Iterator[Collective]:
    """The collectives of a graph in the order of their launches."""
    return (
        Collective(node)
        for node in graph.nodes
        if node.op == "call_function" and ops.launch_form(node.target) is not None
    )


def num_bytes(value: Any) -> int | None:
    """Bytes of one tensor, with hints for symbolic sizes; None if a size is unknown."""
    if not isinstance(value, Tensor):
        return None
    sizes = [hint_of(size) for size in value.shape]
    return None if None in sizes else prod(s for s in sizes if s is not None) * value.element_size()


def _sum_bytes(values: Iterable[Any]) -> int | None:
    sizes = [num_bytes(value) for value in values]
    return None if None in sizes else sum(s for s in sizes if s is not None)


def _alias_closure(launch: Node) -> list[Node]:
    """The launch with the items and views of its results, up to the waits."""
    closure = {launch: None}
    stack = [launch]
    while stack:
        for user in stack.pop().users:
            if user not in closure and is_alias(user) and not ops.is_wait(user.target):
                closure[user] = None
                stack.append(user)
    return list(closure)
