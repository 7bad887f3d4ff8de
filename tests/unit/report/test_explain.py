"""Explanations: which decisions belong to which collective, and their text."""

from __future__ import annotations

import json
from typing import Literal

import pytest
import torch
from torch.fx import GraphModule

import weft
from weft.plan.decision import Decision, Reason
from weft.plan.plan import Evidence
from weft.report.explain import Explanation, explain
from weft.report.plain_text import plain, plain_line
from weft.report.report import GraphRecord, PassRecord, Report

LISTING = """group('dp', size=2)
group('tp', size=4, stride=2)

def graph(x: f32[4, 4], p: f32[2, 4]):
    a: f32[4, 4] = mm(x, x)
    ag: f32[4, 4] = all_gather(p, 2, 'dp')
    w: f32[4, 4] = wait(ag)
    rs: f32[1, 4] = reduce_scatter(w, 'sum', 4, 'tp')
    w2: f32[1, 4] = wait(rs)
    return [a, w2]
"""


@pytest.fixture
def module() -> GraphModule:
    return weft.parse(LISTING)


def report(*decisions: Decision, passes: tuple[str, ...] = ("bucket{max-bytes=4}", "sink-waits")) -> Report:
    graph = GraphRecord(0, 0, "")
    return Report(
        graph,
        graph,
        tuple(PassRecord(spec, True, 0.0, 0, {}) for spec in passes),
        tuple(d for d in decisions if d.applied),
        tuple(d for d in decisions if not d.applied),
    )


def told(explanation: Explanation) -> dict[str, list[str]]:
    return {record.name: [outcome.sentence for outcome in record.outcomes] for record in explanation.collectives}


def test_a_collective_is_told_with_its_kind_group_and_bytes(module: GraphModule):
    first, second = explain(module, report()).collectives
    assert (first.name, first.kind, first.group, first.num_ranks, first.num_bytes) == ("ag", "all_gather", "dp", 2, 64)
    assert (second.name, second.kind, second.group, second.num_ranks) == ("rs", "reduce_scatter", "tp", 4)
    assert second.num_bytes == 64


def test_a_decision_belongs_to_the_collectives_whose_launch_or_wait_it_names(module: GraphModule):
    found = explain(
        module,
        report(
            Decision("sink-waits", Reason.APPLIED, "w2 sinks", ("w2",)),
            Decision("bucket", Reason.DEPENDENCY, "rs needs ag", ("rs", "ag"), "w"),
            Decision("bucket", Reason.APPLIED, "a is something else", ("a",)),
        ),
    )
    assert told(found) == {"ag": ["rs needs ag"], "rs": ["rs needs ag", "w2 sinks"]}
    assert found.collectives[0].outcomes[0].blocking == "w"
    assert not found.collectives[0].outcomes[0].applied


def test_what_is_decided_about_a_bucket_is_told_of_its_members(module: GraphModule):
    found = explain(
        module,
        report(
            Decision("bucket", Reason.APPLIED, "ag goes into bucket", ("ag", "bucket_1")),
            Decision("sink-waits", Reason.ESCAPES, "bucket_1 stays", ("bucket_1",)),
            Decision("sink-waits", Reason.ESCAPES, "bucket_2 stays", ("bucket_2",)),
        ),
    )
    assert told(found) == {"ag": ["ag goes into bucket", "bucket_1 stays"], "rs": []}
    assert found.unconsidered == ("rs",)


def test_totals_count_collectives_and_decisions_by_reason(module: GraphModule):
    found = explain(
        module,
        report(
            Decision("sink-waits", Reason.ESCAPES, "", ("w", "w2")),
            Decision("bucket", Reason.ESCAPES, "", ("rs",)),
            Decision("bucket", Reason.APPLIED, "", ("ag",)),
        ),
    )
    assert [(t.reason, t.num_collectives, t.num_decisions) for t in found.totals] == [
        (Reason.APPLIED, 1, 1),
        (Reason.ESCAPES, 2, 2),
    ]


def test_what_a_pass_that_runs_twice_decides_twice_counts_twice(module: GraphModule):
    twice = [Decision("sink-waits", Reason.ALREADY_DONE, "", ("w",)) for _ in range(2)]
    (total,) = explain(module, report(*twice)).totals
    assert (total.num_collectives, total.num_decisions) == (1, 2)


