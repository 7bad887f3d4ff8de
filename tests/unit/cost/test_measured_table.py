"""Measured tables: exact, between, below and above what was measured; and how well a straight line predicts one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from weft.cost.cluster import Cluster
from weft.cost.levels import Level, Link
from weft.cost.measured_table import Estimate, Table, find_table
from weft.graph.groups import Group
from weft.graph.ops import Kind

LOOPBACK = Cluster.load("loopback-1x4")
TABLE = Table(Kind.ALL_REDUCE, 4, ((1000, 10.0), (4000, 40.0), (16000, 640.0)))

# The loopback GPU, measured (torch 2.11.0, NCCL 2.28.9, one H200): bytes that one rank passes, microseconds.
KB, MB = 1 << 10, 1 << 20
SIZES = (4 * KB, 256 * KB, 4 * MB, 64 * MB, 256 * MB)
MEASURED = {
    (Kind.ALL_REDUCE, 2): (85, 217, 1400, 20900, 88500),
    (Kind.ALL_GATHER, 2): (51, 179, 1620, 20700, 89400),
    (Kind.REDUCE_SCATTER, 2): (51, 138, 810, 10700, 43200),
    (Kind.ALL_REDUCE, 4): (182, 467, 2440, 33200, 131900),
    (Kind.ALL_GATHER, 4): (87, 636, 4450, 66200, 266800),
    (Kind.REDUCE_SCATTER, 4): (72, 279, 1260, 17000, 70700),
}


def full(kind: Kind, num_ranks: int, input_bytes: int) -> int:
    return input_bytes * (num_ranks if kind is Kind.ALL_GATHER else 1)


def wire_share(kind: Kind, num_ranks: int) -> float:
    return (2 if kind is Kind.ALL_REDUCE else 1) * (num_ranks - 1) / num_ranks


@pytest.mark.parametrize(
    ("num_bytes", "estimate"),
    [
        (4000, Estimate(40.0, "table")),
        (2000, Estimate(20.0, "table")),
        (8000, Estimate(240.0, "table")),
        (10, Estimate(10.0, "table", extrapolated=True)),
        (0, Estimate(10.0, "table", extrapolated=True)),
        (32000, Estimate(1280.0, "table", extrapolated=True)),
    ],
)
def test_a_table_answers_exactly_between_and_outside_its_sizes(num_bytes: int, estimate: Estimate):
    found = TABLE.at(num_bytes)
    assert found.us == pytest.approx(estimate.us)
    assert replace(found, us=0.0) == replace(estimate, us=0.0)


def test_below_the_range_the_smallest_measured_time_stands():
    noisy = Table(Kind.ALL_REDUCE, 4, ((1000, 12.0), (4000, 10.0), (16000, 40.0)))
    assert noisy.at(1).us == 10.0


def test_repeated_measurements_count_by_their_median():
    samples = [(4000, 41.0), (1000, 9.0), (4000, 40.0), (1000, 10.0), (4000, 4.0), (1000, 11.0)]
    assert Table.measured(Kind.ALL_REDUCE, 4, samples).points == ((1000, 10.0), (4000, 40.0))


def test_a_table_is_found_by_kind_ranks_and_level():
    inner, any_level = replace(TABLE, level="nvlink"), TABLE
    assert find_table([inner, any_level], Kind.ALL_REDUCE, 4, "nvlink") is inner
    assert find_table([inner, any_level], Kind.ALL_REDUCE, 4, "infiniband") is any_level
    assert find_table([inner], Kind.ALL_REDUCE, 4, "infiniband") is None
    assert find_table([any_level], Kind.ALL_REDUCE, 8, "nvlink") is None
    assert find_table([any_level], Kind.ALL_GATHER, 4, "nvlink") is None


def test_two_tables_that_fit_are_no_answer():
    assert find_table([TABLE, replace(TABLE, points=((1, 1.0),))], Kind.ALL_REDUCE, 4, "nvlink") is None


def test_a_table_comes_before_the_models_for_what_it_holds():
    cluster = replace(Cluster.load("h100-8"), tables=(TABLE,))
    assert cluster.estimate(Kind.ALL_REDUCE, Group("a", 4), 4000) == Estimate(40.0, "table")
    assert cluster.estimate(Kind.ALL_REDUCE, Group("a", 8), 4000).source == "nccl"
    assert cluster.estimate(Kind.ALL_GATHER, Group("a", 4), 4000).source == "nccl"
    assert cluster.estimate(Kind.ALL_TO_ALL, Group("a", 4), 4000).source == "links"


@pytest.mark.parametrize(("kind", "num_ranks"), list(MEASURED))
def test_latency_and_bandwidth_of_two_rows_predict_the_rows_between(kind: Kind, num_ranks: int):
    """Fitted on the 4 KB and the 256 MB row of the loopback GPU."""
    us = dict(zip(SIZES, MEASURED[kind, num_ranks], strict=True))
    low, high = SIZES[0], SIZES[-1]
    per_us = (full(kind, num_ranks, high) - full(kind, num_ranks, low)) / (us[high] - us[low])
    bandwidth = per_us * wire_share(kind, num_ranks) / 1e3
    latency = us[low] - full(kind, num_ranks, low) / per_us
    fitted = Cluster("fitted", 1, num_ranks, (Level("loopback", num_ranks, Link(latency, 0.0, bandwidth)),))
    group = Group("dp", num_ranks)
    for size in (low, high):
        assert fitted.collective_us(kind, group, full(kind, num_ranks, size)) == pytest.approx(us[size], rel=1e-6)
    for size in (4 * MB, 64 * MB):
        assert fitted.collective_us(kind, group, full(kind, num_ranks, size)) == pytest.approx(us[size], rel=0.15)


@pytest.mark.parametrize(("kind", "num_ranks"), list(MEASURED))
def test_a_table_without_one_row_interpolates_it(kind: Kind, num_ranks: int):
    rows = [(full(kind, num_ranks, size), us) for size, us in zip(SIZES, MEASURED[kind, num_ranks], strict=True)]
    table = Table.measured(kind, num_ranks, [*rows[:1], *rows[2:]])
    found = table.at(rows[1][0])
    assert found.us == pytest.approx(rows[1][1], rel=0.5)
    assert not found.extrapolated


@pytest.mark.parametrize(("kind", "num_ranks"), list(MEASURED))
def test_outside_the_measured_range_the_loopback_gpu_says_so(kind: Kind, num_ranks: int):
    group = Group("dp", num_ranks)
    for input_bytes, outside in ((1 * KB, True), (1 * MB, False), (128 * MB, False), (512 * MB, True)):
        estimate = LOOPBACK.estimate(kind, group, full(kind, num_ranks, input_bytes))
        assert (estimate.source, estimate.extrapolated) == ("table", outside)


def test_one_large_all_reduce_beats_many_small_ones_as_measured():
    """64 all-reduces of 256 KB took 15.0 ms with two ranks, one of 16 MB 5.7 ms."""
    group = Group("dp", 2)
    many = 64 * LOOPBACK.collective_us(Kind.ALL_REDUCE, group, 256 * KB)
    one = LOOPBACK.collective_us(Kind.ALL_REDUCE, group, 16 * MB)
    assert many == pytest.approx(15_000, rel=0.15)
    assert one == pytest.approx(5_700, rel=0.15)
