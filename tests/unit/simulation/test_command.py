"""`weft simulate`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from weft.cli.main import app
from weft.prediction import error_bars

LISTING = """group('dp', size=2)

def graph(x: f32[64, 64], p: f32[32, 64]):
    ag = all_gather(p, 2, 'dp')
    a = mm(x, x)
    w = wait(ag)
    r = add(a, w)
    return [r]
"""
CLUSTER = """name = "pair"
num_nodes = 1
ranks_per_node = 2

[device]
name = "plain"
memory_bandwidth = "1 GB/s"
peak_tflops = { f32 = 0.1 }
matmul_efficiency = 1.0

[[levels]]
name = "wire"
spans = "node"
latency = "10 us"
bandwidth = "0.1 GB/s"
"""


def weft(*arguments: object) -> Result:
    return CliRunner().invoke(app, [*map(str, arguments)], catch_exceptions=False)


@pytest.fixture
def listing(tmp_path: Path) -> Path:
    path = tmp_path / "graph.txt"
    path.write_text(LISTING)
    return path


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    path = tmp_path / "pair.toml"
    path.write_text(CLUSTER)
    return path


def test_the_table_says_what_is_exposed_and_what_hides_the_rest(
    listing: Path, cluster: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(error_bars, "residuals", tuple)  # a bar would change with every validated step
    # mm reads and writes 16 KiB at 1 byte per ns, add 48 KiB; ag takes 10 us and sends 8 KiB at 0.1 byte per ns.
    # At add x, p, ag, a and r are there: 16 + 8 + 16 + 16 + 16 KiB.
    done = weft("simulate", listing, "--cluster", cluster)
    assert done.exit_code == 0
    assert done.stderr == f"note: cluster {cluster}: wire carries only 0.1 GB/s for each rank within a node\n"
    assert done.stdout.splitlines() == [
        "step           141 us",
        "compute        81.9 us",
        "communication  91.9 us",
        "exposed        59.2 us",
        "hidden         32.8 us",
        "idle           0 us",
        "peak memory    72.0 KiB",
        "lower bound    141 us (gap 0.0 %)",
        "",
        "most exposed  group  exposed  hidden   hidden by",
        "ag            dp     59.2 us  32.8 us  a",
        "note: error bar: not validated on this device",
    ]


def test_json_holds_every_collective_and_the_critical_path(listing: Path, cluster: Path, tmp_path: Path):
    done = weft("simulate", listing, "--cluster", cluster, "--json", "-o", tmp_path / "out.json")
    assert (done.exit_code, done.stdout) == (0, "")
    found = json.loads((tmp_path / "out.json").read_text())
    assert (found["cluster"], found["step_us"], found["exposed_us"]) == ("pair", 141.072, 59.152)
    assert found["critical_path"] == ["ag", "r"]
    (collective,) = found["collectives"]
    assert collective["hidden_by"] == ["a"]
    assert (collective["start_us"], collective["waited_us"], collective["end_us"]) == (0.0, 32.768, 91.92)


def test_several_sources_run_one_behind_the_other(listing: Path, cluster: Path):
    done = weft("simulate", listing, listing, "--cluster", cluster, "--json")
    assert len(json.loads(done.stdout)["collectives"]) == 2


def test_more_than_ten_are_counted_and_none_is_said(tmp_path: Path, cluster: Path):
    lines = [f"    g{i} = all_reduce(x, 'sum', 'dp')\n    w{i} = wait(g{i})\n" for i in range(12)]
    source = tmp_path / "many.txt"
    source.write_text(f"group('dp', size=2)\n\ndef graph(x: f32[4]):\n{''.join(lines)}    return [w0]\n")
    assert "... and 2 more" in weft("simulate", source, "--cluster", cluster).stdout.splitlines()
    source.write_text("def graph(x: f32[4]):\n    a = relu(x)\n    return [a]\n")
    assert "the graph has no collectives" in weft("simulate", source, "--cluster", cluster).stdout.splitlines()


def test_the_first_line_says_that_a_step_does_not_fit(listing: Path, cluster: Path):
    cluster.write_text(CLUSTER.replace('memory_bandwidth = "1 GB/s"', 'memory_bandwidth = "1 GB/s"\nmemory = "20 kB"'))
    done = weft("simulate", listing, "--cluster", cluster)
    assert done.stdout.splitlines()[0] == "does not fit: needs 72.0 KiB, the device has 20 kB"
    assert json.loads(weft("simulate", listing, "--cluster", cluster, "--json").stdout)["fits"] is False
    cluster.write_text(CLUSTER.replace('memory_bandwidth = "1 GB/s"', 'memory_bandwidth = "1 GB/s"\nmemory = "80 kB"'))
    assert json.loads(weft("simulate", listing, "--cluster", cluster, "--json").stdout)["fits"] is True


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("missing.txt",), "missing.txt: there is no such file"),
        (("missing.txt", "--cluster", "h100"), "cluster: no cluster is called 'h100'"),
        (("missing.txt", "-o", "no/such/folder"), "no/such/folder: its folder does not exist"),
    ],
)
def test_what_does_not_exist_is_a_usage_error(arguments: tuple[str, ...], message: str):
    done = weft("simulate", *arguments)
    assert done.exit_code == 2
    assert done.stderr.startswith(message)


def test_help_answers_without_torch():
    code = (
        "import sys\nfrom typer.testing import CliRunner\nfrom weft.cli.main import app\n"
        "done = CliRunner().invoke(app, ['simulate', '--help'])\n"
        "print(done.exit_code, 'Usage:' in done.stdout, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "0 True False\n"
