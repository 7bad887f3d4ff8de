"""Sweeps: cells by any executor, shards and their merging, the table and the plot."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from torch.fx import GraphModule

from weft.api import optimize, simulate
from weft.cost.cluster import Cluster
from weft.errors import ClusterError, PipelineError, ReadError, ReportError
from weft.graph.listings.text import parse
from weft.passes.pipeline import Pipeline
from weft.quantities import duration_text
from weft.report.baseline import baseline_of
from weft.report.summary import Totals
from weft.report.sweep import Cell, merge, sweep
from weft.report.sweep_plot import plot
from weft.report.sweep_table import sweep_text
from weft.retention.policies import RetentionPolicy
from weft.zoo import load

LISTING = """group('dp', size=2)

def graph(x: f32[64, 64], p: f32[32, 64], q: f32[32, 64]):
    a: f32[64, 64] = mm(x, x)
    ag0: f32[64, 64] = all_gather(p, 2, 'dp')
    w0: f32[64, 64] = wait(ag0)
    ag1: f32[64, 64] = all_gather(q, 2, 'dp')
    w1: f32[64, 64] = wait(ag1)
    b: f32[64, 64] = relu(a)
    r: f32[64, 64] = add(b, w0)
    s: f32[64, 64] = add(r, w1)
    return [s]
