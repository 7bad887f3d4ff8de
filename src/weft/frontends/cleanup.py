"""Turn a raw trace into a readable graph.

Contract: the graph computes the same. Inputs have the names given; nodes are renumbered; nodes that only rename a value
(`detach`, a view of the same shape) and profiler marks are left out. Values that selective checkpointing marked for
recomputation are recomputed in backward, next to their first use, as torch's partitioner would do. Backward of a region
(`provenance.region_of`) recomputes values of this region only: what comes from another region is saved.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from operator import getitem
from typing import Any

from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg
from torch.utils.checkpoint import CheckpointPolicy

from weft.compat import input_nodes
from weft.frontends.provenance import BACKWARD, POLICY_KEY, policy_of, region_of
from weft.graph import metadata, ops
from weft.graph.about import UNREAD_KEY
from weft.graph.edit import ANNOTATIONS, IN_POLICY_KEY, Edit, finish
from weft.graph.operator_effects import draws, profile_of

RENAMES = frozenset({"aten::detach", "aten::alias", "aten::view", "aten::_unsafe_view", "aten::expand"})
KEPT = ("stack_trace", "nn_module_stack", "partitioner_tag")
AGAIN = frozenset({CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE})
NUMBER = re.compile(r"_\d+$")


def tidy(
    traced: GraphModule,
    names: Sequence[str],
    fake: Callable[[Tensor], Tensor],
    again: Mapping[Node, bool] | None = None,
) -> GraphModule:
    """The graph of a trace, with these names for its inputs; `fake` makes the values of its constants.

    `again` says which nodes backward recomputes; for other nodes the policies of checkpointing do.
    """
    return _Tidier(traced, names, fake, again or {}).run()


def sources(traced: GraphModule) -> dict[Node, Node]:
    """The original value of each node that only renames one."""
    found: dict[Node, Node] = {}
    for node in traced.graph.nodes:
        if _is_rename(node):
            source = next(iter(input_nodes(node)))
            found[node] = found.get(source, source)
    return found


class _Tidier:
    """Writes one trace anew."""

    def __init__(
        self,
        traced: GraphModule,
        names: Sequence[str],
        fake: Callable[[Tensor], Tensor],
        again: Mapping[Node, bool],
    ) -> None:
        self.traced, self.fake, self.again = traced, fake, again
        self.names = iter(names)
        self.edit = Edit(Graph(), mode=metadata.mode_of(traced.graph.nodes))
        self.sources = sources(traced)
        self.made: dict[Node, Node] = {}
        self.repeated: dict[Node, Node] = {}

    def run(self) -> GraphModule:
        for node in self.traced.graph.nodes:
            if node.op == "placeholder":
                self.made[node] = self.edit.placeholder(next(self.names), ops.value_of(node))
            elif node.op == "output":
                self.edit.output(map_arg(node.args[0], self._forward_value))
            elif _is_mark(node) or node in self.sources:
                continue
            elif node.op == "get_attr":
                self.made[node] = self._attribute(node)
            else:
                is_backward = node.meta.get("partitioner_tag") == BACKWARD
                self.made[node] = self._write(node, self._values_for(node) if is_backward else self._forward_value)
        module = finish(self.traced, self.edit.graph)
        module.meta[UNREAD_KEY] = sum(self._unread_bytes(node) for node in self.made if node not in self.again)
        return module

    def _unread_bytes(self, node: Node) -> int:
        """Bytes of a result that a policy saves although backward does not read it, nor a view of it."""
        found, value = profile_of(node), ops.value_of(node)
        if policy_of(node) is not CheckpointPolicy.MUST_SAVE or found.is_view or found.launch:
            return 0
        reached = [self.made[node]]
        for name in reached:  # grows by views and parts of the value
            for user in name.users:
                if user.meta.get("partitioner_tag") == BACKWARD:
                    return 0
                if profile_of(user).is_view or user.target is getitem:
                    reached.append(user)
        return value.numel() * value.element_size() if isinstance(value, Tensor) else 0

    def _attribute(self, node: Node) -> Node:
        held, value = ops.attribute(self.traced, str(node.target)), ops.value_of(node)
        if isinstance(held, Tensor):  # the metadata of a trace does not say on which device constants are
            value = self.fake(held)
        return self.edit.attribute(str(node.target), value)

    def _source(self, node: Any) -> Node:
        found: Any = self.sources.get(node, node)
        return found

    def _forward_value(self, node: Node) -> Node:
        return self.made[self._source(node)]

    def _values_for(self, user: Node) -> Callable[[Node], Node]:
        """The values for a node that runs in backward; those marked for recomputation are recomputed before it.

        A wait is recomputed if its launch is, a part of a tuple if the tuple is, and a view, which costs nothing, if
        its source is. A chain of recomputed operators may be longer than Python's stack is deep.
        """
        region, pending = region_of(user), [user]

        def is_repeated(source: Node) -> bool:
            return region_of(source) == region and self._runs_again(source)

        def value(node: Node) -> Node:
            source = self._source(node)
            return self.repeated[source] if is_repeated(source) else self.made[source]

        while pending:
            read = [self._source(node) for node in pending[-1].all_input_nodes]
            missing = [source for source in read if source not in self.repeated and is_repeated(source)]
            if missing:
                pending += reversed(missing)
                continue
            source = pending.pop()
            if source is not user and source not in self.repeated:
                self.repeated[source] = self._write(source, value)
                self.repeated[source].meta["partitioner_tag"] = BACKWARD
        return value

    def _runs_again(self, node: Node) -> bool:
        if node.op != "call_function" or node.meta.get("partitioner_tag") == BACKWARD:
            return False
        found = profile_of(node)
        if found.wait or found.is_view or node.target is getitem:
            sources = [self._source(source) for source in input_nodes(node)]
            return any(region_of(source) == region_of(node) and self._runs_again(source) for source in sources)
        if not self.again.get(node, policy_of(node) in AGAIN):
            return False
        # A second random draw, or a second write, would give another value.
        return not (draws(node) or found.writes or found.ordered or found.opaque)

    def _write(self, node: Node, value_of: Any) -> Node:
        target: Any = node.target
        args, kwargs = map_arg((node.args, dict(node.kwargs)), value_of)
        made = self.edit.call(target, args, kwargs, name=NUMBER.sub("", node.name), value=ops.value_of(node))
        made.meta.update({key: node.meta[key] for key in KEPT if node.meta.get(key)})
        # An item of a tuple or list calls no operator, so torch asks no policy about it.
        made.meta.update({IN_POLICY_KEY: True} if policy_of(node) is not None and target is not getitem else {})
        annotations = {key: value for key, value in node.meta.get(ANNOTATIONS, {}).items() if key != POLICY_KEY}
        made.meta.update({ANNOTATIONS: annotations} if annotations else {})  # the policy has been carried out here
        return made


def _is_mark(node: Node) -> bool:
    """Whether the node is only a mark for a profiler, such as that of an optimizer's step."""
    return isinstance(node.target, ops.OpOverload) and node.target.namespace == "profiler"


def _is_rename(node: Node) -> bool:
    """Whether the node is another name of its first argument: same memory, same sizes."""
    target: Any = node.target
    if not isinstance(target, ops.OpOverload) or target.name() not in RENAMES or not isinstance(node.args[0], Node):
        return False
    mine, source = ops.value_of(node), ops.value_of(node.args[0])
    return isinstance(mine, Tensor) and isinstance(source, Tensor) and metadata.same(mine, source)
