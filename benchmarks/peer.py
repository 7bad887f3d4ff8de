"""PyTorch Inductor's own overlap scheduler, called on Weft's graphs with Weft's prices, on a machine without a GPU.

Contract: the peer gets a copy of the graph, patches of torch are undone after each call, and a variant that raises is
reported with its message. The result is an ordinary graph module that Weft's simulator can read.

The peer needs a device, a process group and its own estimates of compute. Here every tensor claims to be on `meta` (on
`cpu` the peer's memory limits have no effect), the groups are fake, the two figures that the peer reads from a GPU are
constants, and CPU attention counts as compute like the GPU variant that the peer's flop table knows.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch._inductor.fx_passes import ddp_fusion, overlap_scheduling
from torch._inductor.pattern_matcher import stable_topological_sort
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule, Node
from torch.fx.passes.shape_prop import _extract_tensor_metadata
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import flop_registry

from weft.cost.cluster import Cluster
from weft.cost.prices import full_bytes, price
from weft.graph import metadata, ops
from weft.graph.collective import Collective
from weft.graph.dag import Dag
from weft.graph.edit import copy_module
from weft.graph.groups import GroupTable, group_argument, read_groups
from weft.graph.ops import Kind

TFLOPS, MEMORY_GBPS = 600.0, 2500.0
"""Device figures for the peer's own estimates: those of the reference machines."""
CAP_MB = 25
"""Of a bucket of DDP gradients: the peer's default."""
aten = torch.ops.aten
ATTENTION = {
    aten._scaled_dot_product_flash_attention_for_cpu: aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: aten._scaled_dot_product_flash_attention_backward,
}

Estimate = Callable[[Node, int | None], float | None]
Work = Callable[[GraphModule, Estimate], GraphModule]


@dataclass(frozen=True)
class Attempt:
    """The result of one variant of the peer."""

    name: str
    seconds: float
    module: GraphModule | None
    error: str = ""


def _overlap(bucketing: bool, pre_bucketing: bool, exact: bool = True, regions: bool = False) -> Work:
    def work(module: GraphModule, estimate: Estimate) -> GraphModule:
        return overlap_scheduling.schedule_overlap_bucketing(
            module,
            collective_bucketing=bucketing,
            pre_bucketing_fsdp_collectives=pre_bucketing,
            custom_runtime_estimation=estimate if exact else None,
            collective_estimator="analytical",
            compute_estimator="analytical",
            enable_fusion_regions=regions,
        )

    return work


def _ddp_concat(module: GraphModule, _: Estimate) -> GraphModule:
    """The fusion of DDP's gradients, which it finds only where a division stands before each sum."""
    _divide_before_sums(module)
    ddp_fusion.fuse_ddp_communication(module.graph, ["fuse_ddp_with_concat_op", "schedule_comm_wait"], CAP_MB)
    stable_topological_sort(module.graph)
    return module


def _divide_before_sums(module: GraphModule) -> None:
    for node in list(module.graph.nodes):
        if ops.kind_of(node.target) is not Kind.ALL_REDUCE or node.args[1] != "avg":
            continue
        source = node.args[0]
        size = dist.get_world_size(torch.distributed.distributed_c10d._resolve_process_group(node.args[2]))
        with module.graph.inserting_before(node):
            divided = module.graph.call_function(aten.div.Tensor, (source, size))
        divided.meta = {key: source.meta[key] for key in ("val", "tensor_meta")}
        node.args = (divided, "sum", node.args[2])


VARIANTS: dict[str, Work] = {
    "overlap": _overlap(bucketing=False, pre_bucketing=False),
    "overlap, regions": _overlap(bucketing=False, pre_bucketing=False, regions=True),
    "overlap + bucketing": _overlap(bucketing=True, pre_bucketing=False),
    "overlap + pre-bucketing": _overlap(bucketing=True, pre_bucketing=True),
    "default, own estimates": _overlap(bucketing=True, pre_bucketing=True, exact=False),
    "ddp concat": _ddp_concat,
}
"""By name; all but the one with its own estimates run on Weft's prices."""


def variants_for(parallel: str) -> list[str]:
    """Those that mean something for a parallelism."""
    return [name for name in VARIANTS if name != "ddp concat" or parallel == "ddp"]


