"""The Chrome trace: its schema, its arrows, and totals computed again from the events alone."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.unit.simulation.programs import compute, launch, program, wait
from weft.graph.origins import CollectiveOrigin
from weft.plan.decision import Reason
from weft.report.collective_record import CollectiveDecision, CollectiveRecord
from weft.report.summary import SimulatedRun, summarize
from weft.report.trace import save_trace, trace
from weft.simulation.simulator import simulate
from weft.simulation.timeline import CollectiveSpan, Span, Timeline

BEFORE = Timeline(
    compute=(Span(0, "a", 0, 1000, 1000), Span(3, "b", 3500, 5000, 1500)),
    collectives=(CollectiveSpan(1, "ag", 1000, 3500, 2500, 0, 1000, 1000, 0, 2500),),
    step_ns=5000,
    critical_path=(0, 1, 3),
    peak_bytes=2048,
    memory=((0, 1024), (1000, 2048), (3500, 1024)),
    lower_bound_ns=4001,
)
"""One gather that nothing hides."""

AFTER = Timeline(
    compute=(Span(1, "a", 10, 1010, 1000), Span(4, "b", 2000, 3500, 1500), Span(7, "c", 3500, 3600, 100)),
    collectives=(
        CollectiveSpan(0, "ag", 0, 2000, 2000, 0, 0, 1010, 1000, 990, ("a",)),
        CollectiveSpan(2, "rs", 2000, 3001, 1001, 0, 1010, 3500, 1001, 0, ("b",)),
        CollectiveSpan(3, "ar", 1010, 3700, 2690, 1, 1010, None, 1600, 100, ("b", "c")),
    ),
    step_ns=3700,
    critical_path=(0, 4, 7),
    memory=((0, 1024),),
    lower_bound_ns=3500,
)
"""A gather that is hidden in part, a queue that makes another wait, and one that only the end of the step waits for."""

HOISTED = CollectiveDecision("hoist-launches", Reason.APPLIED, "ag goes to the top", ("ag",), None)
RECORD = CollectiveRecord(
    "ag",
    "all_gather",
    "dp",
    8,
    4096,
    (CollectiveDecision("hoist-launches", Reason.APPLIED, "ag goes to the top", ("ag",), None),),
)
RUNS = SimulatedRun(BEFORE, ("dp",), (RECORD,)), SimulatedRun(AFTER, ("dp", "tp"))
TOGETHER = Timeline(
    compute=(Span(0, "a", 0, 1000, 1000), Span(4, "b", 4000, 5000, 1000)),
    collectives=(
        CollectiveSpan(1, "ag", 0, 3000, 3000, 0, 0, 1000, 1000, 2000),
        CollectiveSpan(2, "ar", 0, 4000, 4000, 1, 0, 1000, 1000, 1000),
    ),
    step_ns=5000,
    critical_path=(),
)
"""One wait for two collectives: the time that it stands still is told of either, but counted once."""

REQUIRED: dict[str, dict[str, type | tuple[type, ...]]] = {
    "M": {"args": dict},
    "X": {"cat": str, "ts": (int, float), "dur": (int, float), "args": dict},
    "s": {"cat": str, "ts": (int, float), "id": int},
    "t": {"cat": str, "ts": (int, float), "id": int},
    "f": {"cat": str, "ts": (int, float), "id": int, "bp": str},
    "C": {"ts": (int, float), "args": dict},
    "i": {"ts": (int, float), "s": str},
}
"""By phase, what an event has beside name, ph, pid and tid, as the Trace Event Format asks for it."""


def schema_faults(data: dict[str, Any]) -> list[str]:
    """What is wrong with a trace: keys, types, order, slices that cross, flows without both ends, unnamed threads."""
    faults = [] if set(data) == {"traceEvents", "displayTimeUnit", "otherData"} else [f"keys {sorted(data)}"]
    events: list[dict[str, Any]] = data["traceEvents"]
    for event in events:
        needed = {"name": str, "ph": str, "pid": int, "tid": int, **REQUIRED.get(event["ph"], {"known phase": str})}
        faults += [f"{key} of {event}" for key, kind in needed.items() if not isinstance(event.get(key), kind)]
    if faults:
        return faults
    for event in events:
        faults += [f"negative {key} of {event}" for key in ("ts", "dur") if event.get(key, 0) < 0]
    times = [event["ts"] for event in events if event["ph"] != "M"]
    faults += [] if times == sorted(times) else ["time goes back"]
    names = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    used = {(event["pid"], event["tid"]) for event in events if event["ph"] != "M"}
    return [
        *faults,
        *(f"no name for thread {thread}" for thread in sorted(used - names)),
        *_crossing(events),
        *_flows(events),
    ]


def _crossing(events: list[dict[str, Any]]) -> list[str]:
    faults: list[str] = []
    open_slices: dict[tuple[int, int], list[int]] = {}
    for event in (event for event in events if event["ph"] == "X"):
        start, end = interval(event)
        stack = open_slices.setdefault((event["pid"], event["tid"]), [])
        while stack and stack[-1] <= start:
            stack.pop()
        faults += [f"{event['name']} crosses another slice"] if stack and stack[-1] < end else []
        stack.append(end)
    return faults


def _flows(events: list[dict[str, Any]]) -> list[str]:
    flows: dict[int, list[dict[str, Any]]] = {}
    for event in events:
        if event["ph"] in "stf":
            flows.setdefault(event["id"], []).append(event)
    slices = [event for event in events if event["ph"] == "X"]
    faults = [f"flow {flow} is {phases}" for flow, phases in _phases(flows) if phases not in ("stf", "sf")]
    for event in (event for flow in flows.values() for event in flow):
        same = [each for each in slices if (each["pid"], each["tid"]) == (event["pid"], event["tid"])]
        if not any(each["ts"] <= event["ts"] <= each["ts"] + each["dur"] for each in same):
            faults.append(f"{event} ends in no slice")
    return faults


def _phases(flows: dict[int, list[dict[str, Any]]]) -> list[tuple[int, str]]:
    return [(flow, "".join(event["ph"] for event in events)) for flow, events in flows.items()]


def interval(event: dict[str, Any]) -> tuple[int, int]:
    """Start and end of a slice in whole nanoseconds."""
    start = round(event["ts"] * 1000)
    return start, start + round(event["dur"] * 1000)


def union(intervals: list[tuple[int, int]]) -> int:
    """The length of all intervals together, what they share counted once."""
    length = last = 0
    for start, end in sorted(intervals):
        length += max(end, last) - max(start, last)
        last = max(last, end)
    return length


def overlap_totals(data: dict[str, Any], process: str) -> tuple[int, int]:
    """Exposed and hidden nanoseconds of one process, from nothing but the times of its slices."""
    events: list[dict[str, Any]] = data["traceEvents"]
    (pid,) = [e["pid"] for e in events if e["name"] == "process_name" and e["args"]["name"] == process]
    slices = {
        cat: [interval(event) for event in events if event["pid"] == pid and event.get("cat") == cat]
        for cat in ("compute", "wait", "collective")
    }
    busy = slices["compute"]
    still = union(busy + slices["wait"]) - union(busy)
    hidden = sum(union(busy) + union([each]) - union([*busy, each]) for each in slices["collective"])
    return still, hidden


def test_the_trace_keeps_the_schema():
    assert schema_faults(trace(*RUNS, cluster="h100-8")) == []


@pytest.mark.parametrize(
    ("phase", "change", "fault"),
    [
        ("X", {"dur": "1"}, "dur of"),
        ("X", {"dur": -1.0}, "negative dur"),
        ("X", {"ts": 99.0}, "time goes back"),
        ("X", {"tid": 9}, "no name for thread (1, 9)"),
        ("X", {"dur": 2.0}, "crosses"),
        ("s", {"id": 77}, "flow 77 is s"),
        ("f", {"ts": 2000.0}, "ends in no slice"),
        ("C", {"args": 3}, "args of"),
        ("i", {"ph": "?"}, "known phase"),
    ],
)
def test_the_schema_check_finds_faults(phase: str, change: dict[str, Any], fault: str):
    data = trace(*RUNS)
    next(event for event in data["traceEvents"] if (event["ph"], event["pid"]) == (phase, 1)).update(change)
    assert [found for found in schema_faults(data) if fault in found]


@pytest.mark.parametrize("run", RUNS)
def test_totals_from_the_events_alone_equal_those_of_the_timeline(run: SimulatedRun):
    exposed_ns, hidden_ns = overlap_totals(trace(run, run), "after")
    totals = summarize(run, run).after
    assert exposed_ns / 1000 == run.timeline.exposed_us == totals.exposed_us
    assert hidden_ns / 1000 == totals.hidden_us
    assert exposed_ns > 0


def test_two_collectives_under_one_wait_are_counted_once():
    data = trace(SimulatedRun(TOGETHER), SimulatedRun(TOGETHER))
    assert schema_faults(data) == []
    assert overlap_totals(data, "before") == (3000, 2000)
    assert TOGETHER.exposed_us == 3.0


def test_totals_agree_for_what_the_simulator_makes_of_gaps_slowdown_and_shared_links():
    made = simulate(
        program(
            launch("ag0", 900),
            launch("ag1", 700, "tp"),
            compute("a", 400),
            wait("ag0 ag1"),
            compute("b", 500),
            launch("rs", 800),
            compute("c", 300),
            launch("ar", 500, "tp"),
            links={"dp": "nic", "tp": "nic"},
            gap_ns=7,
            slowdown_ppm=189_000,
        )
    )
    run = SimulatedRun(made, ("dp", "tp"))
    data = trace(run, run)
    exposed_ns, hidden_ns = overlap_totals(data, "after")
    assert schema_faults(data) == []
    assert exposed_ns == sum(span.exposed_ns for span in made.collectives) > 0
    assert hidden_ns == sum(span.hidden_ns for span in made.collectives) > 0
    assert made.collectives[-1].waited_ns is None


def test_processes_and_threads_are_named_in_order():
    heads = [event for event in trace(*RUNS)["traceEvents"] if event["ph"] == "M"]
    names = [(e["pid"], e["tid"], e["args"]["name"]) for e in heads if "name" in e["args"]]
    assert names == [
        (1, 0, "before"),
        (1, 1, "compute"),
        (1, 2, "group dp"),
        (2, 0, "after"),
        (2, 1, "compute"),
        (2, 2, "group dp"),
        (2, 3, "group tp"),
    ]


def test_arrows_lead_from_the_launch_to_the_collective_and_on_to_the_wait():
    events = trace(*RUNS)["traceEvents"]
    arrows = {
        flow: [(event["ph"], event["tid"], event["ts"]) for event in events if event.get("id") == flow]
        for flow in range(4)
    }
    assert arrows == {
        0: [("s", 1, 1.0), ("t", 2, 1.0), ("f", 1, 1.0)],
        1: [("s", 1, 0.0), ("t", 2, 0.0), ("f", 1, 1.01)],
        2: [("s", 1, 1.01), ("t", 2, 2.0), ("f", 1, 3.5)],
        3: [("s", 1, 1.01), ("f", 3, 1.01)],
    }


def test_a_collective_carries_what_is_known_of_it():
    events = trace(*RUNS)["traceEvents"]
    before, after = (event for event in events if event["name"] == "ag")
    if before["pid"] == 2:
        before, after = after, before
    assert before["args"] == {
        "alone_us": 2.5,
        "critical": True,
        "node": "ag",
        "group": "dp",
        "exposed_us": 2.5,
        "hidden_us": 0.0,
        "hidden_by": [],
        "kind": "all_gather",
        "num_ranks": 8,
        "bytes": 4096,
        "decisions": ["hoist-launches: ag goes to the top (applied)"],
    }
    assert after["args"]["hidden_by"] == ["a"]
    assert "decisions" not in after["args"]


def test_a_collective_is_named_after_what_it_carries():
    origins = tuple(CollectiveOrigin(f"layers.3.{name}", "layers.3", "forward", f"{name}.py:1", 1) for name in "ab")
    named = SimulatedRun(BEFORE, ("dp",), (replace(RECORD, origins=origins),))
    events = {e["name"]: e["args"] for e in trace(named, RUNS[1])["traceEvents"] if e["pid"] == 1 and "args" in e}
    found = events["all-gather of layers.3 (2 tensors, 4.00 KiB)"]
    assert (found["node"], found["of"]) == ("ag", ["layers.3.a", "layers.3.b"])
    assert found["source"] == ["a.py:1", "b.py:1"]
    label = "all-gather of layers.3 (2 tensors, 4.00 KiB)"
    assert {f"launch {label}", f"wait {label}"} <= {*events}


def test_memory_is_a_counter_and_the_bound_an_instant():
    events = trace(*RUNS)["traceEvents"]
    memory = [(e["ts"], e["args"]) for e in events if e["ph"] == "C" and e["pid"] == 1]
    assert memory == [(0.0, {"bytes": 1024}), (1.0, {"bytes": 2048}), (3.5, {"bytes": 1024})]
    assert [(e["pid"], e["ts"]) for e in events if e["name"] == "lower bound"] == [(2, 3.5), (1, 4.001)]


def test_the_file_is_the_trace_whatever_nodes_are_called(tmp_path: Path):
    hostile = Timeline((Span(0, '"\ud800</script>\n\u2028', 0, 5, 5),), (), 5, ())
    run = SimulatedRun(hostile)
    save_trace(tmp_path / "trace.json", run, run, cluster="h100-8")
    data = json.loads((tmp_path / "trace.json").read_text())
    assert data == trace(run, run, cluster="h100-8")
    assert data["otherData"]["cluster"] == "h100-8"
    assert schema_faults(data) == []


def test_an_empty_timeline_gives_an_empty_trace():
    run = SimulatedRun(Timeline((), (), 0, ()))
    data = trace(run, run)
    assert schema_faults(data) == []
    assert {event["ph"] for event in data["traceEvents"]} == {"M"}
