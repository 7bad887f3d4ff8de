"""Memory by name: every byte of the simulator's peak has an owner, and streams do not share."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from torch.fx import GraphModule

import weft
from tests.tiers import quick_first
from weft.cost.cluster import Cluster
from weft.graph.dag import Dag
from weft.graph.groups import read_groups
from weft.passes.runtimes import run_as
from weft.prediction.memory import CONTEXT_BYTES, NCCL_BYTES, Held, StepMemory, does_not_fit, memory_of, outside_of
from weft.prediction.owners import MemoryPart, owners_of
from weft.simulation.build import program_of
from weft.simulation.program import Program
from weft.simulation.simulator import simulate

CLUSTER = Cluster.load("h100-1x8")
BLOCK = 512
SHAPE: dict[str, Any] = {
    "dim": 256,
    "ffn_dim": 512,
    "vocabulary": 1024,
    "sequence": 128,
    "num_heads": 8,
    "num_kv_heads": 8,
}


@cache
def step(parallel: str) -> GraphModule:
    return weft.zoo.load("llama-debug", parallel, ranks=8, part="step", **SHAPE)


def program(module: GraphModule) -> Program:
    return program_of(module, read_groups(module), CLUSTER)


def memory(module: GraphModule, runtime: str | None = None) -> StepMemory:
    return memory_of(program(module), owners_of([Dag(module.graph)], runtime), CLUSTER.device)


def parameters(module: GraphModule) -> int:
    inputs = [node.meta["val"] for node in module.graph.nodes if node.op == "placeholder"]
    names = [node.name for node in module.graph.nodes if node.op == "placeholder"]
    states = {name.removesuffix("_exp_avg") for name in names if name.endswith("_exp_avg")}
    return sum(value.nbytes for name, value in zip(names, inputs, strict=True) if name in states)


@pytest.mark.parametrize("parallel", quick_first(["fsdp", "tp", "ddp", "fsdp-tp"]))
def test_the_peak_is_that_of_the_simulator_but_for_rounding(parallel: str):
    module = step(parallel)
    found = memory(module)
    expected, num_storages = simulate(program(module)).peak_bytes, len(module.graph.nodes)
    allocated = found.allocated_bytes - found.parts[MemoryPart.WORKSPACE]
    assert expected <= allocated <= expected + num_storages * BLOCK
    assert sum(found.parts.values()) == found.allocated_bytes <= found.reserved_bytes


def test_parameters_and_optimizer_state_are_named():
    module = step("fsdp")
    parts, expected = memory(module).parts, parameters(module)
    assert expected <= parts[MemoryPart.PARAMETERS] <= expected + 32 * BLOCK
    assert 2 * expected <= parts[MemoryPart.OPTIMIZER_STATE] <= 2 * expected + 100 * BLOCK


def test_gathered_and_reduced_buffers_of_fsdp2_have_streams_of_their_own():
    one, several = memory(step("fsdp")), memory(step("fsdp"), "fsdp2")
    assert set(one.streams) == {"default"}
    assert set(several.streams) == {"default", "all-gather", "reduce-scatter"}
    assert several.reserved_bytes > one.reserved_bytes
    assert several.allocated_bytes == one.allocated_bytes


def test_buckets_of_fsdp2_are_gathered_and_reduced_in_the_memory_of_their_streams():
    module = run_as(step("fsdp"), "fsdp2").module
    nodes = list(module.graph.nodes)
    owners = dict(zip(nodes, owners_of([Dag(module.graph)], "fsdp2"), strict=True))
    launches = [node for node in nodes if node.name.endswith("_bucket")]
    streams = {(str(node.target).split(".")[1], *owners[node]) for node in launches}
    assert streams == {
        ("all_gather_into_tensor", MemoryPart.GATHERED, "all-gather"),
        ("reduce_scatter_tensor", MemoryPart.GRADIENTS, "reduce-scatter"),
    }
    # Gradients stay where they were reduced, and the optimizer finds all of them there.
    assert memory(module, "fsdp2").streams["reduce-scatter"] >= parameters(module)


def test_memory_that_nothing_uses_counts_while_it_is_held():
    module = weft.parse(LISTING)
    given = program(module), owners_of([Dag(module.graph)]), CLUSTER.device
    plain, held = memory_of(*given), memory_of(*given, [Held(3, 4, 1 << 30)])
    assert held.allocated_bytes - plain.allocated_bytes == 1 << 30
    assert held.parts[MemoryPart.ACTIVATIONS] - plain.parts[MemoryPart.ACTIVATIONS] == 1 << 30


LISTING = """def graph(x: f32[1024, 1024]):
    a = mm(x, x)
    b = relu(a)
    e = neg(b)
    f = mul(b, e)
    c = add(f, b)
    d = mm(c, x)
    return [d]
