"""What an operator does, by its schema: which arguments it writes, what its results share, what it touches outside.

Contract: decided by schema and tags, never by the name of a node. What is not known is opaque: it counts as reading and
writing all it is given, drawing random numbers, and communicating.
"""

from __future__ import annotations

import functools
from collections.abc import Collection
from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from weft.compat import (
    CONTROL_DEPS,
    INVOKE,
    HigherOrderOperator,
    OpOverload,
    has_side_effect,
    input_nodes,
    may_return_its_argument,
    schema_of,
    storage_key,
)
from weft.graph import ops
from weft.graph.ops import attribute


@dataclass(frozen=True, slots=True)
class Profile:
    """What an operator does to storages and to the world, by its schema."""

    plain: bool = False
    """New results, reads its inputs, nothing else: the case of most nodes, decided without a look at the node."""
    several: bool = False
    """Returns several tensors."""
    aliases: tuple[str, ...] = ()
    """Arguments whose storage the results share."""
    views_first: bool = False
    """Shares the storage of its first argument and of no other: the case of most views."""
    may_copy: bool = False
    """Shares the storage only where it can (reshape, contiguous); metadata tells."""
    writes: tuple[str, ...] = ()
    random: bool = False
    ordered: bool = False
    """Touches the world outside the graph: assertions, prints, profiler marks."""
    launch: bool = False
    wait: bool = False
    opaque: bool = False
    """Nothing is known: reads and writes its arguments, draws, orders, communicates."""

    @property
    def is_view(self) -> bool:
        """Renames data and never touches it."""
        return bool(self.aliases) and not (self.writes or self.may_copy or self.launch or self.opaque)


PLAIN = Profile(plain=True)
OPAQUE = Profile(opaque=True)
VIEW = Profile(aliases=("input",))
FUNCTIONAL_WRAPPERS = frozenset({"auto_functionalized", "auto_functionalized_v2", "triton_kernel_wrapper_functional"})


@functools.cache
def profile(target: Any) -> Profile:
    """The profile of what a `call_function` node calls; nested graphs are judged by `profile_of`."""
    if target is getitem:
        return VIEW
    if not isinstance(target, OpOverload):
        return PLAIN if ops.name_of(target) and not isinstance(target, HigherOrderOperator) else OPAQUE
    schema = schema_of(target)
    writes = tuple(a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write)
    aliases = _shared_arguments(schema)
    form = ops.launch_form(target)
    if form is not None and form.written and not writes:
        writes = aliases = (form.written,)
    if target.name() in ops.ALIASES_DESPITE_SCHEMA:
        aliases = (schema.arguments[0].name,)
    if target.name() == "aten::set_.source_Tensor":
        aliases = ("self", "source")
    random, wait, launch = ops.is_random(target), ops.is_wait(target), ops.is_communication(target)
    ordered = not (random or wait or launch or writes) and (not schema.returns or has_side_effect(target))
    several = len(schema.returns) > 1 or any(str(r.type) == "List[Tensor]" for r in schema.returns)
    return Profile(
        plain=not (aliases or writes or random or ordered or launch or wait),
        several=several,
        aliases=aliases,
        views_first=aliases == (schema.arguments[0].name,) if schema.arguments else False,
        may_copy=bool(aliases) and not writes and may_return_its_argument(target),
        writes=writes,
        random=random,
        ordered=ordered,
        launch=launch,
        wait=wait,
    )


def _shared_arguments(schema: Any) -> tuple[str, ...]:
    """The arguments that results alias. A list of aliases names no set: it may alias whatever is marked."""
    marks: set[str] = set()
    unnamed = False
    for result in schema.returns:
        if result.alias_info is not None:
            marks |= result.alias_info.before_set
            unnamed |= not result.alias_info.before_set
    return tuple(
        a.name for a in schema.arguments if a.alias_info is not None and (unnamed or a.alias_info.before_set & marks)
    )


