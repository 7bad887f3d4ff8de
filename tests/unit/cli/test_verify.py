"""`weft verify`: values, proofs, and how they end."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

from tests.unit.cli.conftest import LISTING, OPTIMIZED
from weft.cli.usage import UsageError
from weft.cli.verify_command import parse_mesh

Weft = Callable[..., Result]


@pytest.fixture
def optimized(tmp_path: Path) -> Path:
    path = tmp_path / "optimized.txt"
    path.write_text(OPTIMIZED)
    return path


@pytest.fixture
def other(tmp_path: Path) -> Path:
    path = tmp_path / "other.txt"
    path.write_text(LISTING.replace("relu", "neg"))
    return path


# Values.


def test_equal_values_end_with_0(weft: Weft, listing: Path, optimized: Path):
    done = weft("verify", listing, optimized)
    assert (done.exit_code, done.stdout, done.stderr) == (0, "bitwise equal on 2 virtual ranks\n", "")
    assert weft("verify", listing, optimized, "--ranks", 4).stdout == "bitwise equal on 4 virtual ranks\n"
    assert weft("verify", listing, optimized, "--mesh", "pp=3,dp=2").stdout == "bitwise equal on 6 virtual ranks\n"


def test_other_values_end_with_1_and_the_first_difference(weft: Weft, listing: Path, other: Path):
    done = weft("verify", listing, other)
    assert done.exit_code == 1
    assert done.stdout.startswith("different on 2 virtual ranks: outputs[0] on rank 0 at [0, ")


def test_values_as_json(weft: Weft, listing: Path, optimized: Path, other: Path):
    done = weft("verify", listing, optimized, "--json")
    found = json.loads(done.stdout)
    tolerance = found.pop("tolerance")
    assert tolerance.startswith("2 * eps * sqrt(2)")
    assert found == {"equal": True, "bitwise": True, "num_ranks": 2, "backend": "virtual", "difference": None}
    done = weft("verify", listing, other, "--json")
    found = json.loads(done.stdout)
    assert (done.exit_code, found["equal"]) == (1, False)
    assert list(found["difference"]) == ["after", "before", "index", "max_abs_difference", "position", "rank"]
    assert found["difference"]["position"] == "outputs[0]"


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.xdist_group("ranks")
def test_real_ranks_compare_values_too(weft: Weft, listing: Path, optimized: Path):
    done = weft("verify", listing, optimized, "--backend", "gloo")
    assert (done.exit_code, done.stdout) == (0, "bitwise equal on 2 gloo ranks\n")


# Proofs.


def test_a_proof_needs_no_data(weft: Weft, listing: Path, optimized: Path):
    done = weft("verify", listing, optimized, "--proof")
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout.startswith("proved equal (")
    found = json.loads(weft("verify", listing, optimized, "--proof", "--json").stdout)
    assert found.pop("num_values") > 0
    assert found == {"proved": True, "exact": True, "difference": None}


def test_what_is_not_proved_ends_with_1_and_the_place(weft: Weft, listing: Path, other: Path):
    done = weft("verify", listing, other, "--proof")
    assert done.exit_code == 1
    assert done.stdout.startswith("not proved equal: outputs[0] may differ")
    done = weft("verify", listing, other, "--proof", "--json")
    found = json.loads(done.stdout)
    assert (done.exit_code, found["proved"], found["exact"]) == (1, False, False)
    assert "outputs[0]" in found["difference"]


def test_a_proof_in_real_arithmetic_says_so(weft: Weft, tmp_path: Path):
    text = """def graph(x: f32[4], y: f32[4], z: f32[4]):
    a: f32[4] = add(x, y)
    r: f32[4] = add(a, z)
    return [r]
