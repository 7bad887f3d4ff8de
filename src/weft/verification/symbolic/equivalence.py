"""Prove, without data, that two graphs of any size compute the same values.

Contract: sound, not complete. `proved` means that every output, every written input, every random draw and every
external effect is the same on every rank for all data. This assumes that each operator is a function of its arguments,
their strides and the random numbers drawn, and that every rank runs the same text. Graphs that are not proved equal may
still be equal.

Both graphs run once on symbolic values (`run`) that share one table (`tensors.Terms`). Bucketing, deduplication,
reordering and folded casts then leave the same names for the same elements. Strides of outputs, and storage that they
share with each other, are not compared. The proof takes one pass over each graph.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from weft.errors import GraphError, VerificationError
from weft.graph import check, ops
from weft.graph.aliasing import memory_of, places
from weft.graph.dag import Dag, collector_paused
from weft.graph.groups import TABLE_KEY, Group, GroupTable, group_argument, read_groups, with_nested
from weft.graph.listings.types import DTYPE_NAMES
from weft.verification.rank import same_bits
from weft.verification.rendezvous import ambiguous_groups
from weft.verification.symbolic.arguments import Token, literal
from weft.verification.symbolic.run import Setting, SymbolicRun
from weft.verification.symbolic.storage import Lost
from weft.verification.symbolic.tensors import Size, Terms, Undecided, Value
from weft.verification.written_out import written_out

Groups = Mapping[str, int | Sequence[Sequence[int]]]
MAX_WORDS = 8
"""Maximum number of words of a label that a message shows."""
UNINFORMATIVE = ("", "call", "elementwise", "value", "int", "float", "str", "bool", "NoneType", "None")
"""Words of labels that messages leave out."""
MAX_COMPARED = 1 << 20
"""Largest constant, in elements, that is compared by content; a larger one equals only itself."""


@dataclass(frozen=True)
class Proof:
    """The result of an attempt to prove two graphs equal."""

    proved: bool
    difference: str
    """The first output or input that was not proved equal, and the first position in it; empty if proved."""
    num_values: int
    """Number of distinct symbolic values in the two graphs."""
    in_real_arithmetic: bool = False
    """Whether laws were used that hold in real arithmetic only, so that rounding may differ."""

    def __bool__(self) -> bool:
        return self.proved

    def __str__(self) -> str:
        if self.proved:
            how = " in real arithmetic" if self.in_real_arithmetic else ""
            return f"proved equal{how} ({self.num_values} values)"
        return f"not proved equal: {self.difference}"


def prove(
    before: GraphModule, after: GraphModule, *, groups: Groups | None = None, reassociates: bool = False
) -> Proof:
    """Try to prove that two graphs compute the same on every rank.

    `groups` gives the sizes or ranks of groups that the modules do not carry. With `reassociates`, graphs are compared
    in real arithmetic: the terms of a sum may be added in any order, before or after a reduction, and strides do not
    matter.
    """
    terms = Terms()
    with collector_paused():
        try:
            sides = _run_both(before, after, groups, terms, reassociates)
            difference = next(_differences(terms, *sides), "")
        except GraphError as error:
            difference = f"one of the graphs is invalid: {error}"
        except VerificationError as error:
            difference = str(error).splitlines()[0]
        except (Lost, Undecided) as error:
            difference = f"cannot follow {terms.node} in the graph {_SIDES[terms.side]} the rewrite" + _because(error)
    return Proof(not difference, difference, len(terms.labels), in_real_arithmetic=reassociates)


_SIDES = ("before", "after")


def _because(error: Exception) -> str:
    return f": {error}" if str(error) else ""


def _run_both(
    before: GraphModule, after: GraphModule, groups: Groups | None, terms: Terms, reassociates: bool
) -> list[SymbolicRun]:
    modules = [written_out(module, read_groups(module, groups)) for module in (before, after)]
    tables = [read_groups(module, groups) for module in modules]
    names = _group_names(modules, tables)
    dags = [Dag(module.graph) for module in modules]
    constants = _constants(modules, tables, names, dags)
    runs: list[SymbolicRun] = []
    for side, (module, dag) in enumerate(zip(modules, dags, strict=True)):
        check.validate(dag)
        setting = Setting(terms, side, names[side], constants[side], reassociates)
        runs.append(SymbolicRun(module, dag, tables[side], setting))
    shared = {key for run in runs for key in run.tangled_keys()}
    for run in runs:
        run.run(shared)
    return runs


def _group_names(modules: Sequence[GraphModule], tables: Sequence[GroupTable]) -> list[dict[str, Hashable]]:
    """A key for each group by canonical name: its ranks and identity, never a name that Weft made up.

    If both modules have one table, names suffice. If neither carries a table, both belong to one rank, and run-time
    names suffice.
    """
    carried = [module.meta.get(TABLE_KEY) for module in modules]
    by_name = carried[0] is not None and carried[0] is carried[1]
    by_runtime_name = carried == [None, None]
    first: dict[Hashable, Group] = {}
    found: list[dict[str, Hashable]] = []
    for table in tables:
        if table.alike is not None and not by_name and not by_runtime_name:
            raise VerificationError(ambiguous_groups(*table.alike))
        names: dict[str, Hashable] = {}
        for group in table:
            is_told = not by_runtime_name and group.name not in table.unplaced
            runtime = "" if is_told else table.runtime.get(group.name, group.name)
            name = group.name if by_name else runtime
            is_placed = group.size < 2 or group.name not in table.unplaced
            shown = group if is_placed else replace(group, size=0)  # no law may take its ranks for known
            names[group.name] = (first.setdefault((shown.key, name), shown), name)
        found.append(names)
    return found


def _constants(
    modules: Sequence[GraphModule],
    tables: Sequence[GroupTable],
    groups: Sequence[Mapping[str, Hashable]],
    dags: Sequence[Dag],
) -> list[dict[str, Hashable]]:
    """A key for each attribute of each module: the path alone if both modules hold the same at that path."""
    paths = [{str(node.target) for node in module.graph.nodes if node.op == "get_attr"} for module in modules]
    shared = [_shared(module, dag) for module, dag in zip(modules, dags, strict=True)]
    same: set[str] = set()
    for path in paths[0] & paths[1]:
        held = [ops.attribute(module, path) for module in modules]
        met = [
            list(_groups_inside(value, table, known)) for value, table, known in zip(held, tables, groups, strict=True)
        ]
        if met[0] == met[1] and _is_same(*held) and (shared[0].get(path) == shared[1].get(path) or _is_one(*held)):
            same.add(path)
    return [{path: path if path in same else (side, path) for path in found} for side, found in enumerate(paths)]


def _is_one(first: Any, second: Any) -> bool:
    """Whether two constants are the same memory."""
    return isinstance(first, Tensor) and isinstance(second, Tensor) and memory_of(first) == memory_of(second)


def _shared(module: GraphModule, dag: Dag) -> dict[str, Hashable]:
    """The memory of each constant that shares it with something that is written, by path."""
    effects = dag.effects
    nodes = [node for node in dag.nodes if node.op in ("placeholder", "get_attr")] if effects.memory.written else []
    once = {(node.op, str(node.target)): node for node in nodes}
    holders = Counter(s for node in once.values() for s in set(effects.held(dag.index[node])))
    given = {s for node in nodes if node.op == "placeholder" for s in effects.held(dag.index[node])}
    held = {path: ops.attribute(module, path) for op, path in once if op == "get_attr"}
    tensors = {path: value for path, value in held.items() if isinstance(value, Tensor)}
    placed = places(tensors)
    found: dict[str, Hashable] = {}
    for path, tensor in tensors.items():
        mine = effects.memory.written.intersection(effects.held(dag.index[once["get_attr", path]]))
        if path in placed and mine and mine.isdisjoint(given):
            found[path] = placed[path]
        elif any(holders[s] > 1 for s in mine):  # an input may lie in this very memory, not in a copy of it
            found[path] = ("memory", *memory_of(tensor))
    return found


def _groups_inside(value: Any, table: GroupTable, groups: Mapping[str, Hashable]) -> Iterator[Hashable]:
    """The groups of the launches in a nested graph, in order."""
    for node in with_nested(value) if isinstance(value, GraphModule) else ():
        argument = group_argument(node) if node.op == "call_function" and ops.is_communication(node.target) else None
        if argument is not None:
            name = table.canonical(argument)
            yield groups.get(name, name)


def _is_same(first: Any, second: Any) -> bool:
    if first is second:
        return True
    if isinstance(first, GraphModule) and isinstance(second, GraphModule):
        return _is_same_graph(first, second)
    return isinstance(first, Tensor) and isinstance(second, Tensor) and _has_same_bits(first, second)


def _is_same_graph(first: GraphModule, second: GraphModule) -> bool:
    """Whether two nested graphs have the same calls in order, with the same arguments and attributes."""
    modules = (first, second)
    nodes = [list(module.graph.nodes) for module in modules]
    places = [{node: k for k, node in enumerate(found)} for found in nodes]
    if len(nodes[0]) != len(nodes[1]):
        return False
    for pair in zip(*nodes, strict=True):
        old, new = ((node.op, _spelled((node.args, node.kwargs), places[k])) for k, node in enumerate(pair))
        if old != new:
            return False
        if pair[0].op in ("get_attr", "call_module"):
            owned = [ops.attribute(module, str(node.target)) for module, node in zip(modules, pair, strict=True)]
            if owned[0] is None or not _is_same(*owned):
                return False
        elif pair[0].op != "placeholder" and pair[0].target != pair[1].target:
            return False
    return True


def _spelled(argument: Any, places: Mapping[Node, int]) -> Hashable:
    """An argument of a call in a nested graph, with nodes replaced by their positions."""
    if isinstance(argument, Node):
        return "node", places[argument]
    if isinstance(argument, list | tuple):
        kind = list if isinstance(argument, list) else type(argument)
        return kind, tuple(_spelled(item, places) for item in argument)
    if isinstance(argument, dict):
        return tuple((key, _spelled(item, places)) for key, item in argument.items())
    if isinstance(argument, slice):
        return "slice", _spelled([argument.start, argument.stop, argument.step], places)
    return literal(argument)


def _has_same_bits(first: Tensor, second: Tensor) -> bool:
    if not {type(first), type(second)} <= {Tensor, torch.nn.Parameter}:
        return False  # fake tensors and other subclasses have no bits to compare
    if first.is_meta or second.is_meta:
        return False
    return first.numel() <= MAX_COMPARED and same_bits(first, second)


# Differences.


def _differences(terms: Terms, first: SymbolicRun, second: SymbolicRun) -> Iterator[str]:
    """One sentence for each difference; an empty iterator means equal runs."""
    num_inputs = [
        sum(1 for key in run.inputs if isinstance(key, tuple) and key[0] == "input") for run in (first, second)
    ]
    if num_inputs[0] != num_inputs[1]:
        yield f"the graph has {num_inputs[0]} inputs before and {num_inputs[1]} after"
        return
    yield from _trees(terms, "outputs", first.outputs, second.outputs)
    if first.containers != second.containers:
        yield "the outputs are in different containers"
    late = [k for k, (old, new) in enumerate(zip(first.in_flight, second.in_flight, strict=False)) if new and not old]
    if late:
        yield f"tensor {late[0]} of the outputs is complete before and still in flight after"
    for key in {**first.inputs, **second.inputs}:
        place = f"inputs[{key[1]}]" if isinstance(key, tuple) and key[0] == "input" else f"constant {key!r}"
        if key in first.inputs and key in second.inputs:
            yield from _trees(terms, f"{place} after the step", first.inputs[key], second.inputs[key])
        elif not _is_covered(key, first, second):
            yield f"{place} is written on one side only"
    yield from (sentence for race, sentence in second.races.items() if race not in first.races)
    for what, old, new in (
        ("random draws", first.draws, second.draws),
        ("external effects", first.events, second.events),
    ):
        if old != new:
            yield f"{what} differ: {len(old)} before, {len(new)} after"


def _is_covered(key: Hashable, first: SymbolicRun, second: SymbolicRun) -> bool:
    """Whether a constant that one side lacks is not written, or shares its storage with one that both sides have."""
    mine, other = (first, second) if key in first.inputs else (second, first)
    if key not in mine.written:
        return True
    return any(mine.written[key] == mine.written[k] is not None for k in mine.written if k in other.inputs)


def _trees(terms: Terms, place: str, old: Any, new: Any) -> Iterator[str]:
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for k, (a, b) in enumerate(zip(old, new, strict=True)):
            yield from _trees(terms, f"{place}[{k}]", a, b)
    elif isinstance(old, dict) and isinstance(new, dict) and old.keys() == new.keys():
        for key in old:
            yield from _trees(terms, f"{place}[{key!r}]", old[key], new[key])
    elif isinstance(old, Value) and isinstance(new, Value):
        if terms.number(old) != terms.number(new):
            yield f"{place} may differ: {_explain(terms, old, new)}"
    elif type(old) is not type(new) or repr(old) != repr(new) or (old != new and old == old):  # 0.0 is not -0.0
        yield f"{place} is {_show(old)} before, {_show(new)} after"


def _show(held: Any) -> str:
    if isinstance(held, Value):
        return _type(held)
    if isinstance(held, list | dict):
        return f"a {type(held).__name__} of {len(held)}"
    return "a value that is not a tensor" if isinstance(held, Token) else repr(held)


def _type(value: Value) -> str:
    dtype = "?" if value.dtype is None else DTYPE_NAMES.get(value.dtype, str(value.dtype))
    return f"{dtype}[{', '.join(map(str, value.shape))}]"


def _explain(terms: Terms, old: Value, new: Value) -> str:
    """The innermost position at which two values differ, in terms of nodes of both graphs."""
    position: Size = 0
    for _ in range(len(terms.labels) + 1):
        if old.shape != new.shape or old.dtype != new.dtype:
            return f"{_type(old)} before, {_type(new)} after"
        runs = next(((a, b) for a, b in zip(old.runs, new.runs, strict=False) if a != b), None)
        if runs is None:
            return f"it consists of {len(old.runs)} runs of elements before and {len(new.runs)} after"
        place = next(k for k, pair in enumerate(zip(old.runs, new.runs, strict=False)) if pair == runs)
        position = sum(run[2] for run in old.runs[:place])
        (first, start, length), (second, other, count) = runs
        if first == second:
            return (
                f"from element {position}, it takes elements of {_origin(terms, 0, first)}: "
                f"{length} elements from index {start} before, {count} elements from index {other} after"
            )
        inner = _descend(terms, first, second)
        if isinstance(inner, str):
            return f"from element {position}, {inner}"
        old, new = inner
    return "the two are computed differently"


def _descend(terms: Terms, first: int, second: int) -> str | tuple[Value, Value]:
    """The first operands of two atoms that differ: a phrase, or two whole values to compare further."""
    while True:
        operands = terms.operands[first], terms.operands[second]
        values = terms.values[first], terms.values[second]
        alike = terms.labels[first] == terms.labels[second] and len(operands[0]) == len(operands[1])
        pair = next(((a[0], b[0]) for a, b in zip(*operands, strict=False) if a[0] != b[0]), None)
        if alike and pair is not None:
            first, second = pair
            continue
        numbers = next(((a, b) for a, b in zip(*values, strict=False) if a != b), None)
        if alike and numbers is not None and len(values[0]) == len(values[1]):
            return terms.numbered[numbers[0]], terms.numbered[numbers[1]]
        old, new = _origin(terms, 0, first), _origin(terms, 1, second)
        return f"the graph before uses {old} where the graph after uses {new}"


def _origin(terms: Terms, side: int, atom: int) -> str:
    """The node that made an atom, and the words of its label."""
    name = terms.origins[side].get(atom) or next((o[atom] for o in terms.origins if atom in o), "?")
    label = terms.labels[atom]
    if isinstance(label, tuple) and label[0] == "result":  # the label of the call says more
        label = terms.labels[terms.operands[atom][0][0]]
    return f"{name} ({_made_by(label)})"


def _made_by(label: Hashable) -> str:
    """The informative words of a label."""
    words: list[str] = []
    stack: list[Any] = [label]
    while stack and len(words) < MAX_WORDS:
        part = stack.pop(0)
        if isinstance(part, tuple):
            stack[:0] = part
        elif isinstance(part, Group):
            words.append(part.name)
        elif part is not None and part not in UNINFORMATIVE:
            words.append(DTYPE_NAMES.get(part, str(part)))
    return " ".join(words)
