"""Gathers and scatters of activations that become one operator with their products: Weft beside Inductor, as a table.

    PYTHONPATH=src python benchmarks/streams.py [--layers 2]

Both sides get the same captured graph on the CPU. Weft plans for nodes of H100, whose levels list symmetric memory.
Inductor's pass runs in a fake world, with its checks for NCCL and for symmetric memory answered yes.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path
from unittest import mock

import torch
from torch._inductor.fx_passes import micro_pipeline_tp
from torch._inductor.virtualized import V
from torch.fx import GraphModule

sys.path.append(str(Path(__file__).parents[1]))

import weft
from benchmarks.peer import fake_groups
from weft import zoo
from weft.graph import metadata
from weft.graph.collective import collectives
from weft.graph.dag import Dag
from weft.graph.edit import copy_module
from weft.graph.groups import read_groups
from weft.graph.ops import Kind
from weft.graph.roles import Role, Roles
from weft.passes.pipeline import Pipeline

STEPS = (("llama-debug", "tp", 4), ("llama-debug", "fsdp-tp", 8), ("moe-debug", "ep-fsdp", 8))
BATCH = 2
"""Two sequences: with one, gathers along the sequence are views, which Inductor's patterns do not contain."""
KERNEL = "{only=activations chunks=2 kernel=symmetric-memory}"
SPEC = f"clean,algebra,communication,fuse-all-gather-matmuls{KERNEL},fuse-matmul-reduce-scatters{KERNEL}"
aten = torch.ops.aten
RESHAPED = (aten.view.default, aten._unsafe_view.default)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=2)
    layers = parser.parse_args().layers
    print("| step | gathers of activations | Weft | Inductor | scatters of activations | Weft | Inductor |")
    print("|---|---|---|---|---|---|---|")
    for name, parallel, ranks in STEPS:
        module = weft.parse(weft.listing(zoo.load(name, parallel, ranks, layers, batch=BATCH)))
        sites, peer = _activations(module), fused_by_peer(module)
        ours, reasons = fused_by_weft(module)
        cells = [
            cell
            for kind, op in ((Kind.ALL_GATHER, "all_gather"), (Kind.REDUCE_SCATTER, "reduce_scatter"))
            for cell in (sites[kind], ours[op], peer[op])
        ]
        print(f"| {name} {parallel}, {layers} layers | {' | '.join(map(str, cells))} |")
        for reason, count in sorted(reasons.items()):
            print(f"    {count} x {reason}")


def _activations(module: GraphModule) -> Counter[Kind]:
    """The number of collectives of activations, by kind."""
    roles = Roles(Dag(module.graph))
    return Counter(each.kind for each in collectives(module.graph) if roles.of(each) is Role.ACTIVATIONS)


def _fused(module: GraphModule) -> Counter[str]:
    """The number of fused operators, by what they do besides multiplying."""
    names = [str(node.target) for node in module.graph.nodes if "symm_mem.fused" in str(node.target)]
    return Counter("all_gather" if "all_gather" in name else "reduce_scatter" for name in names)


def fused_by_weft(module: GraphModule) -> tuple[Counter[str], Counter[str]]:
    """The number of operators that Weft fuses, and why other gathers and scatters of activations stay."""
    roles = Roles(Dag(module.graph))
    carried = {c.launch.name for c in collectives(module.graph) if roles.of(c) is Role.ACTIVATIONS}
    run = Pipeline.parse(SPEC).run(module, cluster="h100-8")
    decisions = [decision for entry in run.log for decision in entry.step.decisions if "fuse-" in entry.step.spec]
    applied = {decision.nodes[0] for decision in decisions if decision.applied}
    left = [d for d in decisions if not d.applied and d.nodes[0] in carried - applied]
    return _fused(run.module), Counter(f"{d.reason.value}: {d.sentence}" for d in left)


def fused_by_peer(module: GraphModule) -> Counter[str]:
    """The number of operators that Inductor's pass fuses."""
    copy = copy_module(module)
    for node in copy.graph.nodes:
        if node.target in RESHAPED:
            node.target = aten.reshape.default
    with (
        fake_groups(read_groups(module)),
        V.set_fake_mode(metadata.mode_of(copy.graph.nodes)),
        mock.patch("torch.distributed.is_nccl_available", return_value=True),
        mock.patch("torch.distributed._symmetric_memory.is_symm_mem_enabled_for_group", return_value=True),
    ):
        micro_pipeline_tp.micro_pipeline_tp_pass(copy.graph)
    return _fused(copy)


if __name__ == "__main__":
    main()
