"""Plan a step within the memory of the device, if it does not fit there when it is planned without a limit.

Contract: a step that fits is planned once. Otherwise the limit is what the device leaves for tensors: a memory limit
counts neither cuBLAS's workspace nor the memory outside torch's allocator. If no plan keeps this limit, the given run
stays.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from weft.cost.cluster import Cluster
from weft.errors import RefusedError
from weft.graph.groups import GroupTable
from weft.graph.versions import dag_of
from weft.passes.pipeline import DEVICE_LIMIT, Run
from weft.prediction.caching_allocator import BLOCK_BYTES
from weft.prediction.memory import memory_of_graph
from weft.simulation.build import program_of
from weft.simulation.memory import Footprint


def within_device(run: Run, plan: Callable[[int], Run], groups: GroupTable, cluster: Cluster) -> Run:
    """The run if it fits the device, or if no run that `plan` finds for a limit does; else the run with a limit."""
    dag = dag_of(run.module.graph)
    program = program_of(dag, groups, cluster)
    run = replace(run, program=program)
    memory, footprint = memory_of_graph(dag, program, cluster.device), Footprint(program)
    if memory.device_bytes is None or memory.least_bytes <= memory.device_bytes:
        return run
    missing = memory.least_bytes - memory.device_bytes
    rounding = BLOCK_BYTES * len(program.names)  # another order may round up more tensors at its peak
    limit = footprint.peak(range(len(program.names))) - missing - rounding
    if limit < footprint.given_bytes:  # inputs and constants alone exceed it
        return run
    try:
        found = plan(limit)
    except RefusedError:
        return run
    return replace(found, plan=replace(found.plan, facts={**found.plan.facts, DEVICE_LIMIT: limit}))
