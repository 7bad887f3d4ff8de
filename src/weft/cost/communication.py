"""NCCL's collectives, priced analytically: the fastest of ring and tree with each of NCCL's protocols.

    time = base latency + steps x hop latency + bytes / bandwidth

LL sends eight bytes with a flag in them: low latency, at most half of the bandwidth. LL128 sends 120 of 128 bytes as
data and needs NVLink. Simple reaches the full bandwidth and has the highest latency. A ring takes n - 1 steps, twice as
many for an all-reduce. A tree goes through a node rank by rank and takes log2 steps between nodes; only all-reduces use
it.

The constants are NCCL's, from src/graph/tuning.cc (ncclTunerConstantsDefaults); PyTorch has them in
torch/_inductor/comm_analysis.py. The model leaves out CollNet and PAT, and NCCL's correction of trees by message size,
which would make some larger messages faster than smaller ones.

Between nodes, rings reach less than NCCL's own estimate: `network_share` gives the measured share for small and for
large messages. The time is the shorter of two lines, so it rises with the size and its slope never does. Switches that
add and copy (NVLS) make all-reduces faster, alone inside of a node and with a tree between nodes; the tree is no faster
than the network carries it.
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
"""Minimum time of any step of a ring between nodes, by protocol, in microseconds."""
NETWORK = "network"
NVLS_MIN_RANKS = 4
"""NCCL takes the switches of a node for more ranks than this."""
NVLS_TREE_SHARE = 0.8
"""Share of the network that all-reduces by switches and a tree reach: 160 GB/s of the full tensor over more than two
nodes with 400 GB/s each (h100.toml), where every byte leaves a node twice, on its way up and on its way down."""


@dataclass(frozen=True)
class Nccl:
    """Parameters of a GPU in NCCL's cost model. Bandwidths are for one node, two nodes, and more."""

    num_channels: int
    ll_gbps: tuple[float, float, float]
    """Total of all channels."""
    ring_ll128_gbps: tuple[float, float, float]
    """Of one channel; so are the two below."""
    tree_ll128_gbps: tuple[float, float, float]
    tree_simple_gbps: tuple[float, float, float]
    network_share: tuple[float, float] = (1.0, 1.0)
    """Share of the modelled bandwidth that rings between nodes reach, for small and for large messages."""
    network_large_bytes: int = 0
    """Bytes for each rank from which a message counts as large."""
    nvls_gbps: float = 0.0
    """Bandwidth of an all-reduce by the switches of a node, as bytes that one rank sends in a ring; 0: no such switch.
    """
    nvls_us: float = 0.0
    """Its latency."""
    nvls_tree_gbps: tuple[float, float] = (0.0, 0.0)
    """Full tensor per second of an all-reduce by switches and a tree, over two nodes and over more, if the network is
    fast enough; 0: not used."""
    nvls_tree_hop_us: float = 0.0
    """Its latency for each doubling of the number of nodes."""


@dataclass(frozen=True)
class Crossing:
    """One level that a group crosses."""

    wire: str
    """`nvlink`, `pci` or `network`."""
    num_steps: int
    """Steps at this level of one round of a ring."""
    num_joined: int
    """Number of inner blocks that the level joins into one."""
    bandwidth_gbps: float
    """Bandwidth of the ring for one rank."""


def nccl_us(nccl: Nccl, kind: Kind, num_ranks: int, crossings: tuple[Crossing, ...], num_bytes: int) -> float:
    """The time of one collective of `KINDS`; `num_bytes` is the size of the full tensor."""
    return min(
        latency + num_bytes / (bandwidth * 1e3)
        for latency, bandwidth in _choices(nccl, kind is Kind.ALL_REDUCE, num_ranks, crossings)
    )


def _nvls(nccl: Nccl, num_ranks: int, num_nodes: int, crossings: tuple[Crossing, ...]) -> Iterator[tuple[float, float]]:
    """Latency and bandwidth of all-reduces by switches, for groups of several ranks in each node."""
    if num_nodes == 1 and nccl.nvls_gbps and num_ranks > NVLS_MIN_RANKS:
        yield nccl.nvls_us, nccl.nvls_gbps * num_ranks / (2 * (num_ranks - 1))
    rate = nccl.nvls_tree_gbps[num_nodes > 2] if num_nodes > 1 and num_ranks > num_nodes else 0.0
    if rate:
        network = min(each.bandwidth_gbps for each in crossings if each.wire == NETWORK)
        num_sends = 2 if num_nodes > 2 else 1  # two nodes exchange their sums, each byte once
        latency = nccl.nvls_us + nccl.nvls_tree_hop_us * (num_nodes - 1).bit_length()
        yield latency, min(rate, network * NVLS_TREE_SHARE / num_sends)


def _lines(nccl: Nccl, latency: float, bandwidth: float, num_ranks: int) -> Iterator[tuple[float, float]]:
    """The lines whose minimum is the time of a ring between nodes."""
    small, large = nccl.network_share
    yield latency, bandwidth * small
    if large != small:
        meeting = nccl.network_large_bytes * num_ranks / (bandwidth * 1e3)
        yield latency + meeting * (1 / small - 1 / large), bandwidth * large


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
        # NCCL does not use LL128 between nodes, as PyTorch's validation on H100s found.
        if protocol == LL128 and any(each.wire != "nvlink" for each in crossings):
            continue
        ring = _ring_us(protocol, both, num_nodes, crossings), ring_bus[protocol] * num_ranks / num_steps
        yield from _lines(nccl, *ring, num_ranks) if num_nodes > 1 else (ring,)
        if both:
            yield _tree_us(protocol, crossings), tree_bus[protocol] / 2
    if both:
        yield from _nvls(nccl, num_ranks, num_nodes, crossings)


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
