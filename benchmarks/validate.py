"""Predictions against published figures: every row of `published/`, with its signed error.

    python benchmarks/validate.py [--only 8b,tp] [--jobs 2] [--write] [--record]
    python benchmarks/validate.py --rows FILE ... [--json FILE]
    python benchmarks/validate.py --fit

A row names what ran: a source of the zoo, the runtime, what was compiled, the attention kernel. One row for each
hardware fixes one scalar, the share of the peak that large products reach: `--fit` prints it, the preset holds it, and
that row does not count as a prediction. Nothing else is fitted. Each row is also simulated without an execution, as
`weft simulate` and reports do. `--rows` predicts rows of other files, in the same form. Captured graphs are kept in
.benchmarks/captures, by the digest of the source and of the code that captures.

`--write` writes the figures into benchmarks/results and docs/validation.md, with its picture; rows that `--only` left
out keep their figures, with the date of their own run. `--record` writes the errors of all these rows to the file that
error bars come from.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import sys
import time
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
import validation_plot
import validation_table
from bench import ROOT, begin, say
from bench_table import fill
from torch.fx import GraphModule

from weft.bounds.bounded_simulation import simulate_modules
from weft.bucketing.units import Root
from weft.cli.source import load_source
from weft.cost.cluster import Cluster
from weft.frontends import archive
from weft.graph.assumed_sizes import assume_sizes
from weft.graph.versions import dag_of
from weft.passes.pipeline import Pipeline
from weft.passes.runtimes import run_as
from weft.prediction.error_bars import RESIDUALS, write_residuals
from weft.prediction.prediction import Prediction, predict_modules
from weft.prediction.step_kind import step_kind

PUBLISHED = ROOT / "benchmarks" / "published"
CAPTURES = ROOT / ".benchmarks" / "captures"
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "validation.md"
PICTURE = ROOT / "docs" / "images" / "validation.svg"
RECORDED = "published"
"""The name of this set among the recorded residuals; other sets stay as they are."""
NUM_FIT_STEPS = 6
"""Secant steps that fit a scalar. The step time is nearly linear in its inverse, so three suffice."""


@dataclass(frozen=True)
class Published:
    """One published figure, and what ran."""

    page: str
    """File of the row, and the page it cites."""
    name: str
    tokens_per_second: float
    """Per GPU."""
    gib: float | None = None
    """Peak reserved memory."""
    source: str = ""
    forms: str = ""
    """Options of the zoo that the programs of this page have in common."""
    cluster: str = ""
    runtime: str | None = None
    root: Root = "split"
    """Layout of the parameters outside of blocks, as `--root` takes it."""
    execution: str | None = None
    attention: str | None = None
    sizes: str = ""
    """Assumed sizes that the data decides, as `--assume` takes them."""
    pipeline: str = ""
    """Passes that rewrite the step before it runs."""
    fit: bool = False
    """Whether the free scalar of the hardware is fitted on this row."""
    not_predicted: str = ""
    """Why there is no prediction."""

    @property
    def key(self) -> str:
        return f"{self.page}/{self.name}"

    @property
    def query(self) -> str:
        """The whole source."""
        return "&".join(filter(None, (self.source, self.forms, "part=step")))


@dataclass(frozen=True)
class Effect:
    """Two rows that differ in one thing."""

    name: str
    before: str
    after: str


def read(path: Path) -> tuple[list[Published], list[Effect]]:
    """The rows and effects of a file."""
    data = tomllib.loads(path.read_text(encoding="utf-8"))
    known = {field.name for field in fields(Published)} - {"page"}
    rows: list[Published] = []
    for row in data["rows"]:
        given = {**data.get("defaults", {}), **row}
        if unknown := sorted(given.keys() - known):
            sys.exit(f"{path}: row {row.get('name')!r} has the unknown key {unknown[0]!r}")
        rows.append(Published(page=path.stem, **given))
    effects = [
        Effect(each["name"], f"{path.stem}/{each['before']}", f"{path.stem}/{each['after']}")
        for each in data.get("effects", ())
    ]
    return rows, effects


def captured(query: str) -> GraphModule:
    """The graph of a source, from the cache if the same code has captured it before."""
    path = CAPTURES / f"{_digest(query)}.weft"
    if path.exists():
        return archive.load(path)
    module = load_source(query)
    path.parent.mkdir(parents=True, exist_ok=True)
    archive.save(module, path)
    return module


def _digest(query: str) -> str:
    """Of a source, torch, and every file of Weft that a captured graph depends on."""
    found = hashlib.sha256(f"{query}\n{torch.__version__}\n".encode())
    for folder in ("zoo", "frontends", "compat", "graph", "passes/rewrite"):
        for path in sorted((ROOT / "src" / "weft" / folder).rglob("*.py")):
            found.update(path.read_bytes())
    return found.hexdigest()[:32]


def predict(row: Published, efficiency: float | None = None) -> Prediction:
    """The prediction of a row, with the preset's scalar or another one."""
    cluster = Cluster.load(row.cluster)
    if efficiency is not None:
        cluster = replace(cluster, device=replace(cluster.device, matmul_efficiency=efficiency))
    module = captured(row.query)
    if row.sizes:
        assume_sizes(module, row.sizes)
    if row.pipeline:
        module = Pipeline.parse(row.pipeline).run(module, cluster=cluster, effort="fast").module
    return predict_modules(
        [module],
        cluster,
        runtime=row.runtime,
        root=row.root,
        execution=row.execution,
        attention=row.attention,
    )


