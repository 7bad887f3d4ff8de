"""`weft sweep`: tables, shards, merging, the plot, and how they end."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from typer.testing import Result

from tests.tiers import quick_first
from tests.unit.cli.conftest import LISTING
from weft.cli.sweep_command import parse_limits
from weft.graph.listings.text import render
from weft.quantities import size_text
from weft.retention.policies import RetentionPolicy
from weft.zoo import load

Weft = Callable[..., Result]

GIB = 1 << 30

GRID = ("--cluster", "h100-8", "--cluster", "a100-8x8", "--pipeline", "none", "--pipeline", "hoist-launches,sink-waits")
AXES = {"source", "cluster", "pipeline", "memory_limit_bytes", "max_bucket_bytes", "policy"}
FIELDS = AXES | {"sweep", "index", "num_cells", "before", "after", "recomputed", "gathered_again"}
FIELDS |= {"runtime", "runtime_us", "pass_seconds", "error", "fitting_bytes"}


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The listing of a training step."""
    path = tmp_path_factory.mktemp("step") / "step.txt"
    path.write_text(render(load("llama-debug", "fsdp", ranks=2, layers=1)))
    return path


def cells(text: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in text.splitlines()]
    return [{key: value for key, value in each.items() if key != "pass_seconds"} for each in found]


