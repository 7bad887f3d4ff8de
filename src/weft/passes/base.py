"""Pass and Numerics: the base class of all transformations, and how passes are found by name.

Contract: a pass is a frozen dataclass whose fields are its options. `plan` is pure: it reads the graph and returns
data. `apply` is the only part that changes the graph, through an Edit. The base class derives the pass's name, spec
string and parser from the class, registers it, and runs plan and apply in one transaction that checks every invariant.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import inspect
import itertools
import os
import pkgutil
import re
import sys
import textwrap
import typing
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from importlib.metadata import EntryPoint, entry_points
from types import NoneType
from typing import Any, ClassVar

from torch.fx import Graph, Node

from weft.bucketing.build import merge
from weft.compat import refresh_names
from weft.errors import PipelineError, PlanError, RefusedError, compose, nearest
from weft.graph.edit import Edit, copy_graph
from weft.graph.listings.call_lines import LineReader
from weft.passes.presets import NAMED
from weft.plan.context import Context
from weft.plan.decision import Decision, Reason
from weft.plan.plan import Arrange, Erase, Inside, Merge, Move, Replace, Rewrite, Step
from weft.rewriting.new_nodes import sources

ENTRY_POINTS = "weft.passes"
"""The entry-point group in which other packages declare passes: name = "module:Class"."""


class Numerics(Enum):
    """How a pass may change values."""

    EXACT = "exact"
    """Values are bitwise the same."""
    REASSOCIATES = "reassociates"
    """Values are equal in real arithmetic; rounding may differ."""
    CHANGES_DTYPE = "changes-dtype"
    """Values are computed in another dtype."""


@dataclass(frozen=True)
class Pass(ABC):
    """Base of all passes."""

    numerics: ClassVar[Numerics]
    reorders_launches: ClassVar[bool] = False
    """Whether the pass may change the issue order of a group. It must then make the same decisions on every rank."""
    keeps_memory_limit: ClassVar[bool] = False
    """Whether the pass keeps the peak memory within `Context.memory_limit_bytes`, or refuses."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if not hasattr(cls, "numerics"):  # a base of several passes
            return
        if cls.name() in NAMED:
            what = f"the name {cls.name()!r} of a pass is taken by a stage or preset"
            raise PipelineError(compose("passes", what, do="rename it"))
        known = _PASSES.get(cls.name())
        if known is not None and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            what = f"two passes are called {cls.name()!r}: {known.__module__} and {cls.__module__}"
            raise PipelineError(compose("passes", what, do="rename one of them"))
        _PASSES[cls.name()] = cls

    @classmethod
    def name(cls) -> str:
        """`BucketAllGathers` is called `bucket-all-gathers`."""
        return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", cls.__name__).lower()

    def __str__(self) -> str:
        """The spec string: the name, and the options that differ from their defaults."""
        options = [
            f"{f.name.replace('_', '-')}={_show(getattr(self, f.name))}"
            for f in dataclasses.fields(self)
            if getattr(self, f.name) != f.default
        ]
        return self.name() + (f"{{{' '.join(options)}}}" if options else "")

    @classmethod
    def options(cls) -> list[Option]:
        """The options, each with the docstring of its field."""
        hints = typing.get_type_hints(cls)
        return [
            Option(f.name.replace("_", "-"), _type_name(hints[f.name]), f.default, _sentence_under(cls, f.name))
            for f in dataclasses.fields(cls)
        ]

    @abstractmethod
    def plan(self, graph: Graph, context: Context) -> Step:
        """Decide what to do, without changing the graph."""

    def apply(self, edit: Edit, step: Step) -> None:
        """Carry out the actions of a step. A pass with actions of its own overrides this."""
        nodes = NamedNodes(edit.graph.nodes)
        merges = [action for action in step.actions if isinstance(action, Merge)]
        if any(action.together for action in merges):  # all at once: moving the members of one may separate others
            edit.bring_together([[nodes[name] for name in action.launches] for action in merges])
        replacements: dict[Node, Node] = {}
        _carry_out(edit, [action for action in step.actions if isinstance(action, Rewrite)], nodes)
        for action in step.actions:
            match action:
                case Arrange(runs):
                    edit.arrange(_stretches(list(edit.graph.nodes), nodes, runs))
                case Move(names, anchor, side):
                    move = edit.move_before if side == "before" else edit.move_after
                    move([nodes[name] for name in names], nodes[anchor])
                case Replace(name, by):
                    edit.replace(nodes[name], nodes[by])
                case Erase(names):
                    for name in names:
                        edit.erase(nodes[name])
                case Merge():
                    replacements |= merge(edit, nodes, action)
                case Inside(path, rewrites):
                    _carry_out(edit.inside(path), rewrites)
                case Rewrite():  # carried out above
                    pass
                case _:
                    what = f"it has no action {action.kind!r}: the plan is for another pass"
                    raise PlanError(compose(self.name(), what, where=[repr(action)]))
        edit.replace_each(replacements)

    def step(self, actions: typing.Iterable[Any], decisions: typing.Iterable[Decision]) -> Step:
        """A step of this pass."""
        return Step(str(self), tuple(actions), tuple(decisions))

    def decision(self, reason: Reason, sentence: str, *nodes: str, blocking: str | None = None) -> Decision:
        """A decision of this pass."""
        return Decision(self.name(), reason, sentence, nodes, blocking)

    def run(self, graph: Graph, context: Context, step: Step | None = None) -> tuple[Step, bool]:
        """Plan (unless a step is given), apply and check in one transaction; on an error the graph is unchanged."""
        step = self.plan(graph, context) if step is None else step
        refusal = next((d for d in step.declined if d.reason.is_obstacle), None)
        if context.strict and refusal is not None:
            raise RefusedError(compose(self.name(), refusal.sentence, do="leave strict off to accept this"))
        stages = step.stages
        if len(stages) > 1:  # try a copy first: if a later stage fails, the graph must not keep the earlier ones
            self._carry_out(copy_graph(graph), stages)
            refresh_names(graph)
        return step, self._carry_out(graph, stages)

    def _carry_out(self, graph: Graph, stages: Iterable[Step]) -> bool:
        """Apply stages in order, each in a transaction; returns whether the graph changed."""
        changed = False
        for stage in stages:
            with Edit(graph, keep_issue_order=not self.reorders_launches) as edit:
                self.apply(edit, stage)
            changed |= edit.changed
        return changed


