"""`weft explain` on a step of the zoo: for every collective that was not merged, the reason and the node behind it."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from weft.cli.main import app

SOURCE = "zoo:llama-debug/fsdp-tp?layers=2&ranks=4"
PIPELINE = "bucket-all-gathers{only=parameters},bucket-reduce-scatters{only=gradients},fuse-ddp-all-reduces"
MERGING = ("bucket-all-gathers", "bucket-reduce-scatters", "fuse-ddp-all-reduces")


@pytest.fixture(scope="module")
def explained() -> dict[str, object]:
    result = CliRunner().invoke(app, ["explain", SOURCE, "--cluster", "h100-8", "--json", "--pipeline", PIPELINE])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def decisions(explained: dict[str, object]) -> list[tuple[str, list[dict[str, object]]]]:
    collectives = explained["collectives"]
    assert isinstance(collectives, list)
    return [(c["name"], [d for d in c["outcomes"] if d["pass_name"] in MERGING]) for c in collectives]


def test_every_collective_is_considered_by_one_pass_that_merges(explained: dict[str, object]):
    found = decisions(explained)
    assert len(found) > 80
    assert [name for name, decided in found if len(decided) != 1] == []


def test_what_was_not_merged_has_a_reason_and_a_node_behind_it(explained: dict[str, object]):
    collectives = explained["collectives"]
    assert isinstance(collectives, list)
    group_of = {c["name"]: c["group"] for c in collectives}
    kept = [(name, d) for name, decided in decisions(explained) for d in decided if d["reason"] != "applied"]
    assert {d["reason"] for _, d in kept} >= {"other-role"}
    for name, decision in kept:
        assert decision["sentence"]
        assert decision["blocking"] or group_of[name] == "tp", decision  # all of tensor parallelism's group stays


def test_tensor_parallel_collectives_are_told_by_what_they_carry(explained: dict[str, object]):
    collectives = explained["collectives"]
    assert isinstance(collectives, list)
    for collective in collectives:
        (decision,) = [d for d in collective["outcomes"] if d["pass_name"] in MERGING]
        if collective["group"] == "tp" and collective["kind"] in ("all_gather", "reduce_scatter"):
            assert decision["reason"] == "other-role"
            assert "carries activations" in decision["sentence"]
        elif collective["group"] == "dp":
            assert decision["reason"] == "applied"
