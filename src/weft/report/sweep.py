"""Sweep: one graph on several clusters by several pipelines, each of them a cell of a table.

    cells = sweep(module, ["h100-8x8", "a100-8x8"], ["none", "auto"])

Contract: a cell depends on nothing but the listing of the graph, its tokens, its cluster and its pipeline, so that
cells run in any process and in any order; they are numbered by cluster, then by pipeline, and come back in that order.
A cell that fails holds its error. What a cell says is a line of JSON; the lines of all shards of a sweep are joined by
`merge`.
"""

from __future__ import annotations

import json
import math
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError
from torch.fx import GraphModule

from weft.cost.cluster import Cluster
from weft.errors import ReadError, ReportError, WeftError, compose
from weft.graph.about import tokens_per_step
from weft.graph.text import digest, parse, render
from weft.passes.pipeline import Pipeline
from weft.report.comparison import Comparison
from weft.report.plain_text import plain, plain_line
from weft.report.report import GraphRecord, Report, record_passes, table
from weft.report.summary import Totals, count_text, duration_text, share_text, size_text
from weft.report.work import check_tokens

MAX_ERRORS = 20
"""Of files to merge that are shown."""


@dataclass(frozen=True)
class Cell:
    """One cluster with one pipeline."""

    sweep: str
    """Digest of the graph, the clusters and the pipelines: cells of one sweep can be merged."""
    index: int
    num_cells: int
    """Of the whole sweep."""
    cluster: str
    pipeline: str
    before: Totals | None = None
    after: Totals | None = None
    pass_seconds: float | None = None
    error: str | None = None
    """Why there are no numbers."""

    def to_json(self) -> str:
        """The cell as one line of JSON."""
        return json.dumps(asdict(self), sort_keys=True, allow_nan=False)


@dataclass(frozen=True)
class Task:
    """What a worker is sent: it reads the listing itself."""

    cell: Cell
    listing: str
    cluster: Cluster
    pipeline: str
    tokens_per_step: int | None = None


def sweep(
    module: GraphModule,
    clusters: Sequence[str | Path | Cluster],
    pipelines: Sequence[str | Pipeline],
    executor: Executor | None = None,
    *,
    jobs: int = 1,
    shard: tuple[int, int] = (1, 1),
    tokens_per_step: int | None = None,
    done: Callable[[Cell], object] | None = None,
) -> list[Cell]:
    """Optimize and simulate a graph on every cluster by every pipeline.

    The cells run on the executor; without one in this process, or for several jobs in a pool of spawned processes. The
    shard (i, n), with i from 1 to n, takes every n-th cell from the i-th on. `done` is called with each cell in order.
    """
    first, num_shards = shard
    if not 1 <= first <= num_shards:
        raise ReportError(compose("sweep", f"there is no shard {first} of {num_shards}", do="count from 1"))
    tasks = tasks_of(module, clusters, pipelines, tokens_per_step)[first - 1 :: num_shards]
    cells: list[Cell] = []
    for cell in _run_all(tasks, executor, min(jobs, len(tasks))):
        cells.append(cell)
        if done is not None:
            done(cell)
    return cells


def _run_all(tasks: Sequence[Task], executor: Executor | None, jobs: int) -> Iterator[Cell]:
    if executor is not None:
        yield from _submit(tasks, executor)
    elif jobs > 1:
        with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
            yield from _submit(tasks, pool)
    else:
        try:
            yield from map(run_task, tasks)
        finally:
            _module_of.cache_clear()


def tasks_of(
    module: GraphModule,
    clusters: Sequence[str | Path | Cluster],
    pipelines: Sequence[str | Pipeline],
    num_tokens: int | None = None,
) -> list[Task]:
    """All cells in order, not yet run. Unknown clusters and passes are refused here."""
    check_tokens(num_tokens)
    tokens = num_tokens if num_tokens is not None else tokens_per_step(module)  # a listing does not say it
    described = [each if isinstance(each, Cluster) else Cluster.load(each) for each in clusters]
    names = [each.name if isinstance(each, Cluster) else str(each) for each in clusters]
    specs = [str(Pipeline.parse(each) if isinstance(each, str) else each) for each in pipelines]
    labels = [str(each) for each in pipelines]
    for what, given in (("cluster", names), ("pipeline", labels)):
        for name, count in Counter(given).items():
            if count > 1:
                raise ReportError(compose("sweep", f"{what} {name!r} is given {count} times", do="give it once"))
    listing = render(module)
    facts = [digest(listing), *(each.digest for each in described), *specs, *names, *labels, str(tokens)]
    identity = digest("\n".join(facts))
    num_cells = len(names) * len(specs)
    return [
        Task(
            Cell(identity, i * len(specs) + k, num_cells, names[i], labels[k]), listing, described[i], specs[k], tokens
        )
        for i in range(len(names))
        for k in range(len(specs))
    ]


def run_task(task: Task) -> Cell:
    """Run one cell: what any worker calls."""
    try:
        return _run(task)
    except WeftError as error:
        return replace(task.cell, error=str(error))
    except Exception as error:
        return _failed(task, error)


