"""Sources: each sort of file by its content, models of the zoo, and a clear word about everything else."""

from __future__ import annotations

import gzip
import inspect
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from typer.testing import Result

from tests.unit.cli.conftest import LISTING
from weft import zoo
from weft.cli.source import load_source
from weft.cli.usage import SOURCE_HELP, UsageError
from weft.cli.zoo_source import EXAMPLE, OPTIONS, load_zoo, parse_zoo
from weft.errors import ReadError, WeftError
from weft.frontends import archive
from weft.frontends.trace_log import read_log
from weft.graph.about import ABOUT_KEY
from weft.graph.listings.text import parse, render
from weft.zoo.parallel.strategies import STRATEGIES, mesh_of

DATA = Path(__file__).parents[2] / "data"
DOCS = DATA.parents[1] / "docs" / "capture.md"
LOG = DATA / "train_inductor.log"


def fault(source: str | Path, kind: type[WeftError] = ReadError) -> str:
    with pytest.raises(kind) as error:
        load_source(str(source))
    return str(error.value)


# Files.


def test_a_listing_is_read(listing: Path):
    assert render(load_source(str(listing))) == LISTING


def test_an_archive_is_read(tmp_path: Path):
    archive.save(parse(LISTING), tmp_path / "any.name")
    assert render(load_source(str(tmp_path / "any.name"))) == LISTING


@pytest.mark.parametrize("is_packed", [False, True])
def test_a_runnable_is_read(tmp_path: Path, is_packed: bool):
    (text, *_) = [graph.text() for graph in read_log(LOG) if graph.kind == "fx_graph_runnable"]
    path = tmp_path / "runnable"
    path.write_bytes(gzip.compress(text.encode()) if is_packed else text.encode())
    assert load_source(str(path)).meta[ABOUT_KEY]["source"] == "runnable"


def test_one_graph_of_a_log_is_chosen_by_its_line():
    about = load_source(f"{LOG}:96").meta[ABOUT_KEY]
    assert (about["kind"], about["part"]) == ("aot_joint_graph", "joint")


def test_the_only_graph_of_a_log_needs_no_line(tmp_path: Path):
    lines = LOG.read_text().splitlines(keepends=True)
    folder = tmp_path / "logs"
    folder.mkdir()
    (folder / "one.log").write_text("".join(lines[95:173]))
    for source in (folder, folder / "one.log"):
        assert load_source(str(source)).meta[ABOUT_KEY]["kind"] == "aot_joint_graph"


def test_a_log_of_many_graphs_lists_them():
    lines = fault(LOG, UsageError).splitlines()
    assert lines[0] == f"{LOG}: the log has 14 graphs"
    assert lines[1] == f"    {LOG}:96  aot_joint_graph 0/0_1, joint, rank 0, 77 lines"
    assert lines[-1] == f"choose one: {LOG}:96"


def test_a_long_list_of_graphs_is_cut(tmp_path: Path):
    for name in ("a.log", "b.log"):
        shutil.copy(LOG, tmp_path / name)
    lines = fault(tmp_path, UsageError).splitlines()
    assert lines[0] == f"{tmp_path}: the log has 28 graphs"
    assert lines[-2:] == ["    ... and 8 more", f"choose one: {tmp_path / 'a.log'}:96"]


def test_a_line_without_a_graph_lists_those_that_are_there():
    assert fault(f"{LOG}:97", UsageError).startswith(f"{LOG}: no graph of the log is at line 97\n    {LOG}:96  aot_")


def test_a_log_without_a_graph_of_operators_is_refused(tmp_path: Path):
    (tmp_path / "x.log").write_text("".join(LOG.read_text().splitlines(keepends=True)[32:95]))
    assert fault(tmp_path / "x.log") == (
        f"{tmp_path / 'x.log'}: the log has no graph of operators\ncompile with torch.compile"
    )


@pytest.mark.parametrize("content", [b"", b"hello\n", b"\x00\xff\xfe", b"import os\nos.remove('x')\n"])
def test_a_file_of_another_sort_is_refused(tmp_path: Path, content: bytes):
    (tmp_path / "x").write_bytes(content)
    assert fault(tmp_path / "x") == (
        f"{tmp_path / 'x'}: it is not a listing, an archive, a TORCH_TRACE log or an fx_graph_runnable text\n"
        "`weft optimize --help` lists the formats"
    )


def test_a_damaged_file_is_refused(tmp_path: Path):
    (tmp_path / "x").write_bytes(gzip.compress(LISTING.encode())[:-12])
    assert fault(tmp_path / "x").startswith(f"{tmp_path / 'x'}: it cannot be read: ")


def test_a_file_that_is_not_there_is_a_usage_error():
    assert fault("nothing.txt", UsageError) == (
        "nothing.txt: there is no such file\n"
        "give a listing, an archive, a TORCH_TRACE log, an fx_graph_runnable text or zoo:MODEL"
    )


