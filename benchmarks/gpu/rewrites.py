"""Savings on a GPU by rewrites that depend on a cost: padded matmuls and decomposed matmuls.

    PYTHONPATH=src python benchmarks/gpu/rewrites.py [--json FILE]

Each graph runs as it is and rewritten, in turn. Decomposed matmuls are compiled, because they pay only if the product
is fused into the sum. Times are medians of runs by CUDA events.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from typing import Any

import torch

import weft
from weft.passes.pipeline import Pipeline

PADDED = (
    (4096, 4096, 50257),
    (8192, 2048, 50257),
    (4096, 4095, 4096),
    (4096, 1023, 4096),
    (512, 4096, 4097),
    (64, 4096, 4097),
)
APART = (
    (1 << 20, 8, 4),
    (1 << 18, 8, 4),
    (20480, 8, 4),
    (20480, 32, 32),
    (10240, 16, 16),
    (4096, 8, 4),
    (1 << 20, 1, 16),
)

CALLS = 10


def time_ms(work: Callable[[], Any], repeats: int = 15) -> float:
    """Device time of one call; several calls are recorded as one CUDA graph to exclude host time."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            work()
    found: list[float] = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        found.append(start.elapsed_time(end) / CALLS)
    return statistics.median(found)


def compare(spec: str, sizes: tuple[int, int, int], dtype: str, compiled: bool) -> dict[str, Any]:
    rows, terms, columns = sizes
    inputs = f"x: {dtype}[{rows}, {terms}], w: {dtype}[{terms}, {columns}]"
    before = weft.parse(f"def graph({inputs}):\n    m = mm(x, w)\n    return [m]\n")
    after = Pipeline.parse(spec).run(before).module
    kind = torch.bfloat16 if dtype == "bf16" else torch.float32
    given = [torch.randn(size, device="cuda", dtype=kind) for size in ((rows, terms), (terms, columns))]
    torch.compiler.reset()
    works = [torch.compile(module) if compiled else module for module in (before, after)]
    first, second = (work(*given)[0] for work in works)
    error = ((first - second).abs().max() / first.abs().max()).item()
    times = [time_ms(lambda work=work: work(*given)) for work in works]
    even = None
    if not compiled:
        whole = [
            torch.randn(n, m, device="cuda", dtype=kind)
            for n, m in ((rows, -(-terms // 8) * 8), (-(-terms // 8) * 8, -(-columns // 8) * 8))
        ]
        even = time_ms(lambda: torch.mm(*whole))
    row = {"spec": spec, "sizes": sizes, "before_ms": times[0], "after_ms": times[1], "even_ms": even, "error": error}
    slower = f", {times[0] / even:.2f} times an even one" if even else ""
    print(f"{spec:45} {sizes!s:24} {times[0]:8.4f} ms, after {times[1]:8.4f} ms{slower}; error {error:.1e}", flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write the rows to this file")
    options = parser.parse_args()
    print(torch.cuda.get_device_name(), torch.__version__)
    rows = [compare("pad-matmuls{always=true}", sizes, "bf16", False) for sizes in PADDED]
    rows += [compare("decompose-matmuls{anywhere=true min-rows=1 max-terms=32}", sizes, "f32", True) for sizes in APART]
    if options.json:
        with open(options.json, "w") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
