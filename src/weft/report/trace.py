"""A Chrome trace of two simulated runs, for Perfetto (ui.perfetto.dev) and chrome://tracing.

Contract: one process per run, `before` and `after`; a thread for the compute stream and one for each group's queue.
Times are in microseconds with three decimals, which is nanosecond precision.

    cat compute      a kernel on the compute stream
    cat launch       the launch of a collective, without duration
    cat wait         the compute stream is blocked: from a wait to the end of its collective
    cat collective   a collective on its queue; arrows lead from its launch to it and on to its wait

A collective is named after the parameter or module that it carries something of, if that is known; its argument `node`
is the name of the launch.

The events alone show the exposed time (in waits) and the hidden time (compute while a collective runs).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.errors import ReportError
from weft.graph.origins import tell_subject
from weft.plan.plan import save_text
from weft.report.collective_record import CollectiveRecord
from weft.report.summary import SimulatedRun
from weft.simulation.timeline import NS_PER_US, CollectiveSpan, Span
from weft.version import VERSION

COMPUTE = 1
"""The thread of the compute stream; the queues follow."""
FIRST_QUEUE = 2
MAX_HIDDEN_BY = 5

Event = dict[str, Any]


def save_trace(path: str | Path, before: SimulatedRun, after: SimulatedRun, *, cluster: str = "") -> None:
    """Write the trace of both runs as JSON."""
    save_text(path, json.dumps(trace(before, after, cluster=cluster), allow_nan=False), ReportError)


def trace(before: SimulatedRun, after: SimulatedRun, *, cluster: str = "") -> dict[str, Any]:
    """The trace of both runs as data: metadata first, then events in order of time."""
    processes = [
        _Process("before", 1, before, 0),
        _Process("after", 2, after, len(before.timeline.collectives) + len(before.timeline.copies)),
    ]
    events = [event for process in processes for event in process.events()]
    events.sort(key=lambda event: (event["ts"], -event.get("dur", 0)))
    return {
        "traceEvents": [*(head for process in processes for head in process.heads()), *events],
        "displayTimeUnit": "ms",
        "otherData": {"producer": f"weft {VERSION}", "cluster": cluster},
    }


@dataclass(frozen=True)
class _Process:
    """One run as events."""

    label: str
    pid: int
    run: SimulatedRun
    first_flow: int
    """Flows are numbered through all processes."""

    def heads(self) -> Iterator[Event]:
        yield self._head("process_name", 0, {"name": self.label})
        yield self._head("process_sort_index", 0, {"sort_index": self.pid})
        threads = ["compute", *(f"group {self.run.group(queue)}" for queue in range(self.run.num_queues))]
        for tid, name in enumerate(threads, COMPUTE):
            yield self._head("thread_name", tid, {"name": name})
            yield self._head("thread_sort_index", tid, {"sort_index": tid})

    def events(self) -> Iterator[Event]:
        timeline = self.run.timeline
        critical = set(timeline.critical_path)
        for span in timeline.compute:
            yield self._slice("compute", span.name, COMPUTE, span.start_ns, span.end_ns, _span_args(span, critical))
        for flow, span in enumerate((*timeline.collectives, *timeline.copies), self.first_flow):
            yield from self._collective(span, flow, critical)
        yield from self._rest()
        for time, size in timeline.memory:
            yield self._event("C", "memory", COMPUTE, time, args={"bytes": size})
        if timeline.lower_bound_ns:
            yield self._event("i", "lower bound", COMPUTE, timeline.lower_bound_ns, cat="bound", s="p")

    def _collective(self, span: CollectiveSpan, flow: int, critical: set[int]) -> Iterator[Event]:
        tid = FIRST_QUEUE + span.queue
        args = _span_args(span, critical) | _collective_args(span, self.run)
        arrow: Event = {"cat": "flow", "id": flow}
        record = self.run.record_of.get(span.name)
        name = record.label if record is not None and tell_subject(record.origins) else span.name
        yield self._slice("launch", f"launch {name}", COMPUTE, span.launched_ns, span.launched_ns, {})
        yield self._event("s", "collective", COMPUTE, span.launched_ns, **arrow)
        yield self._slice("collective", name, tid, span.start_ns, span.end_ns, args)
        if span.waited_ns is None:
            yield self._event("f", "collective", tid, span.start_ns, bp="e", **arrow)
            return
        yield self._event("t", "collective", tid, span.start_ns, **arrow)
        until = max(span.waited_ns, span.end_ns)
        yield self._slice("wait", f"wait {name}", COMPUTE, span.waited_ns, until, {})
        # An arrow never leads back in time, and ends within the slice of the wait.
        yield self._event("f", "collective", COMPUTE, max(span.waited_ns, span.start_ns), bp="e", **arrow)

    def _rest(self) -> Iterator[Event]:
        """Collectives that nothing waits for can keep the step from ending."""
        timeline = self.run.timeline
        ends = [span.end_ns for span in timeline.compute] + [span.launched_ns for span in timeline.collectives]
        ends += [max(span.waited_ns, span.end_ns) for span in timeline.collectives if span.waited_ns is not None]
        last = max(ends, default=0)
        unwaited = [span.end_ns for span in timeline.collectives if span.waited_ns is None]
        if unwaited and last < min(max(unwaited), timeline.step_ns):
            yield self._slice("wait", "end of step", COMPUTE, last, timeline.step_ns, {})

    def _head(self, name: str, tid: int, args: dict[str, Any]) -> Event:
        return {"ph": "M", "name": name, "pid": self.pid, "tid": tid, "args": args}

    def _slice(self, cat: str, name: str, tid: int, start_ns: int, end_ns: int, args: dict[str, Any]) -> Event:
        return self._event("X", name, tid, start_ns, cat=cat, dur=(end_ns - start_ns) / NS_PER_US, args=args)

    def _event(self, phase: str, name: str, tid: int, time_ns: int, **rest: Any) -> Event:
        return {"ph": phase, "name": name, "pid": self.pid, "tid": tid, "ts": time_ns / NS_PER_US, **rest}


def _span_args(span: Span, critical: set[int]) -> dict[str, Any]:
    return {"alone_us": span.alone_ns / NS_PER_US, "critical": span.op in critical}


def _collective_args(span: CollectiveSpan, run: SimulatedRun) -> dict[str, Any]:
    args: dict[str, Any] = {
        "node": span.name,
        "group": run.group(span.queue),
        "exposed_us": span.exposed_ns / NS_PER_US,
        "hidden_us": span.hidden_ns / NS_PER_US,
        "hidden_by": list(span.hidden_by[:MAX_HIDDEN_BY]),
    }
    record = run.record_of.get(span.name)
    return args if record is None else args | _record_args(record)


def _record_args(record: CollectiveRecord) -> dict[str, Any]:
    decisions = [f"{outcome.pass_name}: {outcome.sentence} ({outcome.reason.value})" for outcome in record.outcomes]
    args = {"kind": record.kind, "num_ranks": record.num_ranks, "bytes": record.num_bytes, "decisions": decisions}
    subjects = list(dict.fromkeys(origin.subject for origin in record.origins if origin.subject))
    sources = list(dict.fromkeys(origin.source for origin in record.origins if origin.source))
    return args | ({"of": subjects} if subjects else {}) | ({"source": sources} if sources else {})
