"""Effects by operator: which arguments it writes, whose memory its results share, what it does outside the graph.

Contract: decided by schema and tags, never by the name of a node. An unknown operator is opaque: it counts as reading
and writing all its arguments, drawing random numbers, and communicating.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

import weft.graph.host_copies  # pyright: ignore[reportUnusedImport] # registers operators of graphs
import weft.graph.rms_norm  # noqa: F401 # pyright: ignore[reportUnusedImport] # registers operators of captured graphs
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
from weft.graph import host, ops, understated
from weft.graph.ops import attribute, cached_by_target
from weft.graph.unknown_graph import UnknownGraph


@dataclass(frozen=True, slots=True)
class Profile:
    """The effects of an operator on storages and outside the graph, by its schema."""

    plain: bool = False
    """Only reads its inputs and returns new results. This covers most nodes, without a look at the node."""
    several: bool = False
    """Returns several tensors."""
    aliases: tuple[str, ...] = ()
    """Arguments whose storage the results share."""
    views_first: bool = False
    """Shares the storage of its first argument only, as most views do."""
    may_copy: bool = False
    """Shares the storage only where possible (reshape, contiguous); metadata decides."""
    may_share: tuple[str, ...] = ()
    """Arguments whose storage the results share in some calls; metadata decides if there is any."""
    writes: tuple[str, ...] = ()
    random: bool = False
    ordered: bool = False
    """Has effects outside the graph: assertions, prints, profiler marks."""
    launch: bool = False
    host_copy: bool = False
    """Launches a copy between device and host memory; `ops.host_copy` gives its direction."""
    wait: bool = False
    opaque: bool = False
    """Unknown: reads and writes its arguments, draws, orders, communicates."""
    host: bool = False
    """May copy between a device and the host, or make the host wait for the device; see `weft.graph.host`."""
    joins: tuple[Node, ...] = ()
    """Inputs of a call with nested graphs whose memory its results may share."""

    @property
    def is_view(self) -> bool:
        """Renames data without reading or writing it."""
        return bool(self.aliases) and not (self.writes or self.may_copy or self.launch or self.opaque)


PLAIN = Profile(plain=True)
OPAQUE = Profile(opaque=True)
VIEW = Profile(aliases=("input",))
FUNCTIONAL_WRAPPERS = frozenset({"auto_functionalized", "auto_functionalized_v2", "triton_kernel_wrapper_functional"})
# Calls with nested graphs, by the origin of their results. All others are opaque.
CALLS_OF_GRAPHS = frozenset(
    {
        "cond",
        "control_deps",
        "foreach_map",
        "hints_wrapper",
        "invoke_quant",
        "invoke_quant_packed",
        "invoke_subgraph",
        "local_map_hop",
        "run_const_graph",
        "strict_mode",
        "tag_activation_checkpoint",
        "wrap",
        "wrap_activation_checkpoint",
        "wrap_with_autocast",
        "wrap_with_set_grad_enabled",
    }
)
"""They return the results of one of their graphs, which receives the arguments after it."""
LOOPS = frozenset({"associative_scan", "scan", "while_loop"})
"""They return the results of their last iteration, or their inputs if they make none."""
ATTENTIONS = frozenset({"flex_attention", "flex_attention_backward"})
NEW_RESULTS = ATTENTIONS | {"map_impl", "while_loop_stack_output"}
"""Their results are new, whatever their graphs return."""


@cached_by_target
def profile(target: Any) -> Profile:
    """The profile of the target of a `call_function` node; `profile_of` also looks into nested graphs."""
    if target is getitem:
        return VIEW
    if not isinstance(target, OpOverload):
        return PLAIN if ops.name_of(target) and not isinstance(target, HigherOrderOperator) else OPAQUE
    schema = schema_of(target)
    launch = ops.is_communication(target)
    if not is_believed(target):
        return Profile(opaque=True, launch=launch)
    name = target.name().partition(".")[0]
    given = [a.name for a in schema.arguments]
    hidden = [argument for argument in understated.WRITES.get(name, ()) if argument in given]
    writes = (*_declared_writes(schema), *hidden)
    unstated = [argument for argument in understated.SHARES.get(name, ()) if argument in given]
    aliases = tuple(dict.fromkeys((*unstated, *_shared_arguments(schema))))
    form = ops.launch_form(target)
    if form is not None and form.written and not writes:
        writes = aliases = (form.written,)
    random, wait, host_copy = ops.is_random(target), ops.is_wait(target), ops.host_copy(target) is not None
    ordered = not (random or wait or launch or writes) and (not schema.returns or has_side_effect(target))
    several = len(schema.returns) > 1 or any(str(r.type) == "List[Tensor]" for r in schema.returns)
    may_share = tuple(a for a in understated.MAY_SHARE.get(name, ()) if a in given and a not in aliases)
    return Profile(
        plain=not (aliases or may_share or writes or random or ordered or launch or wait or host_copy),
        several=several and not may_share and name not in understated.ONE_MEMORY,
        may_share=may_share,
        aliases=aliases,
        views_first=aliases == (schema.arguments[0].name,) if schema.arguments else False,
        may_copy=bool(aliases) and not writes and may_return_its_argument(target),
        writes=writes,
        random=random,
        ordered=ordered,
        launch=launch,
        host_copy=host_copy,
        wait=wait,
        host=host.may_transfer(target),
    )


def is_believed(op: OpOverload) -> bool:
    """Whether the schema of an operator, together with the known exceptions, describes all its effects."""
    name, namespace = op.name().partition(".")[0], op.namespace
    if name in understated.BELIEVED_OPERATORS:
        return True
    if namespace in understated.NEVER_BELIEVED or name in understated.NEVER_BELIEVED_OPERATORS:
        return False
    schema = schema_of(op)
    if not (schema.returns or _declared_writes(schema) or name in understated.WRITES):
        return name in understated.MARKS
    return namespace in understated.BELIEVED or torch.Tag.pt2_compliant_tag in op.tags


def _declared_writes(schema: Any) -> tuple[str, ...]:
    return tuple(a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write)


def _shared_arguments(schema: Any) -> tuple[str, ...]:
    """The arguments that results alias. A list of aliases has no alias set, so it may alias any marked argument."""
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


def is_pointwise(target: Any) -> bool:
    """Whether torch tags the operator as pointwise: each element of its result comes from the elements at its place.

    Operators that write in place are tagged as well.
    """
    return isinstance(target, OpOverload) and torch.Tag.pointwise in target.tags


@cached_by_target
def is_cheap(target: Any) -> bool:
    """Whether the operator only moves, casts or scales data, so that it may move with a launch as its prologue."""
    if target is getitem:
        return True
    if not isinstance(target, OpOverload):
        return False
    found = profile(target)
    cheap = is_pointwise(target) or target.name() in COPIES or bool(found.aliases)
    return cheap and not (found.writes or found.random or found.launch or found.wait)


def profile_of(node: Node) -> Profile:
    """The profile of a node. A call that runs nested graphs does what their nodes do."""
    if node.op != "call_function":
        return OPAQUE if node.op in ("call_module", "call_method") else PLAIN
    found = profile(node.target)
    if not found.opaque or not isinstance(node.target, HigherOrderOperator):
        return found
    name = node.target.name()
    if not _has_only_graphs(node):
        # torch refuses a score or mask graph that writes, but may let it draw random numbers
        is_attention = name in ATTENTIONS and _has_only_graphs(node, UnknownGraph)
        return Profile(several=True, random=True) if is_attention else OPAQUE
    bodies = [_Body(module.graph) for module in graph_arguments(node)]
    random = any(body.random for body in bodies)
    if name in FUNCTIONAL_WRAPPERS:
        random |= any(profile(op).random for op in node.args if isinstance(op, OpOverload))
        return OPAQUE if _does_more_than_copy(node, bodies) else Profile(plain=not random, several=True, random=random)
    if not bodies or any(body.acts or body.writes for body in bodies):
        return OPAQUE
    if name in NEW_RESULTS:
        return Profile(plain=not random, several=True, random=random)
    if name not in CALLS_OF_GRAPHS | LOOPS:
        return OPAQUE
    joins = _joined(node, name, bodies)
    apart = not joins and all(body.results_are_apart for body in bodies)
    return Profile(plain=not (random or joins), several=apart, random=random, joins=joins)


def draws(node: Node) -> bool:
    """Whether the node draws random numbers; attention without dropout does not."""
    if not profile_of(node).random:
        return False
    return not isinstance(node.target, OpOverload) or ops.bind(node).get("dropout_p") != 0.0


def only_computes(node: Node) -> bool:
    """Whether a call gives new tensors that depend on its arguments alone, so that a second call gives the same."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return False
    found = profile(node.target)
    return found.plain or (found.random and not draws(node) and not (found.writes or found.aliases or found.may_share))


