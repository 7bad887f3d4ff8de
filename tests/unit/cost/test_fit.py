"""Calibration: what readers make of traces and tables, what is fitted to it, and the cluster that comes out."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import random
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import weft
from tests.unit.cost.measured import (
    KB,
    LOOPBACK,
    LOOPBACK_COLUMNS,
    MB,
    event,
    loopback_tables,
    nccl_table,
    noisy_us,
    write_trace,
)
from weft.cost.calibration import chrome_trace
from weft.cost.calibration.chrome_trace import merge_traces, read_chrome_trace
from weft.cost.calibration.cluster_writer import MAX_POINTS, cluster_text
from weft.cost.calibration.fit import Fit, FittedLine, fit, read_measurements
from weft.cost.calibration.json_stream import CHUNK
from weft.cost.calibration.nccl_tests import read_nccl_tests
from weft.cost.calibration.samples import MeasurementError, Sample
from weft.cost.cluster import Cluster
from weft.cost.cluster_file import presets
from weft.cost.device import Device
from weft.cost.prices import price
from weft.errors import WeftError
from weft.graph.dag import Dag
from weft.graph.groups import Group, read_groups
from weft.graph.ops import Kind

DATA = Path(__file__).parents[2] / "data"
PAIR = (0, 1)


def line_of(fitted: Fit, kind: str, num_ranks: int) -> FittedLine:
    (line,) = (line for line in fitted.lines if line.kind.value == kind and line.group.size == num_ranks)
    return line


def faults(*paths: Path) -> list[str]:
    with pytest.raises(MeasurementError) as error:
        read_measurements(paths)
    folder = f"{paths[0].parent}/"
    return [line.replace(folder, "") for line in str(error.value).splitlines()]


def trace_faults(folder: Path, *events: Any) -> list[str]:
    return faults(write_trace(folder / "t.json", events))[1:]


# Fits.


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_reduce"])
@pytest.mark.parametrize(("latency", "gbps"), [(12.0, 370.0), (85.0, 3.0)])
def test_known_latency_and_bandwidth_are_recovered_within_5_percent(
    tmp_path: Path, kind: str, latency: float, gbps: float
):
    rng = random.Random(5)
    ranks = tuple(range(8))
    events: list[Any] = []
    for seq in range(400):
        shard = 2 ** rng.randrange(8, 26)
        full = shard * 2 * (1 if kind == "all_reduce" else 8)
        us = noisy_us(kind, full, 8, latency, gbps, rng)
        if rng.random() < 0.05:
            us *= 20  # a straggler, which medians and the robust fit leave aside
        events.append(event(kind, shard, ranks, us, seq=seq))
    fitted = fit(read_measurements([write_trace(tmp_path / "t.json", events)]).samples)
    (line,) = fitted.lines
    assert line.latency_us == pytest.approx(latency, rel=0.05)
    assert line.bandwidth_gbps == pytest.approx(gbps, rel=0.05)
    assert max(abs(residual.error) for residual in line.residuals) < 0.1


def test_latency_and_bandwidth_of_two_sizes_predict_the_sizes_between_them_within_15_percent(tmp_path: Path):
    path = tmp_path / "loopback.txt"
    path.write_text(loopback_tables([4 * KB, 256 * MB]))
    fitted = fit(read_measurements([path]).samples)
    errors: dict[tuple[str, int, int], float] = {}
    for column, (kind, n) in enumerate(LOOPBACK_COLUMNS):
        for size in (4 * MB, 64 * MB):
            told = line_of(fitted, kind, n).at(size * (n if kind == "all_gather" else 1))
            assert told is not None
            assert not told.extrapolated
            errors[kind, n, size] = told.us / (LOOPBACK[size][column] * 1000) - 1
    assert len(errors) == 12
    assert {key: error for key, error in errors.items() if abs(error) > 0.15} == {}


def test_one_outlier_does_not_pull_the_line():
    samples = [Sample(Kind.ALL_REDUCE, 2, size, 10 + size / 1e4) for size in (10**4, 10**5, 10**6, 10**7, 10**8)]
    spoilt = [*samples[:2], Sample(Kind.ALL_REDUCE, 2, 10**6, 1100.0), *samples[3:]]
    (line,) = fit(spoilt).lines
    assert line.latency_us == pytest.approx(10, rel=0.05)
    assert line.bandwidth_gbps == pytest.approx(10, rel=0.05)
    assert [round(residual.error, 1) for residual in line.residuals] == [0, 0, -0.9, 0, 0]


def test_no_latency_is_below_zero():
    (line,) = fit([Sample(Kind.ALL_REDUCE, 2, size, us) for size, us in ((100, 1.0), (1000, 11.0))]).lines
    assert line.latency_us == 0


def test_a_line_says_what_it_extrapolates():
    (line,) = fit([Sample(Kind.ALL_REDUCE, 2, size, 10.0 + size / 100) for size in (100, 1000)]).lines
    told = [line.at(size) for size in (99, 100, 1000, 1001)]
    assert [estimate.extrapolated for estimate in told if estimate is not None] == [True, False, False, True]


def test_the_order_of_samples_changes_nothing():
    rng = random.Random(1)
    samples = [
        Sample(kind, n, 2**size, rng.uniform(10, 1000) + 2**size / 1e3, tuple(range(n)))
        for kind in (Kind.ALL_GATHER, Kind.ALL_REDUCE)
        for n in (2, 4)
        for size in range(8, 24)
    ]
    shuffled = rng.sample(samples, len(samples))
    assert cluster_text(fit(samples, 2)) == cluster_text(fit(shuffled, 2))


def test_times_that_do_not_grow_are_refused():
    with pytest.raises(MeasurementError) as error:
        fit([Sample(Kind.ALL_REDUCE, 2, 8, 10.0), Sample(Kind.ALL_REDUCE, 2, 16, 9.0)])
    assert str(error.value).splitlines() == [
        "calibrate: nothing can be fitted",
        "    intra-node: no kind has two sizes whose times grow with their bytes; measure larger ones",
    ]


def test_one_size_gets_a_table_and_no_line():
    samples = [Sample(Kind.ALL_REDUCE, 2, size, 10 + size / 100) for size in (100, 1000)]
    fitted = fit([*samples, Sample(Kind.BROADCAST, 2, 64, 5.0)])
    line = line_of(fitted, "broadcast", 2)
    assert (line.latency_us, line.bandwidth_gbps, line.at(64), line.residuals) == (None, None, None, ())
    assert "broadcast of 2 ranks, intra-node: only one size, so it has a table but no line" in fitted.notes
    assert fitted.cluster.collective_us(Kind.BROADCAST, Group("g", 2), 64) == 5.0


# The cluster that comes out.


def test_the_file_loads_and_prices_what_was_measured(tmp_path: Path):
    path = tmp_path / "loopback.txt"
    path.write_text(loopback_tables(LOOPBACK))
    fitted = fit(read_measurements([path]).samples, name="loopback")
    (tmp_path / "c.toml").write_text(cluster_text(fitted, ["loopback.txt"]))
    cluster = Cluster.load(tmp_path / "c.toml")
    assert (cluster.name, cluster.num_ranks, [level.name for level in cluster.levels]) == (
        "loopback",
        4,
        ["intra-node"],
    )
    for column, (kind, n) in enumerate(LOOPBACK_COLUMNS):
        for size, times in LOOPBACK.items():
            estimate = cluster.estimate(Kind(kind), Group("g", n), size * (n if kind == "all_gather" else 1))
            assert (estimate.source, estimate.extrapolated) == ("table", False)
            assert estimate.us == pytest.approx(times[column] * 1000, rel=1e-5)


def test_links_price_a_number_of_ranks_that_was_not_measured(tmp_path: Path):
    rng = random.Random(2)
    samples = [
        Sample(Kind.ALL_GATHER, n, size, noisy_us("all_gather", size, n, 10 + 2 * (n - 1), 100.0, rng), tuple(range(n)))
        for n in (2, 8)
        for size in (2**k for k in range(10, 30))
    ]
    cluster = Cluster.read("c.toml", cluster_text(fit(samples)).encode())
    (level,) = cluster.levels
    link = level.link_of(Kind.ALL_GATHER)
    assert (link.latency_us, link.hop_us, link.bandwidth_gbps) == pytest.approx((10, 2, 100), rel=0.1)
    four = Group("g", 4)
    assert cluster.estimate(Kind.ALL_GATHER, four, 2**20).source == "links"
    expected = 16 + 2**20 * 3 / 4 / 100e3
    assert cluster.collective_us(Kind.ALL_GATHER, four, 2**20) == pytest.approx(expected, rel=0.1)


def test_groups_inside_of_a_node_and_between_nodes_get_levels_of_their_own():
    rng = random.Random(3)
    places = {(0, 1, 2, 3): (10.0, 300.0), (0, 4): (30.0, 25.0), tuple(range(8)): (40.0, 25.0)}
    samples = [
        Sample(Kind.ALL_REDUCE, len(ranks), size, noisy_us("all_reduce", size, len(ranks), *truth, rng), ranks)
        for ranks, truth in places.items()
        for size in (2**k for k in range(10, 30))
    ]
    cluster = Cluster.read("c.toml", cluster_text(fit(samples, ranks_per_node=4)).encode())
    assert (cluster.num_nodes, cluster.ranks_per_node) == (2, 4)
    assert [(level.name, level.num_ranks) for level in cluster.levels] == [("intra-node", 4), ("inter-node", 8)]
    bandwidths = [level.link_of(Kind.ALL_REDUCE).bandwidth_gbps for level in cluster.levels]
    assert bandwidths == pytest.approx([300, 25], rel=0.1)
    large = 2**29
    for group, (latency, gbps) in zip((Group("a", 4), Group("b", 2, 4), Group("c", 8)), places.values(), strict=True):
        expected = latency + large * 2 * (group.size - 1) / group.size / gbps / 1e3
        assert cluster.collective_us(Kind.ALL_REDUCE, group, large) == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize(("ranks", "measured"), [((0, 4), "inter-node"), ((4, 5), "intra-node")])
def test_a_level_that_was_not_measured_is_priced_as_the_other(ranks: tuple[int, ...], measured: str):
    fitted = fit([Sample(Kind.ALL_REDUCE, 2, size, 10 + size / 1e3, ranks) for size in (1000, 10**6)], ranks_per_node=4)
    other = "intra-node" if measured == "inter-node" else "inter-node"
    assert f"no {other} group was measured: such groups are priced as {measured} ones" in fitted.notes
    cluster = Cluster.read("c.toml", cluster_text(fitted).encode())
    assert [(level.name, level.num_ranks) for level in cluster.levels] == [(measured, 8)]
    for group in (Group("inside", 2), Group("across", 2, 4)):
        assert cluster.collective_us(Kind.ALL_REDUCE, group, 10**6) == pytest.approx(1010)


def test_what_is_known_of_a_device_is_written_down():
    device = Device("ours", (("bf16", 300.0),), 2000.0, None, 1.5, 0.25, 0.125, matmul_efficiency=1.0)
    samples = [Sample(Kind.ALL_REDUCE, 2, size, 10 + size / 1e3) for size in (1000, 10**6)]
    assert Cluster.read("c.toml", cluster_text(fit(samples, device=device)).encode()).device == device


def test_a_long_table_is_thinned_with_its_ends_kept():
    samples = [Sample(Kind.ALL_REDUCE, 2, size, 10 + size / 1e3) for size in range(1000, 2000)]
    (table,) = Cluster.read("c.toml", cluster_text(fit(samples)).encode()).tables
    assert (len(table.points), table.points[0][0], table.points[-1][0]) == (MAX_POINTS, 1000, 1999)


def test_names_of_files_cannot_leave_their_comment():
    text = cluster_text(fit([Sample(Kind.ALL_REDUCE, 2, size, size / 10) for size in (100, 1000)]), ['a\nname = "b"'])
    assert Cluster.read("c.toml", text.encode()).name == "calibrated"


# Traces.


def test_the_last_rank_to_arrive_tells_the_time(tmp_path: Path):
    rng = random.Random(4)
    ranks = tuple(range(4))
    files: list[list[Any]] = [[] for _ in ranks]
    for seq in range(200):
        shard = 2 ** rng.randrange(10, 24)
        us = noisy_us("all_gather", shard * 8, 4, 20.0, 50.0, rng)
        late = [rng.expovariate(1 / 2000) for _ in ranks]
        for rank in ranks:
            waited = max(late) - late[rank]
            files[rank].append(event("all_gather", shard, ranks, us + waited, seq=seq, ts=seq * 1e5 + late[rank]))
    paths = [write_trace(tmp_path / f"rank{rank}.json", files[rank], rank) for rank in ranks]
    (skewed,) = fit(read_measurements(paths[:1]).samples).lines
    found = read_measurements(paths)
    (line,) = fit(found.samples).lines
    assert (len(found.samples), found.notes) == (200, ())
    assert (line.latency_us, line.bandwidth_gbps) == pytest.approx((20.0, 50.0), rel=0.05)
    assert skewed.latency_us is not None
    assert skewed.latency_us > 200


def test_one_rank_alone_is_told_to_include_waiting(tmp_path: Path):
    path = write_trace(tmp_path / "t.json", [event("all_reduce", 64, PAIR, 9.0)])
    assert merge_traces([read_chrome_trace(path)]).notes == (
        "1 of 1 groups were seen by one rank only: their times include waiting for the others; "
        "give the traces of all ranks",
    )


def test_without_sequence_numbers_ranks_are_matched_by_order_in_time(tmp_path: Path):
    first = [event("all_reduce", 64, PAIR, us, ts=ts) for ts, us in ((1.0, 10.0), (2.0, 50.0), (3.0, 30.0))]
    second = [event("all_reduce", 64, PAIR, us, ts=ts) for ts, us in ((7.0, 31.0), (5.0, 60.0), (6.0, 20.0))]
    paths = [write_trace(tmp_path / f"{i}.json", events, i) for i, events in enumerate((first, second))]
    assert [sample.us for sample in read_measurements(paths).samples] == [10.0, 20.0, 30.0]


def test_collectives_that_one_of_the_traces_lacks_are_left_out(tmp_path: Path):
    first = [event("all_reduce", 64, PAIR, 10.0 + seq, seq=seq) for seq in range(5)]
    second = [event("all_reduce", 64, PAIR, 20.0 + seq, seq=seq) for seq in range(3, 7)]
    paths = [write_trace(tmp_path / f"{i}.json", events, i) for i, events in enumerate((first, second))]
    found = read_measurements(paths)
    assert [sample.us for sample in found.samples] == [13.0, 14.0]
    assert found.notes == ("left out: 5 collectives that some traces of their group do not have",)


def test_traces_of_different_runs_are_refused(tmp_path: Path):
    paths = [write_trace(tmp_path / f"{i}.json", [event("all_reduce", 64, PAIR, 10.0, seq=i)], i) for i in PAIR]
    assert faults(*paths) == [
        "calibrate: nothing can be fitted",
        "    group '0' of 2 ranks: the traces of 0, 1 share none of its collectives",
    ]


def test_groups_of_equal_ranks_and_different_names_are_not_mixed(tmp_path: Path):
    events = [
        event("all_reduce", 64, PAIR, us, seq=1, **{"Process Group Name": name}) for name, us in (("1", 9), ("2", 5))
    ]
    found = read_measurements([write_trace(tmp_path / "t.json", events)])
    assert sorted(sample.us for sample in found.samples) == [5, 9]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("_allgather_base", Kind.ALL_GATHER),
        ("all_gather_into_tensor_coalesced", Kind.ALL_GATHER),
        ("allgather_into_tensor_out", Kind.ALL_GATHER),
        ("_reduce_scatter_base", Kind.REDUCE_SCATTER),
        ("reduce_scatter_tensor_coalesced", Kind.REDUCE_SCATTER),
        ("allreduce_coalesced", Kind.ALL_REDUCE),
        ("all_to_allv", Kind.ALL_TO_ALL),
        ("broadcast_oop", Kind.BROADCAST),
    ],
)
def test_every_form_of_a_collective_is_known(tmp_path: Path, name: str, kind: Kind):
    args = {"Collective name": name, "In msg nelems": 32, "Out msg nelems": 32}
    (kernel,) = read_chrome_trace(write_trace(tmp_path / "t.json", [event("", 1, PAIR, 9.0, **args)])).kernels
    assert (kernel.kind, kernel.num_bytes) == (kind, 64)


def test_bytes_are_those_of_the_full_tensor(tmp_path: Path):
    kinds = ("all_gather", "reduce_scatter", "all_reduce")
    trace = read_chrome_trace(write_trace(tmp_path / "t.json", [event(kind, 8, PAIR, 9.0) for kind in kinds]))
    assert [kernel.num_bytes for kernel in trace.kernels] == [32, 32, 16]
    one = event("all_reduce", 1, PAIR, 9.0, dtype="Float")
    assert read_chrome_trace(write_trace(tmp_path / "scalar.json", [one])).kernels[0].num_bytes == 4


def test_what_has_no_price_is_counted(tmp_path: Path):
    kernel = event("all_reduce", 8, PAIR, 9.0)
    events = [
        kernel,
        event("send", 8, PAIR, 9.0),
        event("recv", 8, PAIR, 9.0),
        event("gather", 8, PAIR, 9.0),
        event("all_reduce", 8, (0,), 9.0),
        event("all_reduce", 0, PAIR, 9.0),
        event("all_reduce", 8, PAIR, 0),
        {"cat": "kernel", "name": "ncclKernel_AllReduce", "dur": 5},
        {"cat": "kernel", "name": "gemm", "dur": 5, "args": {}},
        {"cat": "cpu_op", "name": "record_param_comms", "dur": 5, "args": kernel["args"]},
        {"ph": "M"},
    ]
    trace = read_chrome_trace(write_trace(tmp_path / "t.json", events))
    assert len(trace.kernels) == 1
    assert dict(trace.skipped) == {
        "NCCL kernels that do not say what they do": 1,
        "collectives of no bytes": 1,
        "collectives of one rank": 1,
        "collectives that took no time": 1,
        "kernels that are of kind 'gather'": 1,
        "kernels that are point-to-point": 2,
    }


@pytest.mark.parametrize("config", [[{"pg_name": "0", "ranks": [4, 0]}], {"0": {"ranks": [4, 0]}}])
def test_ranks_that_a_kernel_leaves_out_come_from_the_groups_of_the_run(tmp_path: Path, config: Any):
    kernel = event("all_reduce", 8, PAIR, 9.0, **{"Process Group Ranks": ""})
    info = {"rank": 4, "pg_config": config}
    trace = read_chrome_trace(write_trace(tmp_path / "t.json", [kernel], distributedInfo=info))
    assert (trace.rank, trace.kernels[0].ranks) == (4, (0, 4))


def test_ranks_that_are_cut_short_are_unknown(tmp_path: Path):
    args = {"Process Group Ranks": "[0, 1, 2, ...]", "Group size": 64}
    trace = read_chrome_trace(write_trace(tmp_path / "t.json", [event("all_reduce", 8, PAIR, 9.0, **args)]))
    assert (trace.kernels[0].ranks, trace.kernels[0].num_ranks) == ((), 64)


def test_an_array_of_events_is_a_trace_too(tmp_path: Path):
    (tmp_path / "t.json").write_text(json.dumps([event("all_reduce", 8, PAIR, 9.0)]))
    assert len(read_measurements([tmp_path / "t.json"]).samples) == 1


def test_a_packed_trace_is_read_and_events_may_cross_the_pieces_that_are_read(tmp_path: Path):
    events: list[Any] = []
    for seq in range(3000):
        events += [event("all_reduce", 8, PAIR, 9.0, seq=seq), {"cat": "cpu_op", "name": "x" * (seq % 997)}]
    path = write_trace(tmp_path / "t.json.gz", [*events, {"name": "y" * 3 * CHUNK}])
    assert len(read_chrome_trace(path).kernels) == 3000


@pytest.mark.slow
def test_a_large_trace_takes_the_memory_of_its_pieces(tmp_path: Path):
    other = {"cat": "cpu_op", "name": "x", "args": {"Input Dims": [[4096] * 100]}}
    path = write_trace(tmp_path / "t.json", [*[other] * 20_000, event("all_reduce", 8, PAIR, 9.0)])
    assert path.stat().st_size > 20 * CHUNK
    tracemalloc.start()
    try:
        assert len(read_chrome_trace(path).kernels) == 1
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 8 * CHUNK


def test_a_file_that_did_not_change_is_read_once(tmp_path: Path):
    chrome_trace._read.cache_clear()
    path = write_trace(tmp_path / "t.json", [event("all_reduce", 8, PAIR, 9.0)])
    assert read_chrome_trace(path) is read_chrome_trace(path)
    write_trace(path, [event("all_reduce", 8, PAIR, 5.0)])
    os.utime(path, ns=(1, 1))
    assert read_chrome_trace(path).kernels[0].us == 5.0


def test_traces_of_four_real_ranks_that_share_a_gpu_give_the_bandwidth_of_its_sockets():
    """torch 2.11.0, NCCL 2.28.9; no sequence numbers; the first collective waits 0.3 s for the last rank."""
    paths = [DATA / f"loopback_rank{rank}.json.gz" for rank in range(4)]
    found = read_measurements(paths)
    fitted = fit(found.samples)
    assert found.notes == ("left out: 12 kernels that are point-to-point",)
    assert [(line.kind.value, line.group.size) for line in fitted.lines if line.latency_us is not None] == [
        (kind, n) for kind in ("all_gather", "all_reduce", "reduce_scatter") for n in (2, 4)
    ]
    for line in fitted.lines:
        if line.bandwidth_gbps is not None:
            # The tables of the same machine, measured without a profiler on another day, say 3.0.
            assert 2.5 < line.bandwidth_gbps < 3.7


# The estimates of a profile.


def test_a_profile_prices_exact_sizes_sizes_between_them_and_sizes_below_them(tmp_path: Path):
    events = [event("all_reduce", n, PAIR, us) for n, us in ((512, 20.0), (512, 90.0), (512, 22.0), (1024, 42.0))]
    cluster = fit(read_measurements([write_trace(tmp_path / "t.json", events)]).samples).cluster
    told = [cluster.estimate(Kind.ALL_REDUCE, Group("g", 2), size) for size in (1024, 1536, 2048, 8, 1 << 20)]
    assert [round(estimate.us, 6) for estimate in told[:4]] == [22.0, 32.0, 42.0, 22.0]
    assert [estimate.extrapolated for estimate in told] == [False, False, False, True, True]


def test_groups_of_one_mesh_axis_share_a_price_and_ambiguous_tables_give_none(tmp_path: Path):
    events = [event("all_reduce", n, (0, 2), us) for n, us in ((512, 20.0), (1024, 42.0))]
    cluster = fit(read_measurements([write_trace(tmp_path / "t.json", events)]).samples).cluster
    other = Group("dp", 2, ranks=((1, 3),)) if cluster.num_ranks > 3 else Group("dp", 2, ranks=((1, 2),))
    assert cluster.estimate(Kind.ALL_REDUCE, other, 1024).source == "table"
    twice = Cluster(cluster.name, 1, cluster.num_ranks, cluster.levels, tables=(*cluster.tables, *cluster.tables))
    assert twice.estimate(Kind.ALL_REDUCE, other, 1024).source == "links"


def test_a_profile_prices_out_variants_coalesced_forms_and_zero_dimensional_inputs(tmp_path: Path):
    events = [event("all_gather", n, PAIR, us) for n, us in ((8, 20.0), (16, 40.0))]
    events += [event("all_reduce", n, PAIR, us, dtype="Float") for n, us in ((1, 7.0), (8, 9.0))]
    cluster = fit(read_measurements([write_trace(tmp_path / "t.json", events)]).samples).cluster
    module = weft.parse(
        "group('dp', size=2)\n\n"
        "def graph(x: bf16[8], y: bf16[16], s: f32[()]):\n"
        "    out: bf16[16] = all_gather_out(x, 2, 'dp', out=y)\n"
        "    w0: bf16[16] = wait(out)\n"
        "    many = all_gather_coalesced([x, x], 2, 'dp')\n"
        "    m0: bf16[16] = operator.getitem(many, 0)\n"
        "    m1: bf16[16] = operator.getitem(many, 1)\n"
        "    w1: bf16[16] = wait(m0)\n"
        "    w2: bf16[16] = wait(m1)\n"
        "    ar: f32[()] = all_reduce(s, 'sum', 'dp')\n"
        "    w3: f32[()] = wait(ar)\n"
        "    return [w0, w1, w2, w3]\n"
    )
    dag = Dag(module.graph)
    prices = price(dag, read_groups(module), cluster)
    told = {dag.nodes[i].name: (ns / 1000, prices.sources[i]) for i, ns in prices.collective_ns.items()}
    assert told == {"out": (20.0, "table"), "many": (40.0, "table"), "ar": (7.0, "table")}
    assert not prices.extrapolated


# Tables of nccl-tests.


def test_the_kind_comes_from_a_line_then_from_the_caller_then_from_the_name(tmp_path: Path):
    rows = [(1024, 10.0), (2048, 12.0)]
    path = tmp_path / "all_gather_perf.txt"
    path.write_text(nccl_table("reduce_scatter", 2, rows) + nccl_table("", 2, rows, named=False))
    assert [s.kind for s in read_nccl_tests(path).samples] == [Kind.REDUCE_SCATTER] * 2 + [Kind.ALL_GATHER] * 2
    given_kind = read_nccl_tests(path, Kind.ALL_REDUCE).samples
    assert [s.kind for s in given_kind] == [Kind.REDUCE_SCATTER] * 2 + [Kind.ALL_REDUCE] * 2
    (tmp_path / "log.txt").write_text("$ ./build/alltoall_perf -b 8\n" + nccl_table("", 2, rows, named=False))
    assert [s.kind for s in read_nccl_tests(tmp_path / "log.txt").samples] == [Kind.ALL_TO_ALL] * 2


def test_repeated_sizes_are_repeats(tmp_path: Path):
    (tmp_path / "t").write_text(nccl_table("all_reduce", 2, [(1024, 10.0), (1024, 90.0), (1024, 14.0), (4096, 50.0)]))
    (line,) = fit(read_nccl_tests(tmp_path / "t").samples).lines
    assert line.table.points == ((1024, 14.0), (4096, 50.0))


def test_hosts_say_how_many_ranks_a_node_has(tmp_path: Path):
    rows = [(1 << 20, 100.0), (1 << 24, 900.0)]
    path = tmp_path / "t"
    path.write_text(nccl_table("all_reduce", 2, rows) + nccl_table("all_reduce", 8, rows, hosts=2))
    found = read_nccl_tests(path)
    assert found.ranks_per_node == 4
    assert [line.level for line in fit(found.samples, found.ranks_per_node).lines] == ["intra-node", "inter-node"]


@pytest.mark.parametrize("prefix", ["(head, rank=0, pid=3) [1,0]<stdout>:", "0: ", " 12: ", "127: [1,0]<stdout>:"])
def test_prefixes_logs_missing_columns_and_times_in_place_are_read(tmp_path: Path, prefix: str):
    text = nccl_table("all_gather", 2, [(1024, 10.0)]).replace(" sum", "").replace(" 10.00", " N/A", 1)
    text = text.replace("NCCL version", "host:1:1 [0] NCCL INFO Bootstrap: Using lo\nNCCL version")
    (tmp_path / "t").write_text("".join(f"{prefix}{line}".rstrip() + "\n" for line in text.splitlines()))
    assert read_measurements([tmp_path / "t"]).samples == (Sample(Kind.ALL_GATHER, 2, 1024, 10.0, PAIR),)


def test_old_tables_and_threads_instead_of_devices_are_read(tmp_path: Path):
    (tmp_path / "all_gather.txt").write_text(
        "# nThread 2 nGpus 4 minBytes 1 maxBytes 8589934592 step: 2(factor) validation: 0\n"
        "#       size         count    type     time   algbw   busbw  error     time   algbw   busbw  error\n"
        "        1024            32   float    34.34    0.03    0.03    N/A    34.20    0.03    0.03    N/A\n"
    )
    assert read_nccl_tests(tmp_path / "all_gather.txt").samples == (Sample(Kind.ALL_GATHER, 8, 1024, 34.34),)


def test_rows_without_a_price_are_counted(tmp_path: Path):
    path = tmp_path / "t"
    empty = "0 0 float sum -1 9.0 0.0 0.0 0 9.0 0.0 0.0 0\n"
    path.write_text(nccl_table("sendrecv", 2, [(8, 9.0)]) + nccl_table("all_reduce", 2, [(8, 9.0)]) + empty)
    assert read_nccl_tests(path).notes == (
        "left out: 1 rows of no bytes, no time or one rank",
        "left out: 1 rows of sendrecv that cannot be priced",
    )


# Faults.


def test_every_fault_of_every_file_is_told_at_once_with_its_line(tmp_path: Path):
    good = event("all_reduce", 8, PAIR, 9.0)
    bad = event("all_reduce", 8, PAIR, -1.0, dtype="BFloat61", **{"In msg nelems": "8", "Group size": True})
    del bad["args"]["Out msg nelems"]
    trace = write_trace(tmp_path / "a.json", [good, 5, bad, event("all_reduce", 8, PAIR, 9.0, **{"Group size": 3})])
    table = tmp_path / "b.txt"
    rows = nccl_table("all_reduce", 2, [(8, 9.0), (16, 9.0)]).replace(" 9.00 ", " fast ", 1)
    table.write_text(rows + "    32  8 float\n" + nccl_table("", 2, [(8, 9.0)], named=False))
    (tmp_path / "c.json").write_text('{\n"traceEvents": [{"a": 1},\n{"b": ')
    (tmp_path / "d.bin").write_bytes(b"\x7fELF\x00\xff" * 100)
    (tmp_path / "e.json.gz").write_bytes(gzip.compress(b"[" * 1000)[:-12])
    (tmp_path / "f.txt").write_text("# size count type redop\n 8 2 float sum\n")
    paths = [trace, table, *(tmp_path / name for name in ("c.json", "d.bin", "e.json.gz", "f.txt", "none"))]
    place = trace.read_text().splitlines().index("  5,") + 1
    found = faults(*paths)
    assert found[:6] == [
        "calibrate: nothing can be fitted",
        f"    a.json:{place}: expected an event, found 5",
        f"    a.json:{place + 1}: 'allreduce': dur: expected a time of 0 us or more, found -1.0",
        f"    a.json:{place + 1}: 'allreduce': In msg nelems: expected a whole number of 0 or more, found '8'",
        f"    a.json:{place + 1}: 'allreduce': Out msg nelems: expected a whole number of 0 or more, it is missing",
        f"    a.json:{place + 1}: 'allreduce': Group size: expected a whole number of 1 or more, found True",
    ]
    assert found[6:8] == [
        f"    a.json:{place + 1}: 'allreduce': dtype: expected a dtype such as BFloat16, found 'BFloat61'; "
        "did you mean 'bfloat16'?",
        f"    a.json:{found[7].split(':')[1]}: 'allreduce': Process Group Ranks: expected 3 different ranks, "
        "found '[0, 1]'",
    ]
    assert found[8:] == [
        "    b.txt:12: time: expected microseconds of 0 or more, found 'fast'",
        "    b.txt:17: expected 13 columns, found 3",
        "    b.txt:26: neither a line above the table nor the file's name says its kind; "
        "give --kind, or keep the line that names the test",
        "    c.json:3: it is not a trace: Expecting value",
        "    d.bin:1: it contains neither a table nor a trace; give the output of nccl-tests with its header, "
        "or a Chrome trace of torch.profiler",
        "    e.json.gz: it cannot be read: Compressed file ended before the end-of-stream marker was reached",
        "    f.txt:1: expected a column called time, found size count type redop",
        "    none: it cannot be read: No such file or directory",
    ]


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "it contains neither a table nor a trace"),
        ("{}", "it is not a trace: there is no array traceEvents"),
        ('{"traceEvents": 5}', "it is not a trace: there is no array traceEvents"),
        ('{"traceEvents": []}', "none of its 0 events is a kernel of a collective with its arguments"),
        ('{"traceEvents": []} x', "it is not a trace: there is more text after the end"),
        ('{"traceEvents": [{} {}]}', "it is not a trace: expected a comma or ]"),
        ('{"traceEvents": [{}', "it is not a trace: expected a comma or ]"),
        ('{"traceEvents": [', "it is not a trace: it ends before its closing ]"),
        ("{5: 6}", "it is not a trace: expected a key in double quotes"),
        ('{"a" 6}', "it is not a trace: expected a colon after a key"),
        ('{"a": ' + "[" * 100_000, "it is not a trace: it is nested too deeply"),
        ('{"a": ' + "9" * 5000 + "}", "it is not a trace: Exceeds the limit"),
    ],
)
def test_a_file_that_is_no_trace_is_refused(tmp_path: Path, text: str, what: str):
    (tmp_path / "t.json").write_text(text)
    assert what in faults(tmp_path / "t.json")[1]


def test_a_trace_without_arguments_says_so(tmp_path: Path):
    (fault,) = trace_faults(tmp_path, {"cat": "kernel", "name": "ncclKernel"}, event("send", 8, PAIR, 9.0))
    assert fault.startswith(
        "    t.json:1: none of its 2 events is a kernel of a collective with its arguments "
        "(1 NCCL kernels that do not say what they do, 1 kernels that are point-to-point)"
    )
    assert "torch 2.4 or later" in fault


def test_a_trace_without_kernels_of_nccl_does_not_blame_torch(tmp_path: Path):
    (fault,) = trace_faults(tmp_path, event("send", 8, PAIR, 9.0))
    assert "torch 2.4" not in fault


@pytest.mark.parametrize("us", [-1, "9", None, True, float("nan"), float("inf"), 1e300])
def test_a_duration_that_is_none_is_refused(tmp_path: Path, us: Any):
    (fault,) = trace_faults(tmp_path, event("all_reduce", 8, PAIR, us))
    assert "dur: expected a time of 0 us or more, found" in fault


@pytest.mark.parametrize("ranks", ["[0, x]", "[0, 0]", [0, -1], 5, "[0, 1, 2]", {"0": 1}, "[1.5, 2]"])
def test_ranks_that_are_none_are_refused(tmp_path: Path, ranks: Any):
    (fault,) = trace_faults(tmp_path, event("all_reduce", 8, PAIR, 9.0, **{"Process Group Ranks": ranks}))
    assert "Process Group Ranks: expected 2 different ranks, found" in fault


def test_of_many_faults_the_first_are_shown(tmp_path: Path):
    found = trace_faults(tmp_path, *range(80))
    assert (len(found), found[-1]) == (51, "    ... and 30 more")


def test_a_table_that_does_not_tell_its_ranks_is_refused(tmp_path: Path):
    text = "\n".join(line for line in nccl_table("all_reduce", 2, [(8, 9.0)]).splitlines() if "nThread" not in line)
    (tmp_path / "t").write_text("\n".join(line for line in text.splitlines() if "Rank" not in line))
    assert faults(tmp_path / "t")[1] == (
        "    t:7: the number of ranks is missing; keep the lines '#  Rank  0 ... on HOST device 0' above the table"
    )


def test_a_size_that_no_tensor_has_is_refused(tmp_path: Path):
    (tmp_path / "t").write_text(nccl_table("all_reduce", 2, [(10**30, 9.0)]))
    assert "size: expected at most" in faults(tmp_path / "t")[1]


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)
SPOILT = st.builds(
    lambda base, args, top: {**base, **top, "args": {**base["args"], **args}},
    st.builds(
        event,
        st.sampled_from(["all_gather", "all_reduce", "send"]),
        st.integers(0, 99),
        st.just(PAIR),
        st.floats(0, 99),
    ),
    st.dictionaries(st.sampled_from(list(event("", 1, PAIR, 1.0, seq=1)["args"])), JSON_VALUES, max_size=2),
    st.dictionaries(st.sampled_from(["dur", "ts", "cat", "name"]), JSON_VALUES, max_size=1),
)
FUZZ = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def only_errors_of_weft(path: Path) -> None:
    chrome_trace._read.cache_clear()  # two files within one tick of the clock look alike
    with contextlib.suppress(WeftError):
        text = cluster_text(fit(read_measurements([path]).samples, ranks_per_node=2))
        assert Cluster.read("c.toml", text.encode()).tables


@FUZZ
@given(events=st.lists(SPOILT | JSON_VALUES, max_size=6), info=JSON_VALUES)
def test_any_json_gives_a_cluster_or_an_error_of_weft(tmp_path: Path, events: list[Any], info: Any):
    only_errors_of_weft(write_trace(tmp_path / "t.json", events, distributedInfo=info))


@FUZZ
@given(data=st.data())
def test_any_bytes_give_a_cluster_or_an_error_of_weft(tmp_path: Path, data: st.DataObject):
    text = nccl_table("all_reduce", 2, [(8, 9.0), (1 << 20, 99.0)]).encode()
    trace = json.dumps({"traceEvents": [event("all_reduce", n, PAIR, float(n)) for n in (8, 99)]}).encode()
    base = data.draw(st.sampled_from([text, trace, gzip.compress(trace, mtime=0), b""]))
    start = data.draw(st.integers(0, len(base)))
    content = base[:start] + data.draw(st.binary(max_size=20)) + base[start + data.draw(st.integers(0, 40)) :]
    (tmp_path / "t").write_bytes(content)
    only_errors_of_weft(tmp_path / "t")


@pytest.mark.parametrize("name", presets())
def test_every_preset_reads_back_as_it_was_written(name: str) -> None:
    cluster = Cluster.load(name)
    found = Cluster.read("c.toml", cluster_text(Fit((), cluster)).encode())
    assert replace(found, tables=()) == replace(cluster, tables=())


def test_the_chosen_attention_kernel_is_the_default_of_the_file() -> None:
    cluster = Cluster.load("h200-1x8").with_attention("flash2")
    found = Cluster.read("c.toml", cluster_text(Fit((), cluster)).encode())
    assert found.device.attention[0].name == "flash2"
    assert set(found.device.attention) == set(cluster.device.attention)
