"""Speed of rewriting graphs: the matcher alone, and all rewrites compared with PyTorch Inductor's own post-grad passes.

    python benchmarks/rewrites.py [--json FILE] [--nodes 100000] [--rules 100] [--layers 4 16 32] [--growth 4 8 16 32]

The matcher: rules with patterns of three operators over one graph. No pattern applies, so only the search is timed. The
comparison: the same captured training steps, one process, alternating runs. Communication passes are off on both sides;
Weft runs all rewrites that Inductor also makes by default. Weft's time covers its passes: Dags, plans, edits, metadata,
sorts and checks. Times are medians of processor seconds on the machine at hand; only ratios and growth carry over.
Inductor's pipeline does more than rewrite (reordering, reinplacing): see the column of nodes left.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from typing import Any

import torch
from scenarios import SCENARIOS, capture
from timing import exponent, processor_seconds
from torch._inductor import config as inductor_config
from torch._inductor.fx_passes.post_grad import post_grad_passes
from torch._inductor.virtualized import V
from torch.fx import GraphModule
from torch.fx.passes.shape_prop import _extract_tensor_metadata

import weft
from weft.graph import metadata
from weft.graph.edit import copy_module
from weft.passes.pipeline import Pipeline
from weft.rewriting.draft import Draft
from weft.rewriting.pattern import VIEWS, op
from weft.rewriting.rules import Rule, rewrite

STEPS = {"fsdp": "fsdp-x8-nvlink", "ddp": "ddp-x8-nvlink", "tp": "tp-x8-nvlink"}
"""Scenarios by parallelism."""
REWRITES = (
    "remove-noops,remove-assertions,remove-profiler-marks,fold-constant-cumsums,cancel-splits-and-cats,fuse-addmms,"
    "reuse-partial-reductions,remove-dead-code"
)
"""What Inductor's post-grad pipeline does by default on a CPU, in its order."""
MORE = f"remove-redundant-casts,cancel-views,simplify-arithmetic,dedupe-sizes,{REWRITES}"