def _has_only_graphs(node: Node, *also: type) -> bool:
    """Whether a call takes only operators and nested graphs as code, which can be analysed, or code of these types."""
    owner = node.graph.owning_module
    given = [attribute(owner, str(source.target)) for source in input_nodes(node) if source.op == "get_attr"]
    return all(isinstance(value, (GraphModule, Tensor, *also)) for value in given)


def _does_more_than_copy(node: Node, bodies: Sequence[_Body]) -> bool:
    """Whether a functional wrapper may do more than let its operator or graph write copies and return them."""
    wrapped = [profile(op) for op in node.args if isinstance(op, OpOverload)]
    writes_originals = any(value is not None for key, value in node.kwargs.items() if key.startswith("_only_clone_"))
    acts = any(p.launch or p.host_copy or p.opaque or p.ordered or p.aliases for p in wrapped) or any(
        body.acts for body in bodies
    )
    writes_constants = any(_is_constant(root) for body in bodies for root in body.writes)
    return writes_originals or acts or writes_constants or any(body.given for body in bodies)


Root = Node | tuple[Node, str]


class _Body:
    """A nested graph: its effects, and the memory that its results may share."""

    def __init__(self, graph: Graph) -> None:
        self.inputs: list[Node] = [node for node in graph.nodes if node.op == "placeholder"]
        self._outside = [node for node in graph.nodes if node.op in ("placeholder", "get_attr")]
        self.acts = False
        """Whether it communicates, has ordered effects, or contains an unknown call."""
        self.random = False
        self.writes: set[Root] = set()
        self.results: list[frozenset[Root]] = []
        """For each returned tensor, the inputs, constants and new tensors that may share its memory."""
        roots: dict[Node, frozenset[Root]] = {}
        profiles: dict[Node, Profile] = {}
        for node in graph.nodes:
            found = profiles[node] = profile_of(node)
            self.acts |= found.launch or found.host_copy or found.wait or found.opaque or found.ordered
            self.random |= found.random
            if found.writes:
                self.writes.update(root for source in input_nodes(node) for root in roots[source])
            if node.op == "output":
                self.results = [roots[source] for source in _nodes_in(node.args)]
            else:
                roots[node] = _roots_of(node, profiles, roots)

    @property
    def results_are_apart(self) -> bool:
        """Whether no two results may share memory."""
        return sum(map(len, self.results)) == len(frozenset[Root]().union(*self.results))

    @property
    def given(self) -> list[Node]:
        """The inputs and constants that a result may share memory with."""
        shared = frozenset[Root]().union(*self.results)
        return [node for node in self._outside if node in shared]


