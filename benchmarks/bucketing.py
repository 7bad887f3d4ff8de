"""Speed of merging collectives, compared with PyTorch Inductor's own passes on the same graphs in one process.

    python benchmarks/bucketing.py [--json FILE] [--gathers 250 500 1000] [--layers 16 32 64] [--growth 1250 ... 20000]

Weft's time covers the whole pass, from its log: Dag, plan, edit, metadata, sort and checks. Runs of the two alternate.
Times are medians of processor seconds on the machine at hand; only ratios and growth carry over.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from scenarios import SCENARIOS, capture
from timing import exponent, processor_seconds
from torch._inductor.fx_passes import bucketing, ddp_fusion
from torch._inductor.pattern_matcher import stable_topological_sort
from torch._inductor.virtualized import V
from torch.fx import GraphModule
from torch.fx.passes.shape_prop import _extract_tensor_metadata
from torch.testing._internal.distributed.fake_pg import FakeStore

import weft
from weft.graph import metadata
from weft.graph.collective import collectives
from weft.graph.edit import copy_module
from weft.passes.pipeline import Pipeline

NUM_RANKS = 8
CAP_MB = 25


def gathers(num: int) -> GraphModule:
    """A chain of products, each with a weight that is gathered right before."""
    inputs = ", ".join(f"p{i}: bf16[64, 128]" for i in range(num))
    lines = ["group('0', size=8)", "", f"def graph(h: bf16[512, 512], {inputs}):"]
    before = "h"
    for i in range(num):
        lines += [
            f"    a{i} = all_gather(p{i}, 8, '0')",
            f"    w{i} = wait(a{i})",
            f"    m{i} = mm({before}, w{i})",
            f"    c{i} = cat([m{i}, m{i}, m{i}, m{i}], 1)",
        ]
        before = f"c{i}"
    return weft.parse("\n".join([*lines, f"    return [{before}]"]) + "\n")


def ddp(layers: int) -> GraphModule:
    """A decoder under DDP whose gradients are divided and summed, as the peer expects them."""
    text = weft.listing(capture(SCENARIOS["ddp-x8-nvlink"], layers))
    text = text.replace("group('dp', size=8)", "group('0', size=8)")
    lines: list[str] = []
    for line in text.splitlines():
        if " = all_reduce(" in line:
            left, _, right = line.partition(" = all_reduce(")
            name = right.partition(",")[0]
            typed = left.partition(": ")[2]
            lines.append(f"    div_of_{name}: {typed} = div({name}, 8)")
            line = f"{left} = all_reduce(div_of_{name}, 'sum', '0')"
        lines.append(line)
    return weft.parse("\n".join(lines) + "\n")


def for_peer(module: GraphModule) -> GraphModule:
    copy = copy_module(module)
    for node in copy.graph.nodes:
        if isinstance(node.meta.get("val"), torch.Tensor):
            node.meta["tensor_meta"] = _extract_tensor_metadata(node.meta["val"])
    return copy


def run_peer(work: Callable[[GraphModule], Any]) -> Callable[[GraphModule], float]:
    def run(module: GraphModule) -> float:
        copy = for_peer(module)
        with V.set_fake_mode(metadata.mode_of(copy.graph.nodes)):
            gc.collect()
            start = time.process_time()
            work(copy)
            seconds = time.process_time() - start
        run.launches = sum(1 for _ in collectives(copy.graph))  # type: ignore[attr-defined]
        return seconds

    return run


def run_weft(spec: str) -> Callable[[GraphModule], float]:
    def run(module: GraphModule) -> float:
        gc.collect()
        with processor_seconds():
            done = Pipeline.parse(spec).run(module, groups={"0": NUM_RANKS})
        run.launches = sum(1 for _ in collectives(done.module.graph))  # type: ignore[attr-defined]
        return sum(entry.seconds for entry in done.log)

    return run


def merge_gathers(module: GraphModule) -> None:
    bucketing.bucket_all_gather(module, lambda _: CAP_MB)
    stable_topological_sort(module.graph)


def fuse_ddp(module: GraphModule) -> None:
    ddp_fusion.fuse_ddp_communication(module.graph, ["fuse_ddp_with_concat_op"], CAP_MB)
    stable_topological_sort(module.graph)


def compare(name: str, module: GraphModule, mine: Any, peer: Any, repeats: int) -> dict[str, Any]:
    times: dict[str, list[float]] = {"weft": [], "inductor": []}
    for number in range(repeats):
        times["weft"].append(mine(module))
        if number < 1 or times["inductor"][0] < 5:
            times["inductor"].append(peer(module))
    row = {
        "scenario": name,
        "nodes": len(module.graph.nodes),
        "collectives": sum(1 for _ in collectives(module.graph)),
        "weft_s": statistics.median(times["weft"]),
        "weft_spread_s": max(times["weft"]) - min(times["weft"]),
        "weft_launches": mine.launches,
        "inductor_s": statistics.median(times["inductor"]),
        "inductor_launches": peer.launches,
    }
    row["ratio"] = row["inductor_s"] / row["weft_s"]
    print(
        f"{name:24} {row['nodes']:>7} nodes {row['collectives']:>6} collectives"
        f"   weft {row['weft_s']:8.3f} s (to {row['weft_launches']:>4})"
        f"   inductor {row['inductor_s']:8.3f} s (to {row['inductor_launches']:>4})   {row['ratio']:6.1f} x",
        flush=True,
    )
    return row


def growth(sizes: list[int], repeats: int) -> dict[str, Any]:
    """The exponent of Weft's time in the number of collectives, fitted to medians."""
    run = run_weft(f"bucket-all-gathers{{max-bytes={CAP_MB << 20}}}")
    seconds: list[float] = []
    for size in sizes:
        module = gathers(size)
        seconds.append(statistics.median(run(module) for _ in range(repeats)))
        print(
            f"growth: {size:>6} all-gathers  {seconds[-1]:8.3f} s  {seconds[-1] / size * 1e6:6.0f} us each", flush=True
        )
    found = exponent(sizes, seconds)
    print(f"growth: N^{found:.2f}" if found else "growth: one size tells nothing")
    return {"sizes": sizes, "seconds": seconds, "exponent": found}


