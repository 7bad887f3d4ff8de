"""Sweep: graphs on several clusters with several pipelines and limits; each combination is a cell of a table.

    cells = sweep(module, ["h100-8x8", "a100-8x8"], memory_limits=[20 << 30, 24 << 30])

Contract: a cell depends only on the listing and the marks of a graph, its tokens, the effort and its place on the axes,
so cells run in any process and in any order. They are numbered by graph, then by cluster, pipeline, memory limit and
bucket size, and are returned in that order. Policies, which fix by hand what stays in memory, are planned without a
limit; they come after the limits. A cell that fails holds its error; a cell whose worker dies is run again. If no
schedule was found that meets its memory limit, a cell also holds a limit that can be met. Each cell is one line of
JSON; `merge` joins the lines of all shards of one or more sweeps.
"""

from __future__ import annotations

import json
import math
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError
from torch.fx import GraphModule

from weft.cost.cluster import Cluster
from weft.errors import ClusterError, MemoryLimitError, PipelineError, ReadError, ReportError, WeftError, compose
from weft.graph.about import tokens_per_step
from weft.graph.groups import read_groups
from weft.graph.listings.text import digest, parse, render
from weft.graph.marks import Mark, marks_of, put_marks
from weft.passes.pipeline import Pipeline
from weft.plan.plan import Retention
from weft.report.baseline import Baseline, baseline_of
from weft.report.report import GraphRecord, Report, record_memory, record_passes
from weft.report.simulated import with_simulations
from weft.report.summary import Totals
from weft.report.work import check_tokens
from weft.report.workers import answers, executor_for
from weft.retention.policies import RetentionPolicy, follow_policy, read_policy

Effort = Literal["fast", "default", "best"]
MAX_ERRORS = 20
"""Number of faults that the error of `merge` lists."""


@dataclass(frozen=True)
class Cell:
    """One cluster with one pipeline under one pair of limits."""

    sweep: str
    """Digest of the graphs and of all axes: equal for the shards of one sweep."""
    index: int
    num_cells: int
    """Number of cells of the whole sweep."""
    cluster: str
    pipeline: str
    memory_limit_bytes: int | None = None
    max_bucket_bytes: int | None = None
    source: str | None = None
    """Name of the graph; None if the sweep was given one graph without a name."""
    policy: str | None = None
    """Name of the policy that the graph follows by hand; None for the given graph."""
    before: Totals | None = None
    after: Totals | None = None
    runtime: str | None = None
    """The runtime that people run the graph with today; None if none fits."""
    runtime_us: float | None = None
    """The step of the graph with that runtime."""
    recomputed: int | None = None
    """Number of values that backward recomputes; None without a memory limit and a policy."""
    gathered_again: int | None = None
    """Number of weights that backward gathers again; None without a memory limit and a policy."""
    pass_seconds: float | None = None
    error: str | None = None
    """The reason why the cell has no figures."""
    fitting_bytes: int | None = None
    """If no schedule was found that meets the memory limit: a limit that can be met."""

    @property
    def has_failed(self) -> bool:
        """Whether the cell has no figures for another reason than a memory limit that is too small."""
        return self.error is not None and self.fitting_bytes is None

    def to_json(self) -> str:
        """The cell as one line of JSON."""
        return json.dumps(asdict(self), sort_keys=True, allow_nan=False)


@dataclass(frozen=True)
class Task:
    """The message to a worker, which parses the listing itself."""

    cell: Cell
    listing: str
    marks: tuple[Mark, ...]
    cluster: Cluster
    pipeline: str
    tokens_per_step: int | None = None
    effort: Effort = "default"


def sweep(
    module: GraphModule | Mapping[str, GraphModule],
    clusters: Sequence[str | Path | Cluster],
    pipelines: Sequence[str | Pipeline] = ("auto",),
    executor: Executor | None = None,
    *,
    memory_limits: Sequence[int | None] = (None,),
    bucket_bytes: Sequence[int | None] = (None,),
    policies: Mapping[str, GraphModule | RetentionPolicy] | None = None,
    effort: Effort = "default",
    jobs: int = 1,
    shard: tuple[int, int] = (1, 1),
    tokens_per_step: int | None = None,
    done: Callable[[Cell], object] | None = None,
) -> list[Cell]:
    """Optimize and simulate a graph on every cluster with every pipeline under every limit; None means unlimited.

    Several graphs are given by their names; policies apply to each of them.
    `memory_limits` are limits for `weft.optimize`; `bucket_bytes` are largest bucket sizes for `schedule-overlap`.
    `policies` are steps to compare with, each as its own graph, or as a policy that the given graph is to follow.
    The cells run on the executor. Without one they run in this process, or in a pool of `jobs` spawned processes. The
    shard (i, n), with i from 1 to n, takes every n-th cell from the i-th on. `done` is called with each cell in order.
    """
    axes = SweepAxes(clusters, pipelines, memory_limits, bucket_bytes)
    named = {None: module} if isinstance(module, GraphModule) else module
    graphs = [SweptGraph(name, each, policies or {}) for name, each in named.items()]
    tasks = tasks_of(graphs, axes, tokens_per_step, effort)
    cells: list[Cell] = []
    for cell in run_tasks(shard_of(tasks, *shard), executor, jobs):
        cells.append(cell)
        if done is not None:
            done(cell)
    return cells


