"""The validation set: every published row can be read, and errors, effects and residuals follow from a run."""

from __future__ import annotations

import importlib
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

import weft
from benchmarks import scenarios
from weft.cli.zoo_source import parse_zoo
from weft.cost.cluster import Cluster
from weft.cost.execution import EXECUTIONS
from weft.passes.runtimes import RUNTIMES

RESULTS = sorted((scenarios.HERE / "results").glob("validation-*.json"))
ROWS = """repository = "nobody/nothing"
page = "a page"

[defaults]
cluster = "h100-1x8"
execution = "compiled"

[[rows]]
name = "small"
source = "zoo:llama-debug/fsdp?ranks=8"
tokens_per_second = 100000
gib = 0.1

[[rows]]
name = "large"
source = "zoo:llama-debug/fsdp?ranks=8&batch=4"
tokens_per_second = 200000
fit = true

[[rows]]
name = "unknown"
not_predicted = "not captured"
tokens_per_second = 1

[[effects]]
name = "batch"
before = "small"
after = "large"
"""


@pytest.fixture
def validate(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.syspath_prepend(str(scenarios.HERE))
    module = importlib.import_module("validate")
    monkeypatch.setattr(module, "CAPTURES", tmp_path / "captures")
    return module


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.toml"
    path.write_text(ROWS)
    return path


def test_every_published_row_names_what_ran(validate: Any):
    files = sorted(validate.PUBLISHED.glob("*.toml"))
    rows = [row for path in files for row in validate.read(path)[0]]
    assert len(rows) == 34
    for row in rows:
        if row.not_predicted:
            continue
        parse_zoo(row.query)
        assert Cluster.load(row.cluster).num_ranks >= 8
        assert row.runtime in RUNTIMES, row.key
        assert row.execution in EXECUTIONS


def test_each_hardware_is_fitted_on_at_most_one_row(validate: Any):
    rows = [row for path in validate.PUBLISHED.glob("*.toml") for row in validate.read(path)[0]]
    devices = [Cluster.load(row.cluster).device.name for row in rows if row.fit]
    assert len(devices) == len(set(devices))


def test_effects_name_rows_that_exist(validate: Any):
    for path in validate.PUBLISHED.glob("*.toml"):
        rows, effects = validate.read(path)
        names = {row.key for row in rows}
        assert {key for effect in effects for key in (effect.before, effect.after)} <= names


def test_a_run_gives_signed_errors_effects_and_residuals(validate: Any, rows: Path, tmp_path: Path):
    table = importlib.import_module("validation_table")
    given, effects = validate.read(rows)
    found = {"date": "", "commit": "", "versions": {}, "rows": [validate.outcome(row) for row in given]}
    found["effects"] = [vars(effect) for effect in effects]
    small, large, unknown = found["rows"]
    rate = small["predicted"]["tokens_per_second_per_gpu"]
    assert table.throughput_error(small) == pytest.approx(rate / 100000 - 1)
    assert table.memory_error(large) is None
    assert table.throughput_error(unknown) is None
    page = table.page(found)
    assert "| rows | small | 100,000 |" in page
    assert "| rows | large (fitted) | 200,000 |" in page
    assert "1 predictions" in page  # the fitted row is none
    assert "| batch | +100.0 % |" in page
    assert "rows/unknown: not captured" in page
    change = 200000 / 100000, large["predicted"]["tokens_per_second_per_gpu"] / rate
    is_sized = 0.5 <= (change[1] - 1) / (change[0] - 1) <= 2
    assert page.split("| batch |")[1].splitlines()[0].endswith(f"| yes | {'yes' if is_sized else 'no'} |")
    assert importlib.import_module("validation_plot").draw(found).count("<circle") == 2
    residuals = tmp_path / "residuals.toml"
    residuals.write_text('# head\n\n[[residuals]]\nset = "other"\ndevice = "d"\n\n[[residuals]]\nset = "published"\n')
    validate.record(found, residuals)
    kept, made, plain = tomllib.loads(residuals.read_text())["residuals"]
    assert kept == {"set": "other", "device": "d"}
    assert made["row"] == plain["row"] == "rows/small"
    assert made["step"] == pytest.approx(100000 / rate - 1, abs=1e-4)
    published_us = small["predicted"]["tokens_per_step"] / 8 / 100000 * 1e6
    simulated = weft.simulate(weft.zoo.load("llama-debug", "fsdp", ranks=8, part="step"), "h100-1x8")
    assert plain["execution"] == "plain"
    assert plain["step"] == pytest.approx(simulated.step_us / published_us - 1, abs=1e-4)
    assert plain["peak"] == pytest.approx(simulated.peak_bytes / 2**30 / 0.1 - 1, abs=1e-4)
    assert residuals.read_text().startswith("# head\n")


def test_a_run_of_some_rows_keeps_the_figures_of_the_others(validate: Any):
    table = importlib.import_module("validation_table")
    old = {
        "date": "d1",
        "commit": "c1",
        "versions": {},
        "rows": [{"page": "p", "name": name, "predicted": {}} for name in "ab"],
    }
    new = {"date": "d2", "commit": "c2", "versions": {}, "rows": [{"page": "p", "name": "b", "predicted": {}}]}
    found = validate.merged(old, new, ["p/b", "p/a"])
    assert [(row["name"], row["date"], row["commit"]) for row in found["rows"]] == [
        ("b", "d2", "c2"),
        ("a", "d1", "c1"),
    ]
    assert table.about(found).endswith("1 rows are from d1, commit c1.")
    assert table.about(validate.merged(found, new, ["p/b"])).count("commit") == 1


@pytest.mark.parametrize(
    ("published", "predicted", "is_sized"),
    [(0.1, 0.05, True), (0.1, 0.2, True), (0.1, 0.049, False), (-0.1, -0.21, False), (0.1, -0.1, False)],
)
def test_a_change_has_the_published_size_from_half_to_double(
    validate: Any, published: float, predicted: float, is_sized: bool
):
    assert importlib.import_module("validation_table")._has_size(published, predicted) is is_sized


def test_a_row_that_fails_says_so(validate: Any, rows: Path):
    row = validate.replace(validate.read(rows)[0][0], cluster="no-such-cluster")
    assert validate.outcome(row)["not_predicted"].startswith("fails: ClusterError")


@pytest.mark.slow
def test_a_row_may_state_sizes_and_passes(validate: Any):
    source = "zoo:dropless-debug/ep-fsdp?mesh=dp:2,ep:2&layers=1&batch=4"
    whole = validate.Published("page", "whole", 1.0, source=source, cluster="h100-8x8", sizes="balanced")
    rows = (whole, validate.replace(whole, sizes=""), validate.replace(whole, pipeline="split-batch{chunks=2}"))
    balanced, unknown, chunks = (validate.predict(row).communication_us for row in rows)
    assert unknown < balanced < chunks


def test_a_capture_is_kept_and_read_again(validate: Any, rows: Path, monkeypatch: pytest.MonkeyPatch):
    row = validate.read(rows)[0][0]
    first = validate.predict(row)
    monkeypatch.setattr(validate, "load_source", None)  # a second capture would fail
    assert validate.predict(row) == first


def test_the_fitted_share_gives_the_published_figure(validate: Any, rows: Path):
    row = validate.read(rows)[0][1]
    goal = validate.predict(row, 0.5).tokens_per_second_per_gpu
    share, _ = validate.fit(validate.replace(row, tokens_per_second=goal))
    assert validate.predict(row, share).tokens_per_second_per_gpu == pytest.approx(goal, rel=1e-3)


@pytest.mark.skipif(not RESULTS, reason="no run is kept")
def test_the_docs_show_the_latest_figures(validate: Any, tmp_path: Path):
    copy, picture = tmp_path / "validation.md", tmp_path / "validation.svg"
    copy.write_text(validate.PAGE.read_text())
    validate.show(json.loads(RESULTS[-1].read_text()), copy, picture)
    assert copy.read_text() == validate.PAGE.read_text(), "run: make validate ARGS=--write"
    assert picture.read_text() == validate.PICTURE.read_text()
