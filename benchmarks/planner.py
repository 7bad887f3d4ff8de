"""The planner compared with Inductor's overlap scheduler: same graphs, same prices, one simulator, one process.

    python benchmarks/planner.py [--scenarios fsdp-x8-nvlink,tp-x8-nvlink | all] [--layers 16,32] [--parts joint]
                                 [--efforts fast,default,best] [--pipeline schedule-overlap] [--overlap-costs]
                                 [--no-peer] [--repeats 1] [--json FILE]
    python benchmarks/planner.py --growth [--layers 16,32,64,128] [--synthetic 200000]

Every contestant starts from the captured graph: as it is; naive (launches hoisted under several limits of bytes in
flight, waits sunk); the peer's variants (`peer.py`) on Weft's prices; and Weft. The simulator judges the order of nodes
that each leaves; the bound holds for any order and any merging of the captured graph. The part `split` is forward and
backward as two graphs, each planned alone and judged as a sequence. Weft may use at most 5 % more memory than the
captured order; the others have no such limit.

A cell has: step in ms, excess over the bound, peak memory relative to the captured order, seconds of the pass. Seconds
are processor time, so that a busy machine matters less, and medians of alternating runs; only ratios and growth carry
over to other machines.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from typing import Any

import peer
import torch
from scenarios import BASELINE, SCENARIOS, Scenario, capture
from timing import exponent, processor_seconds
from torch.fx import GraphModule

import weft
from weft.bounds.lower_bound import lower_bound
from weft.cost.cluster import Cluster
from weft.graph.groups import read_groups
from weft.passes.pipeline import Pipeline
from weft.simulation.build import sequence_of
from weft.simulation.program import Program
from weft.simulation.simulator import simulate

MOST_MEMORY = 1.05
"""Memory that Weft may use, relative to the captured order."""
NAIVE = {
    f"naive {mb} MB": f"hoist-launches{{max-in-flight-bytes={mb << 20}}},sink-waits" for mb in (64, 256, 1024, 4096)
}
PARTS = ("joint", "forward", "backward", "step", "split")
TARGETS = {"ddp": 0.002, "fsdp": 0.002, "tp": 0.01, "fsdp-tp": 0.012}
"""Target gaps to the bound for the planner, for joint graphs without overlap costs."""

Modules = list[GraphModule]


@dataclass
class Result:
    """The result of one contestant for a step."""

    step_ms: float = 0.0
    gap: float = 0.0
    peak: float = 0.0
    """Peak memory above the captured order, as a share."""
    launches: int = 0
    seconds: list[float] = field(default_factory=list[float])
    """Seconds of the pass, one for each round."""
    error: str = ""

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds) if self.seconds else 0.0

    def cell(self) -> str:
        """The figures in one cell of a table."""
        if self.error:
            return f"fails: {self.error[:40]}"
        seconds = f" {self.median_s:.1f} s" if self.seconds else ""
        return f"{self.step_ms:.2f} {self.gap:+.2%} {self.peak:+.1%}{seconds}"


@dataclass
class Row:
    """One training step and all contestants."""

    scenario: str
    layers: int
    part: str
    cluster: str
    nodes: int
    bound_ms: float
    bound: str
    """The argument that gave the bound."""
    bound_s: float
    results: dict[str, Result]

    def best(self, start: str) -> tuple[str, Result] | None:
        """The contestant with the shortest step among those with this prefix."""
        found = [(n, r) for n, r in self.results.items() if n.startswith(start) and not r.error]
        return min(found, key=lambda pair: pair[1].step_ms, default=None)


Contestant = Callable[[Modules], tuple[Modules | None, float, str]]
"""Takes graphs; returns the resulting graphs, the seconds of the pass, and the error if any."""


def run_weft(spec: str, cluster: Cluster, effort: str, memory_limit_bytes: int | None) -> Contestant:
    """A pipeline of Weft; the seconds come from its log: plan, edit, metadata, sort and checks."""

    def work(modules: Modules) -> tuple[Modules | None, float, str]:
        made: Modules = []
        seconds = 0.0
        for module in modules:
            gc.collect()
            try:
                with processor_seconds():
                    done = Pipeline.parse(spec).run(
                        module, cluster=cluster, effort=effort, memory_limit_bytes=memory_limit_bytes
                    )
            except weft.WeftError as error:
                return None, seconds, str(error).splitlines()[0]
            made.append(done.module)
            seconds += sum(entry.seconds for entry in done.log)
        return made, seconds, ""

    return work


def run_peer(variant: str, cluster: Cluster) -> Contestant:
    """A variant of the peer."""

    def work(modules: Modules) -> tuple[Modules | None, float, str]:
        attempts = [peer.run(variant, module, cluster) for module in modules]
        made = [attempt.module for attempt in attempts if attempt.module is not None]
        error = next((attempt.error for attempt in attempts if attempt.error), "")
        return None if error else made, sum(attempt.seconds for attempt in attempts), error

    return work


def program_of(modules: Modules, cluster: Cluster) -> Program:
    """The graphs as one sequence."""
    return sequence_of([(module, read_groups(module)) for module in modules], cluster)


def judge(modules: Modules, cluster: Cluster, bound_ms: float, peak_bytes: int | None) -> tuple[Result, int]:
    """The step and the peak memory of the graphs in their order."""
    timeline = simulate(program_of(modules, cluster))
    peak = timeline.peak_bytes / peak_bytes - 1 if peak_bytes else 0.0
    step_ms = timeline.step_ns / 1e6
    return Result(step_ms, step_ms / bound_ms - 1, peak, len(timeline.collectives)), timeline.peak_bytes


def load(scenario: Scenario, layers: int, part: str) -> Modules:
    parts = ("forward", "backward") if part == "split" else (part,)
    return [capture(scenario, layers, each) for each in parts]  # type: ignore[arg-type]


def compare(scenario: Scenario, layers: int, part: str, options: argparse.Namespace) -> Row:
    """All contestants on one step, in alternating rounds."""
    cluster = scenario.cluster(options.overlap_costs)
    modules = load(scenario, layers, part)
    program = program_of(modules, cluster)
    start = time.process_time()
    bound = lower_bound(program)
    bound_s = time.process_time() - start
    bound_ms = bound.bound_ns / 1e6
    captured, peak_bytes = judge(modules, cluster, bound_ms, None)
    nodes = sum(len(module.graph.nodes) for module in modules)
    row = Row(scenario.name, layers, part, cluster.name, nodes, bound_ms, bound.name, bound_s, {"captured": captured})
    print(
        f"\n{scenario.name}, {layers} layers, {part}, {cluster.name}: {nodes} nodes, {captured.launches} launches,"
        f" bound {bound_ms:.3f} ms ({bound.name}, {bound_s:.2f} s)\n    {'captured':32} {captured.cell()}",
        flush=True,
    )
    contestants = contestants_of(scenario, cluster, peak_bytes, options)
    for _ in range(options.repeats):
        for name, work in contestants.items():
            made, seconds, error = work(modules)
            if name not in row.results:
                result = Result(error=error) if made is None else judge(made, cluster, bound_ms, peak_bytes)[0]
                row.results[name] = result
            row.results[name].seconds.append(seconds)
            print(f"    {name:32} {row.results[name].cell()}  {row.results[name].launches} launches", flush=True)
    return row


def contestants_of(
    scenario: Scenario, cluster: Cluster, peak_bytes: int, options: argparse.Namespace
) -> dict[str, Contestant]:
    found = {name: run_weft(spec, cluster, "default", None) for name, spec in NAIVE.items()}
    keeps_limit = "schedule-overlap" in str(Pipeline.parse(options.pipeline))
    limit = int(peak_bytes * MOST_MEMORY) if keeps_limit else None
    for effort in options.efforts.split(","):
        found[f"weft {effort}"] = run_weft(options.pipeline, cluster, effort, limit)
    if options.peer:
        found |= {f"peer {name}": run_peer(name, cluster) for name in peer.variants_for(scenario.parallel)}
    return found


def table(rows: Sequence[Row], efforts: Sequence[str]) -> str:
    """One line per step, as Markdown."""
    head = ["scenario", "nodes", "bound ms", "captured", "best naive", "peer's default", "peer's best that runs"]
    head += [f"weft {effort}" for effort in efforts]
    head += ["weft against the peer", "pass time, peer / weft", "target"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in rows:
        naive, best = row.best("naive"), row.best("peer")
        default = row.results.get("peer overlap + pre-bucketing")
        mine = row.results.get("weft default") or next(
            (row.results[f"weft {e}"] for e in efforts if f"weft {e}" in row.results), None
        )
        cells = [f"{row.scenario}, {row.layers}, {row.part}, {row.cluster}", str(row.nodes), f"{row.bound_ms:.2f}"]
        cells += [row.results["captured"].cell(), named(naive), default.cell() if default else "", named(best)]
        cells += [row.results[f"weft {effort}"].cell() if f"weft {effort}" in row.results else "" for effort in efforts]
        cells += verdict(row, mine, best, default)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def named(found: tuple[str, Result] | None) -> str:
    return f"{found[1].cell()} ({found[0].partition(' ')[2]})" if found else ""


def verdict(row: Row, mine: Result | None, best: tuple[str, Result] | None, default: Result | None) -> list[str]:
    """Compare with the peer's best step, with the time of its default, and with the target."""
    if mine is None or mine.error:
        return ["", "", ""]
    against = f"{mine.step_ms / best[1].step_ms - 1:+.2%}" if best else ""
    # If the default fails, the time of the best variant that runs.
    timed = default if default is not None and not default.error else best[1] if best else None
    ratio = f"{timed.median_s / mine.median_s:.1f} x" if timed and mine.median_s else ""
    target = TARGETS.get(SCENARIOS[row.scenario].parallel)
    if target is None or row.part != "joint" or row.cluster.endswith("-overlap"):
        return [against, ratio, "none"]
    return [against, ratio, f"{'met' if mine.gap <= target else 'missed'} ({mine.gap:.2%} of {target:.1%})"]