def _is_constant(root: Root) -> bool:
    return isinstance(root, Node) and root.op == "get_attr"


def _roots_of(node: Node, profiles: Mapping[Node, Profile], roots: Mapping[Node, frozenset[Root]]) -> frozenset[Root]:
    sources = list(input_nodes(node))
    if node.target is getitem and len(sources) == 1:
        is_new = roots[sources[0]] == frozenset[Root]({sources[0]}) and profiles[sources[0]].several
        return frozenset({(sources[0], str(node.args[1]))}) if is_new else roots[sources[0]]
    found = profiles[node]
    shares = bool(found.aliases) and not (found.may_copy and not shares_storage(node))
    if shares or found.opaque or found.joins or found.may_share:
        return frozenset[Root]({node}).union(*(roots[source] for source in sources))
    return frozenset({node})


def _joined(node: Node, name: str, bodies: Sequence[_Body]) -> tuple[Node, ...]:
    """The inputs of a call whose memory its results may share."""
    given = [root for body in bodies for root in body.given]
    runs_for_sure = name in CALLS_OF_GRAPHS or (name == "scan" and len(node.args) > 2 and bool(node.args[2]))
    if runs_for_sure and not given:
        return ()
    operands = _operands(node, name)
    fitting = [body for body in bodies if len(body.inputs) == len(operands)]
    by_input = {taken: operand for body in fitting for taken, operand in zip(body.inputs, operands, strict=True)}
    if runs_for_sure and all(root in by_input for root in given):
        return tuple(dict.fromkeys(by_input[root] for root in given if isinstance(by_input[root], Node)))
    numbers = (int, float, torch.SymInt, torch.SymFloat, torch.SymBool)
    shares_constants = any(map(_is_constant, given))  # constants are inside the nested graph that the attribute holds
    return tuple(
        n
        for n in input_nodes(node)
        if (shares_constants or not _is_graph(n)) and not isinstance(ops.value_of(n), numbers)
    )