COPIES = frozenset(
    {"aten::_to_copy", "aten::clone", "aten::cat", "aten::constant_pad_nd", "prims::convert_element_type"}
)


@functools.cache
def is_cheap(target: Any) -> bool:
    """Whether the operator only moves, casts or scales data: what may travel with a launch as its prologue."""
    if target is getitem:
        return True
    if not isinstance(target, OpOverload):
        return False
    found = profile(target)
    cheap = torch.Tag.pointwise in target.tags or target.name() in COPIES or bool(found.aliases)
    return cheap and not (found.writes or found.random or found.launch or found.wait)


def profile_of(node: Node) -> Profile:
    """The profile of a node. A call that runs nested graphs does what their nodes do."""
    if node.op != "call_function":
        return OPAQUE if node.op in ("call_module", "call_method") else PLAIN
    found = profile(node.target)
    if not found.opaque or not isinstance(node.target, HigherOrderOperator):
        return found
    nested = nested_graphs(node)
    wrapped = [a for a in node.args if isinstance(a, OpOverload)]
    inner = [profile_of(inner) for graph in nested for inner in graph.graph.nodes] + [profile(op) for op in wrapped]
    if not nested and node.target.name() not in FUNCTIONAL_WRAPPERS:
        return OPAQUE
    if any(p.launch or p.wait or p.opaque or p.ordered for p in inner):
        return OPAQUE
    random = any(p.random for p in inner)
    if node.target.name() in FUNCTIONAL_WRAPPERS:
        return Profile(plain=not random, several=True, random=random)
    if any(p.writes for p in inner):
        return OPAQUE
    return Profile(plain=not random, several=True, random=random)


def nested_graphs(node: Node) -> list[GraphModule]:
    """The graph modules that a call takes as arguments."""
    owner = node.graph.owning_module
    found: list[GraphModule] = []
    for argument in input_nodes(node):
        if argument.op == "get_attr" and owner is not None:
            value = attribute(owner, str(argument.target))
            if isinstance(value, GraphModule):
                found.append(value)
    return found


def touched(node: Node) -> Collection[Node]:
    """The nodes whose data a call may touch: its inputs, without those that it only has to come after."""
    if not _is_call_of(node, CONTROL_DEPS):
        return input_nodes(node)
    found: dict[Node, None] = {}
    map_arg(node.args[1:], lambda source: found.setdefault(source))
    return list(found)


def waited_inside(node: Node) -> list[Node]:
    """The operands that a call waits for in the nested graph that it runs, whatever else it does there."""
    nested = nested_graphs(node) if _is_call_of(node, CONTROL_DEPS, INVOKE) else []
    if len(nested) != 1:
        return []
    parameters = [inner for inner in nested[0].graph.nodes if inner.op == "placeholder"]
    operands = dict(zip(parameters, node.args[2:], strict=False))
    found: dict[Node, None] = {}
    for inner in nested[0].graph.nodes:
        waits = inner.op == "call_function" and ops.is_wait(inner.target)
        for source in input_nodes(inner) if waits else waited_inside(inner):
            while is_alias(source):
                source = next(iter(input_nodes(source)))
            operand = operands.get(source)
            if isinstance(operand, Node):
                found[operand] = None
    return list(found)


def _is_call_of(node: Node, *names: str) -> bool:
    return isinstance(node.target, HigherOrderOperator) and node.target.name() in names


def is_alias(node: Node) -> bool:
    """Whether the node only renames data: a view, an item of a list, a wait."""
    if node.op != "call_function":
        return False
    found = profile(node.target)
    return found.is_view or (found.may_copy and shares_storage(node))


def shares_storage(node: Node) -> bool:
    """Whether metadata says that the node's storage is one of its inputs'; taken as true where there is none."""
    mine = ops.value_of(node)
    keys = [storage_key(v) for v in map(ops.value_of, input_nodes(node)) if isinstance(v, Tensor)]
    return not isinstance(mine, Tensor) or storage_key(mine) in keys