def test_every_cell_is_a_row_of_the_table(weft: Weft, listing: Path):
    done = weft("sweep", listing, *GRID)
    assert (done.exit_code, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    heads = [
        "cluster",
        "pipeline",
        "step",
        "run today",
        "exposed",
        "bound",
        "gap",
        "peak memory",
        "collectives",
        "passes",
        "MFU",
    ]
    assert re.split(" {2,}", lines[0]) == heads
    assert [line.split()[:2] for line in lines[1:]] == [
        ["h100-8", "none"],
        ["h100-8", "hoist-launches,sink-waits"],
        ["a100-8x8", "none"],
        ["a100-8x8", "hoist-launches,sink-waits"],
    ]


def test_as_json_every_cell_is_a_line(weft: Weft, listing: Path, tmp_path: Path):
    out = tmp_path / "cells.jsonl"
    done = weft("sweep", listing, "--cluster", "h100-8", "--json", "-o", out)
    assert (done.exit_code, done.stderr) == (0, "")
    assert out.read_text() == done.stdout
    (found,) = (json.loads(line) for line in done.stdout.splitlines())
    assert set(found) == FIELDS
    assert (found["cluster"], found["pipeline"], found["error"]) == ("h100-8", "auto", None)
    assert found["after"]["lower_bound_us"] <= found["after"]["step_us"] <= found["before"]["step_us"]


def test_shards_are_merged_into_the_whole(weft: Weft, listing: Path, tmp_path: Path):
    shards = [tmp_path / f"{i}.jsonl" for i in (1, 2, 3)]
    for i, shard in enumerate(shards, 1):
        assert weft("sweep", listing, *GRID, "--shard", f"{i}/3", "-o", shard).exit_code == 0
    whole = weft("sweep", listing, *GRID, "--json")
    merged = weft("sweep", "--merge", *reversed(shards), "--json")
    assert (merged.exit_code, merged.stderr) == (0, "")
    assert cells(merged.stdout) == cells(whole.stdout)
    assert weft("sweep", "--merge", *shards).stdout.startswith("cluster ")


def test_sources_share_a_table_and_their_sweeps_are_merged(weft: Weft, listing: Path, step: Path, tmp_path: Path):
    grid = ("--cluster", "h100-8", "--pipeline", "none")
    together = weft("sweep", listing, step, *grid)
    lines = together.stdout.splitlines()
    assert (together.exit_code, lines[0].split()[0]) == (0, "source")
    assert [line.split()[0] for line in lines[1:]] == [str(listing), str(step)]
    files = [tmp_path / "1.jsonl", tmp_path / "2.jsonl"]
    for source, file in zip((listing, step), files, strict=True):
        assert weft("sweep", source, *grid, "-o", file).exit_code == 0
    merged = weft("sweep", "--merge", *files, "--plot", tmp_path / "plot.svg")
    timeless = [re.sub(r"[\d.]+ m?s  +", "", line) for line in (*lines, *merged.stdout.splitlines())]
    assert timeless[: len(lines)] == timeless[len(lines) :]
    assert "step by source" in (tmp_path / "plot.svg").read_text()


def test_limits_are_swept_sharded_merged_and_drawn(weft: Weft, listing: Path, tmp_path: Path):
    svg = tmp_path / "plot.svg"
    grid = ("--cluster", "h100-8", "--memory-limit", "100,1KiB,none", "--bucket-bytes", "1MiB,none")
    shards = [tmp_path / f"{i}.jsonl" for i in (1, 2)]
    ends = [weft("sweep", listing, *grid, "--shard", f"{i}/2", "-o", shards[i - 1]).exit_code for i in (1, 2)]
    assert ends == [0, 0]  # 100 bytes are too few, which is an answer
    done = weft("sweep", "--merge", *shards, "--plot", svg)
    assert done.exit_code == 0
    lines = done.stdout.splitlines()
    assert [line.split("  ")[0] for line in lines[1:7]] == ["h100-8"] * 6
    assert [re.split(" {2,}", line)[2:5] for line in lines[1:3]] == [
        ["100 B", "1 MiB", "needs 288 B"],  # what is added, the sum, and both inputs
        ["100 B", "-", "needs 288 B"],
    ]
    assert [re.split(" {2,}", line)[2:4] for line in lines[3:7]] == [
        *(["1 KiB", "1 MiB"], ["1 KiB", "-"], ["-", "1 MiB"], ["-", "-"]),
    ]
    assert "found no order that fits in 100 bytes; the smallest peak found is 288" in done.stdout
    assert "step by memory limit, h100-8" in svg.read_text()


@pytest.mark.parametrize(
    ("text", "limits"),
    [
        ("30GiB:90GiB", [GIB * size for size in (30, 40, 50, 60, 70, 80, 90)]),
        ("30GB:90GB:3", [30 * 10**9, 60 * 10**9, 90 * 10**9]),
        ("4GiB:5GiB:4", [4 * GIB, 4437 << 20, 4778 << 20, 5 * GIB]),  # whole MiB are fine enough
        ("1:8:3, none", [1, 4, 8, None]),
    ],
)
def test_a_range_has_limits_at_equal_distances(text: str, limits: list[int | None]):
    assert parse_limits(text) == limits


def test_a_range_shows_where_the_step_fits_and_what_policies_need(weft: Weft, step: Path, tmp_path: Path):
    out, svg = tmp_path / "cells.jsonl", tmp_path / "plot.svg"
    grid = ("--cluster", "h100-8", "--memory-limit", "1KiB:2MiB:3", "--effort", "fast")
    done = weft("sweep", step, *grid, "-o", out, "--plot", svg)
    assert (done.exit_code, done.stderr) == (0, "")
    found = cells(out.read_text())
    low, middle, high, *by_hand = found
    assert low["fitting_bytes"] > low["memory_limit_bytes"]
    assert f"needs {size_text(low['fitting_bytes'])}" in done.stdout
    assert done.stdout.count("found no order that fits") == 1
    for each in (middle, high):
        assert each["after"]["peak_bytes"] <= each["memory_limit_bytes"]
        assert each["after"]["lower_bound_us"] <= each["after"]["step_us"]
    heads = ["memory limit", "policy", "step", "peak memory", "recomputed", "gathered again"]
    assert [head for head in re.split(" {2,}", done.stdout.splitlines()[0]) if head in heads] == heads
    counts = {each["policy"]: (each["recomputed"], each["gathered_again"]) for each in by_hand}
    assert list(counts) == [policy.value for policy in RetentionPolicy]
    assert counts["all kept"] == (0, 0)
    recomputed, gathered_again = counts["all recomputed, weights gathered again"]
    assert recomputed > 0
    assert gathered_again > 0
    assert {each["memory_limit_bytes"] for each in by_hand} == {None}
    assert "step by peak memory, h100-8, auto" in svg.read_text()


def test_policies_that_give_the_same_graph_are_one_row(weft: Weft, listing: Path):
    found = cells(weft("sweep", listing, "--cluster", "h100-8", "--memory-limit", "1KiB:2KiB:2", "--json").stdout)
    assert [(each["memory_limit_bytes"], each["policy"]) for each in found] == [
        *((1024, None), (2048, None), (None, "all kept")),
    ]


def test_a_range_on_a_cluster_that_is_too_small_is_rows_with_errors(weft: Weft, listing: Path):
    done = weft("sweep", listing, "--cluster", "loopback-1x1", "--memory-limit", "1KiB:2KiB:2", "--json")
    assert done.exit_code == 1
    assert [each["error"].partition("\n")[0] for each in cells(done.stdout)] == [
        "cluster loopback-1x1: it has 1 ranks, group 'dp' needs 2"
    ] * 2


@pytest.mark.parametrize(
    ("parallel", "policies"),
    quick_first(
        [
            ("ddp", ["checkpoint=none", "checkpoint=selective", "checkpoint=full"]),
            (
                "fsdp",
                [
                    f"checkpoint={checkpoint}, reshard={reshard}"
                    for checkpoint in ("none", "selective", "full")
                    for reshard in ("always", "never")
                ],
            ),
        ]
    ),
)
def test_a_model_of_the_zoo_is_captured_with_each_policy(weft: Weft, parallel: str, policies: list[str]):
    source = f"zoo:llama-debug/{parallel}?layers=1&ranks=2"
    grid = ("--cluster", "h100-8", "--pipeline", "none,schedule-overlap", "--effort", "fast")
    done = weft("sweep", source, *grid, "--memory-limit", "1GiB:2GiB:2", "--json")
    found = cells(done.stdout)
    assert [each["policy"] for each in found] == [None, None, *policies]
    kept, *_, full = found[2:]
    assert kept["recomputed"] == 0 < full["recomputed"]
    assert kept["after"]["compute_us"] < full["after"]["compute_us"]


def test_a_part_of_a_step_has_no_policies(weft: Weft):
    source = "zoo:llama-debug/ddp?layers=1&ranks=2&part=forward"
    done = weft("sweep", source, "--cluster", "h100-8", "--memory-limit", "1GiB:2GiB:2", "--json", "--effort", "fast")
    assert [each["policy"] for each in cells(done.stdout)] == [None, None]


def test_a_shard_with_no_cell_is_empty(weft: Weft, listing: Path, tmp_path: Path):
    out = tmp_path / "cells.jsonl"
    done = weft("sweep", listing, "--cluster", "h100-8", "--shard", "2/2", "-o", out)
    assert (done.exit_code, done.stdout, out.read_text()) == (0, "the sweep has no cells\n", "")


@pytest.mark.slow
def test_several_jobs_give_the_same_cells(weft: Weft, listing: Path):
    done = weft("sweep", listing, *GRID, "--json", "--jobs", 2)
    assert cells(done.stdout) == cells(weft("sweep", listing, *GRID, "--json").stdout)


def test_a_scheduler_that_cannot_be_reached_is_refused(weft: Weft, listing: Path):
    pytest.importorskip("distributed", reason="dask.distributed is not installed")
    done = weft("sweep", listing, *GRID, "--dask", "nowhere://1")
    assert (done.exit_code, done.stdout) == (2, "")
    assert "--dask: nowhere://1 cannot be reached" in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_the_workers_of_a_scheduler_give_the_same_cells(weft: Weft, listing: Path):
    distributed = pytest.importorskip("distributed", reason="dask.distributed is not installed")
    options = {"n_workers": 2, "threads_per_worker": 1, "host": "127.0.0.1", "dashboard_address": None}
    with distributed.LocalCluster(**options) as local:
        done = weft("sweep", listing, *GRID, "--json", "--dask", local.scheduler_address)
    assert cells(done.stdout) == cells(weft("sweep", listing, *GRID, "--json").stdout)


def test_a_gap_and_a_duplicate_end_with_1_and_write_nothing(weft: Weft, listing: Path, tmp_path: Path):
    shard, out = tmp_path / "1.jsonl", tmp_path / "out.jsonl"
    weft("sweep", listing, *GRID, "--shard", "1/4", "-o", shard)
    done = weft("sweep", "--merge", shard, shard, "-o", out)
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr.splitlines() == [
        "merge: the files are not whole sweeps",
        f"    {shard}:1: cell 0 is already in {shard}:1",
        f"    3 of 4 cells are missing in the sweep of {shard}:1: 1, 2, 3",
        "give the files of all shards of each sweep, each once",
    ]
    assert not out.exists()


def test_a_cell_that_fails_is_a_row_and_the_status_is_1(weft: Weft, listing: Path, tmp_path: Path):
    out = tmp_path / "cells.jsonl"
    done = weft("sweep", listing, "--cluster", "loopback-1x1", "--cluster", "h100-8", "-o", out)
    assert (done.exit_code, done.stderr) == (1, "")
    lines = done.stdout.splitlines()
    assert lines[1].split() == ["loopback-1x1", "auto", "failed", *"--------"]
    assert lines[3:] == [
        "",
        "loopback-1x1, auto:",
        "    cluster loopback-1x1: it has 1 ranks, group 'dp' needs 2",
        "    use loopback-1x2, or a graph for at most 1 ranks",
    ]
    assert [each["error"] is None for each in cells(out.read_text())] == [False, True]
    assert weft("sweep", "--merge", out).exit_code == 1


def test_the_plot_is_an_svg_in_which_names_are_text(weft: Weft, listing: Path, tmp_path: Path):
    shard, svg = tmp_path / "cells.jsonl", tmp_path / "plot.svg"
    weft("sweep", listing, "--cluster", "h100-8", "-o", shard)
    shard.write_text(shard.read_text().replace('"h100-8"', '"<script>alert(1)</script>\\u001b[2J"'))
    done = weft("sweep", "--merge", shard, "--plot", svg)
    assert done.exit_code == 0
    assert "\x1b" not in done.stdout
    root = ElementTree.fromstring(svg.read_text())
    assert "<script>alert(1)</script>[2J" in [each.text for each in root.iter()]
    assert not [each for each in root.iter() if each.tag.endswith("script")]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["g.txt"], "sweep: no cluster is given\ngive one or more: --cluster h100-8x8\n"),
        (["g.txt", "g.txt", "--cluster", "h100-8"], "sweep: g.txt is given twice\ngive it once\n"),
        (
            ["g.txt", "--cluster", "h100-8", "--cluster", "h100-8"],
            "sweep: --cluster h100-8 is given twice\ngive it once\n",
        ),
        (
            ["g.txt", "--cluster", "h100-8", "--pipeline", "auto", "--pipeline", "auto"],
            "sweep: --pipeline auto is given twice\ngive it once\n",
        ),
        (
            ["g.txt", "--cluster", "h100-8", "--memory-limit", "1KiB,1024"],
            "sweep: --memory-limit 1024 is given twice\ngive it once\n",
        ),
        (
            ["g.txt", "--cluster", "h100-8", "--memory-limit", "20GiB,"],
            "--memory-limit: '' is not a size\nwrite 24GiB, 24GB or a number of bytes\n",
        ),
        (
            ["g.txt", "--cluster", "h100-8", "--memory-limit", "30GiB:90GiB:7:1"],
            "--memory-limit: '30GiB:90GiB:7:1' is not a range of sizes\n"
            "write LOW:HIGH:POINTS, as in --memory-limit 30GiB:90GiB:7\n",
        ),
        (
            ["g.txt", "--cluster", "h100-8", "--memory-limit", "30GiB:"],
            "--memory-limit: '30GiB:' is not a range of sizes\n"
            "write LOW:HIGH:POINTS, as in --memory-limit 30GiB:90GiB:7\n",
        ),
        (
            ["g.txt", "--cluster", "h100-8", "--memory-limit", "30GiB:none"],
            "--memory-limit: 'none' is not a size\nwrite 24GiB, 24GB or a number of bytes\n",
        ),
        (
            ["g.txt", "--cluster", "h100-8", "--memory-limit", "90GiB:30GiB"],
            "--memory-limit: the range '90GiB:30GiB' does not grow\nwrite the smaller limit first\n",
        ),
        (
            ["g.txt", "--cluster", "h100-8", "--memory-limit", "30GiB:90GiB:1"],
            "--memory-limit: the range '30GiB:90GiB:1' has 1 points, expected 2 to 1000\nwrite 30GiB:90GiB:7\n",
        ),
        (
            ["g.txt", "--cluster", "h100-8", "--memory-limit", "10:12:4"],
            "--memory-limit: the range '10:12:4' has 4 points, expected 2 to 3\nwrite 10:12:3\n",
        ),
        (
            ["g.txt", "--cluster", "h100-8", "--memory-limit", "30GiB:90GiB,60GiB"],
            "sweep: --memory-limit 64424509440 is given twice\ngive it once\n",
        ),
        (
            ["g.txt", "--cluster", "h100-8", "--pipeline", "sink-wates"],
            "pipeline: no pass is called 'sink-wates'\ndid you mean 'sink-waits'?\n",
        ),
        (
            ["g.txt", "--cluster", "h100-8", "--plot", "no/plot.svg"],
            "no/plot.svg: its folder does not exist\ngive a file in a folder that exists\n",
        ),
        (
            ["g.txt", "--cluster", "h100-8", "--plot", "steps.pdf"],
            "steps.pdf: plots are drawn as SVG\nwrite --plot steps.svg\n",
        ),
        (
            ["a.jsonl", "--merge", "--bucket-bytes", "1", "--effort", "best"],
            "sweep: --merge runs nothing, so --bucket-bytes and --effort have no effect\n"
            "leave --bucket-bytes and --effort off\n",
        ),
        (
            ["a.jsonl", "--merge", "--cluster", "h100-8", "--shard", "1/2"],
            "sweep: --merge runs nothing, so --cluster and --shard have no effect\nleave --cluster and --shard off\n",
        ),
    ],
)
def test_wrong_arguments_end_with_2_before_the_source_is_read(weft: Weft, arguments: list[str], message: str):
    done = weft("sweep", *arguments)
    assert (done.exit_code, done.stdout, done.stderr) == (2, "", message)


@pytest.mark.parametrize("shard", ["0/2", "3/2", "1", "1/", "a/b", "1/2/3", "-1/2", "1/٣"])
def test_a_shard_that_is_none_ends_with_2(weft: Weft, shard: str):
    done = weft("sweep", "g.txt", "--cluster", "h100-8", f"--shard={shard}")
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr == f"sweep: {shard!r} is not a shard\nwrite I/N with I from 1 to N: --shard 1/4\n"


def test_an_unknown_cluster_ends_with_2_and_the_nearest_one(weft: Weft, listing: Path):
    done = weft("sweep", listing, "--cluster", "h10-8")
    assert done.exit_code == 2
    assert done.stderr.startswith("cluster: no cluster is called 'h10-8'\ndid you mean 'h100-8'?\n")


def test_the_graph_of_a_listing_is_swept_as_it_is(weft: Weft, tmp_path: Path):
    source = tmp_path / "graph.txt"
    source.write_text(LISTING.replace("f32", "bf16"))
    (found,) = cells(weft("sweep", source, "--cluster", "h100-8", "--pipeline", "none", "--json").stdout)
    assert found["before"] == found["after"]
    assert found["before"]["num_bytes"] == 32