def synthetic(num_nodes: int) -> GraphModule:
    """A sharded training step of many equal layers: gathers, products forward, gathers, products, scatters backward."""
    layers = max(1, num_nodes // 25)
    weights = ", ".join(f"p{i}: f32[512, 4096]" for i in range(layers))
    lines = ["group('dp', size=8)", "", f"def graph(h0: bf16[4096, 4096], {weights}):"]
    for i in range(layers):
        lines += [
            f"    c{i} = _to_copy(p{i}, dtype=bf16)",
            f"    g{i} = all_gather(c{i}, 8, 'dp')",
            f"    w{i} = wait(g{i})",
            f"    t{i} = t(w{i})",
            f"    m{i} = mm(h{i}, t{i})",
            f"    s{i} = silu(m{i})",
            f"    h{i + 1} = add(s{i}, h{i})",
        ]
    lines.append(f"    d{layers} = mul(h{layers}, h{layers})")
    for i in reversed(range(layers)):
        lines += [
            f"    cb{i} = _to_copy(p{i}, dtype=bf16)",
            f"    gb{i} = all_gather(cb{i}, 8, 'dp')",
            f"    wb{i} = wait(gb{i})",
            f"    b{i} = silu_backward(d{i + 1}, m{i})",
            f"    bt{i} = t(b{i})",
            f"    dw{i} = mm(bt{i}, h{i})",
            f"    dx{i} = mm(b{i}, wb{i})",
            f"    d{i} = add(dx{i}, d{i + 1})",
            f"    e{i} = _to_copy(dw{i}, dtype=f32)",
            f"    r{i} = reduce_scatter(e{i}, 'avg', 8, 'dp')",
            f"    q{i} = wait(r{i})",
            f"    u{i} = mul(q{i}, 0.01)",
            f"    v{i} = sub(p{i}, u{i})",
            f"    x{i} = mul(v{i}, 1.0)",
            f"    y{i} = add(x{i}, 0.0)",
            f"    z{i} = mul(y{i}, 1.0)",
            f"    o{i} = add(z{i}, 0.0)",
        ]
    results = ", ".join(f"o{i}" for i in range(layers))
    return weft.parse("\n".join([*lines, f"    return [{results}]"]) + "\n")


def growth(scenario: Scenario, options: argparse.Namespace) -> dict[str, Any]:
    """Time of the pass and of the bound by graph size, and the exponents fitted to them."""
    cluster = scenario.cluster(options.overlap_costs)
    sizes = [(f"{layers} layers", layers) for layers in map(int, options.layers.split(","))]
    found: list[dict[str, Any]] = []
    steps: Iterable[tuple[str, Callable[[], GraphModule]]] = (
        *((name, lambda layers=layers: capture(scenario, layers)) for name, layers in sizes),
        *((f"synthetic {num}", lambda num=num: synthetic(num)) for num in options.synthetic),
    )
    for name, make in steps:
        module = make()
        program = program_of([module], cluster)
        start = time.process_time()
        lower_bound(program)
        bound_s = time.process_time() - start
        limit = None
        if "schedule-overlap" in str(Pipeline.parse(options.pipeline)):
            limit = int(simulate(program).peak_bytes * MOST_MEMORY)
        work = run_weft(options.pipeline, cluster, options.efforts.split(",")[0], limit)
        made, seconds, error = work([module])
        found.append({"name": name, "nodes": len(module.graph.nodes), "seconds": seconds, "bound_s": bound_s})
        ends = f"step {simulate(program_of(made, cluster)).step_ns / 1e6:.2f} ms" if made else f"fails: {error}"
        nodes = len(module.graph.nodes)
        print(f"{name:20} {nodes:>8} nodes  pass {seconds:8.2f} s  bound {bound_s:7.2f} s  {ends}", flush=True)
    zoo = found[: len(sizes)]
    result: dict[str, Any] = {"points": found}
    for key in ("seconds", "bound_s"):
        result[f"{key}_exponent"] = exponent([p["nodes"] for p in zoo], [p[key] for p in zoo])
        result[f"{key}_exponent_with_synthetic"] = exponent([p["nodes"] for p in found], [p[key] for p in found])
    print(json.dumps({key: value for key, value in result.items() if key != "points"}))
    return result


def keep(path: str | None, found: Any) -> None:
    if path:
        with open(path, "w") as file:
            json.dump(found, file, indent=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenarios", default=",".join(BASELINE), help="comma-separated names, or all")
    parser.add_argument("--layers", default="", help="comma-separated numbers; default: those of the peer's figures")
    parser.add_argument("--parts", default="joint", help=f"of {', '.join(PARTS)}, separated by commas")
    parser.add_argument("--efforts", default="default")
    parser.add_argument("--pipeline", default="schedule-overlap")
    parser.add_argument("--overlap-costs", action="store_true", help="with overlap slowdown and launch gap")
    parser.add_argument("--peer", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--growth", action="store_true")
    parser.add_argument("--synthetic", type=int, nargs="*", default=[200_000], help="nodes, for --growth")
    parser.add_argument("--json", help="write the rows to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    names = list(SCENARIOS) if options.scenarios == "all" else options.scenarios.split(",")
    if options.growth:
        options.layers = options.layers or "16,32,64,128"
        name = names[0] if len(names) == 1 else "fsdp-x64-tp-x8"
        keep(options.json, growth(SCENARIOS[name], options))
    else:
        rows: list[Row] = []
        for part, name in product(options.parts.split(","), names):
            for layers in map(int, options.layers.split(",")) if options.layers else [SCENARIOS[name].layers]:
                rows.append(compare(SCENARIOS[name], layers, part, options))
                keep(options.json, [asdict(row) for row in rows])  # a run may take hours
        print("\n" + table(rows, options.efforts.split(",")))


if __name__ == "__main__":
    main()
