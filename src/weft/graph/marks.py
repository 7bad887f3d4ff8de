"""Marks: the metadata of nodes that passes and reports read and listings leave out, as plain data.

Contract: a listing and its marks describe a graph to another process: plans made there are the same. Marks are found by
the names of nodes. Nested graphs have none.
"""

from __future__ import annotations

from torch.fx import GraphModule, Node

from weft.graph.edit import IN_POLICY_KEY, MEMBERS_KEY

ModuleStack = tuple[tuple[str, str, str], ...]
"""Key, path and class of each module that a node comes from, outermost first."""
Mark = tuple[str, str | None, ModuleStack, tuple[str, ...] | None, bool]
"""Name of a node, its phase as `partitioner_tag` has it, its modules, the nodes that it replaces, and whether it runs
under a checkpointing policy."""


def marks_of(module: GraphModule) -> tuple[Mark, ...]:
    """The marks of the nodes that have some, in the order of the graph."""
    found: list[Mark] = []
    for node in module.graph.nodes:
        tag, members = node.meta.get("partitioner_tag"), node.meta.get(MEMBERS_KEY)
        mark = (
            node.name,
            tag if isinstance(tag, str) else None,
            module_stack(node),
            None if members is None else tuple(members),
            node.meta.get(IN_POLICY_KEY) is True,
        )
        if mark != (node.name, None, (), None, False):
            found.append(mark)
    return tuple(found)


def put_marks(module: GraphModule, marks: tuple[Mark, ...]) -> None:
    """Give the nodes of a graph their marks."""
    nodes = {node.name: node for node in module.graph.nodes}
    for name, tag, stack, members, in_policy in marks:
        meta = nodes[name].meta
        if tag is not None:
            meta["partitioner_tag"] = tag
        if stack:
            meta["nn_module_stack"] = {key: (path, kind) for key, path, kind in stack}
        if members is not None:
            meta[MEMBERS_KEY] = members
        if in_policy:
            meta[IN_POLICY_KEY] = True


def module_stack(node: Node) -> ModuleStack:
    """The modules that a node comes from."""
    found: list[tuple[str, str, str]] = []
    for key, value in (node.meta.get("nn_module_stack") or {}).items():
        path, kind = value if isinstance(value, tuple) and len(value) == 2 else (value, "")
        name = f"{kind.__module__}.{kind.__qualname__}" if isinstance(kind, type) else str(kind)
        found.append((str(key), str(path), name))
    return tuple(found)
