"""`weft simulate`: the time of a step on a described cluster, and its exposed communication."""

from __future__ import annotations

import json
from collections.abc import Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft.cli import usage

if TYPE_CHECKING:
    from torch.fx import GraphModule

    from weft.cost.cluster import Cluster
    from weft.prediction.error_bars import ErrorBar
    from weft.simulation.timeline import CollectiveSpan, Timeline

MAX_COLLECTIVES = 10
"""Number of exposed collectives that the table lists."""


class Root(StrEnum):
    """Layouts of the parameters outside of blocks."""

    ONE = "one"
    SPLIT = "split"


Sources = Annotated[
    list[str], typer.Argument(metavar="SOURCE...", help=f"{usage.SOURCE_HELP} Several graphs run one after the other.")
]
ClusterOption = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        metavar="NAME|FILE",
        help="A preset or a TOML file; the default is h100-8x8, or larger if the graph needs it.",
    ),
]
RuntimeOption = Annotated[
    str | None,
    typer.Option(
        "--as",
        metavar="RUNTIME",
        help="Simulate the step as a runtime executes it: synchronous (the default), ddp, fsdp2, simple-fsdp, hsdp, "
        "tp or async-tp.",
    ),
]
RootOption = Annotated[
    Root,
    typer.Option(
        "--root",
        help="With --as: gather the parameters outside of blocks together (one), or those before and those after the "
        "blocks by themselves (split).",
    ),
]


def simulate(
    sources: Sources,
    cluster: ClusterOption = None,
    runtime: RuntimeOption = None,
    root: RootOption = Root.SPLIT,
    assume: usage.AssumeOption = None,
    output: usage.OutputOption = None,
    as_json: usage.JsonOption = False,
) -> None:
    """Simulate a graph: step time, exposed communication, and the kernels that hide the rest. Needs no GPU."""
    usage.check_files((output,), (*sources, cluster))
    with usage.progress("importing torch"):
        from weft.bounds.bounded_simulation import simulate_modules
        from weft.cli.source import load_source
        from weft.cost.cluster import ASSUMED_NODES, Cluster, assumed_cluster
        from weft.graph.assumed_sizes import assume_sizes, notes_on_sizes
        from weft.graph.dag import Dag
        from weft.graph.groups import read_groups
        from weft.passes.runtimes import SYNCHRONOUS, find_runtime
        from weft.prediction.between_nodes import notes_on_bytes_between_nodes
        from weft.prediction.error_bars import error_bars
        from weft.prediction.memory import does_not_fit
        from weft.prediction.step_kind import step_kind
        from weft.report.simulated import notes_on
        from weft.simulation.price_notes import notes_on_prices

    found = find_runtime(runtime or SYNCHRONOUS)
    known = Cluster.load(cluster) if cluster else None
    with usage.progress(f"reading {', '.join(sources)}"):
        modules = [load_source(source) for source in sources]
    sizes = usage.sizes_of(assume)
    for module in modules if sizes is not None else ():
        assume_sizes(module, sizes or {})
    described = known or assumed_cluster((group for module in modules for group in read_groups(module)), ASSUMED_NODES)
    emulated, run_notes = _run_as(modules, runtime, root, described) if runtime is not None else (modules, [])
    with usage.progress(f"simulating {sum(len(module.graph.nodes) for module in modules)} nodes"):
        timeline = simulate_modules(emulated, described, bound=True)
    bars = error_bars(step_kind((Dag(module.graph) for module in modules), described, timeline))
    nodes = (node for module in emulated for node in module.graph.nodes)
    notes = [
        *run_notes,
        *dict.fromkeys(note for module in modules for note in notes_on_sizes(module)),
        *(notes_on_prices(timeline.program, nodes) if timeline.program else ()),
        *notes_on(described),
        *dict.fromkeys(note for module in modules for note in notes_on_bytes_between_nodes(module, described)),
        *(f"error bar: {basis}" for basis in dict.fromkeys(b.basis for b in bars)),
    ]
    too_large = does_not_fit(timeline.peak_bytes, described.device.memory_bytes)
    if as_json:
        errors = {"step_error": bars[0].share, "peak_error": bars[1].share, "error_basis": [bar.basis for bar in bars]}
        fits = {"fits": too_large is None}
        record = {"runtime": runtime or SYNCHRONOUS, **_record(timeline, described.name, notes), **errors, **fits}
        text = json.dumps(record, indent=1)
    else:
        assumed = [] if cluster is not None else [f"on {described.name}, the default without --cluster", ""]
        named = [f"as {found.title}: {found.does}", ""] if runtime is not None else []
        first = [too_large, ""] if too_large else []
        text = "\n".join([*first, *assumed, *named, *_lines(timeline, bars), *(f"note: {note}" for note in notes)])
    usage.write(text + "\n", output)