def test_the_text_tells_every_collective_and_the_totals(module: GraphModule):
    found = explain(
        module,
        report(
            Decision("bucket", Reason.DEPENDENCY, "ag stays", ("ag",), "x"),
            Decision("sink-waits", Reason.ALREADY_DONE, "w is there already", ("w",)),
            Decision("sink-waits", Reason.APPLIED, "w sinks to rs", ("w",), "rs"),
        ),
    )
    assert str(found).splitlines() == [
        "ag: all-gather of p (64 B) over dp (2 ranks)",
        "  - bucket: ag stays (dependency: x)",
        "  + sink-waits: w sinks to rs",
        "  = sink-waits: w is there already (already-done)",
        "rs: reduce_scatter of 64 B over tp (4 ranks)",
        "  no pass has considered it",
        "",
        "reason          collectives  decisions",
        "applied         1            1",
        "already-done    1            1",
        "dependency      1            1",
        "not considered  1            0",
    ]


def test_what_is_exposed_is_summed_by_reason_a_bucket_once(module: GraphModule):
    found = explain(
        module,
        report(
            Decision("plan", Reason.EXPOSED_BY_QUEUE, "ag and rs are one", ("ag", "rs"), None, 70.0, 20.0),
            Decision("plan", Reason.EXPOSED_BY_DEPENDENCY, "ag", ("ag",), "x", 1500.0, 1500.0),
            Decision("plan", Reason.ALREADY_DONE, "rs is hidden", ("rs",)),
            passes=("plan",),
        ),
    )
    assert [(t.reason.value, t.num_collectives, t.exposed_us, t.gain_us) for t in found.totals] == [
        ("already-done", 1, 0.0, 0.0),
        ("exposed-by-dependency", 1, 1500.0, 1500.0),
        ("exposed-by-queue", 2, 70.0, 20.0),
    ]
    assert str(found).splitlines()[-4:] == [
        "reason                 collectives  decisions  exposed  could save up to",
        "already-done           1            1",
        "exposed-by-dependency  1            1          1.50 ms  1.50 ms",
        "exposed-by-queue       2            1          70.0 us  20.0 us",
    ]


@pytest.mark.parametrize(
    ("bound_of", "told"),
    [
        ("before", "20.0 % above the lower bound of 1.00 ms for the original graph"),
        ("after", "20.0 % above the lower bound of 1.00 ms for the rewritten graph, which has less work"),
    ],
)
def test_the_step_is_held_against_the_bound(module: GraphModule, bound_of: Literal["before", "after"], told: str):
    evidence = Evidence("h100-1x8", 1_200_000, 1, 1_000_000, "compute: 1 ms on the stream", bound_of=bound_of)
    text = str(explain(module, report(), evidence))
    assert text.splitlines()[-2:] == [
        f"the step takes 1.20 ms on h100-1x8, {told}",
        "proof of the bound: compute: 1 ms on the stream",
    ]


def test_sizes_that_are_unknown_are_told_so():
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    launch = graph.call_function(torch.ops._c10d_functional.all_reduce.default, (x, "sum", "tp"))
    graph.output([graph.call_function(torch.ops._c10d_functional.wait_tensor.default, (launch,))])
    (record,) = explain(GraphModule({}, graph), report()).collectives
    assert (record.num_ranks, record.num_bytes) == (0, None)
    text = str(explain(GraphModule({}, graph), report()))
    assert text.startswith("all_reduce_default: all-reduce of x (unknown size) over tp (unknown ranks)\n")


def test_a_graph_without_collectives_is_told_so():
    module = weft.parse("def graph(x: f32[2]):\n    r: f32[2] = relu(x)\n    return [r]\n")
    assert str(explain(module, report())) == "the graph has no collectives"


def test_the_json_holds_all_of_it(module: GraphModule):
    done = weft.optimize(module, pipeline="dedupe-collectives,hoist-launches,sink-waits")
    data = json.loads(explain(module, done.report).to_json())
    assert [record["name"] for record in data["collectives"]] == ["ag", "rs"]
    assert [outcome["pass_name"] for outcome in data["collectives"][0]["outcomes"]][-2:] == [
        "hoist-launches",
        "sink-waits",
    ]
    assert data["totals"][0]["reason"] == "applied"
    assert data["unconsidered"] == []


def test_a_name_cannot_write_to_the_terminal(module: GraphModule):
    evil = Decision("bucket", Reason.DEPENDENCY, "ag\x1b[2Jstays\r\nrs: merged", ("ag",), "x\x07\u202e")
    text = str(explain(module, report(evil)))
    assert "  - bucket: ag[2Jstaysrs: merged (dependency: x)" in text.splitlines()


def test_plain_text_keeps_its_lines():
    assert plain("a\x1b[1m\nb\tc\u2028é→") == "a[1m\nbcé→"
    assert plain_line("a\nb") == "ab"