"""
    before, after = tmp_path / "before.txt", tmp_path / "after.txt"
    before.write_text(text)
    after.write_text(text.replace("add(x, y)", "add(y, z)").replace("add(a, z)", "add(x, a)"))
    done = weft("verify", before, after, "--proof")
    assert done.exit_code == 0
    assert done.stdout.startswith("proved equal in real arithmetic (")
    assert "; bitwise: not proved equal: outputs[0]" in done.stdout
    found = json.loads(weft("verify", before, after, "--proof", "--json").stdout)
    assert (found["proved"], found["exact"]) == (True, False)


# Usage.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--ranks", "1"],
            "verify: groups 'dp' of 2 ranks with stride 1 do not tile 1 ranks\nuse a multiple of 2 ranks\n",
        ),
        (
            ["--ranks", "3"],
            "verify: groups 'dp' of 2 ranks with stride 1 do not tile 3 ranks\nuse a multiple of 2 ranks\n",
        ),
        (
            ["--mesh", "dp=4"],
            "verify: group 'dp' has 2 ranks in the graph, 4 in the mesh\ncapture the graph for this mesh\n",
        ),
        (
            ["--mesh", "dp=4", "--proof"],
            "verify: group 'dp' has 2 ranks in the graph, 4 in the mesh\ncapture the graph for this mesh\n",
        ),
        (["--mesh", "dp=2", "--ranks", "4"], "verify: the mesh dp=2 has 2 ranks, --ranks is 4\nleave --ranks off\n"),
        (["--mesh", "dp"], "--mesh dp: 'dp' is not an axis with a size\nwrite dp=2,tp=2\n"),
        (
            ["--proof", "--ranks", "2"],
            "verify: --ranks has no effect on a proof, which runs nothing\nleave --ranks off\n",
        ),
        (
            ["--proof", "--backend", "gloo"],
            "verify: --backend has no effect on a proof, which runs nothing\nleave --backend off\n",
        ),
    ],
)
def test_ranks_that_cannot_be_end_with_2(weft: Weft, listing: Path, optimized: Path, options: list[str], message: str):
    done = weft("verify", listing, optimized, *options)
    assert (done.exit_code, done.stdout, done.stderr) == (2, "", message)


def test_a_fault_of_a_listing_names_the_file(weft: Weft, listing: Path, tmp_path: Path):
    typo = tmp_path / "typo.txt"
    typo.write_text(listing.read_text().replace("relu", "rellu"))
    for sides in ((listing, typo), (typo, listing)):
        done = weft("verify", *sides, "--proof")
        assert (done.exit_code, done.stdout) == (1, "")
        assert done.stderr.startswith(f"{typo}: listing line 7: ")
        assert str(listing) not in done.stderr


def test_a_source_that_is_not_there_ends_with_2(weft: Weft, listing: Path):
    done = weft("verify", listing, "missing.txt")
    assert done.exit_code == 2
    assert done.stderr.startswith("missing.txt: there is no such file\n")


def test_a_backend_that_does_not_exist_ends_with_2(weft: Weft, listing: Path):
    done = weft("verify", listing, listing, "--backend", "hope")
    assert done.exit_code == 2
    assert "'hope' is not one of" in done.stderr


def test_graphs_with_other_inputs_are_refused(weft: Weft, listing: Path, tmp_path: Path):
    more = tmp_path / "more.txt"
    more.write_text(LISTING.replace("(x: f32[4, 4], p: f32[2, 4])", "(x: f32[4, 4], p: f32[2, 4], z: f32[3])"))
    done = weft("verify", listing, more)
    assert done.exit_code == 1
    assert done.stderr.startswith("verification: the graph takes 3 inputs, rank 0 was given 2\n")


@pytest.mark.parametrize("text", ["", "dp=", "=2", "dp=0", "dp=-1", "dp=2,", "dp=2,dp=4", "dp=1e3", "dp=٣", "dp=2=2"])
def test_a_mesh_that_says_nothing_is_refused(text: str):
    with pytest.raises(UsageError, match=r"is not an axis with a size|is given twice"):
        parse_mesh(text)


def test_a_mesh_keeps_the_order_of_its_axes():
    assert list(parse_mesh("dp=2, tp=4").items()) == [("dp", 2), ("tp", 4)]
