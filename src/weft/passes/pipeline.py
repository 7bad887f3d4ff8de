"""Pipeline: an ordered list of passes, with a string form.

    Pipeline.parse("remove-dead-code,hoist-launches{max-in-flight-bytes=1048576},sink-waits").run(module)
    Pipeline.parse("my-pass,auto,my-other-pass").run(module)

Presets and their stages are named in one table (`presets.py`), and may appear among passes. The string form of a
pipeline is part of every cache key.
"""

from __future__ import annotations

import re
import time
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import lcm
from pathlib import Path
from typing import Any, Literal, Self

import torch
from torch.fx import Graph, GraphModule

from weft.compat import refresh_names
from weft.cost.cluster import Cluster
from weft.errors import PipelineError, PlanError, RefusedError, WeftError, compose
from weft.graph import check
from weft.graph.dag import collector_paused
from weft.graph.edit import Snapshot, copy_module, recompile
from weft.graph.groups import Group, GroupTable, read_groups
from weft.graph.listings.text import KnownLines, canonical_digest, digest, render, without_values
from weft.graph.renaming import LentNames, lend_names
from weft.graph.versions import analyses_kept, dag_of, forget
from weft.passes.base import Pass, find_pass, parse_pass
from weft.passes.presets import AUTO, NAMED, recognise
from weft.plan.context import Context
from weft.plan.plan import Plan, Step, change_of_lines, nodes_that_differ, what_differs
from weft.quantities import exact_size_text, size_text
from weft.simulation.build import program_of
from weft.simulation.program import Program
from weft.simulation.simulator import simulate
from weft.version import VERSION

MAKE_AGAIN = "make the plan again for this graph with weft.optimize"
MAX_TOLD = 3
"""Number of actions, and of nodes of each, that an error names."""
BREAKS = re.compile(r"[,{}]")
PLANNER, DECIDER, COPIER = "schedule-overlap", "decide-memory", "copy-collectives"
"""The pass that plans the order in every preset, the pass that decides what to keep for it, and the pass that chooses
copies for the result of that."""
DEVICE_LIMIT = "device_limit_bytes"
"""Name of the fact of a plan that states the memory limit, if none was given and the device's memory was the limit."""


@dataclass(frozen=True)
class LogEntry:
    """The outcome of one pass of a run."""

    step: Step
    changed: bool
    seconds: float
    before: str
    """The listing before the pass."""
    after: str


@dataclass(frozen=True)
class Run:
    """The result of a pipeline."""

    module: GraphModule
    plan: Plan
    log: tuple[LogEntry, ...]
    before: str
    """The listing before the first pass."""
    after: str
    from_cache: bool = False
    """Whether the plan was found in the plan cache instead of searched."""
    program: Program | None = None
    """The program of the module, if it is known already."""

    @property
    def device_limit_bytes(self) -> int | None:
        """The memory limit, if none was given and the step fits the device only with one."""
        return self.plan.facts.get(DEVICE_LIMIT)


@dataclass(frozen=True)
class Rewritten:
    """A copy of a module after the passes of a pipeline."""

    module: GraphModule
    steps: tuple[Step, ...]
    changed: bool


