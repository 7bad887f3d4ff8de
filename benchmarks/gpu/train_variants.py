"""The variants of a training step: eager, torch's own wrappers, compilers, and the captured graph in several orders.

Contract: a variant's `run` makes one step and returns the loss and this rank's gradients, in the order of the model's
parameters. Graphs run as they are, operator by operator, so that only their orders differ.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._inductor import config as inductor_config
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.fx import GraphModule
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize
from train_predict import EXECUTIONS, GRAPHS, executed, predictions
from train_profile import node_times

import weft
from weft.cost.cluster import Cluster
from weft.frontends import session
from weft.frontends.min_cut import Partition
from weft.graph.collective import collectives
from weft.graph.listings.text import digest

if TYPE_CHECKING:
    from train_rank import Rank

OVERLAP = {
    "reorder_for_compute_comm_overlap": True,
    "bucket_all_gathers_fx": "all",
    "bucket_reduce_scatters_fx": "all",
    "bucket_all_reduces_fx": "all",
    "aten_distributed_optimizations.enable_overlap_scheduling": True,
    "aten_distributed_optimizations.collective_bucketing": True,
    "aten_distributed_optimizations.insert_overlap_deps": True,
}
"""Inductor's settings for bucketing and overlap; settings that a torch version lacks are reported and skipped."""
INSTEAD = {"inductor overlap": "inductor overlap, without deps"}
"""Fallback if a variant fails: in some graphs Inductor cannot lower the dependencies that keep its order."""


@dataclass(frozen=True)
class Variant:
    """A way to make a step."""

    run: Callable[[], list[Tensor]]
    about: Callable[[], dict[str, Any]] = field(default=lambda: {})
    """Remarks on the variant, after it has run."""


def make_variant(held: Rank, name: str) -> Variant:
    """The variant of that name."""
    if name in GRAPHS:
        return _graph(held, name)
    if name == "eager":
        return Variant(partial(_train, held.model, held.model, held.batch), partial(_of_executed, held, name))
    if name == "torch's own":
        return _own(held)
    weave = {"weft.cluster": held.job["cluster"]}
    known = inductor_config.get_config_copy() if name.startswith("inductor overlap") else {}
    missing = [key for key in OVERLAP if key not in known] if known else []
    wanted = {key: value for key, value in OVERLAP.items() if key in known}
    ways: dict[str, dict[str, Any]] = {
        "weft_eager": {"backend": "weft_eager", "options": weave},
        "weft": {"backend": "weft", "options": weave},
        "weft cudagraphs": {"backend": "weft", "options": {**weave, "triton.cudagraphs": True}},
        "inductor": {},
        "inductor overlap": {"options": wanted},
        "inductor overlap, without deps": {"options": wanted | {key: False for key in wanted if "deps" in key}},
        "inductor cudagraphs": {"mode": "reduce-overhead"},
    }
    settings = dict(ways[name])
    if name.startswith("weft"):  # register the backend even if the package and its entry points are not installed
        from weft.frontends import backends

        settings["backend"] = getattr(backends, settings["backend"])
    compiled = torch.compile(held.model, **settings)
    earlier = len(_optimized())
    about = partial(_of_compiler, held, name, missing, earlier)
    return Variant(partial(_train, compiled, held.model, held.batch), about)


def _train(called: Any, model: nn.Module, batch: tuple[Tensor, ...]) -> list[Tensor]:
    """A step by autograd."""
    loss = called(*batch)
    loss.backward()
    found = [loss.detach(), *(_local(p.grad) for p in model.parameters() if p.grad is not None)]
    model.zero_grad(set_to_none=True)
    return found


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@cache
def _optimized() -> list[GraphModule]:
    """Collects the optimized graphs of all backends from now on."""
    plain, found = session.optimize, list[GraphModule]()

    def optimize(module: GraphModule, cluster: Cluster, **settings: Any) -> weft.Result:
        result = plain(module, cluster, **settings)
        found.append(result.module)
        return result

    session.optimize = optimize
    return found


def _of_executed(held: Rank, name: str) -> dict[str, Any]:
    """The prediction for a variant whose graph is that of a capture."""
    module = executed(name, held.job["parallel"], lambda partition: _captured(held, partition))
    return {} if module is None else predictions(module, Cluster.load(held.job["cluster"]), EXECUTIONS[name])


