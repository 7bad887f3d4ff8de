"""Memory decisions against policies made by hand: same steps, same prices, one planner.

    python benchmarks/memory.py [--steps all] [--layers 8] [--effort default] [--json FILE]
    python benchmarks/memory.py --docs benchmarks/results/memory-DATE.json      writes its table into docs/memory.md
    python benchmarks/memory.py --share 0.6 [--steps all] [--layers 8] [--effort default]

Each policy is captured and planned without a limit. Weft then gets the step without recomputation and the policy's peak
as its limit. The command fails if Weft's step is longer. With `--share`, the limit is this share of the captured peak
instead, and the command prints the step without a limit, within it, and within it with offloading, next to the bound.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from bench_table import fill
from scenarios import HERE
from torch.fx import GraphModule

import weft
import weft.zoo
from weft.cost.cluster import Cluster
from weft.errors import MemoryLimitError
from weft.graph.groups import read_groups
from weft.passes.pipeline import Pipeline
from weft.report.simulated import SimulatedReport
from weft.simulation.build import program_of
from weft.simulation.simulator import simulate
from weft.simulation.timeline import Timeline

Effort = Literal["fast", "default", "best"]
PAGE = HERE.parent / "docs" / "memory.md"
BEGIN, END = "<!-- memory: begin -->", "<!-- memory: end -->"
STEPS: Mapping[str, tuple[str, dict[str, Any], str]] = {
    "FSDP, 64 ranks": ("llama-8b", {"parallel": "fsdp", "mesh": {"dp": 64}}, "h100-8x8"),
    "FSDP, 64 ranks, Ethernet": ("llama-8b", {"parallel": "fsdp", "mesh": {"dp": 64}}, "ethernet-h100-8x8"),
    "FSDP x TP, 8 x 8 ranks": ("llama-8b", {"parallel": "fsdp-tp", "mesh": {"dp": 8, "tp": 8}}, "h100-8x8"),
    "FSDP, 8 ranks": ("llama-8b", {"parallel": "fsdp", "mesh": {"dp": 8}}, "h100-8"),
    "FSDP, 512 ranks": ("llama-8b", {"parallel": "fsdp", "mesh": {"dp": 512}}, "h100-64x8"),
    "70b, FSDP x TP, 32 x 8 ranks": ("llama-70b", {"parallel": "fsdp-tp", "mesh": {"dp": 32, "tp": 8}}, "h100-32x8"),
    "MoE, 8 x 8 ranks": ("moe-8x7b", {"parallel": "ep-fsdp", "mesh": {"dp": 8, "ep": 8}}, "h100-8x8"),
}
"""Model, how it is spread, and cluster; each with AdamW."""
POLICIES: Mapping[str, dict[str, Any]] = {
    "nothing recomputed": {},
    "reshard default": {"reshard": "default"},
    "reshard never": {"reshard": "never"},
    "full by block": {"checkpoint": "full"},
    "full by block, reshard never": {"checkpoint": "full", "reshard": "never"},
    "selective by operator": {"checkpoint": "selective"},
    "all products saved": {"checkpoint": "products"},
    "every second block": {"checkpoint": "layer"},
    "min-cut": {"partition": "min-cut"},
    **{
        f"min-cut, budget {budget:g}": {"partition": "min-cut", "memory_budget": budget}
        for budget in (0.75, 0.5, 0.25, 0.0)
    },
}
"""Options of the capture."""

OFFLOADING = "clean,algebra,communication,sums,decide-memory{offload=true},schedule-overlap"


def capture(step: str, layers: int, policy: Mapping[str, Any]) -> GraphModule:
    """The step of a model under a policy."""
    model, options, _ = STEPS[step]
    return weft.zoo.load(model, part="step", layers=layers, **options, **policy)


def planned(module: GraphModule, cluster: Cluster, effort: Effort, limit_bytes: int | None = None) -> Timeline:
    """The planned step."""
    run = Pipeline.parse("auto").run(module, cluster=cluster, effort=effort, memory_limit_bytes=limit_bytes)
    return simulate(program_of(run.module, read_groups(run.module), cluster))


def compare(step: str, layers: int, name: str, effort: Effort, module: GraphModule) -> dict[str, Any]:
    """One policy, and Weft within its peak for the module in which nothing is recomputed."""
    cluster = Cluster.load(STEPS[step][2])
    by_hand = planned(capture(step, layers, POLICIES[name]) if POLICIES[name] else module, cluster, effort)
    row: dict[str, Any] = {"step": step, "layers": layers, "policy": name, "effort": effort}
    row |= {"hand_ms": by_hand.step_ns / 1e6, "hand_bytes": by_hand.peak_bytes}
    start = time.process_time()
    try:
        made = planned(module, cluster, effort, by_hand.peak_bytes)
        row |= {"weft_ms": made.step_ns / 1e6, "weft_bytes": made.peak_bytes}
    except MemoryLimitError as error:
        row |= {"weft_ms": None, "weft_bytes": error.least_bytes}
    row["seconds"] = time.process_time() - start
    row["is_shorter"] = row["weft_ms"] is not None and row["weft_ms"] <= row["hand_ms"]
    return row


def write(row: Mapping[str, Any], file: Path) -> None:
    """Put a row into a file, in place of the same row of an earlier run."""
    rows = [row, *(json.loads(file.read_text()) if file.exists() else ())]
    places = {name: place for names in (STEPS, POLICIES) for place, name in enumerate(names)}
    last = len(places)  # for rows whose step or policy the benchmark no longer has
    found: dict[tuple[Any, ...], Mapping[str, Any]] = {}
    for each in rows:
        step, policy = (places.get(each[name], last) for name in ("step", "policy"))
        found.setdefault((step, each["layers"], policy, each["effort"], each["step"], each["policy"]), each)
    file.write_text(json.dumps([found[key] for key in sorted(found)], indent=1) + "\n")


def print_within(step: str, layers: int, share: float, effort: Effort) -> None:
    """The steps without a limit and within a share of the captured peak, as a table in Markdown."""
    cluster, module = Cluster.load(STEPS[step][2]), capture(step, layers, {})
    captured = simulate(program_of(module, read_groups(module), cluster))
    limit = int(captured.peak_bytes * share)
    shown = f"{captured.peak_bytes / 2**30:.2f} GiB and {captured.step_ns / 1e6:.1f} ms"
    print(f"{step}, {layers} layers: {shown} as captured; the limit is {limit / 2**30:.2f} GiB")
    print("| | step | peak | longer than without a limit | bound of choices | above it |\n|---|--:|--:|--:|--:|--:|")
    free = planned(module, cluster, effort)
    print(f"| no limit | {free.step_ns / 1e6:.1f} ms | {free.peak_bytes / 2**30:.2f} GiB | | | |", flush=True)
    for name, passes in (("within the limit", "auto"), ("with offloading", OFFLOADING)):
        report = weft.optimize(
            module, cluster, pipeline=passes, memory_limit_bytes=limit, effort=effort, cache=False
        ).report
        assert isinstance(report, SimulatedReport)
        assert report.choices_bound is not None
        made, bound_ns = report.graphs[1].timeline, report.choices_bound.bound_ns
        longer, above = (100 * (made.step_ns / ns - 1) for ns in (free.step_ns, bound_ns))
        print(
            f"| {name} | {made.step_ns / 1e6:.1f} ms | {made.peak_bytes / 2**30:.2f} GiB | {longer:.1f} % |"
            f" {bound_ns / 1e6:.1f} ms | {above:.1f} % |",
            flush=True,
        )


def page(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as a table in Markdown."""
    lines = ["| step | policy | its peak | its step | Weft within that peak | change |", "|---|---|--:|--:|--:|--:|"]
    for row in rows:
        if row["weft_ms"] is None:
            result = f"does not fit; least {row['weft_bytes'] / 2**30:.2f} GiB | "
        else:
            change = 100 * (row["weft_ms"] / row["hand_ms"] - 1)
            result = f"{row['weft_ms']:.1f} ms at {row['weft_bytes'] / 2**30:.2f} GiB | {change:+.1f} %"
        where = f"{row['step']}, {row['layers']} layers"
        peak = f"{row['hand_bytes'] / 2**30:.2f} GiB"
        lines.append(f"| {where} | {row['policy']} | {peak} | {row['hand_ms']:.1f} ms | {result} |")
    fit = [row for row in rows if row["weft_ms"] is not None]
    longer = sum(not row["is_shorter"] for row in fit)
    said = f"Weft's step is longer in {longer} of {len(fit)} rows. In {len(rows) - len(fit)} more, no choice fits."
    return "\n".join([*lines, "", said])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", default="all", help="names, separated by semicolons; all for all")
    parser.add_argument("--policies", default="all", help="names, separated by semicolons; all for all")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--effort", choices=("fast", "default", "best"), default="default")
    parser.add_argument("--share", type=float, help="plan within this share of the captured peak instead")
    parser.add_argument("--json", type=Path, help="write the rows to this file; its other rows stay")
    parser.add_argument("--docs", type=Path, metavar="FILE", help="write the rows of this file into the docs, and end")
    options = parser.parse_args()
    if options.docs:
        fill(PAGE, page(json.loads(options.docs.read_text())), BEGIN, END)
        return
    steps = list(STEPS) if options.steps == "all" else options.steps.split(";")
    if options.share:
        for step in steps:
            print_within(step, options.layers, options.share, options.effort)
        return
    names = list(POLICIES) if options.policies == "all" else options.policies.split(";")
    rows: list[dict[str, Any]] = []
    module = None
    for step, name in ((step, name) for step in steps for name in names):
        module = capture(step, options.layers, {}) if module is None or name == names[0] else module
        row = compare(step, options.layers, name, options.effort, module)
        rows.append(row)
        found = "none fits" if row["weft_ms"] is None else f"{row['weft_ms']:.1f} ms"
        print(
            f"{'ok  ' if row['is_shorter'] else 'LONG'} {step}, {name}: {row['hand_ms']:.1f} ms at"
            f" {row['hand_bytes'] / 2**30:.2f} GiB, Weft {found} at {row['weft_bytes'] / 2**30:.2f} GiB"
            f" in {row['seconds']:.1f} s",
            flush=True,
        )
        if options.json:
            write(row, options.json)
    longer = sum(not row["is_shorter"] for row in rows)
    print(f"Weft is longer in {longer} of {len(rows)} rows")
    sys.exit(longer > 0)


if __name__ == "__main__":
    main()
