"""The table of two runs: numbers, text, JSON."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from weft.quantities import duration_text, size_text
from weft.report.collective_record import CollectiveRecord
from weft.report.summary import SimulatedRun, Totals, summarize
from weft.report.work import Work
from weft.simulation.timeline import CollectiveSpan, Span, Timeline


def run(exposed_ns: int, bound_ns: int = 0, sizes: tuple[int | None, ...] = (), peak_bytes: int = 0) -> SimulatedRun:
    """Two milliseconds of compute and one collective that takes one, of which some is exposed."""
    collective = CollectiveSpan(1, "ag", 0, 1_000_000, 1_000_000, 0, 0, 0, 1_000_000 - exposed_ns, exposed_ns)
    timeline = Timeline(
        (Span(0, "a", 0, 2_000_000, 2_000_000),), (collective,), 2_000_000 + exposed_ns, (), peak_bytes, (), bound_ns
    )
    records = tuple(CollectiveRecord("ag", "all_gather", "dp", 8, size, ()) for size in sizes)
    return SimulatedRun(timeline, ("dp",), records)


BEFORE = run(500_000, 2_000_000, (1024, 2048), 3 << 30)
AFTER = run(0, 2_000_000, (3072,), 3 << 29)


def test_the_totals_are_those_of_the_timeline():
    assert summarize(BEFORE, AFTER).before == Totals(
        step_us=2500.0,
        compute_us=2000.0,
        exposed_us=500.0,
        hidden_us=500.0,
        lower_bound_us=2000.0,
        gap=0.25,
        peak_bytes=3 << 30,
        num_collectives=1,
        num_bytes=3072,
    )


def test_the_plain_table_says_what_changed():
    assert summarize(BEFORE, AFTER).lines() == [
        "             before    after     change",
        "step         2.50 ms   2.00 ms   -20.0 %",
        "exposed      500 us    0 us      -100.0 %",
        "hidden       500 us    1.00 ms   +100.0 %",
        "bound        2.00 ms   2.00 ms",
        "gap          25.0 %    0.0 %     -25.0 points",
        "peak memory  3.00 GiB  1.50 GiB  -50.0 %",
        "collectives  1         1",
        "bytes        3.00 KiB  3.00 KiB",
    ]


def test_tokens_and_mfu_are_told_where_the_work_is_given():
    summary = summarize(BEFORE, AFTER, Work(num_tokens=4096, flops_share=0.001))
    assert summary.lines()[-2:] == [
        "MFU          40.0 %     50.0 %     +10.0 points",
        "tokens/s     1,638,400  2,048,000  +25.0 %",
    ]
    assert [row.better for row in summary.rows] == [True, True, None, None, True, True, None, None, True, True]


def test_what_is_not_known_is_left_out_or_a_dash():
    summary = summarize(run(500_000), run(0))
    assert [row.name for row in summary.rows] == ["step", "exposed", "hidden", "collectives"]
    assert summary.before.gap is None
    (bound,) = [row for row in summarize(run(500_000), AFTER).rows if row.name == "bound"]
    assert (bound.before, bound.after, bound.change, bound.better) == ("-", "2.00 ms", "", None)


def test_bytes_are_not_told_where_one_size_is_unknown():
    assert summarize(run(0, sizes=(1024, None)), AFTER).before.num_bytes is None


def test_a_change_for_the_worse_is_one():
    assert summarize(AFTER, BEFORE).rows[0].better is False
    assert summarize(AFTER, BEFORE).rows[1].change == ""


def test_the_json_is_the_data():
    data = json.loads(summarize(run(500_000), AFTER).to_json())
    assert data["before"]["lower_bound_us"] is None
    assert data["after"]["step_us"] == 2000.0


def test_a_terminal_gets_colours():
    terminal = io.StringIO()
    table = summarize(BEFORE, AFTER).to_rich()
    Console(file=terminal, force_terminal=True, color_system="standard", width=80).print(table)
    assert "\x1b[32m-20.0 %" in terminal.getvalue()


@pytest.mark.parametrize(
    ("microseconds", "text"),
    [(0, "0 us"), (9.994, "9.99 us"), (9.996, "10.0 us"), (999.4, "999 us"), (999.6, "1.00 ms"), (2.5e6, "2.50 s")],
)
def test_durations_have_three_digits(microseconds: float, text: str):
    assert duration_text(microseconds) == text


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (3 << 29, "1.50 GiB"), (1 << 70, "1048576 PiB")],
)
def test_sizes_have_three_digits(num_bytes: int, text: str):
    assert size_text(num_bytes) == text


def test_a_queue_without_a_given_group_has_a_number():
    assert SimulatedRun(BEFORE.timeline).group(0) == "queue 0"
    assert SimulatedRun(BEFORE.timeline).num_queues == 1
