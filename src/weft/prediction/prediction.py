"""Prediction: what a training step does on a cluster, each figure with its error bar.

The graph is rewritten into what the runtime executes, priced for the way it is executed, and simulated. A step ends
with its slowest rank: the time that the others wait for it is added, from a stated spread of the ranks' times.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import lcm

from torch.fx import GraphModule

from weft.bucketing.units import Root
from weft.cost.cluster import Cluster
from weft.cost.device import Device
from weft.cost.execution import compiled_nodes, is_backward
from weft.cost.fused import fused_shape
from weft.graph import ops
from weft.graph.about import held, saved_unread_bytes, tokens_per_step
from weft.graph.dag import Dag
from weft.graph.groups import GroupTable, group_argument, read_groups
from weft.graph.versions import dag_of
from weft.passes.runtimes import notes_on, run_as
from weft.prediction.error_bars import ErrorBar, StepKind, error_bars
from weft.prediction.memory import Held, StepMemory, memory_of
from weft.prediction.owners import owners_of
from weft.prediction.step_kind import step_kind
from weft.prediction.work import flops_of_step
from weft.simulation.build import sequence_of
from weft.simulation.host_stalls import notes_on_stalls
from weft.simulation.price_notes import notes_on_prices
from weft.simulation.simulator import simulate

STRAGGLER_SIGMA = 0.01
"""Standard deviation of the ranks' step times, as a share. The Llama 3 paper (arXiv 2407.21783) reports throughput that
varies by 1 to 2 % over a day because clocks follow temperature."""
ONE_GRAPH = "simple-fsdp"
"""The runtime whose step is one graph, which keeps only values that backward reads, even with eager kernels."""
NO_OPTIMIZER = "the graph updates no input, so the optimizer's time and state are not counted"
NO_TOKENS = "the graph does not say how many tokens it takes: give --tokens for tokens/s"


@dataclass(frozen=True)
class Prediction:
    """One step on one cluster. Shares are fractions of one; None: unknown."""

    cluster: str
    kind: StepKind
    runtime: str | None
    attention: str | None
    num_ranks: int
    step_us: float
    """Time of a step, with the time that ranks wait for the slowest."""
    simulated_us: float
    """Time of a step of a rank as fast as the average."""
    waiting_us: float
    """Time that ranks wait for the slowest, on average."""
    straggler_sigma: float
    """Standard deviation of the ranks' step times, as a share of the step."""
    compute_us: float
    communication_us: float
    exposed_us: float
    tokens_per_step: int | None
    """Of all ranks together."""
    tokens_per_second_per_gpu: float | None
    mfu: float | None
    """Model flops, without recomputation, over the peak."""
    hfu: float | None
    """Executed flops, with recomputation, over the peak."""
    memory: StepMemory
    step_error: ErrorBar
    """For the step and everything that follows from it."""
    peak_error: ErrorBar
    notes: tuple[str, ...] = ()

    def to_json(self) -> str:
        """The prediction as JSON: raw numbers, units in the keys."""
        data = asdict(self)
        data["memory"]["needed_bytes"] = self.memory.needed_bytes
        data["fits"] = self.memory.does_not_fit is None
        return json.dumps(data, indent=1, sort_keys=True, allow_nan=False)


