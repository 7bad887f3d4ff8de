"""The exposed time by layer: shares of buckets, alike layers, and the sentence that says why the step is slow."""

from __future__ import annotations

import pytest

from weft.graph.origins import CollectiveOrigin
from weft.plan.decision import Reason
from weft.report.collective_record import CollectiveDecision, CollectiveRecord
from weft.report.layers import exposed_by_layer, layer_lines, why_slow


def record(name: str, *layers: str, reason: Reason | None = None, phase: str = "forward") -> CollectiveRecord:
    """A launch with tensors of these layers, each larger than the one before."""
    origins = tuple(CollectiveOrigin(f"{each}.up", each, phase, "", 10 * i) for i, each in enumerate(layers, 1))
    outcomes = (CollectiveDecision("plan", reason, "", (name,), None, 1.0),) if reason is not None else ()
    return CollectiveRecord(name, "all_gather", "dp", 8, 100, outcomes, origins)


def test_alike_layers_are_one_row_and_the_longest_row_is_first():
    alike = [(record(f"a{i}", f"layers.{i}", reason=Reason.EXPOSED_BY_QUEUE), 100.0 + i) for i in range(1, 31)]
    first = (record("a0", "layers.0", reason=Reason.EXPOSED_BY_DEPENDENCY), 5000.0)
    rows = exposed_by_layer([*alike, first, (record("hidden", "norm"), 0.0)])
    assert [line.split("  ")[0] for line in layer_lines(rows)] == ["exposed by layer", "layers.0", "layers.1-30"]
    assert [row.row[2:] for row in rows] == [
        ("1", "5.00 ms", "inputs come too late, or the result is needed too soon"),
        ("30", "3.46 ms", "other collectives go first in the queue"),
    ]


def test_a_layer_that_is_exposed_for_much_longer_keeps_its_row():
    times = {1: 10.0, 2: 11.0, 3: 500.0, 4: 10.0}
    rows = exposed_by_layer(
        (record(f"a{i}", f"layers.{i}", reason=Reason.EXPOSED_BY_ORDER), time) for i, time in times.items()
    )
    assert [row.name for row in rows] == ["layers.3", "layers.1-2", "layers.4"]


def test_the_time_of_a_bucket_is_divided_by_bytes_and_none_is_lost():
    rows = exposed_by_layer([(record("bucket", "layers.0", "layers.1", "norm", reason=Reason.EXPOSED_BY_LINK), 60.0)])
    assert {row.name: row.exposed_us for row in rows} == pytest.approx({"norm": 30.0, "layers.0-1": 30.0})
    assert all(row.launches == ("bucket",) for row in rows)


def test_forward_and_backward_are_told_apart():
    rows = exposed_by_layer([(record("f", "layers.0"), 2.0), (record("b", "layers.0", phase="backward"), 1.0)])
    assert [(row.name, row.phase) for row in rows] == [("layers.0", "forward"), ("layers.0", "backward")]
    assert "schedule-overlap did not run" in rows[0].cause_text


def test_the_sentence_names_the_layer_and_the_cause():
    rows = exposed_by_layer([(record("a", "layers.0", reason=Reason.EXPOSED_BY_MEMORY), 30.0)])
    assert why_slow(100.0, 60.0, 40.0, rows) == (
        "Of the 100 us step, compute takes 60.0 us and exposed communication 40.0 us (40.0 %); the largest "
        "part is layers.0 in forward, 30.0 us: an earlier launch does not fit into memory."
    )
    assert why_slow(100.0, 60.0, 40.0, exposed_by_layer([(record("a"), 40.0)])).endswith("40.0 us (40.0 %).")
    assert why_slow(60.0, 60.0, 0.0, ()).endswith("no communication is exposed.")