def _run_as(
    modules: Sequence[GraphModule], runtime: str, root: Root, cluster: Cluster
) -> tuple[list[GraphModule], list[str]]:
    """The graphs as a runtime executes them, and notes on how they were made."""
    from weft.passes.runtimes import notes_on, run_as

    notes: dict[str, None] = {}
    made: list[GraphModule] = []
    for module in modules:
        with usage.progress(f"running {len(module.graph.nodes)} nodes as {runtime}"):
            made.append(run_as(module, runtime, root=root.value, cluster=cluster).module)
        notes.update(dict.fromkeys(notes_on(module, runtime)))
    return made, list(notes)


def _record(timeline: Timeline, cluster: str, notes: Sequence[str]) -> dict[str, Any]:
    names = timeline.program.names if timeline.program is not None else ()
    return {
        "cluster": cluster,
        "notes": notes,
        "step_us": timeline.step_us,
        "compute_us": timeline.compute_us,
        "communication_us": timeline.communication_us,
        "exposed_us": timeline.exposed_us,
        "hidden_us": timeline.hidden_us,
        "idle_us": timeline.idle_us,
        "lower_bound_us": timeline.lower_bound_us if timeline.lower_bound_ns else None,
        "gap": timeline.gap if timeline.lower_bound_ns else None,
        "peak_bytes": timeline.peak_bytes,
        "critical_path": [names[op] for op in timeline.critical_path],
        "collectives": [_collective(timeline, span) for span in timeline.collectives],
    }


def _collective(timeline: Timeline, span: CollectiveSpan) -> dict[str, Any]:
    return {
        "name": span.name,
        "group": _group(timeline, span),
        "launched_us": span.launched_ns / 1000,
        "start_us": span.start_ns / 1000,
        "end_us": span.end_ns / 1000,
        "waited_us": None if span.waited_ns is None else span.waited_ns / 1000,
        "exposed_us": span.exposed_ns / 1000,
        "hidden_us": span.hidden_ns / 1000,
        "hidden_by": list(span.hidden_by),
    }


def _lines(timeline: Timeline, bars: tuple[ErrorBar, ErrorBar]) -> list[str]:
    from weft.quantities import duration_text, size_text
    from weft.report.plain_text import plain_line, table

    totals = [
        ("step", f"{duration_text(timeline.step_us)} {bars[0].text}".rstrip()),
        ("compute", duration_text(timeline.compute_us)),
        ("communication", duration_text(timeline.communication_us)),
        ("exposed", duration_text(timeline.exposed_us)),
        ("hidden", duration_text(timeline.hidden_us)),
        ("idle", duration_text(timeline.idle_us)),
        ("peak memory", f"{size_text(timeline.peak_bytes)} {bars[1].text}".rstrip()),
    ]
    if timeline.lower_bound_ns:
        totals.append(("lower bound", f"{duration_text(timeline.lower_bound_us)} (gap {timeline.gap * 100:.1f} %)"))
    exposed = [span for span in timeline.collectives if span.exposed_ns]
    if not exposed:
        return [
            *table(totals),
            "",
            "no collective is exposed" if timeline.collectives else "the graph has no collectives",
        ]
    most = sorted(exposed, key=lambda span: (-span.exposed_ns, span.launched_ns, span.op))[:MAX_COLLECTIVES]
    rows = [("most exposed", "group", "exposed", "hidden", "hidden by")]
    for span in most:
        times = [duration_text(ns / 1000) for ns in (span.exposed_ns, span.hidden_ns)]
        rows.append((span.name, _group(timeline, span), times[0], times[1], ", ".join(span.hidden_by) or "nothing"))
    rest = len(exposed) - len(most)
    return [*table(totals), "", *map(plain_line, table(rows)), *([f"... and {rest} more"] if rest else [])]


def _group(timeline: Timeline, span: CollectiveSpan) -> str:
    return timeline.program.queues[span.queue].group if timeline.program is not None else str(span.queue)
