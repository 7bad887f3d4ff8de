"""`--cluster`: folders, too few ranks, a cluster that is not given, and one that does not describe compute."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

Weft = Callable[..., Result]

LINKS = """name = "pair"
num_nodes = 1
ranks_per_node = 2

[[levels]]
name = "wire"
spans = "node"
latency = "10 us"
bandwidth = "10 GB/s"
"""
NOTE = "cluster pair has no peak_tflops and no memory_gbps in [device]: compute takes no time"


@pytest.mark.parametrize("command", ["optimize", "explain", "simulate", "sweep"])
def test_a_folder_is_said_to_be_one(weft: Weft, listing: Path, tmp_path: Path, command: str):
    done = weft(command, listing, "--cluster", tmp_path)
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith(
        f"cluster {tmp_path}: it cannot be read: Is a directory\ngive a TOML file, or a preset"
    )


def test_a_folder_with_the_name_of_a_preset_hides_nothing(
    weft: Weft, listing: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "h100-8").mkdir()
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path)
    assert weft("simulate", listing, "--cluster", "h100-8").exit_code == 0
    assert weft("simulate", listing, "--cluster", "mine").stderr.startswith("cluster mine: it cannot be read: Is a dir")


@pytest.mark.parametrize(
    ("cluster", "num_ranks", "do"),
    [
        ("h100-8", 64, "use h100-8x8, or a graph for at most 8 ranks"),
        ("loopback-1x2", 4, "use loopback-1x4, or a graph for at most 2 ranks"),
        ("loopback-1x2", 64, "use another cluster such as h100-8x8, or a graph for at most 2 ranks"),
    ],
)
@pytest.mark.parametrize("command", ["optimize", "simulate"])
def test_too_few_ranks_are_told_with_a_cluster_that_has_them(
    weft: Weft, listing: Path, command: str, cluster: str, num_ranks: int, do: str
):
    listing.write_text(
        f"group('dp', size={num_ranks})\n\ndef graph(x: f32[4]):\n"
        "    g = all_reduce(x, 'sum', 'dp')\n    w = wait(g)\n    return [w]\n"
    )
    done = weft(command, listing, "--cluster", cluster)
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.splitlines()[1:] == [do]
    assert f"group 'dp' needs {num_ranks}" in done.stderr


def test_simulate_names_the_cluster_that_it_assumes(weft: Weft, listing: Path):
    assert weft("simulate", listing).stdout.startswith("on h100-8x8, the default without --cluster\n\nstep ")
    assert weft("simulate", listing, "--cluster", "h100-8x8").stdout.startswith("step ")


@pytest.mark.parametrize(
    ("device", "note"),
    [
        ("", NOTE),
        (
            'memory_bandwidth = "1 GB/s"',
            "cluster pair has no peak_tflops in [device]: products are priced by their bytes alone",
        ),
        (
            "peak_tflops = { f32 = 1.0 }",
            "cluster pair has no memory_gbps in [device]: only matrix products take time",
        ),
        ('peak_tflops = { f32 = 1.0 }\nmemory_bandwidth = "1 GB/s"', None),
    ],
)
def test_what_a_cluster_leaves_out_of_compute_is_said(
    weft: Weft, tmp_path: Path, listing: Path, device: str, note: str | None
):
    file = tmp_path / "pair.toml"
    file.write_text(f"{LINKS}\n[device]\n{device}\n" if device else LINKS)
    given = (listing, "--cluster", file)
    texts = weft("optimize", *given).stderr, weft("simulate", *given).stdout
    for text in texts:
        notes = [line for line in text.splitlines() if line.startswith("note: cluster")]
        assert notes == ([f"note: {note}"] if note else [])
    records = (
        json.loads(weft("optimize", *given, "--json").stdout)["report"],
        json.loads(weft("simulate", *given, "--json").stdout),
    )
    for record in records:
        assert [each for each in record["notes"] if each.startswith("cluster")] == ([note] if note else [])
        assert not any("may be too low" in each for each in record["notes"])