def _of_compiler(held: Rank, name: str, missing: list[str], earlier: int) -> dict[str, Any]:
    about: dict[str, Any] = {"settings_missing": missing} if missing else {}
    if name.startswith("weft"):
        reports = [entry.report for entry in weft.run_report().entries if entry.report][earlier:]
        about["graphs"] = len(reports)
        about["collectives"] = [sum(r[side]["num_collectives"] for r in reports) for side in ("before", "after")]
        about["changes"] = sum(len(r["applied"]) for r in reports)
        about |= predictions(_optimized()[earlier:], Cluster.load(held.job["cluster"]), EXECUTIONS[name])
        about["messages"] = [str(message)[:300] for message in weft.run_report().messages]
    else:
        about |= _of_executed(held, name)
    if "cudagraphs" in name:
        counters = torch._dynamo.utils.counters["inductor"]
        about["cudagraphs_skipped"] = counters["cudagraph_skips"]
    return about


# Torch's own wrappers for these parallelisms, without a compiler.


class _Cast(nn.Module):
    """A parameter in bf16, its gradient in f32: as the zoo computes."""

    def forward(self, x: Tensor) -> Tensor:
        return x.to(torch.bfloat16)


def _own(held: Rank) -> Variant:
    """DDP, or FSDP2 with a group for each layer: both overlap from hooks."""
    model, batch = held.build(plain=True)
    reduce = torch.bfloat16 if held.job["reduce"] == "bf16" else torch.float32
    if held.job["parallel"] == "ddp":
        for module in list(model.modules()):
            for name, _ in list(module.named_parameters(recurse=False)):
                parametrize.register_parametrization(module, name, _Cast(), unsafe=True)
        wrapped: Any = DistributedDataParallel(model)
    elif held.job["parallel"] == "fsdp":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce)
        layers: Any = model.layers
        for layer in layers:
            fully_shard(layer, mesh=held.mesh, mp_policy=policy)
        wrapped = fully_shard(model, mesh=held.mesh, mp_policy=policy)
    else:
        raise ValueError(f"torch has nothing that overlaps {held.job['parallel']} without a compiler")
    return Variant(partial(_train, wrapped, model, batch), partial(_of_executed, held, "torch's own"))


# The captured graph.


def _graph(held: Rank, name: str) -> Variant:
    before, cluster = _captured(held, "autograd"), Cluster.load(held.job["cluster"])
    inputs = _inputs(held)
    started = time.perf_counter()
    result = weft.optimize(before, cluster.running("eager"), pipeline=GRAPHS[name])
    seconds = time.perf_counter() - started
    _agree(digest(weft.listing(result.module)))

    def run() -> list[Tensor]:
        with torch.no_grad():
            return list(result.module(*inputs))

    def about() -> dict[str, Any]:
        if held.measured is None:  # timed in the captured order, in which nothing overlaps, on all ranks at once
            path = Path(held.job["folder"]) / f"nodes_rank{held.rank}.json"
            with torch.no_grad():
                held.measured = node_times(before, inputs, path, held.device.type)
        counts = [sum(1 for _ in collectives(m.graph)) for m in (before, result.module)]
        told = {"pass_s": round(seconds, 2), "collectives": counts, "changes": len(result.report.applied)}
        return told | predictions(result.module, cluster, "eager", held.measured)

    return Variant(run, about)


def _captured(held: Rank, partition: Partition) -> GraphModule:
    """The joint graph of this rank, captured once for each partition."""
    known: dict[str, GraphModule] = held.captured
    if partition not in known:
        step = weft.TrainingStep(held.model)
        known[partition] = weft.capture(step, held.batch, held.mesh, "joint", partition=partition)
    return known[partition]


def _inputs(held: Rank) -> list[Tensor]:
    """The arguments of a captured graph."""
    state = {**dict(held.model.named_parameters()), **dict(held.model.named_buffers())}
    return [*(_local(each).detach() for each in state.values()), *held.batch]


def _agree(own: str) -> None:
    """Raise on every rank if ranks would run different graphs: they would wait for each other forever."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    if len(set(found)) > 1:
        raise RuntimeError(f"ranks would run different graphs: {found}")
