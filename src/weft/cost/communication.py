"""Analytic time of NCCL's collectives: the fastest of ring and tree with each of its protocols.

    time = base latency + steps x hop latency + bytes / bandwidth

LL sends eight bytes with a flag in them: little latency, at most half of the bandwidth. LL128 sends 120 of 128 bytes as
data and needs NVLink. Simple has all of the bandwidth and the most latency. A ring takes n - 1 steps (an all-reduce
twice as many), a tree goes through a node rank by rank and between nodes in log2 steps, and only all-reduces use it.

Constants are those of NCCL, src/graph/tuning.cc (ncclTunerConstantsDefaults), as PyTorch carries them too in
torch/_inductor/comm_analysis.py. Left out: NVLS, CollNet and PAT, and NCCL's correction of trees by message size, which
would let a larger message take less time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from weft.graph.ops import Kind

KINDS = frozenset({Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.ALL_REDUCE})
LL, LL128, SIMPLE = range(3)

TREE_BASE_US = (6.8, 14.0, 8.4)
RING_BASE_US = (6.6, 14.0, 8.4)
TREE_HOP_US = {"nvlink": (0.6, 1.25, 4.0), "pci": (1.0, 1.9, 4.0), "network": (5.0, 8.5, 14.0)}
RING_HOP_US = {"nvlink": (0.6, 1.9, 3.4), "pci": (1.0, 2.5, 5.7), "network": (2.7, 4.0, 14.0)}
NETWORK_OVERHEAD_US = (1.0, 1.0, 3.0)
"""The least that any step of a ring between nodes takes."""
NETWORK = "network"


@dataclass(frozen=True)
class Nccl:
    """What NCCL's model takes of a GPU. Bandwidths are for one node, two, and more."""

    num_channels: int
    ll_gbps: tuple[float, float, float]
    """Of all channels."""
    ring_ll128_gbps: tuple[float, float, float]
    """Of one channel, as the two below."""
    tree_ll128_gbps: tuple[float, float, float]
    tree_simple_gbps: tuple[float, float, float]


@dataclass(frozen=True)
class Crossing:
    """One level that a group crosses."""

    wire: str
    """`nvlink`, `pci` or `network`."""
    num_steps: int
    """Of a ring once around, those at this level."""
    num_joined: int
    """How many blocks of the level within it are joined into one."""
    bandwidth_gbps: float
    """Of the ring, as one rank sees it."""


def nccl_us(nccl: Nccl, kind: Kind, num_ranks: int, crossings: tuple[Crossing, ...], num_bytes: int) -> float:
    """The time of one collective of `KINDS`; `num_bytes` are those of the full tensor."""
    return min(
        latency + num_bytes / (bandwidth * 1e3)
        for latency, bandwidth in _choices(nccl, kind is Kind.ALL_REDUCE, num_ranks, crossings)
    )


def _choices(nccl: Nccl, both: bool, num_ranks: int, crossings: tuple[Crossing, ...]) -> Iterator[tuple[float, float]]:
    """Latency and bandwidth of every algorithm and protocol; `both` for an all-reduce, which scatters and gathers."""
    bus = min(each.bandwidth_gbps for each in crossings)
    num_nodes = _num_nodes(crossings)
    scale = min(num_nodes, 3) - 1
    num_steps = (2 if both else 1) * (num_ranks - 1)
    ring_bus = (
        min(nccl.ll_gbps[scale], bus * 0.5),
        min(bus * 120 / 128, nccl.num_channels * nccl.ring_ll128_gbps[scale]),
        bus,
    )
    tree_bus = (
        min(nccl.ll_gbps[scale], bus / 3.8),
        min(bus * (7 / 9 if num_nodes == 1 else 120 / 128), nccl.num_channels * nccl.tree_ll128_gbps[scale]),
        min(bus * 0.92, nccl.num_channels * nccl.tree_simple_gbps[scale]),
    )
    for protocol in (LL, LL128, SIMPLE):
        # PyTorch's validation on H100s: LL128 is not used between nodes.
        if protocol == LL128 and any(each.wire != "nvlink" for each in crossings):
            continue
        yield _ring_us(protocol, both, num_nodes, crossings), ring_bus[protocol] * num_ranks / num_steps
        if both:
            yield _tree_us(protocol, crossings), tree_bus[protocol] / 2


def _num_nodes(crossings: tuple[Crossing, ...]) -> int:
    num = 1
    for each in crossings:
        num *= each.num_joined if each.wire == NETWORK else 1
    return num


def _ring_us(protocol: int, both: bool, num_nodes: int, crossings: tuple[Crossing, ...]) -> float:
    least = NETWORK_OVERHEAD_US[protocol] if num_nodes > 1 else 0.0
    once = sum(each.num_steps * max(RING_HOP_US[each.wire][protocol], least) for each in crossings)
    return RING_BASE_US[protocol] + (2 if both else 1) * once


def _tree_us(protocol: int, crossings: tuple[Crossing, ...]) -> float:
    steps = (
        (each.num_joined.bit_length() - 1 if each.wire == NETWORK else each.num_joined - 1)
        * TREE_HOP_US[each.wire][protocol]
        for each in crossings
    )
    return TREE_BASE_US[protocol] + 2 * sum(steps)
