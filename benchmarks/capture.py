"""Size of captured graphs and cost of capturing them: nodes, collectives, seconds, peak memory.

    python benchmarks/capture.py [--model llama-8b] [--layers 32] [--ranks 64] [--part joint] [--json FILE]

Each capture runs in its own process, so that peak memory is measured separately. Seconds are of the machine at hand.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections import Counter
from typing import Any

PARALLELISMS = ("ddp", "fsdp", "fsdp:kept", "hsdp", "tp", "fsdp-tp")
KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")


def measure(model: str, parallel: str, layers: int, ranks: int, part: Any, batch: int) -> dict[str, Any]:
    """Capture one step in this process."""
    import torch

    from weft import zoo
    from weft.graph.collective import collectives
    from weft.graph.listings.text import parse, render

    torch.set_num_threads(1)
    name, _, kept = parallel.partition(":")
    tensor_only = name == "tp"
    before_s, before_cpu_s = time.perf_counter(), time.process_time()
    module = zoo.load(
        model,
        name,
        ranks=min(ranks, 8) if tensor_only else ranks,
        layers=layers,
        part=part,
        batch=batch,
        reshard=not kept,
    )
    capture_s, cpu_s = time.perf_counter() - before_s, time.process_time() - before_cpu_s
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    counts = Counter(collective.kind.value for collective in collectives(module.graph))
    calls = [node for node in module.graph.nodes if node.op == "call_function"]
    text = render(module)
    return {
        "parallel": parallel,
        "mesh": module.meta["weft.about"]["mesh"],
        "nodes": len(module.graph.nodes),
        **{kind: counts[kind] for kind in KINDS},
        "capture_s": capture_s,
        "cpu_s": cpu_s,
        "nodes_per_s": len(module.graph.nodes) / capture_s,
        "peak_bytes": peak_bytes,
        "nodes_with_module": sum(bool(node.meta.get("nn_module_stack")) for node in calls) / len(calls),
        "nodes_with_line": sum(bool(node.meta.get("stack_trace")) for node in calls) / len(calls),
        "listing_bytes": len(text),
        "round_trips": render(parse(text)) == text,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="llama-8b")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--part", default="joint")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--parallel", nargs="*", default=PARALLELISMS)
    parser.add_argument("--json", help="write the figures to this file")
    parser.add_argument("--one", action="store_true", help="measure one parallelism in this process")
    options = parser.parse_args()
    if options.one:
        row = measure(options.model, options.parallel[0], options.layers, options.ranks, options.part, options.batch)
        print(json.dumps(row))
        return
    rows: list[dict[str, Any]] = []
    shape = [f"--{key}={getattr(options, key)}" for key in ("model", "layers", "ranks", "part", "batch")]
    print(f"{options.model}, {options.layers} layers, part {options.part}, batch {options.batch}")
    header = f"{'parallel':10} {'mesh':26} {'nodes':>6} {'AG':>5} {'RS':>5} {'AR':>5} {'A2A':>4}"
    print(header + f" {'s':>6} {'CPU s':>6} {'MiB':>6}  module  line  round trip")
    for parallel in options.parallel:
        command = [sys.executable, __file__, "--one", *shape, "--parallel", parallel]
        row = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
        rows.append(row)
        counts = " ".join(f"{row[kind]:>{width}}" for kind, width in zip(KINDS, (5, 5, 5, 4), strict=True))
        size = f"{row['capture_s']:>6.1f} {row['cpu_s']:>6.1f} {row['peak_bytes'] >> 20:>6}"
        shares = f"{row['nodes_with_module']:>7.0%} {row['nodes_with_line']:>5.0%}  {row['round_trips']}"
        print(f"{parallel:10} {row['mesh']!s:26} {row['nodes']:>6} {counts} {size} {shares}", flush=True)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
