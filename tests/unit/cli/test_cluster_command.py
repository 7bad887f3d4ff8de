"""`weft cluster`: what it lists, shows and writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from weft.cli.main import app
from weft.cost.cluster import Cluster

run = CliRunner().invoke


def test_presets_are_listed_with_their_rates():
    lines = run(app, ["cluster", "list"]).stdout.splitlines()
    assert next(line for line in lines if line.startswith("h100-8x8")).endswith("nvlink 345 GB/s, infiniband 50 GB/s")
    names = [each["name"] for each in json.loads(run(app, ["cluster", "list", "--json"]).stdout)]
    assert "h100-8x8" in names


def test_a_cluster_is_shown_with_units():
    text = run(app, ["cluster", "show", "h100-16x8"]).stdout
    assert "128 ranks" in text
    assert "400 Gbit/s" in text


@pytest.mark.parametrize(
    ("adapters", "gbps"),
    [
        (["--nic", "400Gbit/s"], 50.0),
        (["--nic", "400Gbit"], 50.0),
        (["--nic", "400 Gbit"], 50.0),
        (["--nic", "50GB/s", "--nics-per-node", "4"], 25.0),
        ([], 50.0),
    ],
)
def test_a_new_cluster_can_be_read(tmp_path: Path, adapters: list[str], gbps: float):
    path = tmp_path / "ours.toml"
    result = run(app, ["cluster", "new", "--from", "h100-16x8", "--nodes", "4", *adapters, "-o", str(path)])
    assert result.exit_code == 0, result.output
    made = Cluster.load(path)
    assert (made.num_ranks, made.levels[-1].link.bandwidth_gbps, made.levels[-1].rails) == (32, gbps, True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--from", "h100-16x8", "--nic", "400"], "'400' is not a rate"),
        (["--from", "h100-16x8", "--nics-per-node", "8"], "the rate of an adapter is missing"),
        (["--from", "pcie-h100-8", "--nic", "400Gbit/s"], "has no level between nodes"),
        (["--from", "h101-8x8"], "no cluster is called 'h101-8x8'"),
    ],
)
def test_wrong_options_are_refused(arguments: list[str], message: str):
    result = run(app, ["cluster", "new", *arguments])
    assert result.exit_code == 2
    assert message in result.output


def test_a_warning_about_a_file_is_one_note(tmp_path: Path):
    path = tmp_path / "ours.toml"
    path.write_text('base = "h100-16x8"\nname = "ours"\n\n[[levels]]\nname = "infiniband"\nrails = false\n')
    result = run(app, ["cluster", "show", str(path)])
    assert result.exit_code == 0
    [note] = result.stderr.splitlines()
    assert note.startswith(f"note: cluster {path}: the 8 ranks of a node share one adapter of 50 GB/s on infiniband")
    assert "6.25 GB/s for each" in note
    assert note.endswith("write rails = true")