def simulated(row: Published) -> dict[str, Any]:
    """The row without an execution, as `weft simulate` and reports do, and its kind."""
    cluster = Cluster.load(row.cluster)
    cluster = cluster if row.attention is None else cluster.with_attention(row.attention)
    module = captured(row.query)
    ran = module if row.runtime is None else run_as(module, row.runtime, root=row.root, cluster=cluster).module
    timeline = simulate_modules([ran], cluster)
    kind = step_kind([dag_of(module.graph)], cluster, timeline)
    return {"kind": asdict(kind), "step_us": timeline.step_us, "peak_bytes": timeline.peak_bytes}


def outcome(row: Published) -> dict[str, Any]:
    """A row with its prediction, or with the reason why there is none."""
    torch.set_num_threads(1)
    start = time.process_time()
    told = asdict(row)
    if row.not_predicted:
        return told
    try:
        found, plain = predict(row), simulated(row)
    except Exception as error:  # one faulty row must not end a run of tens of minutes; the exit status tells of it
        return told | {"not_predicted": f"fails: {type(error).__name__}: {error}".partition("\n")[0]}
    told |= {"predicted": json.loads(found.to_json()), "simulated": plain}
    return told | {"seconds": time.process_time() - start}


def fit(row: Published) -> tuple[float, float]:
    """The share of the peak at which the prediction of a row equals the published figure; and the one of its preset."""
    given = Cluster.load(row.cluster).device.matmul_efficiency
    goal = 1 / row.tokens_per_second

    def excess(inverse: float) -> float:
        rate = predict(row, 1 / inverse).tokens_per_second_per_gpu
        return (1 / rate if rate else 0.0) - goal

    x0, x1 = 1 / given, 1.02 / given
    y0, y1 = excess(x0), excess(x1)
    for _ in range(NUM_FIT_STEPS):
        if abs(y1) < 1e-4 * goal or y1 == y0:
            break
        x0, x1, y0 = x1, x1 - y1 * (x1 - x0) / (y1 - y0), y1
        y1 = excess(x1)
    return 1 / x1, given


def run(rows: Sequence[Published], jobs: int) -> Iterator[dict[str, Any]]:
    """The outcomes, as they arrive."""
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        doing = {pool.submit(outcome, row): row for row in rows}
        for done in as_completed(doing):
            found = done.result()
            say(f"{doing[done].key:45} {validation_table.one_line(found)}")
            yield found


def record(found: dict[str, Any], path: Path = RESIDUALS) -> None:
    """Write the residuals of a run to the file that error bars come from."""
    rows = [row for row in found["rows"] if not row["fit"] and row.get("predicted") is not None]
    made = [_residual(row, *errors) for row in rows for errors in _errors(row)]
    write_residuals(path, RECORDED, made)


