"""`weft calibrate`: what goes where, and how it ends."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

from tests.unit.cost.measured import LOOPBACK, event, loopback_tables, nccl_table, write_trace
from weft.cost.cluster import Cluster

Weft = Callable[..., Result]


def test_help_answers_without_torch():
    code = (
        "import sys\nfrom typer.testing import CliRunner\nfrom weft.cli.main import app\n"
        "done = CliRunner().invoke(app, ['calibrate', '--help'])\n"
        "print(done.exit_code, 'Usage:' in done.stdout, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "0 True False\n"


@pytest.fixture
def tables(tmp_path: Path) -> Path:
    path = tmp_path / "loopback.txt"
    path.write_text(loopback_tables(LOOPBACK))
    return path


def test_the_cluster_goes_to_stdout_and_the_fit_with_its_residuals_to_stderr(weft: Weft, tables: Path):
    done = weft("calibrate", tables, "--name", "loopback")
    assert done.exit_code == 0
    assert Cluster.read("stdout", done.stdout.encode()).name == "loopback"
    lines = done.stderr.splitlines()
    assert lines[:4] == [
        "all_gather of 2 ranks, intra-node: 52.09 us + 2.922 GB/s on the wire, from 8192 to 536870912 bytes",
        "  bytes      measured us  fitted us  off by",
        "  8192       51           53.49      +4.9 %",
        "  524288     179          141.8      -20.8 %",
    ]
    assert lines[-1] == "all groups are taken to be inside one node; give --ranks-per-node if they are not"


def test_the_cluster_goes_to_a_file(weft: Weft, tables: Path, tmp_path: Path):
    done = weft("calibrate", tables, "-o", tmp_path / "c.toml", "--ranks-per-node", 2)
    assert (done.exit_code, done.stdout) == (0, "")
    cluster = Cluster.load(tmp_path / "c.toml")
    assert (cluster.num_nodes, cluster.ranks_per_node) == (2, 2)
    assert [level.name for level in cluster.levels] == ["intra-node", "inter-node"]
    assert "all_gather of 4 ranks, inter-node" in done.stderr


def test_a_base_describes_what_was_not_measured(weft: Weft, tables: Path, tmp_path: Path):
    done = weft("calibrate", tables, "-o", tmp_path / "c.toml", "--base", "h100-2x8")
    assert done.exit_code == 0, done.stderr
    cluster, base = Cluster.load(tmp_path / "c.toml"), Cluster.load("h100-2x8")
    assert (cluster.device, cluster.num_ranks, cluster.levels[1]) == (base.device, 16, base.levels[1])
    assert len(cluster.tables) == 6
    assert weft("calibrate", tables, "--base", "h100-2x8", "--ranks-per-node", 2).exit_code == 2


def test_json_holds_lines_residuals_and_the_file(weft: Weft, tables: Path, tmp_path: Path):
    done = weft("calibrate", tables, "--json")
    assert (done.exit_code, done.stderr) == (0, "")
    data = json.loads(done.stdout)
    assert list(data) == ["name", "num_nodes", "ranks_per_node", "lines", "notes", "compute", "toml"]
    line = data["lines"][0]
    assert (line["kind"], line["num_ranks"], line["level"], line["num_samples"]) == ("all_gather", 2, "intra-node", 5)
    assert [residual["measured_us"] for residual in line["residuals"]] == [51.0, 179.0, 1620.0, 20700.0, 89400.0]
    data = json.loads(weft("calibrate", tables, "--json", "-o", tmp_path / "c.toml").stdout)
    assert "toml" not in data
    assert Cluster.load(tmp_path / "c.toml").num_ranks == 4


def test_the_kind_of_a_table_can_be_given(weft: Weft, tmp_path: Path):
    (tmp_path / "t").write_text(nccl_table("", 2, [(1 << 10, 10.0), (1 << 20, 99.0)], named=False))
    assert weft("calibrate", tmp_path / "t").exit_code == 1
    assert 'kind = "all_to_all"' in weft("calibrate", tmp_path / "t", "--kind", "all_to_all").stdout


def test_every_fault_is_told_and_nothing_is_written(weft: Weft, tables: Path, tmp_path: Path):
    (tmp_path / "a.json").write_text('{"traceEvents": [')
    write_trace(tmp_path / "b.json", [event("all_reduce", 8, (0, 1), -5.0)])
    out = tmp_path / "c.toml"
    done = weft("calibrate", tables, tmp_path / "a.json", tmp_path / "b.json", "-o", out)
    assert (done.exit_code, done.stdout, out.exists()) == (1, "", False)
    lines = done.stderr.replace(f"{tmp_path}/", "").splitlines()
    assert lines[:2] == [
        "calibrate: nothing can be fitted",
        "    a.json:1: it is not a trace: it ends before its closing ]",
    ]
    assert lines[2].endswith("'allreduce': dur: expected a time of 0 us or more, found -5.0")


def test_files_that_do_not_exist_are_a_matter_of_usage(weft: Weft, tables: Path, tmp_path: Path):
    (tmp_path / "folder").mkdir()
    done = weft("calibrate", tables, tmp_path / "x", tmp_path / "folder")
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.replace(f"{tmp_path}/", "").splitlines() == [
        "calibrate: nothing can be fitted",
        "    x: there is no such file",
        "    folder: it is a folder",
    ]


def test_a_name_that_no_cluster_can_have_is_refused(weft: Weft, tables: Path, tmp_path: Path):
    out = tmp_path / "c.toml"
    done = weft("calibrate", tables, "--name", "two boxes", "-o", out)
    assert (done.exit_code, out.exists()) == (2, False)
    assert "name: expected up to 80 letters, digits, dots and dashes, found 'two boxes'" in done.stderr


@pytest.mark.parametrize("option", [("--kind", "gather"), ("--ranks-per-node", "0")])
def test_wrong_options_are_a_matter_of_usage(weft: Weft, tables: Path, option: tuple[str, str]):
    assert weft("calibrate", tables, *option).exit_code == 2