def predict_modules(
    modules: Sequence[GraphModule],
    cluster: Cluster,
    *,
    runtime: str | None = None,
    root: Root = "split",
    execution: str | None = None,
    attention: str | None = None,
    tokens: int | None = None,
    straggler_sigma: float = STRAGGLER_SIGMA,
    groups: Mapping[str, int | Sequence[Sequence[int]]] | None = None,
) -> Prediction:
    """Predict the step that these graphs make, one after the other."""
    described = _as_executed(cluster, execution, attention)
    ran = [
        module if runtime is None else run_as(module, runtime, root=root, cluster=cluster, groups=groups).module
        for module in modules
    ]
    tables = [read_groups(module, groups) for module in ran]
    dags = [dag_of(module.graph) for module in ran]
    program = sequence_of(list(zip(dags, tables, strict=True)), described)
    timeline = simulate(program)
    num_ranks = _num_ranks(tables)
    waiting = waiting_share(num_ranks, straggler_sigma)
    step_us = timeline.step_us * (1 + waiting)
    kind = step_kind(dags if runtime is None else [dag_of(module.graph) for module in modules], described, timeline)
    step_error, peak_error = error_bars(kind)
    num_tokens = tokens if tokens is not None else _tokens(modules)
    flops = flops_of_step(modules)
    notes = [note for module in modules for note in (notes_on(module, runtime) if runtime is not None else ())]
    notes += [] if _updates(dags) else [NO_OPTIMIZER]
    notes += [] if num_tokens else [NO_TOKENS]
    notes += notes_on_stalls(program)
    notes += notes_on_prices(program, (node for dag in dags for node in dag.nodes))
    return Prediction(
        cluster=described.name,
        kind=kind,
        runtime=runtime,
        attention=attention,
        num_ranks=num_ranks,
        step_us=step_us,
        simulated_us=timeline.step_us,
        waiting_us=step_us - timeline.step_us,
        straggler_sigma=straggler_sigma,
        compute_us=timeline.compute_us,
        communication_us=timeline.communication_us,
        exposed_us=timeline.exposed_us,
        tokens_per_step=num_tokens,
        tokens_per_second_per_gpu=num_tokens / num_ranks / step_us * 1e6 if num_tokens and step_us else None,
        mfu=flops.share_of_peak(flops.model, described.device, step_us) if flops else None,
        hfu=flops.share_of_peak(flops.hardware, described.device, step_us) if flops else None,
        memory=memory_of(
            program,
            owners_of(dags, runtime, described.device.execution),
            described.device,
            [*_held(modules, dags, described.device, runtime), *_parts_of_scatters(dags, tables)],
        ),
        step_error=step_error,
        peak_error=peak_error,
        notes=tuple(dict.fromkeys(notes)),
    )


def waiting_share(num_ranks: int, sigma: float) -> float:
    """How much later than the average the slowest of many ranks ends, as a share of the step.

    The largest of N independent normal times is about sigma sqrt(2 ln N) above their mean.
    """
    return sigma * math.sqrt(2 * math.log(num_ranks)) if num_ranks > 1 else 0.0


def _held(modules: Sequence[GraphModule], dags: Sequence[Dag], device: Device, runtime: str | None) -> list[Held]:
    """Values that eager execution holds although nothing reads them; none if the step is one graph.

    Selective checkpointing keeps some tensors until backward. A function of autograd holds its variables until it
    returns.
    """
    if not device.execution or runtime == ONE_GRAPH:
        return []
    found: list[Held] = []
    start = 0
    for module, dag in zip(modules, dags, strict=True):
        backward = [start + i for i, node in enumerate(dag.nodes) if is_backward(node)]
        num_bytes = saved_unread_bytes(module) if device.execution == "eager" else 0
        found += [Held(backward[0], backward[-1], num_bytes)] if backward and num_bytes else []
        compiled = compiled_nodes(dag, device)
        at = {node.name: i for i, node in enumerate(dag.nodes) if not compiled[i]}
        ends = [(at.get(first), at.get(last), size) for first, last, size in held(module)]
        found += [Held(start + i, start + j, size) for i, j, size in ends if i is not None and j is not None]
        start += len(dag.nodes)
    return found


def _parts_of_scatters(dags: Sequence[Dag], tables: Sequence[GroupTable]) -> list[Held]:
    """The parts that fused scatters sum, which exist only while the operator runs."""
    found: list[Held] = []
    start = 0
    for dag, table in zip(dags, tables, strict=True):
        for i, node in enumerate(dag.nodes):
            argument = group_argument(node) if ops.is_fused(node.target) else None
            size = table.group(argument).size if argument is not None else 0
            shape = fused_shape(node, size) if size else None
            if shape is not None and shape.scatters:
                found.append(Held(start + i, start + i, shape.parts_bytes(size)))
        start += len(dag.nodes)
    return found


def _as_executed(cluster: Cluster, execution: str | None, attention: str | None) -> Cluster:
    """The cluster, priced for the way in which the step is executed."""
    if attention is not None:
        cluster = cluster.with_attention(attention)
    return cluster if execution is None else cluster.running(execution)


def _num_ranks(tables: Sequence[GroupTable]) -> int:
    return lcm(1, *(group.span for table in tables for group in table))


def _tokens(modules: Sequence[GraphModule]) -> int | None:
    return next((found for module in modules if (found := tokens_per_step(module)) is not None), None)


def _updates(dags: Sequence[Dag]) -> bool:
    """Whether some graph writes an input, as an optimizer does."""
    for dag in dags:
        written = dag.effects.memory.direct_writes
        inputs = (i for i, node in enumerate(dag.nodes) if node.op == "placeholder")
        if any(storage in written for i in inputs for storage in dag.effects.held(i)):
            return True
    return False