@dataclass(frozen=True)
class SweptGraph:
    """A graph of a sweep."""

    name: str | None
    module: GraphModule
    policies: Mapping[str, GraphModule | RetentionPolicy]
    """Steps to compare with, planned without a memory limit."""


@dataclass(frozen=True)
class SweepAxes:
    """The values that a sweep combines for each graph."""

    clusters: Sequence[str | Path | Cluster]
    pipelines: Sequence[str | Pipeline]
    memory_limits: Sequence[int | None]
    bucket_bytes: Sequence[int | None]


def shard_of(tasks: Sequence[Task], first: int, num_shards: int) -> Sequence[Task]:
    """Every n-th task, from the first on, which counts from 1."""
    if not 1 <= first <= num_shards:
        raise ReportError(compose("sweep", f"shard {first} of {num_shards} does not exist", do="count from 1"))
    return tasks[first - 1 :: num_shards]


def run_tasks(tasks: Sequence[Task], executor: Executor | None = None, jobs: int = 1) -> Iterator[Cell]:
    """The cells of the tasks, in order, each as soon as it and all before it are known.

    A cell whose worker died is run in this process.
    """
    num_workers = len(tasks) if executor is not None else min(jobs, len(tasks))
    early: dict[int, Cell] = {}
    place = 0
    try:
        with executor_for(executor, num_workers) as chosen:
            for _, cell in answers(chosen, max(num_workers, 1), run_task, tasks):
                early[cell.index] = cell
                while place < len(tasks) and tasks[place].cell.index in early:
                    yield early.pop(tasks[place].cell.index)
                    place += 1
    finally:
        _module_of.cache_clear()
        _baseline_of.cache_clear()


def tasks_of(
    graphs: Sequence[SweptGraph], axes: SweepAxes, num_tokens: int | None = None, effort: Effort = "default"
) -> list[Task]:
    """The tasks of all cells, in order. Raises for unknown clusters and passes."""
    check_tokens(num_tokens)
    described = [each if isinstance(each, Cluster) else Cluster.load(each) for each in axes.clusters]
    names = [each.name if isinstance(each, Cluster) else str(each) for each in axes.clusters]
    specs = [str(Pipeline.parse(each) if isinstance(each, str) else each) for each in axes.pipelines]
    labels = [str(each) for each in axes.pipelines]
    sizes = [[str(size) for size in given] for given in (axes.memory_limits, axes.bucket_bytes)]
    known = {"cluster": names, "pipeline": labels, "memory limit": sizes[0], "size of buckets": sizes[1]}
    _check_once({"graph": [str(graph.name) for graph in graphs]} | known)
    tasks: list[Task] = []
    for graph in graphs:
        tokens = num_tokens if num_tokens is not None else tokens_per_step(graph.module)
        listing, marks = render(graph.module), marks_of(graph.module)
        for name, cluster in zip(names, described, strict=True):
            by_hand = _follow_all(graph.module, graph.policies, cluster)
            for label, spec in zip(labels, specs, strict=True):
                for limit, bucket in product(axes.memory_limits, axes.bucket_bytes):
                    cell = Cell("", len(tasks), 0, name, label, limit, bucket, graph.name)
                    tasks.append(Task(cell, listing, marks, cluster, spec, tokens, effort))
                for (policy, made), bucket in product(by_hand, axes.bucket_bytes):
                    place = Cell("", len(tasks), 0, name, label, None, bucket, graph.name, policy)
                    cell = replace(place, recomputed=made.recomputed, gathered_again=made.gathered_again)
                    tasks.append(Task(cell, made.listing, made.marks, cluster, spec, tokens, effort))
    facts = [digest(repr((task.listing, task.marks, task.cell, task.tokens_per_step))) for task in tasks]
    facts += [*(each.digest for each in described), *specs, effort]
    identity = digest("\n".join(facts))
    return [replace(task, cell=replace(task.cell, sweep=identity, num_cells=len(tasks))) for task in tasks]


