"""The functions of the public interface: optimize, apply, verify, bisect, simulate, predict, listing and parse."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import lcm, prod
from pathlib import Path
from typing import Any, Literal, get_args

from torch import Tensor
from torch.fx import GraphModule

from weft.arguments import (
    check_cache,
    check_cluster,
    check_groups,
    check_mesh,
    check_mesh_of,
    check_module,
    check_modules,
    check_optimization,
    check_ranks,
    check_type,
)
from weft.bounds.bounded_simulation import simulate_modules
from weft.compat import real_values
from weft.cost.cluster import Cluster
from weft.errors import ListingError, PlanError, ReportError, VerificationError, WeftError, compose
from weft.graph.aliasing import may_share_inputs
from weft.graph.assumed_sizes import Sizes, assume_sizes, notes_on_sizes
from weft.graph.collective import collectives
from weft.graph.dag import collector_paused
from weft.graph.groups import Group, GroupTable, read_groups
from weft.graph.listings.text import digest, render
from weft.graph.listings.text import parse as read_listing
from weft.graph.origins import name_nodes
from weft.graph.versions import analyses_kept
from weft.passes.base import Numerics, parse_pass
from weft.passes.cache_key import key_of
from weft.passes.pipeline import LogEntry, Pipeline, Run, replay
from weft.plan.cache import PlanCache, is_switched_off
from weft.plan.context import Context
from weft.plan.plan import Plan
from weft.prediction.between_nodes import notes_on_bytes_between_nodes
from weft.prediction.prediction import STRAGGLER_SIGMA, Prediction, predict_modules
from weft.prediction.within_device import within_device
from weft.process import left_as_it_was
from weft.report.plain_text import WORD
from weft.report.report import GraphRecord, Report, record_memory, record_passes, record_streams
from weft.report.simulated import notes_on, with_simulations
from weft.report.work import check_tokens
from weft.simulation.timeline import Timeline
from weft.verification.bisection import Fault, find_fault
from weft.verification.comparison import Verdict, compare, example_inputs
from weft.verification.real_ranks.world import RealRanks
from weft.verification.rounding import Sides, judge_rounding
from weft.verification.symbolic.equivalence import Proof, prove
from weft.verification.virtual.cluster import VirtualCluster

log = logging.getLogger("weft")

Groups = Mapping[str, int | Sequence[Sequence[int]]]
Witness = Literal["structure", "equivalence", "values", "off"]


@dataclass(frozen=True)
class Result:
    """An optimized module, the plan that led to it, and the report."""

    module: GraphModule
    report: Report
    log: tuple[LogEntry, ...] = field(default=(), repr=False)
    """The step of each pass, with the listing before and after it."""

    @property
    def plan(self) -> Plan:
        """The plan. For a cluster it has evidence, which is computed on first use."""
        return self.report.plan


@left_as_it_was()
def optimize(
    module: GraphModule,
    cluster: str | Path | Cluster | None = None,
    *,
    pipeline: str | Pipeline = "auto",
    memory_limit_bytes: int | None = None,
    effort: Literal["fast", "default", "best"] = "default",
    strict: bool = False,
    verify: Witness = "structure",
    groups: Groups | None = None,
    withheld: Mapping[str, str] | None = None,
    tokens_per_step: int | None = None,
    cache: bool | str | Path = True,
    sizes: Sizes | None = None,
) -> Result:
    """Run a pipeline on a copy of the module, which shares its parameters; the module itself does not change.

    `cluster` is a preset, such as `h100-8x8`, a TOML file or a `Cluster`; without one, nothing is priced or compared.
    `pipeline` names passes, stages and presets, separated by commas; `auto` chooses by the graph (`planning.md`).
    `memory_limit_bytes` is the peak memory that one rank may reach; without it, a step that does not fit the cluster's
    device is planned again within the device's memory (`memory.md`). `effort` is how long to search for a shorter step.
    `strict` raises if the graph prevents a rewrite that a pass wanted to make. `groups` gives sizes or ranks of groups
    that the graph does not state: `{'dp': 8}`. `verify` chooses the witness: `structure` checks the invariants after
    every pass; `equivalence` also proves, without data and at any size, that both graphs compute the same; `values`
    runs both on every rank of a virtual cluster. `withheld` maps groups whose launches no pass may merge to the
    reason why; `weft.verification.agreement.agreement.withheld` finds them for ranks with different graphs.
    `tokens_per_step`, of all ranks together, is for the report; the zoo sets it for its own captures. `cache` is the
    folder of the plan cache (`planning.md`), or False to search for a plan even if an earlier call found one. `sizes`
    are assumptions about sizes that only the data decides: `balanced`, or values by the names of the listing, such as
    `{'u0': 512}`. Only prices use them (`experts.md`).

    Raises a `WeftError`: `GraphError`, `ClusterError`, `PipelineError` or `ReportError` for an invalid argument,
    `RefusedError` if `strict` or the memory limit cannot be met, `VerificationError` if the check fails.
    """
    check_optimization("optimize", module, cluster, pipeline, memory_limit_bytes, effort, groups)
    if verify not in get_args(Witness):
        do = f"use one of {', '.join(map(repr, get_args(Witness)))}"
        raise VerificationError(compose("optimize", f"no witness is called {verify!r}", do=do))
    if tokens_per_step is not None:
        do = "leave it out if it is not known"
        check_type("optimize", "tokens_per_step", tokens_per_step, int, "a whole number", do=do, error=ReportError)
    check_tokens(tokens_per_step)
    described = Cluster.load(cluster) if isinstance(cluster, str | Path) else cluster
    chosen = Pipeline.parse(pipeline) if isinstance(pipeline, str) else pipeline
    check_cache("optimize", cache)
    if sizes is not None:
        assume_sizes(module, sizes)
    with collector_paused(), analyses_kept():
        table = read_groups(module, groups)

        def plan_within(pipeline: Pipeline, limit_bytes: int | None) -> Run:
            return pipeline.run(
                module,
                cluster=described,
                groups=groups,
                memory_limit_bytes=limit_bytes,
                effort=effort,
                strict=strict,
                withheld=withheld,
            )

        def search() -> Run:
            if memory_limit_bytes is not None or described is None:
                return plan_within(chosen, memory_limit_bytes)
            expanded = chosen.chosen(module.graph, table)
            run = plan_within(expanded, None)
            if not expanded.decides_memory(module.graph, table):
                return run
            return within_device(run, partial(plan_within, expanded), table, described)

        if cache is False or is_switched_off():
            run = search()
        else:
            context = Context(table, described, memory_limit_bytes, effort, strict, withheld or {})
            key = key_of(module, chosen, context)
            run = _from_cache(PlanCache(None if cache is True else cache), key, module, groups, search)
        return _checked(module, run, described, verify, groups, tokens_per_step, memory_limit_bytes)


def _from_cache(
    cache: PlanCache, key: str | None, module: GraphModule, groups: Groups | None, search: Callable[[], Run]
) -> Run:
    """The run of a plan in the cache; without one, a plan is searched and kept."""
    if key is None:
        return search()
    try:
        plan = cache.find(key)
        if plan is not None:
            return replace(replay(module, plan, groups=groups), from_cache=True)
    except WeftError as error:
        log.warning("weft: a graph is planned anew: %s", error)
    run = search()
    cache.keep(key, run.plan)
    return run


def carry_out(
    module: GraphModule,
    plan: Plan,
    cluster: Cluster | None = None,
    *,
    verify: Witness = "structure",
    groups: Groups | None = None,
) -> Result:
    """Apply a plan to a copy of the module, with the checks and the report of `optimize`."""
    with analyses_kept():
        return _checked(module, replay(module, plan, groups=groups), cluster, verify, groups, None)


def _checked(
    module: GraphModule,
    run: Run,
    cluster: Cluster | None,
    verify: Witness,
    groups: Groups | None,
    tokens_per_step: int | None,
    memory_limit_bytes: int | None = None,
) -> Result:
    """The result of a run: checked by a witness, and reported."""
    witnesses = ["structure: every invariant holds after every pass"] if verify != "off" else []
    if verify == "equivalence":
        witnesses.append(f"equivalence: {_proof(module, run, groups)}")
    if verify == "values":
        verdict = _verify_modules(module, run.module, groups=groups)
        if not verdict.equal:
            raise VerificationError(compose("optimize", f"the optimized graph computes something else: {verdict}"))
        witnesses.append(f"values: {verdict}")
    report = _report(module, run, tuple(witnesses))
    if cluster is not None:
        report = with_simulations(
            report,
            module,
            run.module,
            cluster,
            groups=groups,
            tokens_per_step=tokens_per_step,
            memory_limit_bytes=memory_limit_bytes,
            device_limit_bytes=run.device_limit_bytes,
            program=run.program,
        )
    return Result(run.module, report, run.log)


def _proof(module: GraphModule, run: Run, groups: Groups | None) -> Proof:
    """The proof that a run kept the results; in real arithmetic only if a pass that reassociates changed the graph."""
    reassociates = any(
        entry.changed and parse_pass(entry.step.spec).numerics is not Numerics.EXACT for entry in run.log
    )
    proof = prove(module, run.module, groups=groups)
    if not proof and reassociates:
        proof = prove(module, run.module, groups=groups, reassociates=True)
    if not proof:
        do = "compare values with verify='values'; if they differ, please report the listing"
        raise VerificationError(compose("optimize", f"the optimized graph is {proof}", do=do))
    return proof


def _report(module: GraphModule, run: Run, witnesses: tuple[str, ...]) -> Report:
    return Report(
        before=_record(module, run.before),
        after=_record(run.module, run.after),
        passes=record_passes(run.log),
        streams=record_streams(run.log),
        memory=record_memory(run.log),
        applied=tuple(d for entry in run.log for d in entry.step.applied),
        declined=tuple(d for entry in run.log for d in entry.step.declined),
        bare_plan=run.plan,
        witnesses=witnesses,
        may_share_inputs=may_share_inputs(module),
        from_cache=run.from_cache,
        modules=_modules(module, run),
    )


def _modules(module: GraphModule, run: Run) -> dict[str, str]:
    """The modules of the nodes that decisions name."""
    sentences = (decision.sentence for entry in run.log for decision in entry.step.decisions)
    named = {word for sentence in sentences for word in WORD.findall(sentence)}
    found = name_nodes(module.graph, named)
    return dict(sorted((found | name_nodes(run.module.graph, named - found.keys())).items()))


def _record(module: GraphModule, listing: str) -> GraphRecord:
    return GraphRecord(len(module.graph.nodes), sum(1 for _ in collectives(module.graph)), digest(listing))


@left_as_it_was()
def apply(module: GraphModule, plan: Plan, *, groups: Groups | None = None) -> GraphModule:
    """Apply a plan to a copy of the module.

    `groups` gives sizes or ranks of groups that the graph does not state, as for `weft.optimize`. Raises `PlanError`
    if the plan was made for another graph.
    """
    check_module("apply", module)
    is_path = isinstance(plan, str | Path)
    do = f"load it first: Plan.load({str(plan)!r})" if is_path else "pass result.plan, or what Plan.load returns"
    check_type("apply", "plan", plan, Plan, "a Plan", do=do, error=PlanError)
    check_groups("apply", groups)
    return replay(module, plan, groups=groups).module


@left_as_it_was()
def verify(
    before: GraphModule | Sequence[GraphModule],
    after: GraphModule | Sequence[GraphModule],
    ranks: int | None = None,
    *,
    mesh: Mapping[str, int] | None = None,
    backend: Literal["virtual", "gloo"] = "virtual",
    inputs: Sequence[Sequence[Any]] | None = None,
    seed: int = 0,
    groups: Groups | None = None,
) -> Verdict:
    """Run both sides on every rank and compare outputs and mutated inputs.

    Each side is one module for all ranks or one per rank. `mesh` gives the axes with their sizes, the last one
    varying fastest, and names every group of the graph; without it the groups of the modules tile `ranks` ranks.
    `backend` runs the ranks in this process (`virtual`) or each in its own process (`gloo`). `inputs` holds the
    arguments of each rank; by default they are random, made from the metadata of the graph's inputs and `seed`.
    `groups` gives sizes or ranks of groups that the graph does not state.

    Raises `GraphError` or `VerificationError` if a side cannot run. The verdict says whether the sides differ.
    """
    check_modules("verify", before, name="before")
    check_modules("verify", after, name="after")
    check_ranks(ranks)
    check_mesh(mesh)
    check_groups("verify", groups)
    with real_values():  # a compiler that calls us may be tracing
        return _verify(before, after, ranks, mesh, backend, inputs, seed, groups)


def _verify(
    before: GraphModule | Sequence[GraphModule],
    after: GraphModule | Sequence[GraphModule],
    ranks: int | None,
    mesh: Mapping[str, int] | None,
    backend: str,
    inputs: Sequence[Sequence[Any]] | None,
    seed: int,
    groups: Groups | None,
) -> Verdict:
    first = before if isinstance(before, GraphModule) else before[0]
    table = read_groups(first, groups)
    num_ranks = ranks or (prod(mesh.values()) if mesh else lcm(1, *(group.span for group in table)))
    given = inputs if inputs is not None else example_inputs(first, num_ranks, seed=seed)
    sides = [_tables(side, num_ranks, mesh, groups) for side in (before, after)]
    if backend == "virtual":
        cluster = VirtualCluster(num_ranks)
        results = [
            cluster.run(side, given, tables, seed=seed) for side, tables in zip((before, after), sides, strict=True)
        ]
    elif backend == "gloo":
        with RealRanks(num_ranks) as world:
            results = [
                world.run(side, given, tables, seed=seed) for side, tables in zip((before, after), sides, strict=True)
            ]
    else:
        raise VerificationError(compose("verify", f"no backend is called {backend!r}", do="use 'virtual' or 'gloo'"))
    verdict = compare(*results, num_terms=num_ranks)
    if not verdict:
        verdict = judge_rounding(verdict, Sides((before, after), sides, given, seed), results)
    return replace(verdict, backend=backend)


_verify_modules = verify

__all__ = [
    "Fault",
    "Prediction",
    "Result",
    "apply",
    "bisect",
    "listing",
    "optimize",
    "parse",
    "predict",
    "simulate",
    "verify",
]


@left_as_it_was()
def bisect(
    module: GraphModule,
    cluster: str | Path | Cluster | None = None,
    *,
    pipeline: str | Pipeline = "auto",
    memory_limit_bytes: int | None = None,
    effort: Literal["fast", "default", "best"] = "default",
    verify: Literal["values", "equivalence"] = "values",
    groups: Groups | None = None,
    seed: int = 0,
) -> Fault | None:
    """Find the first pass of a pipeline that changes values or fails a check; None if no pass does.

    `values` runs the graph on every rank of a virtual cluster before and after each pass; `equivalence` tries to prove
    each change instead, without data and at any size; a change that it cannot prove counts as a fault. The other
    arguments are the same as for `weft.optimize`.
    """
    check_optimization("bisect", module, cluster, pipeline, memory_limit_bytes, effort, groups)
    if verify not in ("values", "equivalence"):
        do = "use 'values' or 'equivalence'"
        raise VerificationError(compose("bisect", f"no witness is called {verify!r}", do=do))
    described = Cluster.load(cluster) if isinstance(cluster, str | Path) else cluster
    context = Context(read_groups(module, groups), described, memory_limit_bytes, effort)
    chosen = Pipeline.parse(pipeline) if isinstance(pipeline, str) else pipeline

    def compare_values(before: GraphModule, after: GraphModule, exactly: bool) -> str:
        verdict = _verify_modules(before, after, groups=groups, seed=seed)
        return "" if verdict.bitwise or (verdict.equal and not exactly) else str(verdict)

    def compare_names(before: GraphModule, after: GraphModule, exactly: bool) -> str:
        proof = prove(before, after, groups=groups, reassociates=not exactly)
        return "" if proof else str(proof)

    compared = compare_values if verify == "values" else compare_names
    return find_fault(module, chosen.chosen(module.graph, context.groups, memory_limit_bytes).passes, context, compared)


def _tables(
    side: GraphModule | Sequence[GraphModule], num_ranks: int, mesh: Mapping[str, int] | None, groups: Groups | None
) -> GroupTable | list[GroupTable]:
    if not isinstance(side, GraphModule):
        return [_table(module, num_ranks, mesh, groups) for module in side]
    return _table(side, num_ranks, mesh, groups)


def _table(module: GraphModule, num_ranks: int, mesh: Mapping[str, int] | None, groups: Groups | None) -> GroupTable:
    table = read_groups(module, groups)
    if mesh is not None:
        check_mesh_of(table, mesh, groups)
    known = dict(table.groups)
    stride = 1
    for axis, size in reversed(list((mesh or {}).items())):
        if axis in known and known[axis].size not in (0, size):
            what = f"group {axis!r} has {known[axis].size} ranks in the graph, {size} in the mesh"
            raise VerificationError(compose("verify", what, do="capture the graph for this mesh"))
        known[axis] = replace(known.get(axis, Group(axis, size)), size=size, stride=stride, ranks=None)
        stride *= size
    for group in known.values():
        if group.size == 0:
            do = "give it: groups={" + repr(group.name) + ": 8}"
            raise VerificationError(compose("verify", f"the size of group {group.name!r} is unknown", do=do))
        if group.size > num_ranks:
            what = f"group {group.name!r} has {group.size} ranks, the cluster {num_ranks}"
            raise VerificationError(compose("verify", what, do=f"use ranks={group.size} or more"))
    return GroupTable(known, table.runtime)


@left_as_it_was()
def simulate(
    modules: GraphModule | Sequence[GraphModule],
    cluster: str | Path | Cluster | None = None,
    *,
    groups: Groups | None = None,
    overrides: Mapping[str, float] | None = None,
    sizes: Sizes | None = None,
) -> Timeline:
    """The timeline of a graph, or of graphs that run one after the other, on a cluster; with a lower bound.

    `cluster` is a preset, a TOML file or a `Cluster`; the default is `h100-8x8`, or more such nodes if the groups
    need them. `groups` gives sizes or ranks of groups that the graph does not state. `overrides` are times in
    microseconds by the name of a node, such as measured ones; they replace estimates. `sizes` are assumptions about
    sizes that only the data decides, as for `weft.optimize`. Raises `GraphError` if a graph
    cannot be simulated, `ClusterError` if the cluster cannot be read or has too few ranks.
    """
    check_modules("simulate", modules)
    if cluster is not None:
        check_cluster("simulate", cluster)
    check_groups("simulate", groups)
    _assume(modules, sizes)
    return simulate_modules(modules, cluster, groups, overrides=overrides)


@left_as_it_was()
def predict(
    modules: GraphModule | Sequence[GraphModule],
    cluster: str | Path | Cluster,
    *,
    runtime: str | None = None,
    root: Literal["split", "one"] = "split",
    execution: str | None = None,
    attention: str | None = None,
    tokens_per_step: int | None = None,
    straggler_sigma: float = STRAGGLER_SIGMA,
    groups: Groups | None = None,
    sizes: Sizes | None = None,
) -> Prediction:
    """Predict a training step on a cluster: throughput, utilisation, memory and exposed communication.

    `runtime` rewrites the graph into what a framework executes, such as `fsdp2`; without it, the graph runs as it is.
    `root` is the layout of the parameters outside of blocks: all one group, or embedding and head each by itself.
    `execution` says what is compiled: `compiled`, `blocks` (each repeated one), `eager` or `cuda-graphs` (compiled and
    replayed). `attention` names a kernel of the device, such as `flash2` or `cudnn`. `tokens_per_step`, of all ranks
    together, is only needed if the graph does not state it. `straggler_sigma` is the standard deviation of the ranks'
    step times, as a share. `sizes` and other arguments are as in `weft.simulate`. The error bars come from steps
    that were published or measured (`validation.md`).
    """
    check_modules("predict", modules)
    check_cluster("predict", cluster)
    check_groups("predict", groups)
    check_tokens(tokens_per_step)
    several = _assume(modules, sizes)
    described = cluster if isinstance(cluster, Cluster) else Cluster.load(cluster)
    found = predict_modules(
        several,
        described,
        runtime=runtime,
        root=root,
        execution=execution,
        attention=attention,
        tokens=tokens_per_step,
        straggler_sigma=straggler_sigma,
        groups=groups,
    )
    sized = dict.fromkeys(note for module in several for note in notes_on_sizes(module))
    between = (note for module in several for note in notes_on_bytes_between_nodes(module, described, groups))
    return replace(found, notes=(*found.notes, *sized, *notes_on(described), *between))


def _assume(modules: GraphModule | Sequence[GraphModule], sizes: Sizes | None) -> list[GraphModule]:
    """The modules as a list, after stating the sizes that only the data decides."""
    several = [modules] if isinstance(modules, GraphModule) else list(modules)
    for module in several if sizes is not None else ():
        assume_sizes(module, sizes or {})
    return several


@left_as_it_was()
def listing(module: GraphModule) -> str:
    """The graph of a module as text; `weft.parse` reads it back."""
    check_module("listing", module)
    return render(module)


@left_as_it_was()
def parse(text: str, constants: Mapping[str, Tensor] | None = None) -> GraphModule:
    """The graph module of a listing, as `weft.listing` writes it; no part of the text is run.

    `tutorial.md` shows a listing. `constants` gives the values of constants that are too large for the text. Raises
    `ListingError`, with the line, if the text is not a listing.
    """
    do = "pass the text of a listing: weft.parse(Path('step.txt').read_text())"
    check_type("parse", "text", text, str, "the text of a listing", do=do, error=ListingError)
    return read_listing(text, constants)
