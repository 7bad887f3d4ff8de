"""Speed of the graph layer, compared with torch's own stable topological sort in one process.

    python benchmarks/backbone.py [--json FILE]

Times are medians of processor seconds on the machine at hand; only ratios and growth carry over.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
import tracemalloc
from collections.abc import Callable
from random import Random
from typing import Any

import torch
from torch._inductor.pattern_matcher import stable_topological_sort
from torch.fx import Graph, GraphModule

from weft.graph.dag import Dag
from weft.graph.edit import Edit
from weft.graph.listings.text import parse, render

REPEATS = 5
BLOCK = 49
"""Nodes per collective: what an FSDP step of a decoder has, within a factor of two."""


def training_step(num_collectives: int) -> str:
    """A listing like an FSDP step: each block gathers a weight, computes, scatters a gradient; the optimizer writes."""
    lines = ["group('dp', size=8)", ""]
    weights = [f"p{i}: f32[8, 64]" for i in range(64)]
    lines.append(f"def graph(x: bf16[64, 64], {', '.join(weights)}):")
    activation = "x"
    for block in range(num_collectives // 2):
        lines += _block(block, activation)
        activation = f"h{block}_{(2 * BLOCK - 9) // 3 - 1}"
    for weight in range(32):
        lines.append(
            f"    u{weight} = copy_(p{weight}, s{weight})" if weight < num_collectives // 2 else "    z = neg(x)"
        )
    return "\n".join([*lines, f"    return [{activation}]"]) + "\n"


def _block(block: int, activation: str) -> list[str]:
    weight = f"p{block % 64}"
    lines = [
        f"    c{block} = _to_copy({weight}, dtype=bf16)",
        f"    g{block} = all_gather(c{block}, 8, 'dp')",
        f"    w{block} = wait(g{block})",
        f"    t{block} = t(w{block})",
    ]
    for step in range((2 * BLOCK - 9) // 3):
        lines += [
            f"    v{block}_{step} = view({activation}, [64, 64])",
            f"    m{block}_{step} = mm(v{block}_{step}, t{block})",
            f"    h{block}_{step} = add(m{block}_{step}, {activation})",
        ]
        activation = f"h{block}_{step}"
    lines += [
        f"    d{block} = mm(t{block}, {activation})",
        f"    e{block} = _to_copy(d{block}, dtype=f32)",
        f"    r{block} = reduce_scatter(e{block}, 'avg', 8, 'dp')",
        f"    s{block} = wait(r{block})",
    ]
    return lines


def median_s(work: Callable[[], Any], repeats: int = REPEATS) -> tuple[float, float]:
    """Median and spread (max - min) in seconds."""
    times: list[float] = []
    for _ in range(repeats):
        gc.collect()
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    return statistics.median(times), max(times) - min(times)


def analyse(graph: Graph) -> Dag:
    dag = Dag(graph)
    _ = dag.before, dag.after, dag.queue
    return dag


def bytes_of_dag(graph: Graph) -> int:
    gc.collect()
    tracemalloc.start()
    dag = analyse(graph)
    current, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    del dag
    return current


def commit_moves(module: GraphModule, num_moves: int) -> None:
    rng = Random(0)
    nodes = [node for node in module.graph.nodes if node.op == "call_function"]
    with Edit(module.graph) as edit:
        for node in rng.sample(nodes, num_moves):
            edit.move_before([node], nodes[rng.randrange(len(nodes))]) if rng.random() < 0.5 else None


def measure(num_collectives: int) -> dict[str, Any]:
    text = training_step(num_collectives)
    parse_s, _ = median_s(lambda: parse(text), repeats=1)
    module = parse(text)
    graph = module.graph
    render_s, _ = median_s(lambda: render(module), repeats=3)
    sort_s, sort_spread = median_s(lambda: stable_topological_sort(graph))
    dag_s, dag_spread = median_s(lambda: analyse(graph))
    commit_s, _ = median_s(lambda: commit_moves(module, 1000), repeats=3)
    return {
        "nodes": len(graph.nodes),
        "collectives": num_collectives,
        "torch_sort_s": sort_s,
        "torch_sort_spread_s": sort_spread,
        "dag_s": dag_s,
        "dag_spread_s": dag_spread,
        "dag_over_sort": dag_s / sort_s,
        "dag_bytes_per_node": bytes_of_dag(graph) / len(graph.nodes),
        "render_s": render_s,
        "parse_s": parse_s,
        "commit_1000_moves_s": commit_s,
        "commit_us_per_node": commit_s / len(graph.nodes) * 1e6,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", help="write the figures to this file")
    parser.add_argument("--collectives", type=int, nargs="*", default=[200, 1000, 2000])
    options = parser.parse_args()
    rows = [measure(count) for count in options.collectives]
    print(f"torch {torch.__version__}; medians of {REPEATS}")
    for key in rows[0]:
        cells = [f"{row[key]:.3f}" if isinstance(row[key], float) else str(row[key]) for row in rows]
        print(f"{key:22}" + "".join(cell.rjust(12) for cell in cells))
    if options.json:
        with open(options.json, "w") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