@dataclass(frozen=True)
class Pipeline:
    """An ordered list of passes. `auto` expands to the preset that fits the graph."""

    passes: tuple[Pass, ...]
    auto_at: int | None = None
    """The index in `passes` at which `auto` expands. None: the pipeline has no `auto`."""
    from_presets: frozenset[int] = field(default=frozenset(), compare=False)
    """Indices of the passes that a stage or a preset expanded to. `strict` applies only to the passes named one by one.
    """
    left_out: frozenset[str] = frozenset()
    """Names of passes that are not run."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse names of passes, stages and presets, separated by commas."""
        passes: list[Pass] = []
        auto_at: int | None = None
        from_presets: set[int] = set()
        for spec in _specs(text):
            name, _, options = spec.strip().partition("{")
            if name in NAMED and options:
                raise PipelineError(compose("pipeline", f"{name!r} stands for several passes and has no options"))
            if name == AUTO and auto_at is not None:
                raise PipelineError(compose("pipeline", f"{AUTO!r} is given twice", do="give it once"))
            if name == AUTO:
                auto_at = len(passes)
            elif name in NAMED:
                stands_for = cls.parse(NAMED[name]).passes
                from_presets |= {len(passes) + k for k in range(len(stands_for))}
                passes += stands_for
            elif spec.strip():
                passes.append(parse_pass(spec, also=NAMED))
        return cls(tuple(passes), auto_at, frozenset(from_presets))

    def __str__(self) -> str:
        specs = list(map(str, self.passes))
        return ",".join(specs if self.auto_at is None else [*specs[: self.auto_at], AUTO, *specs[self.auto_at :]])

    def chosen(self, graph: Graph, groups: GroupTable, memory_limit_bytes: int | None = None) -> Self:
        """This pipeline with `auto` expanded to the preset that fits the graph.

        With a memory limit, each preset decides what to keep in memory before it plans the order.
        """
        expanded = self._expanded(graph, groups)
        return expanded if memory_limit_bytes is None else expanded._deciding_memory()

    def decides_memory(self, graph: Graph, groups: GroupTable) -> bool:
        """Whether this pipeline, given a memory limit, decides what to keep in memory."""
        passes = self.chosen(graph, groups, memory_limit_bytes=0).passes
        return DECIDER not in self.left_out and any(each.name() == DECIDER for each in passes)

    def _deciding_memory(self) -> Self:
        passes: list[Pass] = []
        from_presets: set[int] = set()
        for k, each in enumerate(self.passes):
            is_preset = k in self.from_presets
            if is_preset and each.name() == PLANNER:
                last = len(passes) - 1
                is_after_copier = last in from_presets and passes[last].name() == COPIER
                from_presets.add(len(passes))
                decider = parse_pass(str(each).replace(PLANNER, DECIDER, 1))  # both have the same options
                passes.insert(last if is_after_copier else len(passes), decider)
            if is_preset:
                from_presets.add(len(passes))
            passes.append(each)
        return replace(self, passes=tuple(passes), from_presets=frozenset(from_presets))

    def _expanded(self, graph: Graph, groups: GroupTable) -> Self:
        if self.auto_at is None:
            return self
        at, preset = self.auto_at, self.parse(recognise(dag_of(graph), groups)).passes
        from_presets = {k if k < at else k + len(preset) for k in self.from_presets} | set(range(at, at + len(preset)))
        passes = (*self.passes[:at], *preset, *self.passes[at:])
        return type(self)(passes, None, frozenset(from_presets), self.left_out)

    def without(self, names: Iterable[str]) -> Self:
        """This pipeline without the passes of these names, also where a stage or a preset has them."""
        left_out = {find_pass(name, "pipeline").name() for name in names}  # an unknown name is an error
        return replace(self, left_out=self.left_out | left_out)

    def run(
        self,
        module: GraphModule,
        *,
        cluster: str | Path | Cluster | None = None,
        groups: Mapping[str, int | Sequence[Sequence[int]]] | None = None,
        memory_limit_bytes: int | None = None,
        effort: Literal["fast", "default", "best"] = "default",
        strict: bool = False,
        withheld: Mapping[str, str] | None = None,
    ) -> Run:
        """Run the passes on a copy of the module.

        `withheld` maps groups whose launches no pass may merge to the reason why; `agreement.withheld` finds them.
        """
        described = Cluster.load(cluster) if isinstance(cluster, str | Path) else cluster
        context = Context(read_groups(module, groups), described, memory_limit_bytes, effort, strict, withheld or {})
        chosen = self.chosen(module.graph, context.groups, memory_limit_bytes)
        if memory_limit_bytes is not None and not any(p.keeps_memory_limit for p in chosen.passes):
            what = f"no pass of {str(self)!r} keeps a memory limit"
            raise PipelineError(compose("pipeline", what, do="add schedule-overlap, or leave memory_limit_bytes out"))
        places = [k for k, p in enumerate(chosen.passes) if p.name() not in self.left_out]
        from_presets = {new for new, old in enumerate(places) if old in chosen.from_presets}
        run = _run(module, context, [(chosen.passes[k], None) for k in places], from_presets=from_presets)
        if memory_limit_bytes is not None:
            _check_memory(run, context, memory_limit_bytes)
        return run

    def rewrite(
        self,
        module: GraphModule,
        *,
        cluster: str | Path | Cluster | None = None,
        groups: Mapping[str, int | Sequence[Sequence[int]]] | None = None,
    ) -> Rewritten:
        """Run the passes on a copy of the module, without the listings that a plan needs."""
        described = Cluster.load(cluster) if isinstance(cluster, str | Path) else cluster
        context = Context(read_groups(module, groups), described)
        with collector_paused(), analyses_kept():
            chosen = self.chosen(module.graph, context.groups)
            check.validate(dag_of(module.graph))
            made = copy_module(module)
            done: list[tuple[Step, bool]] = []
            for each in (each for each in chosen.passes if each.name() not in self.left_out):
                done.append(each.run(made.graph, context))
                if not _is_ours(each):
                    forget(made.graph)
            recompile(made)
        return Rewritten(made, tuple(step for step, _ in done), any(changed for _, changed in done))