def run(name: str, module: GraphModule, cluster: Cluster) -> Attempt:
    """Run one variant on a copy of a graph; its seconds are those that the pass alone kept the processor busy."""
    groups = read_groups(module)
    copy = copy_module(module)
    with fake_groups(groups), _patched(), _on_meta(copy):
        estimate = _estimates(copy, groups, cluster)
        with V.set_fake_mode(metadata.mode_of(copy.graph.nodes)):
            gc.collect()
            start = time.process_time()
            try:
                made, error = VARIANTS[name](copy, estimate), ""
            except Exception as raised:  # whatever it is, it is the result
                made, error = None, f"{type(raised).__name__}: {str(raised).strip().splitlines()[0][:90]}"
            seconds = time.process_time() - start
        if made is not None:
            _back_from_meta(made)
    return Attempt(name, seconds, made, error)


def _estimates(module: GraphModule, groups: GroupTable, cluster: Cluster) -> Estimate:
    """Weft's prices in milliseconds, of the nodes there are and of collectives that the peer makes."""
    dag = Dag(module.graph)
    prices = price(dag, groups, cluster)
    known = {node: prices.compute_ns[i] / 1e6 for i, node in enumerate(dag.nodes)}
    known |= {dag.nodes[i]: ns / 1e6 for i, ns in prices.collective_ns.items()}

    def estimate(node: Node, override_size: int | None) -> float | None:
        if override_size is None and node in known:
            return known[node]
        if ops.launch_form(node.target) is None:
            return known.get(node, 0.0)
        collective = Collective(node)
        num_bytes = full_bytes(collective) if override_size is None else override_size
        return cluster.collective_us(collective.kind, groups.group(group_argument(node)), num_bytes or 0) / 1e3

    return estimate


@contextmanager
def fake_groups(groups: GroupTable) -> Iterator[None]:
    """A fake world whose process groups have the names that the graph uses for its groups."""
    table = list(groups)
    spans = [max((max(part) for part in group.ranks), default=0) + 1 if group.ranks else 0 for group in table]
    spans += [group.size * group.stride for group in table]
    dist.init_process_group("fake", rank=0, world_size=max(spans, default=1), store=FakeStore())
    register = torch._C._distributed_c10d._register_process_group
    try:
        for group in table:
            ranks = group.ranks[0] if group.ranks else tuple(range(0, group.size * group.stride, group.stride))
            register(groups.runtime.get(group.name, group.name), dist.new_group(list(ranks)))
        yield
    finally:
        torch._C._distributed_c10d._unregister_all_process_groups()
        dist.destroy_process_group()


@contextmanager
def _patched() -> Iterator[None]:
    """The figures that the peer reads off a GPU, attention of the CPU as compute, and no log: errors are reported."""
    home = torch.utils._runtime_estimation
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    with (
        mock.patch.object(home, "get_gpu_dram_gbps", return_value=MEMORY_GBPS),
        mock.patch.object(home, "get_device_tflops", return_value=TFLOPS),
        mock.patch.dict(flop_registry, {cpu: flop_registry[twin] for cpu, twin in ATTENTION.items()}),
    ):
        try:
            yield
        finally:
            logging.disable(level)


@contextmanager
def _on_meta(module: GraphModule) -> Iterator[None]:
    """Say of every fake tensor that it is on `meta`, and give nodes the metadata that the peer reads."""
    moved: dict[int, tuple[FakeTensor, torch.device]] = {}

    def move(value: Any) -> Any:
        if isinstance(value, FakeTensor):
            moved.setdefault(id(value), (value, value.fake_device))
            value.fake_device = torch.device("meta")
        return value

    for node in module.graph.nodes:
        value = tree_map(move, node.meta.get("val"))
        if isinstance(value, torch.Tensor):
            node.meta["tensor_meta"] = _extract_tensor_metadata(value)
    try:
        yield
    finally:
        for value, device in moved.values():
            value.fake_device = device


def _back_from_meta(module: GraphModule) -> None:
    """Put the tensors that the peer made on the device of the rest."""

    def move(value: Any) -> Any:
        if isinstance(value, FakeTensor) and value.fake_device.type == "meta":
            value.fake_device = torch.device("cpu")
        return value

    for node in module.graph.nodes:
        tree_map(move, node.meta.get("val"))