@dataclass(frozen=True)
class _ByHand:
    """A graph that follows a policy."""

    listing: str
    marks: tuple[Mark, ...]
    recomputed: int
    gathered_again: int


def _follow_all(
    module: GraphModule, policies: Mapping[str, GraphModule | RetentionPolicy], cluster: Cluster
) -> list[tuple[str, _ByHand]]:
    """The graphs that follow the policies; where several policies give the same graph, only the first of them."""
    found: dict[str, tuple[str, _ByHand]] = {}
    for name, policy in policies.items():
        try:
            made, table = _follow(module, policy, cluster)
        except ClusterError:  # the cells of the given graph fail for the same reason, and say so
            return []
        listing = render(made)
        found.setdefault(listing, (name, _ByHand(listing, marks_of(made), *_count_repeated(table))))
    return list(found.values())


def _follow(
    module: GraphModule, policy: GraphModule | RetentionPolicy, cluster: Cluster
) -> tuple[GraphModule, tuple[Retention, ...]]:
    if isinstance(policy, RetentionPolicy):
        return follow_policy(module, policy, read_groups(module), cluster)
    return policy, read_policy(policy, read_groups(policy), cluster)


def _count_repeated(table: Iterable[Retention]) -> tuple[int, int]:
    """The numbers of values that backward recomputes and gathers again."""
    counts = Counter[str]()
    for row in table:
        counts[row.choice] += row.num_values
    return counts["recomputed"], counts["gathered again"]


def _check_once(axes: Mapping[str, Sequence[str]]) -> None:
    for what, given in axes.items():
        for name, count in Counter(given).items():
            if count > 1:
                raise ReportError(compose("sweep", f"{what} {name!r} is given {count} times", do="give it once"))


def run_task(task: Task) -> Cell:
    """Run one cell; every worker calls this."""
    try:
        return _run(task)
    except MemoryLimitError as error:
        return replace(task.cell, error=str(error), fitting_bytes=error.least_bytes)
    except WeftError as error:
        return replace(task.cell, error=str(error))
    except Exception as error:
        return _failed(task, error)


def _run(task: Task) -> Cell:
    module = _module_of(task.listing, task.marks, threading.get_ident())
    pipeline = _with_buckets(Pipeline.parse(task.pipeline), module, task.cell.max_bucket_bytes)
    limit = task.cell.memory_limit_bytes
    run = pipeline.run(module, cluster=task.cluster, memory_limit_bytes=limit, effort=task.effort)
    sizes = [GraphRecord(len(each.graph.nodes), 0, "") for each in (module, run.module)]
    report = Report(sizes[0], sizes[1], record_passes(run.log), (), ())
    found = with_simulations(
        report,
        module,
        run.module,
        task.cluster,
        tokens_per_step=task.tokens_per_step,
        memory_limit_bytes=limit,
    ).summary
    seconds = sum(entry.seconds for entry in run.log)
    cell = replace(task.cell, before=found.before, after=found.after, pass_seconds=seconds)
    usual = _baseline_of(task.listing, task.marks, threading.get_ident(), task.cluster)
    if usual is not None:
        cell = replace(cell, runtime=usual.runtime, runtime_us=usual.step_us)
    if limit is None:
        return cell
    recomputed, gathered_again = _count_repeated(record_memory(run.log))
    return replace(cell, recomputed=recomputed, gathered_again=gathered_again)


def _with_buckets(pipeline: Pipeline, module: GraphModule, max_bytes: int | None) -> Pipeline:
    """The pipeline with this limit on the bucket size of its planner."""
    if max_bytes is None:
        return pipeline
    chosen = pipeline.chosen(module.graph, read_groups(module))
    passes = chosen.passes
    capped = [any(field.name == "max_bucket_bytes" for field in fields(each)) for each in passes]
    if not any(capped):
        what = f"no pass of {str(pipeline)!r} has a bucket size"
        raise PipelineError(compose("sweep", what, do="add schedule-overlap, or omit the bucket sizes"))
    given: dict[str, Any] = {"max_bucket_bytes": max_bytes}
    pairs = zip(passes, capped, strict=True)
    return replace(chosen, passes=tuple(replace(each, **given) if has else each for each, has in pairs))