"""
CLUSTERS = ["h100-8", "ethernet-h100-8x8"]
PIPELINES = ["none", "auto"]
TOTALS = Totals(10.0, 4.0, 5.0, 1.0, 8.0, 0.25, 1024, 2, 128)
HOSTILE = "<img src=x onerror=alert(1)>\"'&\x1b[2J\x00\u202e\ud800]]>"


@pytest.fixture(scope="module")
def module() -> GraphModule:
    return parse(LISTING)


@pytest.fixture(scope="module")
def cells(module: GraphModule) -> list[Cell]:
    return sweep(module, CLUSTERS, PIPELINES)


def timeless(cells: list[Cell]) -> list[Cell]:
    """Without what differs from run to run."""
    return [replace(cell, pass_seconds=None) for cell in cells]


def cell(index: int = 0, num_cells: int = 1, **rest: Any) -> Cell:
    named: dict[str, Any] = {"cluster": "c", "pipeline": "p", "before": TOTALS, "after": TOTALS, "pass_seconds": 0.5}
    return Cell("digest", index, num_cells, **(named | rest))


# Cells.


def test_cells_are_numbered_by_cluster_then_by_pipeline(cells: list[Cell]):
    assert [(each.index, each.num_cells, each.cluster, each.pipeline) for each in cells] == [
        (0, 4, "h100-8", "none"),
        (1, 4, "h100-8", "auto"),
        (2, 4, "ethernet-h100-8x8", "none"),
        (3, 4, "ethernet-h100-8x8", "auto"),
    ]
    assert len({each.sweep for each in cells}) == 1


def test_a_cell_says_what_optimize_says(module: GraphModule, cells: list[Cell]):
    report = optimize(module, "h100-8").report
    simulated = json.loads(report.to_json())["simulated"]
    found = json.loads(cells[1].to_json())
    assert (found["before"], found["after"]) == (simulated["before"], simulated["after"])
    assert (found["before"]["num_collectives"], found["after"]["num_collectives"]) == (2, 1)
    assert found["pass_seconds"] > 0
    assert found["error"] is None


def test_clusters_and_pipelines_may_be_values(module: GraphModule):
    (found,) = sweep(module, [Cluster.load("h100-8")], [Pipeline.parse("hoist-launches,sink-waits")])
    assert (found.cluster, found.pipeline) == ("h100-1x8", "hoist-launches,sink-waits")


def test_a_cell_that_fails_holds_its_error_and_the_others_run(module: GraphModule):
    good, bad = sweep(module, ["h100-8", "loopback-1x1"], ["auto"])
    assert good.error is None
    do = "use loopback-1x2, or a graph for at most 1 ranks"
    assert bad.error == f"cluster loopback-1x1: it has 1 ranks, group 'dp' needs 2\n{do}"
    assert (bad.before, bad.after, bad.pass_seconds) == (None, None, None)


def test_a_fault_inside_a_cell_is_a_row_too(module: GraphModule, monkeypatch: pytest.MonkeyPatch):
    def fail(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("by nothing")

    monkeypatch.setattr(Pipeline, "run", fail)
    assert [each.error for each in sweep(module, ["h100-8"], ["auto"])] == ["ZeroDivisionError: by nothing"]


@pytest.mark.parametrize(
    ("clusters", "pipelines", "error", "message"),
    [
        (["h10-8"], ["auto"], ClusterError, "no cluster is called 'h10-8'"),
        (["h100-8"], ["sink-wates"], PipelineError, "no pass is called 'sink-wates'"),
        (["h100-8", "h100-8"], ["auto"], ReportError, "sweep: cluster 'h100-8' is given 2 times\ngive it once"),
        (["h100-8"], ["auto", "auto"], ReportError, "sweep: pipeline 'auto' is given 2 times\ngive it once"),
    ],
)
def test_what_names_nothing_or_comes_twice_is_refused(
    module: GraphModule, clusters: list[str], pipelines: list[str], error: type[Exception], message: str
):
    with pytest.raises(error) as caught:
        sweep(module, clusters, pipelines)
    assert message in str(caught.value)


# Limits.

NEED = 64 * 64 * 4


def test_limits_are_axes_behind_clusters_and_pipelines(module: GraphModule):
    found = sweep(module, ["h100-8"], memory_limits=[None, 1 << 30], bucket_bytes=[1, None])
    assert [(each.index, each.memory_limit_bytes, each.max_bucket_bytes) for each in found] == [
        (0, None, 1),
        (1, None, None),
        (2, 1 << 30, 1),
        (3, 1 << 30, None),
    ]
    assert [each.pipeline for each in found] == ["auto"] * 4
    assert [each.after.num_collectives for each in found if each.after] == [2, 1, 2, 1]


def test_a_limit_that_nothing_meets_tells_what_would_fit(module: GraphModule):
    (refused,) = sweep(module, ["h100-8"], memory_limits=[NEED])
    assert refused.fitting_bytes is not None
    assert refused.fitting_bytes > NEED
    assert refused.error is not None
    assert f"the smallest peak found is {refused.fitting_bytes}" in refused.error
    assert refused.error.endswith(f"\nallow {refused.fitting_bytes} bytes")
    (fits,) = sweep(module, ["h100-8"], memory_limits=[refused.fitting_bytes])
    assert fits.error is None
    assert fits.after is not None
    assert fits.after.peak_bytes is not None
    assert fits.after.peak_bytes <= refused.fitting_bytes


def test_the_effort_is_that_of_every_cell(module: GraphModule, monkeypatch: pytest.MonkeyPatch):
    seen: list[Any] = []
    run = Pipeline.run
    monkeypatch.setattr(Pipeline, "run", lambda *args, **given: (seen.append(given["effort"]), run(*args, **given))[1])
    cells = [sweep(module, ["h100-8"], effort=effort)[0] for effort in ("fast", "best")]
    assert seen == ["fast", "best"]
    assert cells[0].sweep != cells[1].sweep


def test_sizes_of_buckets_need_a_pass_that_takes_them(module: GraphModule):
    (found,) = sweep(module, ["h100-8"], ["sink-waits"], bucket_bytes=[1 << 20])
    do = "add schedule-overlap, or omit the bucket sizes"
    assert found.error == f"sweep: no pass of 'sink-waits' has a bucket size\n{do}"


@pytest.mark.slow
def test_a_captured_step_is_planned_as_optimize_plans_it():
    captured = load("llama-debug", "fsdp", ranks=8, layers=2, part="step")
    limit = int(simulate(captured, "h100-8").peak_bytes * 0.9)
    (found,) = sweep(captured, ["h100-8"], memory_limits=[limit], effort="fast")
    report = optimize(captured, "h100-8", memory_limit_bytes=limit, effort="fast").report
    assert found.after is not None
    assert json.loads(found.to_json())["after"] == json.loads(report.to_json())["simulated"]["after"]
    made = [sum(row.num_values for row in report.memory if row.choice == c) for c in ("recomputed", "gathered again")]
    assert made[0] > 0
    assert [found.recomputed, found.gathered_again] == made


def test_policies_come_after_the_limits_of_each_cluster_without_a_limit(module: GraphModule):
    policies = {"own": parse(LISTING.replace("relu(a)", "neg(a)")), "kept": RetentionPolicy.KEEP}
    found = sweep(module, CLUSTERS, ["none,schedule-overlap"], memory_limits=[1 << 20, 1 << 30], policies=policies)
    places = [(each.memory_limit_bytes, each.policy) for each in found]
    assert places == [(1 << 20, None), (1 << 30, None), (None, "own"), (None, "kept")] * 2
    assert [each.cluster for each in found] == [CLUSTERS[0]] * 4 + [CLUSTERS[1]] * 4
    assert [each.index for each in found] == list(range(8))
    assert {each.num_cells for each in found} == {8}
    assert {(each.recomputed, each.gathered_again) for each in found} == {(0, 0)}


# Executors.


def test_graphs_are_numbered_first_and_named_in_the_table_and_the_plot(module: GraphModule):
    other = parse(LISTING.replace("relu", "neg"))
    found = sweep({"one": module, "two": other}, ["h100-8"], PIPELINES)
    assert [(each.index, each.source, each.pipeline) for each in found] == [
        *((0, "one", "none"), (1, "one", "auto")),
        *((2, "two", "none"), (3, "two", "auto")),
    ]
    alone = sweep(other, ["h100-8"], PIPELINES)
    assert [each.after for each in found[2:]] == [each.after for each in alone]
    assert sweep_text(found).startswith("source  cluster")
    assert sweep_text(found[2:]).startswith("cluster")
    heads = [each.text for each in drawn(plot(found), "text") if each.get("class") == "head"]
    assert heads[:2] == ["h100-8: one", "h100-8: two"]
    assert "step by source" in heads
    assert "step by pipeline, h100-8, two" in heads


@pytest.mark.slow
def test_a_cell_has_the_step_that_people_run_today():
    module = load("llama-debug", "fsdp", ranks=2, layers=1)
    [found, _] = sweep(module, ["h100-8"], PIPELINES)
    usual = baseline_of(module, Cluster.load("h100-8"))
    assert usual is not None
    assert (found.runtime, found.runtime_us) == (usual.runtime, usual.step_us)
    assert f"{duration_text(usual.step_us)} (fsdp2)" in sweep_text([found])
    assert "run today: fsdp2" in [each.text for each in drawn(plot([found]), "text")]


def test_each_cell_is_told_when_it_is_done_in_order(module: GraphModule, cells: list[Cell]):
    told: list[Cell] = []
    with ThreadPoolExecutor(2) as pool:
        sweep(module, CLUSTERS, PIPELINES, pool, done=told.append)
    assert timeless(told) == timeless(cells)


def test_threads_give_the_same_cells(module: GraphModule, cells: list[Cell]):
    with ThreadPoolExecutor(3) as pool:
        assert timeless(sweep(module, CLUSTERS, PIPELINES, pool)) == timeless(cells)


@pytest.mark.slow
def test_processes_give_the_same_cells(module: GraphModule, cells: list[Cell]):
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        assert timeless(sweep(module, CLUSTERS, PIPELINES, pool)) == timeless(cells)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_dask_gives_the_same_cells(module: GraphModule, cells: list[Cell]):
    distributed = pytest.importorskip("distributed", reason="dask.distributed is not installed")
    options = {"n_workers": 2, "threads_per_worker": 1, "host": "127.0.0.1", "dashboard_address": None}
    with distributed.LocalCluster(**options) as local, distributed.Client(local) as client:
        assert timeless(sweep(module, CLUSTERS, PIPELINES, client.get_executor())) == timeless(cells)


class Dying(Executor):
    """Loses every second task, as a pool does whose worker is killed."""

    count = 0

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.count += 1
        if self.count % 2:
            future.set_result(fn(*args, **kwargs))
        else:
            future.set_exception(OSError("the worker died"))
        return future


def test_a_cell_whose_worker_dies_is_run_again(module: GraphModule, cells: list[Cell]):
    assert timeless(sweep(module, CLUSTERS, PIPELINES, Dying())) == timeless(cells)


def kill(_: Any) -> None:
    os._exit(1)


@pytest.mark.slow
def test_a_pool_whose_process_was_killed_loses_no_cell(module: GraphModule, cells: list[Cell]):
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        pool.submit(kill, None).exception()
        assert timeless(sweep(module, CLUSTERS, PIPELINES, pool)) == timeless(cells)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_dask_loses_no_cell_though_a_worker_is_killed(module: GraphModule):
    distributed = pytest.importorskip("distributed", reason="dask.distributed is not installed")
    limits = [1 << k for k in range(30, 42)]
    options = {"n_workers": 2, "threads_per_worker": 1, "host": "127.0.0.1", "dashboard_address": None}
    killed: list[int] = []
    with distributed.LocalCluster(**options) as local, distributed.Client(local) as client:

        def kill_one(_: Cell) -> None:
            if not killed:
                killed.append(min(client.run(os.getpid).values()))
                os.kill(killed[0], signal.SIGKILL)

        found = sweep(module, CLUSTERS, executor=client.get_executor(), memory_limits=limits, done=kill_one)
    assert killed
    assert timeless(found) == timeless(sweep(module, CLUSTERS, memory_limits=limits))


def test_a_limit_is_given_once(module: GraphModule):
    with pytest.raises(ReportError, match=r"sweep: memory limit '5' is given 2 times\ngive it once"):
        sweep(module, ["h100-8"], memory_limits=[5, 5])
    with pytest.raises(ReportError, match=r"sweep: size of buckets 'None' is given 2 times\ngive it once"):
        sweep(module, ["h100-8"], bucket_bytes=[None, None])


# Shards.


def save(path: Path, cells: list[Cell]) -> Path:
    path.write_text("".join(f"{each.to_json()}\n" for each in cells))
    return path


def test_shards_take_every_nth_cell_and_merge_to_the_whole(module: GraphModule, cells: list[Cell], tmp_path: Path):
    shards = [sweep(module, CLUSTERS, PIPELINES, shard=(i, 3)) for i in (1, 2, 3)]
    assert [[each.index for each in shard] for shard in shards] == [[0, 3], [1], [2]]
    paths = [save(tmp_path / f"{i}.jsonl", shard) for i, shard in enumerate(shards)]
    assert timeless(merge(paths[::-1])) == timeless(cells)


def test_a_shard_may_be_empty(module: GraphModule):
    assert sweep(module, ["h100-8"], ["none"], shard=(2, 2)) == []


@pytest.mark.parametrize("shard", [(0, 2), (3, 2), (1, 0)])
def test_a_shard_that_is_not_there_is_refused(module: GraphModule, shard: tuple[int, int]):
    with pytest.raises(ReportError, match=f"shard {shard[0]} of {shard[1]} does not exist\ncount from 1"):
        sweep(module, ["h100-8"], ["none"], shard=shard)


def merge_error(*paths: Path) -> list[str]:
    with pytest.raises(ReadError) as caught:
        merge(paths)
    lines = str(caught.value).splitlines()
    assert lines[0] == "merge: the files are not whole sweeps"
    assert lines[-1] == "give the files of all shards of each sweep, each once"
    return [line.strip() for line in lines[1:-1]]


def test_duplicates_and_gaps_of_every_sweep_are_told_at_once(tmp_path: Path):
    other = replace(cell(1, 2), sweep="other", cluster="d")
    path = save(tmp_path / "a", [cell(0, 4), cell(1, 4), cell(0, 4), cell(9, 4), other, cell(2, 5)])
    assert merge_error(path) == [
        f"{path}:3: cell 0 is already in {path}:1",
        f"{path}:4: cell 9 of 4, counted from 0",
        f"{path}:6: its sweep has 5 cells, according to {path}:1 4",
        f"2 of 4 cells are missing in the sweep of {path}:1: 2, 3",
        f"1 of 2 cells are missing in the sweep of {path}:5: 0",
    ]


def test_sweeps_are_merged_in_the_order_of_the_files_and_again(tmp_path: Path):
    first = [cell(i, 2, pipeline=str(i)) for i in (1, 0)]
    second = replace(cell(0, 1, source="s"), sweep="other")
    paths = [save(tmp_path / "a", [second, first[0]]), save(tmp_path / "b", [first[1]])]
    assert merge(paths) == [second, first[1], first[0]]
    assert merge([save(tmp_path / "c", merge(paths))]) == merge(paths)


def test_sweeps_of_the_same_combination_are_not_merged(tmp_path: Path):
    path = save(tmp_path / "a", [cell(0, 1), replace(cell(0, 1), sweep="other")])
    assert merge_error(path) == [
        f"{path}:2: another sweep has this combination of source, cluster, pipeline and limits: {path}:1"
    ]


def test_lines_that_are_no_cells_are_told_at_once(tmp_path: Path):
    good = cell().to_json()
    path, latin = tmp_path / "a", tmp_path / "b"
    path.write_text(
        "\n".join(
            [
                good,
                "{",
                "[]",
                good.replace('"index": 0', '"index": "0"'),
                good.replace('"index": 0', '"index": -1'),
                good.replace('"step_us": 10.0', '"step_us": NaN'),
                good.replace('"gap": 0.25', '"gap": 1e999'),
                good.replace('"error": null', '"error": "x"'),
                good.replace('"pass_seconds": 0.5', '"pass_seconds": null'),
                "[" * 100_000,
            ]
        )
    )
    latin.write_bytes(b"\xff\xfe")
    found = merge_error(path, latin, tmp_path / "missing")
    assert [line.partition(": ")[0] for line in found[:-2]] == [f"{path}:{number}" for number in range(2, 11)]
    assert found[1] == f"{path}:3: the line: Input should be an object"
    assert found[2] == f"{path}:4: index: Input should be a valid integer"
    assert {line.partition(": ")[2] for line in found[3:6]} == {"a number is negative or not finite"}
    assert {line.partition(": ")[2] for line in found[6:8]} == {"a cell has either numbers or an error"}
    assert found[-2:] == [
        f"{latin}: it cannot be read: it is not UTF-8 text",
        f"{tmp_path}/missing: it cannot be read: No such file or directory",
    ]


def test_many_missing_cells_are_counted_and_an_empty_file_has_none(tmp_path: Path):
    (told,) = merge_error(path := save(tmp_path / "a", [cell(0, 10**12)]))
    assert told.startswith(f"999999999999 of 1000000000000 cells are missing in the sweep of {path}:1: 1, 2, 3, ")
    assert told.endswith(", 20 and 999999999979 more")
    assert merge_error(save(tmp_path / "b", [])) == ["the files have no cells"]


def test_a_line_holds_whatever_a_name_holds(tmp_path: Path):
    hostile = cell(cluster=HOSTILE, pipeline="a\nb")
    assert "\n" not in hostile.to_json()
    assert merge([save(tmp_path / "a", [replace(hostile, cluster="\u2028")])])[0].pipeline == "a\nb"


# The table and the plot.


def test_the_table_shows_every_cell_and_the_errors_under_it():
    failed = cell(1, 2, pipeline="q", before=None, after=None, pass_seconds=None, error="who: what\ndo")
    assert sweep_text([cell(0, 2), failed]).splitlines() == [
        "cluster  pipeline  step                exposed             bound    gap     peak memory  collectives  passes",
        "c        p         10.0 us -> 10.0 us  5.00 us -> 5.00 us  8.00 us  25.0 %  1.00 KiB     2 -> 2       500 ms",
        "c        q         failed              -                   -        -       -            -            -",
        "",
        "c, q:",
        "    who: what",
        "    do",
    ]
    assert sweep_text([]) == "the sweep has no cells"


def test_limits_are_columns_where_they_are_given_and_a_cell_that_does_not_fit_says_what_it_needs():
    refused = cell(
        1, 2, memory_limit_bytes=2048, before=None, after=None, pass_seconds=None, error="e", fitting_bytes=4096
    )
    lines = sweep_text([cell(0, 2, memory_limit_bytes=20 * 10**9, max_bucket_bytes=3 << 20), refused]).splitlines()
    assert lines[0].startswith("cluster  pipeline  memory limit  buckets  step ")
    assert lines[1].startswith("c        p         20 GB         3 MiB    10.0 us -> 10.0 us ")
    assert lines[2].split() == ["c", "p", "2", "KiB", "-", "needs", "4.00", "KiB", *"------"]
    assert lines[3:] == ["", "c, p, 2 KiB of memory:", "    e"]


def test_a_hostile_name_stays_one_line_of_text_in_the_table():
    lines = sweep_text([cell(cluster=HOSTILE, pipeline="a\nb")]).splitlines()
    assert len(lines) == 2
    assert all(line.isprintable() for line in lines)


def test_the_plot_has_a_bar_for_each_cell_on_one_scale():
    quick = replace(TOTALS, step_us=5.0, exposed_us=1.0, lower_bound_us=4.0)
    root = ElementTree.fromstring(plot([cell(0, 2, after=quick), cell(1, 2, cluster="d")]))
    bars = [(each.get("class"), each.get("x"), each.get("width")) for each in root.iter() if each.get("height") == "16"]
    assert bars == [
        ("was", "326.0", "480.0"),
        ("covered", "326.0", "192.0"),
        ("exposed", "518.0", "48.0"),
        ("was", "326.0", "480.0"),
        ("covered", "326.0", "240.0"),
        ("exposed", "566.0", "240.0"),
    ]
    texts = [each.text for each in root.iter("{http://www.w3.org/2000/svg}text")]
    assert texts[4:] == [
        *("c", "before", "10.0 us", "p", "5.00 us, gap 25.0 %"),
        *("d", "before", "10.0 us", "p", "10.0 us, gap 25.0 %"),
        *("step by cluster", "5.00 us", "10.0 us", "c", "d", "p"),
    ]


def drawn(text: str, tag: str) -> list[ElementTree.Element]:
    return list(ElementTree.fromstring(text).iter(f"{{http://www.w3.org/2000/svg}}{tag}"))


def test_the_step_is_drawn_against_each_axis():
    steps = {(1024, None): 9.0, (2048, None): 8.0, (None, None): 7.0, (1024, 5): 10.0, (2048, 5): 10.0, (None, 5): 6.0}
    cells = [
        cell(i, 6, memory_limit_bytes=memory, max_bucket_bytes=bucket, after=replace(TOTALS, step_us=step))
        for i, ((memory, bucket), step) in enumerate(reversed(steps.items()))
    ]
    text = plot(cells)
    titles = [each.text for each in drawn(text, "text") if each.get("class") == "head"]
    assert titles == ["c", "step by memory limit, c", "step by bucket size, c"]
    lines = [each.get("points", "").split() for each in drawn(text, "polyline")]
    assert [len(line) for line in lines] == [3, 3, 2, 2, 2]
    heights = [[float(point.partition(",")[2]) for point in line] for line in lines[:2]]
    assert heights[0][0] == heights[0][1] < heights[0][2]  # buckets of 5 bytes: 10, 10, 6, the longest at the top
    assert heights[1] == sorted(heights[1])  # 9, 8, 7
    names = [each.text for each in drawn(text, "text") if each.get("class") == "name"]
    assert names[-10:] == [
        *("1 KiB", "2 KiB", "not given", "p, 5 B", "p"),
        *("5 B", "not given", "p", "p, 2 KiB", "p, 1 KiB"),
    ]


def test_a_cell_that_does_not_fit_is_a_cross_with_what_it_needs():
    refused = cell(
        0, 2, memory_limit_bytes=1, before=None, after=None, pass_seconds=None, error="e", fitting_bytes=4096
    )
    text = plot([refused, cell(1, 2, memory_limit_bytes=8192)])
    assert [each[0].text for each in drawn(text, "path")] == ["p: failed, needs 4.00 KiB"]
    assert "does not fit, needs 4.00 KiB" in [each.text for each in drawn(text, "text")]
    assert drawn(text, "polyline") == []


def test_a_failed_cell_is_named_in_the_plot_and_an_empty_sweep_has_one():
    failed = cell(before=None, after=None, pass_seconds=None, error="e")
    root = ElementTree.fromstring(plot([failed]))
    assert [each.text for each in root.iter("{http://www.w3.org/2000/svg}text")][-3:] == ["c", "p", "failed"]
    ElementTree.fromstring(plot([]))


def test_a_hostile_name_stays_text_in_the_plot():
    other = cell(1, 2, cluster=HOSTILE, pipeline="p", before=None, after=None, pass_seconds=None, error="e")
    text = plot([cell(0, 2, cluster=HOSTILE, pipeline=HOSTILE + "long" * 20), other, cell(2, 3)])
    assert text.isascii()
    root = ElementTree.fromstring(text)
    tags = {each.tag.rpartition("}")[2] for each in root.iter()}
    assert tags == {"svg", "title", "style", "text", "circle", "line", "path", "rect"}
    shown = "".join(root.itertext())
    assert "<img src=x onerror=alert(1)>\"'&[2J]]>" in shown
    assert not any(part in text for part in ("<img", "<script", "http://cdn", "href"))
