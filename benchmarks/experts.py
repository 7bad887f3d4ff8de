"""Steps of a mixture of experts in one to four chunks of the batch, all planned, on several meshes.

    python benchmarks/experts.py [--only slow] [--chunks 1,2] [--json FILE]
    python benchmarks/experts.py --docs benchmarks/results/experts-DATE.json      writes its table into docs/experts.md

One chunk is the whole batch. Routing is balanced. Each step is planned with the effort `fast`; `split-batch` chooses
the staggered order of its chunks.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from bench import ROOT, begin, say
from bench_table import fill, table

import weft
import weft.zoo
from weft.cost.cluster import Cluster
from weft.simulation.timeline import Timeline

PAGE = ROOT / "docs" / "experts.md"
BEGIN, END = "<!-- experts: begin -->", "<!-- experts: end -->"
SLOW_GBPS = 41.0
"""Bytes per second between nodes, in 1e9, of each rank of a cluster with slow links: those of 32 H100 over RoCE, as
all-to-alls of 302 MB in 7.4 ms (torchtitan, issue 3434) need them."""
STEPS: Mapping[str, tuple[dict[str, int], str, float | None]] = {
    "EP 8 x FSDP 8": ({"dp": 8, "ep": 8}, "h100-8x8", None),
    "EP 32": ({"dp": 1, "ep": 32}, "h100-4x8", None),
    "EP 32, slow links": ({"dp": 1, "ep": 32}, "h100-4x8", SLOW_GBPS),
}
"""Mesh, cluster, and the bandwidth between nodes if it is not the preset's."""
MODEL = "dropless-16b"
SHAPE: dict[str, Any] = {"layers": 2, "batch": 12, "sequence": 1024, "vocabulary": 10240}
CHUNKS = (1, 2, 3, 4)
PASSES = "clean,algebra,communication,sums"


def cluster_of(name: str) -> Cluster:
    """The cluster of a step."""
    _, preset, gbps = STEPS[name]
    found = Cluster.load(preset)
    if gbps is None:
        return found
    *inner, network = found.levels
    slow = replace(network, link=replace(network.link, bandwidth_gbps=gbps))
    return replace(found, name=f"{preset}, {gbps:g} GB/s between nodes", levels=(*inner, slow))


def pipeline_of(chunks: int) -> str:
    """The passes that plan a step in chunks."""
    split = [f"split-batch{{chunks={chunks}}}"] if chunks > 1 else []
    return ",".join([PASSES, *split, "schedule-overlap"])


def measure(name: str, chunks: Sequence[int]) -> Iterator[dict[str, Any]]:
    """The step as captured, and planned in each number of chunks."""
    mesh, _, _ = STEPS[name]
    cluster = cluster_of(name)
    module = weft.zoo.load(MODEL, "ep-fsdp", mesh=mesh, **SHAPE)
    yield {"step": name, "chunks": 0, **figures(weft.simulate(module, cluster, sizes="balanced"))}
    for count in chunks:
        start = time.process_time()
        result = weft.optimize(module, cluster, pipeline=pipeline_of(count), sizes="balanced", effort="fast")
        seconds = time.process_time() - start
        found = figures(weft.simulate(result.module, cluster, sizes="balanced"))
        yield {"step": name, "chunks": count, "seconds": seconds, **found}


def figures(timeline: Timeline) -> dict[str, Any]:
    """The simulated times and peak of a step."""
    return {
        "step_us": timeline.step_us,
        "exposed_us": timeline.exposed_us,
        "compute_us": timeline.compute_us,
        "peak_bytes": timeline.peak_bytes,
    }


def page(found: dict[str, Any]) -> str:
    """The table, with the gain over the planned whole."""
    rows: list[list[str]] = []
    for name in STEPS:
        mine = {row["chunks"]: row for row in found["rows"] if row["step"] == name}
        for chunks, row in sorted(mine.items()):
            whole = mine.get(1)
            gain = f"{row['step_us'] / whole['step_us'] - 1:+.1%}" if whole and chunks > 1 else ""
            label = "captured" if chunks == 0 else str(chunks)
            times = [f"{row[key] / 1000:.1f}" for key in ("step_us", "exposed_us", "compute_us")]
            rows.append([name, label, *times, f"{row['peak_bytes'] / (1 << 30):.1f}", gain])
    head = ["mesh", "chunks", "step, ms", "exposed, ms", "compute, ms", "peak, GiB", "step, compared with 1 chunk"]
    when = f"Simulated on {found['date']} at commit {found['commit']} with torch {found['versions']['torch']}."
    return f"{when}\n\n{table(head, rows)}"


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="run the steps whose names contain this word")
    parser.add_argument("--chunks", default=",".join(map(str, CHUNKS)), help="comma-separated numbers of chunks")
    parser.add_argument("--json", type=Path, default=ROOT / ".benchmarks" / "experts.json", help="output file")
    parser.add_argument("--docs", type=Path, metavar="FILE", help="write these figures into the docs and exit")
    options = parser.parse_args()
    if options.docs:
        fill(PAGE, page(json.loads(options.docs.read_text())), BEGIN, END)
        return
    torch.set_num_threads(1)
    chunks = [int(word) for word in options.chunks.split(",")]
    found: dict[str, Any] = {k: v for k, v in begin().items() if k in ("date", "commit", "versions")} | {"rows": []}
    for name in STEPS:
        for row in measure(name, chunks) if options.only in name else ():
            found["rows"].append(row)
            say(f"{row['step']:20} {row['chunks']} chunks: {row['step_us'] / 1000:.1f} ms")
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text(json.dumps(found, indent=1) + "\n")
    say("\n" + page(found) + f"\n\nwrote {options.json}")
    if not found["rows"]:
        sys.exit(f"no step contains {options.only!r}: {', '.join(STEPS)}")


if __name__ == "__main__":
    main()