def _operands(node: Node, name: str) -> list[Any]:
    """The operands of a call's nested graphs, in order; empty if they are unknown."""
    if name not in CALLS_OF_GRAPHS or node.kwargs:
        return []
    last = max((k for k, part in enumerate(node.args) if isinstance(part, Node) and _is_graph(part)), default=-1)
    given = node.args[last + (2 if name == "invoke_subgraph" else 1) :]
    return list(_leaves(given))


def _leaves(part: Any) -> Iterable[Any]:
    if isinstance(part, list | tuple):
        for item in part:
            yield from _leaves(item)
    else:
        yield part


def _nodes_in(part: Any) -> list[Node]:
    found: list[Node] = []
    map_arg(part, found.append)
    return found


def _is_graph(node: Node) -> bool:
    owner = node.graph.owning_module
    return node.op == "get_attr" and isinstance(attribute(owner, str(node.target)), GraphModule)


def graph_arguments(node: Node) -> list[GraphModule]:
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
    """The nodes whose data a call may access: its inputs, without pure ordering dependencies."""
    if not _is_call_of(node, CONTROL_DEPS):
        return input_nodes(node)
    found: dict[Node, None] = {}
    map_arg(node.args[1:], lambda source: found.setdefault(source))
    return list(found)


def waited_by(wait: Node) -> list[Node]:
    """The nodes that a wait completes. The wait of a copy takes the source of the copy as well."""
    return _nodes_in(next(iter(ops.bind(wait).values())))


def waited_inside(node: Node) -> list[Node]:
    """The operands that a call waits for inside the nested graph that it runs."""
    nested = graph_arguments(node) if _is_call_of(node, CONTROL_DEPS, INVOKE) else []
    if len(nested) != 1:
        return []
    parameters = [inner for inner in nested[0].graph.nodes if inner.op == "placeholder"]
    operands = dict(zip(parameters, node.args[2:], strict=False))
    found: dict[Node, None] = {}
    for inner in nested[0].graph.nodes:
        waits = inner.op == "call_function" and ops.is_wait(inner.target)
        for source in waited_by(inner) if waits else waited_inside(inner):
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
    """Whether the node has the storage of one of its inputs according to metadata; true without metadata."""
    mine = ops.value_of(node)
    keys = [storage_key(v) for v in map(ops.value_of, input_nodes(node)) if isinstance(v, Tensor)]
    return not isinstance(mine, Tensor) or storage_key(mine) in keys