def _is_ours(rewrite: Pass) -> bool:
    """Whether a pass changes graphs only through an `Edit`."""
    return type(rewrite).__module__.startswith("weft.")


def _specs(text: str) -> Iterator[str]:
    """The parts of a text between commas, except commas inside braces."""
    start, is_inside = 0, False
    for at in BREAKS.finditer(text):
        if at[0] == "," and not is_inside:
            yield text[start : at.start()]
            start = at.end()
        elif at[0] != ",":
            is_inside = at[0] == "{"
    yield text[start:]


def replay(
    module: GraphModule, plan: Plan, *, groups: Mapping[str, int | Sequence[Sequence[int]]] | None = None
) -> Run:
    """Apply a plan to a copy of the module; raises if the plan was made for another graph."""
    context = Context(read_groups(module, groups))
    steps = [(parse_pass(step.spec), step) for step in plan.steps]
    return _run(module, context, steps, plan)


def identity_of(
    module: GraphModule, groups: Mapping[str, int | Sequence[Sequence[int]]] | None = None
) -> tuple[str, str]:
    """The listing of a graph, and the digest under which a folder keeps its plan.

    The digest does not depend on the names of nodes, unless the graph has symbolic sizes.
    """
    made, table = copy_module(module), read_groups(module, groups)
    listing = render(made, table)
    return listing, canonical_digest(made, table) or digest(listing)


def replay_in_place(
    module: GraphModule, plan: Plan, *, groups: Mapping[str, int | Sequence[Sequence[int]]] | None = None
) -> None:
    """Apply a plan that was made for a copy of the module to the module itself, for compilers that keep a reference.

    On an exception the module is restored, so that no compiler is left with half of a plan.
    """
    context = Context(read_groups(module, groups))
    kept = Snapshot(module)
    try:
        refresh_names(module.graph)  # otherwise new nodes may get other names than in the copy
        lent = lend_names(module.graph, plan.listing)
        try:
            for step in plan.steps:
                parse_pass(step.spec).run(module.graph, context, step)
        finally:
            if lent is not None:
                lent.give_back()
        recompile(module)
    except BaseException:
        kept.restore()
        recompile(module)
        raise


def _run(
    module: GraphModule,
    context: Context,
    work: Sequence[tuple[Pass, Step | None]],
    plan: Plan | None = None,
    from_presets: Container[int] = (),
) -> Run:
    with collector_paused(), analyses_kept():
        return _run_passes(module, context, work, plan, from_presets)


def _run_passes(
    module: GraphModule,
    context: Context,
    work: Sequence[tuple[Pass, Step | None]],
    plan: Plan | None,
    from_presets: Container[int],
) -> Run:
    expected = plan.facts if plan is not None else {}
    check.validate(dag_of(module.graph))
    made = copy_module(module)
    lines = KnownLines()
    listing = render(made, context.groups, lines)
    facts = facts_of(made, context.groups, listing)
    if DEVICE_LIMIT in expected:
        facts[DEVICE_LIMIT] = expected[DEVICE_LIMIT]
    _check_version(expected, facts)
    log: list[LogEntry] = []
    own, current = listing, digest(listing)
    lent = None if plan is None or plan.start == current else _lend_names(made, context.groups, plan)
    if lent is not None and plan is not None:
        listing, current, lines = plan.listing, plan.start, KnownLines()
    for place, (rewrite, step) in enumerate(work):
        if step is not None and plan is not None and step.digest != current:
            raise _other_graph(plan, place, listing, facts)
        start = time.perf_counter()
        mine = replace(context, strict=False) if place in from_presets else context
        done, changed = (
            rewrite.run(made.graph, mine, step) if step is None else _carry_out(rewrite, made, mine, step, listing)
        )
        seconds = time.perf_counter() - start
        if not _is_ours(rewrite):
            forget(made.graph)
        after = render(made, context.groups, lines) if changed else listing
        known = step.lines if step is not None else ()  # they only serve messages; digests check the listings
        done = replace(done, digest=current, lines=(known or change_of_lines(listing, after)) if changed else ())
        log.append(LogEntry(done, changed, seconds, listing, after))
        listing, current = after, digest(after) if changed else current
    if plan is not None and plan.result != current:
        raise _other_graph(plan, len(plan.steps), listing, facts)
    if lent is not None and plan is not None:
        lent.give_back()
        recompile(made)
        return Run(made, plan, tuple(_in_own_names(entry, lent) for entry in log), own, render(made, context.groups))
    recompile(made)
    steps = tuple(entry.step for entry in log)
    return Run(made, Plan(steps, facts, result=current, listing=without_values(own)), tuple(log), own, listing)