@pytest.mark.parametrize(
    ("source", "status"), [("nothing.txt", 2), ("zoo:lama-debug", 2), (str(LOG), 2), (str(DATA / "README.md"), 1)]
)
def test_the_exit_status_tells_usage_from_refusal(weft: Callable[..., Result], source: str, status: int):
    done = weft("optimize", source)
    assert (done.exit_code, done.stdout) == (status, "")


# The zoo.


def test_the_options_are_those_of_load():
    parameters = inspect.signature(zoo.load).parameters
    assert set(OPTIONS) == set(parameters) - {"name", "parallel", "changes"}


def test_a_source_of_the_zoo_is_parsed():
    assert parse_zoo(EXAMPLE) == ("llama-debug", {"parallel": "fsdp-tp", "layers": 2, "ranks": 4})
    assert parse_zoo("zoo:llama-8b") == ("llama-8b", {})
    text = (
        "zoo:llama-debug/hsdp?mesh=replicate:2,shard:4&part=step&reshard=false&compute_dtype=f32&dim=128&norm_eps=1e-6"
    )
    assert parse_zoo(text)[1] == {
        "parallel": "hsdp",
        "mesh": {"replicate": 2, "shard": 4},
        "part": "step",
        "reshard": False,
        "compute_dtype": torch.float32,
        "dim": 128,
        "norm_eps": 1e-6,
    }


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("zoo:", f"it is not a model of the zoo\nwrite {EXAMPLE}"),
        ("zoo:llama-debug/", f"it is not a model of the zoo\nwrite {EXAMPLE}"),
        ("zoo:llama-debug/tp/dp", f"it is not a model of the zoo\nwrite {EXAMPLE}"),
        ("zoo:llama-debug?", f"it is not a model of the zoo\nwrite {EXAMPLE}"),
        ("zoo:lama-debug/fsdp", "no model is called 'lama-debug'\ndid you mean 'llama-debug'?"),
        ("zoo:llama-debug?layers", f"'layers' is not an option\nwrite key=value, as in {EXAMPLE}"),
        ("zoo:llama-debug?layers=1&layers=2", "'layers' is given twice\ngive it once"),
        ("zoo:llama-debug/fsdp?parallel=tp", "'parallel' is given twice\ngive it once"),
        ("zoo:llama-debug?layer=1", "no option is called 'layer'\ndid you mean 'layers'?"),
        ("zoo:llama-debug?layers=two", "layers is 'two', expected a whole number"),
        ("zoo:llama-debug?dynamic=yes", "dynamic is 'yes', expected true or false"),
        ("zoo:llama-debug?mesh=dp2", "mesh is 'dp2', expected sizes by axis such as dp:2,tp:4"),
        ("zoo:llama-debug?mesh=dp:2,dp:4", "mesh is 'dp:2,dp:4', expected sizes by axis such as dp:2,tp:4"),
        ("zoo:llama-debug?compute_dtype=f31", "compute_dtype is 'f31', expected a dtype such as bf16"),
        ("zoo:llama-debug?norm_eps=x", "norm_eps is 'x', expected a number"),
        ("zoo:llama-debug?tied=1", "tied is '1', expected true or false"),
    ],
)
def test_a_source_that_is_no_model_is_refused(source: str, message: str):
    with pytest.raises(UsageError) as error:
        parse_zoo(source)
    assert str(error.value) == f"{source}: {message}"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("zoo:llama-debug/fsdpp", "zoo: no parallelism is called 'fsdpp'\ndid you mean 'fsdp'?"),
        ("zoo:llama-debug/fsdp?part=joined&ranks=2", "capture: no part is called 'joined'\ndid you mean 'joint'?"),
    ],
)
def test_what_the_zoo_refuses_is_a_usage_error(source: str, message: str):
    assert fault(source, UsageError) == message


def test_a_model_of_the_zoo_is_loaded():
    module = load_zoo("zoo:llama-debug/fsdp-tp?layers=1&ranks=4&part=forward")
    assert render(module) == render(zoo.load("llama-debug", "fsdp-tp", ranks=4, layers=1, part="forward"))


def test_documented_sources_parse_and_name_the_axes_of_every_parallelism():
    page = DOCS.read_text()
    sources = re.findall(r"zoo:[^'`\s]+", f"{page} {SOURCE_HELP}")
    parsed = [parse_zoo(source.rstrip(".,"))[1] for source in sources]
    meshes = [options for options in parsed if "mesh" in options]
    assert len(meshes) >= 2
    for options in meshes:
        assert mesh_of(options["parallel"], None, options["mesh"]) == options["mesh"]
    _, _, table = page.partition("| parallelism | axes of `mesh` |\n|---|---|\n")
    told: dict[str, tuple[str, ...]] = {}
    for row in table.partition("\n\n")[0].splitlines():
        names, axes = (tuple(re.findall(r"`([\w-]+)`", cell)) for cell in row.strip("|").split("|"))
        told |= dict.fromkeys(names, axes)
    assert told == {name: each.axes for name, each in STRATEGIES.items() if each.axes}