@lru_cache(maxsize=1)
def _module_of(listing: str, marks: tuple[Mark, ...], _thread: int) -> GraphModule:
    """The graph, parsed once for all cells of a worker. Threads do not share it: a graph module is not thread-safe."""
    module = parse(listing)
    put_marks(module, marks)
    return module


@lru_cache(maxsize=1)
def _baseline_of(listing: str, marks: tuple[Mark, ...], thread: int, cluster: Cluster) -> Baseline | None:
    """The step that people run today: the same for all pipelines and limits of a cluster."""
    return baseline_of(_module_of(listing, marks, thread), cluster)


def _failed(task: Task, error: Exception) -> Cell:
    return replace(task.cell, error=f"{type(error).__name__}: {error}")


def merge(paths: Sequence[str | Path]) -> list[Cell]:
    """The cells of whole sweeps from the files of their shards, sweep by sweep in the order of the files.

    The error lists all faults, not only the first.
    """
    found: list[tuple[str, Cell]] = []
    faults: list[str] = []
    for path in paths:
        try:
            lines = Path(path).read_text(encoding="utf-8").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            faults.append(f"{path}: it cannot be read: {getattr(error, 'strerror', None) or 'it is not UTF-8 text'}")
            continue
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                found.append((f"{path}:{number}", _cell_of(line)))
            except ValueError as error:
                faults.append(f"{path}:{number}: {error}")
    sweeps: dict[str, list[tuple[str, Cell]]] = {}
    for place, cell in found:
        sweeps.setdefault(cell.sweep, []).append((place, cell))
    if not faults:
        faults += [] if found else ["the files have no cells"]
        faults += [fault for members in sweeps.values() for fault in _contradictions(members)]
        faults += _repeated(found)
    if faults:
        shown = faults[:MAX_ERRORS] + ([f"... and {len(faults) - MAX_ERRORS} more"] if len(faults) > MAX_ERRORS else [])
        do = "give the files of all shards of each sweep, each once"
        raise ReadError(compose("merge", "the files are not whole sweeps", where=shown, do=do))
    return [cell for members in sweeps.values() for _, cell in sorted(members, key=lambda each: each[1].index)]


_CELLS = TypeAdapter(Cell)


def _cell_of(line: str) -> Cell:
    try:
        cell = _CELLS.validate_json(line, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise ValueError(f"{'.'.join(map(str, first['loc'])) or 'the line'}: {first['msg']}") from None
    if not all(math.isfinite(number) and number >= 0 for number in _numbers(asdict(cell))):
        raise ValueError("a number is negative or not finite")
    if (cell.error is None) == (cell.before is None or cell.after is None or cell.pass_seconds is None):
        raise ValueError("a cell has either numbers or an error")
    return cell


def _numbers(data: dict[str, Any]) -> Iterator[float]:
    for value in data.values():
        if isinstance(value, dict):
            yield from _numbers(value)
        elif isinstance(value, int | float):
            yield value


def _contradictions(found: Sequence[tuple[str, Cell]]) -> Iterator[str]:
    """Faults of the cells of one sweep: duplicates, and missing cells."""
    first_place, first = found[0]
    places: dict[int, str] = {}
    for place, cell in found:
        if cell.num_cells != first.num_cells:
            yield f"{place}: its sweep has {cell.num_cells} cells, according to {first_place} {first.num_cells}"
        elif cell.index >= cell.num_cells:
            yield f"{place}: cell {cell.index} of {cell.num_cells}, counted from 0"
        elif cell.index in places:
            yield f"{place}: cell {cell.index} is already in {places[cell.index]}"
        else:
            places[cell.index] = place
    missing = first.num_cells - len(places)
    if missing:
        gaps = (i for i in range(first.num_cells) if i not in places)
        shown = [str(next(gaps)) for _ in range(min(missing, MAX_ERRORS))]
        rest = f" and {missing - MAX_ERRORS} more" if missing > MAX_ERRORS else ""
        where = f"{missing} of {first.num_cells} cells are missing in the sweep of {first_place}"
        yield f"{where}: {', '.join(shown)}{rest}"


def _repeated(found: Sequence[tuple[str, Cell]]) -> Iterator[str]:
    """Cells of several sweeps that nothing but their figures would tell apart."""
    seen: dict[tuple[object, ...], tuple[str, str]] = {}
    for place, cell in found:
        axes = (cell.source, cell.cluster, cell.pipeline, cell.memory_limit_bytes, cell.max_bucket_bytes, cell.policy)
        first, identity = seen.setdefault(axes, (place, cell.sweep))
        if identity != cell.sweep:
            yield f"{place}: another sweep has this combination of source, cluster, pipeline and limits: {first}"