def _errors(row: dict[str, Any]) -> Iterator[tuple[dict[str, Any], float, float | None]]:
    """Kind, error of the step time and error of the peak: with the execution of the row, and without one."""
    if (error := validation_table.throughput_error(row)) is not None:
        yield row["predicted"]["kind"], 1 / (1 + error) - 1, validation_table.memory_error(row)
        if (plain := row.get("simulated")) is not None:
            published_us = row["predicted"]["step_us"] * (1 + error)
            gib = plain["peak_bytes"] / validation_table.GIB
            yield plain["kind"], plain["step_us"] / published_us - 1, gib / row["gib"] - 1 if row["gib"] else None


def _residual(row: dict[str, Any], kind: dict[str, Any], step: float, peak: float | None) -> dict[str, Any]:
    told = {} if peak is None else {"peak": round(peak, 4)}
    return {"set": RECORDED, "row": f"{row['page']}/{row['name']}", **kind, "step": round(step, 4), **told}


def merged(stored: dict[str, Any], found: dict[str, Any], keys: Iterable[str]) -> dict[str, Any]:
    """The figures of a run, in this order; rows that it left out keep their stored figures."""
    rows = {f"{row['page']}/{row['name']}": {**_ran(stored), **row} for row in stored["rows"]}
    rows |= {f"{row['page']}/{row['name']}": {**_ran(found), **row} for row in found["rows"]}
    return found | {"rows": [rows[key] for key in keys if key in rows]}


def _ran(found: dict[str, Any]) -> dict[str, Any]:
    return {"date": found["date"], "commit": found["commit"]}


def stored_figures() -> dict[str, Any]:
    """The latest figures in the repository."""
    latest = max(RESULTS.glob("validation-*.json"), key=lambda path: path.name)
    return json.loads(latest.read_text())


def show(found: dict[str, Any], page: Path, picture: Path) -> None:
    """Write a run into the docs."""
    fill(page, validation_table.page(found), validation_table.BEGIN, validation_table.END)
    picture.write_text(validation_plot.draw(found))


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="comma-separated words; predict the rows whose names contain one")
    parser.add_argument(
        "--rows", type=Path, nargs="+", metavar="FILE", help="files of rows instead of the published ones"
    )
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1), help="number of parallel processes")
    parser.add_argument("--json", type=Path, default=ROOT / ".benchmarks" / "validation.json", help="output file")
    parser.add_argument(
        "--fit", action="store_true", help="print the scalar of each hardware, from its one row, and exit"
    )
    parser.add_argument("--record", action="store_true", help="write the errors to the file that error bars come from")
    parser.add_argument("--write", action="store_true", help="write the figures into benchmarks/results and the docs")
    options = parser.parse_args()
    if options.rows and (options.write or options.record):
        parser.error("--write and --record are for the published rows, not for --rows")
    read_files = [read(path) for path in options.rows or sorted(PUBLISHED.glob("*.toml"))]
    words = [word for word in options.only.split(",") if word]
    rows = [row for each, _ in read_files for row in each if not words or any(word in row.key for word in words)]
    if options.fit:
        for row in rows:
            if row.fit:
                share, given = fit(row)
                say(f"{row.cluster}: matmul_efficiency = {share:.4f} from {row.key}; the preset has {given:g}")
        return
    order = {row.key: k for k, row in enumerate(rows)}
    made = sorted(run(rows, options.jobs), key=lambda row: order[f"{row['page']}/{row['name']}"])
    effects = [asdict(effect) for _, each in read_files for effect in each]
    found = {key: value for key, value in begin().items() if key in ("date", "commit", "versions")}
    found |= {"rows": made, "effects": effects}
    path = options.json
    if options.write:
        keys = [row.key for each, _ in read_files for row in each]
        found, path = merged(stored_figures(), found, keys), RESULTS / f"validation-{found['date']}.json"
        show(found, PAGE, PICTURE)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1) + "\n")
    if options.record:
        record(found)
    say("\n" + validation_table.page(found) + f"\n\nwrote {path}")
    sys.exit(any(row["source"] and row.get("predicted") is None for row in made))


if __name__ == "__main__":
    main()
