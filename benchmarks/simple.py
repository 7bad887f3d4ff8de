"""The planner against Weft's own simple pipelines: same graphs, same prices, one simulator.

    python benchmarks/simple.py [--scenarios all] [--layers 8] [--parts joint,forward,backward,step]
                                [--pipeline schedule-overlap] [--overlap-costs] [--json FILE]
    python benchmarks/simple.py --tables --json benchmarks/results/simple-DATE.json     all steps of the figures page
    python benchmarks/simple.py --docs benchmarks/results/simple-DATE.json              writes its table there

Simple pipelines hoist launches and sink waits. Most of them merge launches first, with each strategy of the bucketing
passes, with DDP's buckets, or by layer as FSDP2 does. The planner runs without a memory limit. A row shows the best
simple pipeline that needs no more memory than the planner's plan. The command fails if one of them is faster.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench_table import NAMES, fill
from scenarios import HERE, SCENARIOS, Scenario, capture
from torch.fx import GraphModule

import weft
from weft.cost.cluster import Cluster
from weft.graph.collective import collectives
from weft.graph.groups import read_groups
from weft.passes.pipeline import Pipeline
from weft.scheduling.search import allowed_bytes
from weft.simulation.build import program_of
from weft.simulation.simulator import simulate
from weft.simulation.timeline import Timeline

HOISTED = "hoist-launches,sink-waits"
BUCKETS = {
    "all_gather": "bucket-all-gathers",
    "reduce_scatter": "bucket-reduce-scatters",
    "all_reduce": "bucket-all-reduces",
    "all_to_all": "bucket-transfers",
    "broadcast": "bucket-transfers",
}
SINGLE = 5000
"""In larger graphs passes that merge run only all together."""
LAYERS = "*.[0-9]/*.[0-9][0-9]"
PAGE = HERE.parent / "docs" / "planner-figures.md"
BEGIN, END = "<!-- simple: begin -->", "<!-- simple: end -->"
IB, ETHERNET = ("x8-nvlink", "x64-ib", "x512-ib"), ("x64-ethernet", "x512-ethernet")
SHARDED = (*(f"fsdp-{each}" for each in IB), "tp-x8-nvlink", "fsdp-x64-tp-x8", "hsdp-x64", "moe-x64")
REPLICATED = ("ddp-x8-nvlink", "ddp-x512-ib")
TABLES: tuple[tuple[str, int, tuple[str, ...]], ...] = (
    ("joint", 16, tuple(f"ddp-{each}" for each in IB)),
    ("joint", 32, (*SHARDED, "fsdp-x8-tp-x8")),
    ("joint", 8, ("ddp-x64-ethernet", *(f"fsdp-{each}" for each in ETHERNET), "fsdp-x64-tp-x8-ethernet")),
    ("joint", 8, ("hsdp-x64-ethernet", "moe-x64-ethernet")),
    ("forward", 8, SHARDED),
    ("backward", 8, (*REPLICATED, *SHARDED)),
    ("step", 8, (*REPLICATED, *SHARDED)),
    ("backward", 32, ("fsdp-x8-nvlink", "fsdp-x64-ib", "moe-x64")),
)
STEPS = [(part, layers, name) for part, layers, names in TABLES for name in names]
"""The steps of the tables in docs/planner-figures.md: 17 joint ones and 28 parts."""


def simple_pipelines(module: GraphModule) -> Iterator[str]:
    """The simple pipelines that do something to the collectives of a graph."""
    kinds = {each.kind.value for each in collectives(module.graph)}
    names = list(dict.fromkeys(name for kind, name in BUCKETS.items() if kind in kinds))
    yield HOISTED
    yield "hoist-launches{max-in-flight-bytes=1073741824},sink-waits{max-in-flight-bytes=none}"
    for strategy in ("concat", "coalesced", "pack"):
        chosen = [f"{n}{{strategy={strategy}}}" for n in names if (n, strategy) != ("bucket-transfers", "coalesced")]
        yield from (f"{each},{HOISTED}" for each in chosen if len(module.graph.nodes) <= SINGLE or len(chosen) == 1)
        if len(chosen) > 1:
            yield f"{','.join(chosen)},{HOISTED}"
    if "all_reduce" in kinds:
        yield f"fuse-ddp-all-reduces{{max-bytes=1048576/26214400}},{HOISTED}"
    if "all_gather" in kinds:
        by_layer = f"bucket-all-gathers{{strategy=coalesced modules={LAYERS} prefetch=1}}"
        yield f"{by_layer},bucket-reduce-scatters{{strategy=coalesced modules={LAYERS}}},sink-waits"


def timeline(module: GraphModule, cluster: Cluster) -> Timeline:
    return simulate(program_of(module, read_groups(module), cluster))


def compare(scenario: Scenario, layers: int, part: str, pipeline: str, overlap_costs: bool) -> dict[str, Any]:
    """One step: the planner, and every simple pipeline."""
    cluster = scenario.cluster(overlap_costs)
    module = capture(scenario, layers, part)  # type: ignore[arg-type]
    captured = timeline(module, cluster)
    allowed = allowed_bytes(captured.peak_bytes)
    start = time.process_time()
    planned = timeline(Pipeline.parse(pipeline).run(module, cluster=cluster).module, cluster)
    seconds = time.process_time() - start
    row: dict[str, Any] = {"scenario": scenario.name, "layers": layers, "part": part, "cluster": cluster.name}
    row |= {"nodes": len(module.graph.nodes), "seconds": seconds}
    row |= {"captured_ms": captured.step_ns / 1e6, "planned_ms": planned.step_ns / 1e6, "simple": {}}
    for spec in simple_pipelines(module):
        try:
            made = timeline(Pipeline.parse(spec).run(module, cluster=cluster).module, cluster)
        except weft.WeftError as error:
            row["simple"][spec] = {"error": str(error).splitlines()[0]}
            continue
        row["simple"][spec] = {"step_ms": made.step_ns / 1e6, "fits": made.peak_bytes <= allowed}
    fitting = {spec: found["step_ms"] for spec, found in row["simple"].items() if found.get("fits")}
    row["best"] = min(fitting, key=lambda spec: fitting[spec], default="")
    row["best_ms"] = fitting.get(row["best"], captured.step_ns / 1e6)
    row["is_shorter"] = row["planned_ms"] <= row["best_ms"]
    return row


def page(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as a table in Markdown."""
    lines = [
        "| step | part, layers | nodes | as captured | best simple pipeline | its buckets | Weft |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        ms = "{captured_ms:.2f} | {best_ms:.2f}".format(**row)
        by = 100 * (row["planned_ms"] / row["best_ms"] - 1)
        lines.append(
            f"| {_step(SCENARIOS[row['scenario']])} | {row['part']}, {row['layers']} | {row['nodes']} | {ms}"
            f" | {_buckets(row['best'])} | {row['planned_ms']:.2f} ({by:+.2f} %) |"
        )
    joint, longer = sum(row["part"] == "joint" for row in rows), sum(not row["is_shorter"] for row in rows)
    lines += ["", f"Weft's step is longer in {longer} of these {joint} joint steps and {len(rows) - joint} parts."]
    done = {(row["part"], row["layers"], row["scenario"]) for row in rows}
    left = [
        f"{_step(SCENARIOS[name])} ({part}, {layers})"
        for part, layers, name in STEPS
        if (part, layers, name) not in done
    ]
    lines += ["", f"Not compared: {'; '.join(left)}."] if left else []
    return "\n".join(lines)


def _step(scenario: Scenario) -> str:
    ranks = " x ".join(str(size) for _, size in scenario.mesh)
    return f"{NAMES[scenario.parallel]}, {ranks} ranks{', Ethernet' if scenario.wire == 'ethernet' else ''}"


def _buckets(spec: str) -> str:
    """The buckets of a simple pipeline, in words."""
    if "fuse-ddp-all-reduces" in spec:
        return "DDP's"
    if "modules=" in spec:
        return "FSDP2's"
    strategy = next((each for each in ("concat", "coalesced", "pack") if f"strategy={each}" in spec), "")
    kinds = [name.removeprefix("bucket-") for name in dict.fromkeys(BUCKETS.values()) if name in spec]
    in_flight = " (1 GiB in flight)" if "max-in-flight-bytes=1073741824" in spec else ""
    return f"{', '.join(kinds)}: {strategy}" if kinds else f"none{in_flight}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenarios", default="all", help="names, separated by commas; all for all")
    parser.add_argument("--layers", type=int, default=0, help="those of the peer's figures where it is left out")
    parser.add_argument("--parts", default="joint", help="of joint, forward, backward, step, separated by commas")
    parser.add_argument("--tables", action="store_true", help="the steps of the figures page, whatever else is chosen")
    parser.add_argument("--pipeline", default="schedule-overlap")
    parser.add_argument("--overlap-costs", action="store_true", help="with overlap slowdown and launch gap")
    parser.add_argument("--json", help="write the rows to this file")
    parser.add_argument("--docs", type=Path, metavar="FILE", help="write the rows of this file into the docs, and end")
    options = parser.parse_args()
    if options.docs:
        fill(PAGE, page(json.loads(options.docs.read_text())), BEGIN, END)
        return
    names = list(SCENARIOS) if options.scenarios == "all" else options.scenarios.split(",")
    chosen = [(part, options.layers or SCENARIOS[n].layers, n) for part in options.parts.split(",") for n in names]
    chosen = STEPS if options.tables else chosen
    rows: list[dict[str, Any]] = []
    for part, layers, name in chosen:
        row = compare(SCENARIOS[name], layers, part, options.pipeline, options.overlap_costs)
        rows.append(row)
        print(
            f"{'ok  ' if row['is_shorter'] else 'LONG'} {name}, {layers}, {part}: planned"
            f" {row['planned_ms']:.3f} ms in {row['seconds']:.1f} s, {row['best_ms']:.3f} ms by {row['best']}",
            flush=True,
        )
        if options.json:
            with open(options.json, "w") as file:
                json.dump(rows, file, indent=1)
    longer = sum(not row["is_shorter"] for row in rows)
    print(f"Weft's step is longer in {longer} of {len(rows)} rows")
    sys.exit(longer > 0)


if __name__ == "__main__":
    main()