def _carry_out(edit: Edit, rewrites: typing.Sequence[Rewrite], nodes: NamedNodes | None = None) -> None:
    """Insert the calls of rewrites, redirect users to them, and remove the replaced nodes."""
    if not rewrites:
        return
    nodes = nodes if nodes is not None else NamedNodes(edit.graph.nodes)
    reader = LineReader([call for action in rewrites for call in action.calls], nodes)
    replacements: dict[Node, Node] = {}  # deferred, so that a user of many nodes is rewritten once
    for action in rewrites:
        erased = [nodes[name] for name in action.erased]
        like = [nodes[old] for old, _ in action.heirs] or erased
        annotated = [*like, *erased]
        for text in action.calls:
            line = reader.read(text)
            inputs = [each for each in sources(line.args, line.kwargs) if isinstance(each, Node)]
            if any(source in replacements for source in inputs):
                edit.replace_each(replacements)
                replacements = {}
            nodes[line.name] = edit.call(
                line.target,
                line.args,
                line.kwargs,
                before=nodes[action.before],
                name=line.name,
                like=like or inputs,  # a slice of an input replaces nothing
                annotated=annotated,
            )
        mine = {nodes[old]: nodes[new] for old, new in action.heirs}
        if not replacements.keys().isdisjoint([*mine, *mine.values()]):
            edit.replace_each(replacements)
            replacements = {}
        replacements |= mine
        for name in action.erased:
            edit.erase(nodes[name])
    edit.replace_each(replacements)


def _stretches(order: list[Node], nodes: NamedNodes, runs: Iterable[tuple[str, str]]) -> list[Node]:
    """The nodes of the given runs, in order; a run is a stretch of the graph from its first to its last node."""
    place = {node: i for i, node in enumerate(order)}
    return [node for first, last in runs for node in order[place[nodes[first]] : place[nodes[last]] + 1]]


class NamedNodes(dict[str, Node]):
    """The nodes of a graph by name; an unknown name raises a PlanError that suggests the nearest."""

    def __init__(self, nodes: Iterable[Node]) -> None:
        super().__init__((node.name, node) for node in nodes)

    def __missing__(self, name: str) -> Node:
        raise PlanError(compose("plan", f"the graph has no node {name!r}", do=nearest(name, self)))


@dataclass(frozen=True)
class Option:
    """One option of a pass, for help texts."""

    name: str
    type: str
    default: Any
    doc: str


def _type_name(hint: Any) -> str:
    return str(hint) if typing.get_args(hint) else getattr(hint, "__name__", str(hint))


def _sentence_under(cls: type[Pass], name: str) -> str:
    """The docstring of a field, read from the source of the class that declares it."""
    home = next(base for base in cls.__mro__ if name in vars(base).get("__annotations__", {}))
    body = ast.parse(textwrap.dedent(inspect.getsource(home))).body[0]
    statements = body.body if isinstance(body, ast.ClassDef) else []
    for field_, below in itertools.pairwise(statements):
        is_field = (
            isinstance(field_, ast.AnnAssign) and isinstance(field_.target, ast.Name) and field_.target.id == name
        )
        if is_field and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            return inspect.cleandoc(str(below.value.value))
    return ""


_PASSES: dict[str, type[Pass]] = {}


def all_passes() -> dict[str, type[Pass]]:
    """Every pass by name: Weft's, those defined in this process, and those of installed packages that load."""
    _load()
    return dict(sorted(_PASSES.items()))


def broken_passes() -> dict[str, PipelineError]:
    """Passes of installed packages that cannot be used, by name, each with an error that says why."""
    return _load()