def measure(num_gathers: Sequence[int], layers: Sequence[int], sizes: list[int], repeats: int) -> dict[str, Any]:
    """All rows, and the growth where there are sizes."""
    steps = {count: ddp(count) for count in layers}  # before there is a process group: capture makes its own
    dist.init_process_group("fake", rank=0, world_size=NUM_RANKS, store=FakeStore())
    try:
        cap = f"{{max-bytes={CAP_MB << 20}}}"
        mine, peer = run_weft(f"bucket-all-gathers{cap}"), run_peer(merge_gathers)
        mine(gathers(8)), peer(gathers(8))  # what is loaded on the first call is not the pass
        rows = [compare(f"{num} all-gathers", gathers(num), mine, peer, repeats) for num in num_gathers]
        mine, peer = run_weft(f"fuse-ddp-all-reduces{cap}"), run_peer(fuse_ddp)
        rows += [compare(f"DDP, {count} layers", module, mine, peer, repeats) for count, module in steps.items()]
        return {"rows": rows, "growth": growth(sizes, max(repeats, 3)) if sizes else None}  # it takes seconds
    finally:
        dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write the rows to this file")
    parser.add_argument("--gathers", type=int, nargs="*", default=[250, 500, 1000])
    parser.add_argument("--layers", type=int, nargs="*", default=[16, 32, 64])
    parser.add_argument("--growth", type=int, nargs="*", default=[1250, 2500, 5000, 10_000, 20_000])
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = measure(options.gathers, options.layers, options.growth, options.repeats)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(found, file, indent=1)


if __name__ == "__main__":
    main()