def chain(nodes: int) -> GraphModule:
    """A long program of products, sums, views and pointwise operators."""
    lines, last = ["def graph(x: f32[8, 8], w: f32[8, 8], b: f32[8]):"], "x"
    for i in range(nodes // 5):
        lines += [f"    m{i} = mm({last}, w)", f"    s{i} = add(m{i}, b)", f"    v{i} = view(s{i}, [64])"]
        lines += [f"    u{i} = view(v{i}, [8, 8])", f"    r{i} = relu(u{i})"]
        last = f"r{i}"
    return weft.parse("\n".join([*lines, f"    return [{last}]"]) + "\n")


def idle_rules(number: int) -> list[Rule]:
    """Rules whose patterns begin as the graph does, three of four with two operators, and then do not fit."""
    tops = ("add", "relu", "mm", VIEWS)
    middles = ("mm", VIEWS, "relu", VIEWS)
    inner = ("sigmoid", "tanh", "exp", "log", "sub", "div", "bmm", "amax", "softmax.int", "erf")
    rules: list[Rule] = []
    for k in range(number):
        leaf = op(inner[k % len(inner)]).ignoring().named(f"leaf{k}")
        middle = op(middles[k % 4] if k % 16 < 12 else "neg", leaf).ignoring()
        rules.append(Rule(op(tops[k % len(tops)], middle).ignoring(), lambda draft, match: None))
    return rules


def matcher(nodes: int, rules: int) -> dict[str, Any]:
    module = chain(nodes)
    found = idle_rules(rules)
    gc.collect()
    start = time.process_time()
    draft = Draft(module.graph)
    middle = time.process_time()
    applied, _ = rewrite(draft, found)
    end = time.process_time()
    row = {"nodes": len(module.graph.nodes), "rules": rules, "draft_s": middle - start, "search_s": end - middle}
    assert not applied
    print(
        f"matcher: {rules} rules over {row['nodes']} nodes: "
        f"draft {row['draft_s']:.2f} s, search {row['search_s']:.2f} s"
    )
    return row


def step(layers: int, parallel: str) -> GraphModule:
    return capture(SCENARIOS[STEPS[parallel]], layers)


def run_peer(module: GraphModule) -> tuple[float, int]:
    copy = copy_module(module)
    for node in copy.graph.nodes:
        if isinstance(node.meta.get("val"), torch.Tensor):
            node.meta["tensor_meta"] = _extract_tensor_metadata(node.meta["val"])
    with V.set_fake_mode(metadata.mode_of(copy.graph.nodes)), inductor_config.patch(reorder_for_locality=False):
        gc.collect()
        start = time.process_time()
        post_grad_passes(copy, is_inference=False)
        seconds = time.process_time() - start
    return seconds, len(copy.graph.nodes)


def run_weft(module: GraphModule, spec: str) -> tuple[float, int]:
    gc.collect()
    with processor_seconds():
        done = Pipeline.parse(spec).run(module)
    return sum(entry.seconds for entry in done.log), len(done.module.graph.nodes)


def compare(name: str, module: GraphModule, repeats: int) -> dict[str, Any]:
    times: dict[str, list[float]] = {"weft": [], "weft_more": [], "inductor": []}
    nodes: dict[str, int] = {}
    for _ in range(repeats):
        for key, work in (
            ("weft", lambda: run_weft(module, REWRITES)),
            ("inductor", lambda: run_peer(module)),
            ("weft_more", lambda: run_weft(module, MORE)),
        ):
            seconds, nodes[key] = work()
            times[key].append(seconds)
    row: dict[str, Any] = {"scenario": name, "nodes": len(module.graph.nodes)}
    for key, found in times.items():
        row |= {f"{key}_s": statistics.median(found), f"{key}_nodes": nodes[key]}
    row["ratio"] = row["inductor_s"] / row["weft_s"]
    print(
        f"{name:20} {row['nodes']:>6} nodes   weft {row['weft_s']:7.3f} s to {row['weft_nodes']:>6}"
        f"   all {row['weft_more_s']:7.3f} s to {row['weft_more_nodes']:>6}"
        f"   inductor {row['inductor_s']:7.3f} s to {row['inductor_nodes']:>6}   {row['ratio']:5.1f} x",
        flush=True,
    )
    return row


def growth(layers: list[int], repeats: int) -> dict[str, Any]:
    """The exponent of Weft's time in the number of nodes, fitted to medians."""
    sizes: list[int] = []
    seconds: list[float] = []
    for count in layers:
        module = step(count, "fsdp")
        sizes.append(len(module.graph.nodes))
        seconds.append(statistics.median(run_weft(module, MORE)[0] for _ in range(repeats)))
        print(
            f"growth: {sizes[-1]:>7} nodes  {seconds[-1]:8.3f} s  {seconds[-1] / sizes[-1] * 1e6:6.0f} us each",
            flush=True,
        )
    found = exponent(sizes, seconds)
    print(f"growth: N^{found:.2f}" if found else "growth: one size tells nothing")
    return {"sizes": sizes, "seconds": seconds, "exponent": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write the rows to this file")
    parser.add_argument("--nodes", type=int, default=100_000)
    parser.add_argument("--rules", type=int, default=100)
    parser.add_argument("--layers", type=int, nargs="*", default=[4, 16, 32])
    parser.add_argument("--growth", type=int, nargs="*", default=[4, 8, 16, 32])
    parser.add_argument("--parallel", nargs="*", default=list(STEPS), choices=STEPS)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, Any] = {"matcher": matcher(options.nodes, options.rules) if options.nodes else None}
    found["rows"] = [
        compare(f"{parallel}, {layers} layers", step(layers, parallel), options.repeats)
        for parallel in options.parallel
        for layers in options.layers
    ]
    found["rows"] += [
        compare(f"{model}, {parallel}", weft.zoo.load(model, parallel=parallel, ranks=4), options.repeats)
        for model, parallel in (("moe-debug", "fsdp"), ("vision-debug", "ddp"), ("llama-debug", "fsdp-tp"))
    ]
    found["growth"] = growth(options.growth, options.repeats) if options.growth else None
    if options.json:
        with open(options.json, "w") as file:
            json.dump(found, file, indent=1)


if __name__ == "__main__":
    main()