def _load() -> dict[str, PipelineError]:
    """Import all passes. A broken package does not affect the others."""
    _import_built_in_passes()
    broken: dict[str, PipelineError] = {}
    for entry in _offered(tuple(map(_state, sys.path))):
        known = dict(_PASSES)
        try:
            wrong = _why_not_offered(entry)
        except (Exception, SystemExit) as error:  # importing a package may raise anything
            wrong = f"it cannot be loaded: {type(error).__name__}: {error}"
        if wrong:
            _PASSES.clear()
            _PASSES.update(known)
            package = f"{entry.dist.name} {entry.dist.version}" if entry.dist else "a package"
            what = f"{package} offers {entry.name!r} ({entry.value}), but {wrong}"
            broken[entry.name] = PipelineError(compose("passes", what, do=f"fix or uninstall {package}"))
    return broken


@functools.cache
def _import_built_in_passes() -> None:
    """Import every module of `communication` and `rewrite`; each registers the pass that it defines."""
    for package in ("communication", "rewrite"):
        path = importlib.import_module(f"weft.passes.{package}").__path__
        for module in pkgutil.iter_modules(path):
            importlib.import_module(f"weft.passes.{package}.{module.name}")


@functools.lru_cache(maxsize=4)
def _offered(folders: tuple[tuple[int, ...], ...]) -> tuple[EntryPoint, ...]:
    """The passes that installed packages declare; cached by the state of `sys.path`, since reading them is slow."""
    return tuple(sorted(entry_points(group=ENTRY_POINTS), key=lambda entry: (entry.name, entry.value)))


def _state(folder: str) -> tuple[int, ...]:
    """The identity of a folder and the time of its last change; an installation changes it."""
    try:
        found = os.stat(folder or ".")
    except OSError:
        return ()
    return found.st_dev, found.st_ino, found.st_mtime_ns


def _why_not_offered(entry: EntryPoint) -> str:
    found = entry.load()
    if not (isinstance(found, type) and issubclass(found, Pass)):
        return "it is not a Pass"
    if inspect.isabstract(found) or not hasattr(found, "numerics"):
        return "it is a base class: it has no plan or no numerics"
    if found.name() != entry.name:
        return f"the pass is called {found.name()!r}"
    known = _PASSES.setdefault(entry.name, found)
    return "" if known is found else f"{known.__module__} has a pass of that name"


def find_pass(name: str, who: str, also: Iterable[str] = ()) -> type[Pass]:
    """The pass of this name. `who` names the caller in error messages; `also` lists further names to suggest."""
    known = all_passes()
    if name in known:
        return known[name]
    broken = broken_passes()
    if name in broken:
        raise broken[name]
    do = nearest(name, [*known, *also]) or "`weft passes` lists them"
    raise PipelineError(compose(who, f"no pass is called {name!r}", do=do))


def parse_pass(spec: str, also: Iterable[str] = ()) -> Pass:
    """The pass of a spec string such as `hoist-launches{max-in-flight-bytes=1048576}`.

    `also` lists other names to suggest if no pass has this name.
    """
    matched = re.fullmatch(r"\s*([\w-]+)\s*(?:\{([^{}]*)\})?\s*", spec)
    if matched is None:
        do = "write name or name{option=value}"
        raise PipelineError(compose("pipeline", f"{spec.strip()!r} is not a pass", do=do))
    name, options = matched[1], (matched[2] or "").split()
    cls = find_pass(name, "pipeline", also)
    return cls(**dict(_parse_option(cls, option) for option in options))


def _parse_option(cls: type[Pass], option: str) -> tuple[str, Any]:
    key, equals, text = option.partition("=")
    fields = [f.name.replace("_", "-") for f in dataclasses.fields(cls)]
    if key not in fields:
        do = nearest(key, fields) or (f"its options are {', '.join(fields)}" if fields else "it has no options")
        raise PipelineError(compose(cls.name(), f"no option is called {key!r}", do=do))
    hint = typing.get_type_hints(cls)[key.replace("-", "_")]
    if typing.get_origin(hint) is tuple and equals:
        (item, _) = typing.get_args(hint)
        items = tuple(_read(item, part) for part in text.split("/"))
        if _NO_VALUE not in items and "" not in items:
            return key.replace("-", "_"), items
    for kind in typing.get_args(hint) or (hint,):
        if equals and (value := _read(kind, text)) is not _NO_VALUE:
            return key.replace("-", "_"), value
    raise PipelineError(compose(cls.name(), f"{key} is {text!r}, expected {_type_name(hint)}", do=f"write {key}=VALUE"))


_NO_VALUE = object()


def _read(kind: Any, text: str) -> Any:
    if kind is NoneType:
        return None if text == "none" else _NO_VALUE
    if kind is bool:
        return {"true": True, "false": False}.get(text, _NO_VALUE)
    if kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            return _NO_VALUE
    return text if kind is str or text == kind else _NO_VALUE


def _show(value: Any) -> str:
    if isinstance(value, tuple):
        return "/".join(map(str, value))
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