def _lend_names(module: GraphModule, groups: GroupTable, plan: Plan) -> LentNames | None:
    """Lend a module the names of the graph that a plan was made for; None if they differ in more than names."""
    lent = lend_names(module.graph, plan.listing)
    if lent is not None and digest(render(module, groups)) != plan.start:
        lent.give_back()
        return None
    return lent


def _in_own_names(entry: LogEntry, lent: LentNames) -> LogEntry:
    """The outcome of a pass with the graph's own names in its decisions."""
    decisions = (
        replace(
            each,
            nodes=tuple(lent.back.get(name, name) for name in each.nodes),
            blocking=lent.own_name(each.blocking),
            sentence=lent.in_own_names(each.sentence, (*each.nodes, *filter(None, [each.blocking]))),
        )
        for each in entry.step.decisions
    )
    return replace(entry, step=replace(entry.step, decisions=tuple(decisions)))


def _carry_out(rewrite: Pass, module: GraphModule, context: Context, step: Step, listing: str) -> tuple[Step, bool]:
    """Carry out a step of a plan. The pass trusts the actions, so a corrupt plan may raise any exception."""
    try:
        return rewrite.run(module.graph, context, step)
    except WeftError:
        raise
    except Exception as error:
        what = f"step {step.spec!r} cannot be carried out: {type(error).__name__}: {error}"
        raise PlanError(compose("plan", what, where=_nodes_of(step, listing), do=MAKE_AGAIN)) from error


def _nodes_of(step: Step, listing: str) -> list[str]:
    """The first actions of a step, each with the lines of the nodes that it names."""
    lines = {line.strip().partition(":")[0]: line.strip() for line in listing.splitlines() if line.startswith(" ")}
    told: list[str] = []
    for action in step.actions[:MAX_TOLD]:
        words = dict.fromkeys(re.findall(r"\w+", repr(action)))
        names = [word for word in words if word in lines][:MAX_TOLD]
        told += [f"action {action.kind!r} names no node of the graph"] if not names else []
        told += [f"action {action.kind!r} names {lines[name]}" for name in names]
    return told


def _check_memory(run: Run, context: Context, limit_bytes: int) -> None:
    """Check the result against the memory limit: passes after the scheduler may have raised the peak."""
    peak = simulate(program_of(run.module, context.groups, context.target_cluster)).peak_bytes
    if peak > limit_bytes:
        what = f"the graph needs {size_text(peak)}, above the memory limit of {exact_size_text(limit_bytes)}"
        raise RefusedError(compose("pipeline", what, do="put schedule-overlap last, or raise the limit"))


def _check_version(expected: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    """Refuse a plan made with another version of torch: operators of the same name may behave differently."""
    differences = what_differs(expected, found, only=("torch",)) if "torch" in expected else []
    if differences:
        do = "make the plan again with this version"
        raise PlanError(compose("plan", "it was made with another version of torch", where=differences, do=do))


def _other_graph(plan: Plan, num_steps: int, listing: str, found: Mapping[str, Any]) -> PlanError:
    """The error for a plan that was made for another graph, or whose first steps lead to another one than then."""
    differences = nodes_that_differ(plan.listing_after(num_steps), without_values(listing))
    if num_steps:
        what = f"step {plan.steps[num_steps - 1].spec!r} leads to another graph than it did when the plan was made"
    else:
        what = (
            f"step {plan.steps[0].spec!r} was made for another graph" if plan.steps else "it was made for another graph"
        )
        differences = [*what_differs(plan.facts, found), *differences]
    return PlanError(compose("plan", what, where=differences, do=MAKE_AGAIN))


def facts_of(module: GraphModule, groups: GroupTable, listing: str) -> dict[str, Any]:
    """Facts that help a reader tell graphs apart: versions, ranks, groups, inputs and number of nodes."""
    inputs = next((line for line in listing.splitlines() if line.startswith("def graph(")), "")
    return {
        "num_ranks": lcm(1, *(group.span for group in groups)),
        "groups": {g.name: _layout(g) for g in groups},
        "inputs": inputs.removeprefix("def graph(").removesuffix("):"),
        "num_nodes": len(module.graph.nodes),
        "torch": torch.__version__.partition("+")[0],
        "weft": VERSION,
    }


def _layout(group: Group) -> Any:
    """The ranks that form the groups, as stored in JSON."""
    if group.ranks is not None:
        return [list(part) for part in group.ranks]
    return {"size": group.size, "stride": group.stride}