"""


@pytest.mark.parametrize(("execution", "num_tensors"), [("compiled", 3), ("eager", 4)])
def test_values_inside_a_fused_kernel_take_no_memory(execution: str, num_tensors: int):
    module = weft.parse(LISTING)
    cluster = CLUSTER.running(execution)
    found = memory_of(program_of(module, read_groups(module), cluster), owners_of([Dag(module.graph)]), cluster.device)
    # Compiled, x, a and c live together; eager, x, b, f and e or c.
    assert found.allocated_bytes - found.parts[MemoryPart.WORKSPACE] == num_tensors * 4 << 20


def test_a_cuda_graph_keeps_its_memory_while_the_optimizer_runs():
    module = step("fsdp")
    cluster = CLUSTER.running("cuda-graphs")
    made = program_of(module, read_groups(module), cluster)
    one, pools = (
        memory_of(made, owners_of([Dag(module.graph)], execution=how), cluster.device)
        for how in ("compiled", "cuda-graphs")
    )
    assert set(pools.streams) == {"default", "CUDA graphs"}
    assert pools.allocated_bytes == one.allocated_bytes
    assert pools.reserved_bytes > one.reserved_bytes
    state = pools.parts[MemoryPart.PARAMETERS] + pools.parts[MemoryPart.OPTIMIZER_STATE]
    assert pools.streams["default"] > state  # and what the optimizer needs meanwhile


def test_the_sentence_says_what_is_needed_and_what_there_is():
    assert does_not_fit(10, None) is None
    assert does_not_fit(10, 10) is None
    assert does_not_fit(129 << 30, 80_000_000_000) == "does not fit: needs 129 GiB, the device has 80 GB"


SHARED = """group('tp', size=8)
group('other', size=4)

def graph(x: bf16[4096, 1024], a: bf16[8192, 1024], b: bf16[1024, 512]):
    f: (bf16[32768, 1024], [bf16[32768, 512]]) = symm_mem.fused_all_gather_matmul.default(x, [b], 0, 'tp')
    p = f[1]
    y = p[0]
    s: bf16[1024, 512] = symm_mem.fused_matmul_reduce_scatter.default(a, b, 'sum', 0, 'tp')
    c: bf16[1024, 1024] = weft.copy_reduce_scatter.default(x, 'sum', 'other')
    w = wait(c)
    return [y, s, w]
"""


def test_symmetric_memory_takes_memory_of_the_device_that_the_allocator_does_not_count():
    shared = program(weft.parse(SHARED))
    shard, part, sent = 4096 * 1024 * 2, 8192 // 8 * 512 * 2, 4096 * 1024 * 2
    assert shared.symmetric_bytes == max(shard, 2 * part) + sent  # of each group, what its largest operator needs
    assert outside_of(shared) == {
        "CUDA context": CONTEXT_BYTES,
        "NCCL buffers": NCCL_BYTES,  # only the copies of `other` have a queue
        "symmetric memory": shared.symmetric_bytes,
    }
    assert program(step("tp")).symmetric_bytes == 0