def _run(task: Task) -> Cell:
    module = _module_of(task.listing, threading.get_ident())
    run = Pipeline.parse(task.pipeline).run(module, cluster=task.cluster)
    sizes = [GraphRecord(len(each.graph.nodes), 0, "") for each in (module, run.module)]
    report = Report(sizes[0], sizes[1], record_passes(run.log), (), ())
    found = Comparison(module, run.module, task.cluster, tokens_per_step=task.tokens_per_step).summary(report)
    seconds = sum(entry.seconds for entry in run.log)
    return replace(task.cell, before=found.before, after=found.after, pass_seconds=seconds)


@lru_cache(maxsize=1)
def _module_of(listing: str, _thread: int) -> GraphModule:
    """A worker that runs several cells reads the graph once. Threads do not share it: it is not made for that."""
    return parse(listing)


def _submit(tasks: Sequence[Task], executor: Executor) -> Iterator[Cell]:
    futures: list[Future[Cell]] = []
    try:
        futures += [_start(task, executor) for task in tasks]
        for task, future in zip(tasks, futures, strict=True):
            try:
                yield future.result()
            except Exception as error:  # the worker died, or the executor lost it
                yield _failed(task, error)
    finally:
        for future in futures:
            future.cancel()


def _start(task: Task, executor: Executor) -> Future[Cell]:
    try:
        return executor.submit(run_task, task)
    except BrokenExecutor as error:  # a worker died while tasks were still being sent
        lost: Future[Cell] = Future()
        lost.set_exception(error)
        return lost


def _failed(task: Task, error: Exception) -> Cell:
    return replace(task.cell, error=f"{type(error).__name__}: {error}")


def merge(paths: Sequence[str | Path]) -> list[Cell]:
    """The cells of a whole sweep from the files of its shards. Every fault is told at once."""
    found: list[tuple[str, Cell]] = []
    faults: list[str] = []
    for path in paths:
        try:
            lines = Path(path).read_text(encoding="utf-8").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            faults.append(f"{path}: it cannot be read: {getattr(error, 'strerror', None) or 'it is no text'}")
            continue
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                found.append((f"{path}:{number}", _cell_of(line)))
            except ValueError as error:
                faults.append(f"{path}:{number}: {error}")
    faults += _contradictions(found) if not faults else []
    if faults:
        shown = faults[:MAX_ERRORS] + ([f"... and {len(faults) - MAX_ERRORS} more"] if len(faults) > MAX_ERRORS else [])
        do = "give the files of all shards of one sweep, each once"
        raise ReadError(compose("merge", "the files are not one sweep", where=shown, do=do))
    return sorted((cell for _, cell in found), key=lambda cell: cell.index)


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
    """Cells of other sweeps, cells that come twice, and cells that are missing."""
    if not found:
        yield "there are no cells"
        return
    first_place, first = found[0]
    places: dict[int, str] = {}
    for place, cell in found:
        if (cell.sweep, cell.num_cells) != (first.sweep, first.num_cells):
            yield f"{place}: it is of another sweep than {first_place}"
        elif cell.index >= cell.num_cells:
            yield f"{place}: cell {cell.index} of {cell.num_cells}, counted from 0"
        elif cell.index in places:
            yield f"{place}: cell {cell.index} is in {places[cell.index]} already"
        else:
            places[cell.index] = place
    missing = first.num_cells - len(places)
    if missing:
        gaps = (i for i in range(first.num_cells) if i not in places)
        shown = [str(next(gaps)) for _ in range(min(missing, MAX_ERRORS))]
        rest = f" and {missing - MAX_ERRORS} more" if missing > MAX_ERRORS else ""
        yield f"{missing} of {first.num_cells} cells are missing: {', '.join(shown)}{rest}"


HEAD = ("cluster", "pipeline", "step", "exposed", "bound", "gap", "peak memory", "collectives", "passes")
WHERE_KNOWN = ("MFU", "tokens/s")
"""Columns that are left out where no cell knows them."""


def sweep_text(cells: Iterable[Cell]) -> str:
    """The cells as a table, and the errors of those that failed."""
    rows = [[*HEAD, *WHERE_KNOWN]]
    errors: list[str] = []
    for cell in cells:
        rows.append([*map(plain_line, (cell.cluster, cell.pipeline, *_texts(cell)))])
        if cell.error is not None:
            message = plain(cell.error).replace("\n", "\n    ")
            errors += ["", f"{rows[-1][0]}, {rows[-1][1]}:", f"    {message}"]
    if len(rows) == 1:
        return "there are no cells"
    known = [any(cell != "-" for cell in column[1:]) for column in zip(*rows, strict=True)]
    shown = [i for i, is_known in enumerate(known) if i < len(HEAD) or is_known]
    return "\n".join([*table([[row[i] for i in shown] for row in rows]), *errors])


def _texts(cell: Cell) -> list[str]:
    before, after = cell.before, cell.after
    if before is None or after is None:
        return ["failed", *["-"] * (len(HEAD) + len(WHERE_KNOWN) - 3)]
    return [
        f"{duration_text(before.step_us)} -> {duration_text(after.step_us)}",
        f"{duration_text(before.exposed_us)} -> {duration_text(after.exposed_us)}",
        "-" if after.lower_bound_us is None else duration_text(after.lower_bound_us),
        "-" if after.gap is None else share_text(after.gap),
        "-" if after.peak_bytes is None else size_text(after.peak_bytes),
        f"{before.num_collectives} -> {after.num_collectives}",
        duration_text((cell.pass_seconds or 0) * 1e6),
        "-" if after.mfu is None else share_text(after.mfu),
        "-" if after.tokens_per_second is None else count_text(after.tokens_per_second),
    ]
