"""Simulated runs of a made-up training step, of any size: what the page of a report is tested with."""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate

from weft.graph.origins import CollectiveOrigin
from weft.plan.decision import Reason
from weft.report.collective_record import CollectiveDecision, CollectiveRecord
from weft.report.html import ReportPage
from weft.report.report import PassRecord
from weft.report.summary import SimulatedRun, summarize
from weft.report.work import Work
from weft.simulation.timeline import CollectiveSpan, Span, Timeline

GATHER_NS, SCATTER_NS, BYTES = 1_700_000, 1_300_000, 218 << 20
SOURCE = "model.py:7 in forward: self.up(x)"
HOISTED = CollectiveDecision("hoist-launches", Reason.APPLIED, "it is launched one layer earlier", ("x",), None)
STAYS = CollectiveDecision("bucket-all-gathers", Reason.FULL, "its bucket would exceed 256 MiB", ("x",), None)
CAUSE = CollectiveDecision(
    "schedule-overlap", Reason.EXPOSED_BY_DEPENDENCY, "the first layer needs it", ("x",), None, 1700.0
)
NEEDED = CollectiveDecision("hoist-launches", Reason.DEPENDENCY, "it needs the layer before it", ("x",), "mm_3")


def make_run(layers: int, ops: int, ahead: int, hostile: str | None = None) -> SimulatedRun:
    """Layers of compute, each with a gather before it, launched so many layers ahead, and a scatter behind it."""
    compute: list[Span] = []
    collectives: list[CollectiveSpan] = []
    gathers: dict[int, tuple[int, int]] = {}
    stream, queue, scatters = 0, 0, 0
    for layer in range(layers):
        for wanted in range(layer, min(layer + ahead, layers - 1) + 1):
            if wanted not in gathers:
                queue = max(queue, stream) + GATHER_NS
                gathers[wanted] = (stream, queue)
        launched, end = gathers[layer]
        name = hostile if hostile and layer == 1 else f"all_gather_{layer}"
        collectives.append(_collective(name, 0, launched, end - GATHER_NS, end, stream, compute))
        stream = max(stream, end)
        for op in range(ops):
            length = 2_200_000 // ops * (1 + (op * 7 + layer) % 5) // 3
            compute.append(Span(len(compute), f"mm_{layer}_{op}", stream, stream + length, length))
            stream += length
        start = max(stream, scatters)
        scatters = start + SCATTER_NS
        collectives.append(_collective(f"reduce_scatter_{layer}", 1, stream, start, scatters, None, compute))
    return SimulatedRun(_timeline(compute, collectives, max(stream, scatters)), ("fsdp", "tp"), _records(collectives))


def _collective(
    name: str, queue: int, launched: int, start: int, end: int, waited: int | None, compute: list[Span]
) -> CollectiveSpan:
    still = max(0, end - waited) if waited is not None else 0
    hidden = max(0, end - start - still)
    by = tuple(span.name for span in compute[-3:]) if hidden else ()
    return CollectiveSpan(-1, name, start, end, end - start, queue, launched, waited, hidden, still, by)


def _timeline(compute: list[Span], collectives: list[CollectiveSpan], step_ns: int) -> Timeline:
    changes = sorted(
        change
        for each in collectives
        for change in ((each.launched_ns, BYTES), (max(each.end_ns, each.waited_ns or 0) + 1_000_000, -BYTES))
    )
    held = list(accumulate((size for _, size in changes), initial=18 << 30))[1:]
    memory = tuple((time, size) for (time, _), size in zip(changes, held, strict=True))[
        : bisect_right(changes, (step_ns, 0))
    ]
    busy = sum(span.end_ns - span.start_ns for span in compute)
    return Timeline(
        tuple(compute),
        tuple(collectives),
        step_ns,
        tuple(range(0, len(compute), 3)),
        max(held),
        memory,
        busy + GATHER_NS,
    )


def _records(collectives: list[CollectiveSpan]) -> tuple[CollectiveRecord, ...]:
    outcomes = ((HOISTED,), (STAYS, HOISTED), (NEEDED,), ())
    return tuple(
        CollectiveRecord(
            each.name,
            ("all_gather", "reduce_scatter")[each.queue],
            "fsdp",
            64,
            BYTES,
            (*([CAUSE] if each.exposed_ns else []), *outcomes[i % 4]),
            (CollectiveOrigin(f"layers.{i // 2}.up", f"layers.{i // 2}", "forward", SOURCE, BYTES),),
        )
        for i, each in enumerate(collectives)
    )


def make_page(
    layers: int = 32, ops: int = 14, hostile: str | None = None, title: str = "llama-8b, FSDP, 64 ranks"
) -> ReportPage:
    """A page of two runs: one that gathers each layer when it is needed, one that gathers ahead."""
    before, after = make_run(layers, ops, 0, hostile), make_run(layers, ops, 2, hostile)
    summary = summarize(before, after, Work(num_tokens=64 * 4096, flops_share=0.05))
    passes = (
        PassRecord("bucket-all-gathers{max-bytes=268435456}", True, 0.012, 12, {"dependency": 3, "full": 1}),
        PassRecord(hostile or "hoist-launches", False, 1.5, 0, {}),
    )
    return ReportPage(title, "h100-8x8", before, after, summary, ("equivalence: proved at 64 ranks",), passes)
