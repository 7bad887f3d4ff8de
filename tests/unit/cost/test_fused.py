"""Operators that multiply while they communicate: priced by the copies and products that they consist of."""

from __future__ import annotations

from dataclasses import replace

import pytest

import weft
from weft.cost.cluster import Cluster
from weft.cost.prices import price
from weft.graph.dag import Dag
from weft.graph.groups import read_groups

H100 = Cluster.load("h100-8")
GATHER = """group('tp', size=4)

def graph(x: bf16[{rows}, 4096], b: bf16[4096, 8192], c: bf16[4096, 8192]):
    f: (bf16[16384, 4096], [{types}]) = symm_mem.fused_all_gather_matmul.default(x, [{rights}], 0, 'tp')
    p = f[1]
    y = p[0]
    return [y]
"""
SCATTER = """group('tp', size=4)

def graph(a: bf16[{rows}, 8192], b: bf16[8192, 4096]):
    f: bf16[1024, 4096] = symm_mem.fused_matmul_reduce_scatter.default(a, b, 'sum', 0, 'tp')
    return [f]
"""


def gathered(*rights: str) -> str:
    return GATHER.format(rows=4096, rights=", ".join(rights), types=", ".join(["bf16[16384, 8192]"] * len(rights)))


def fused_us(listing: str, cluster: Cluster = H100) -> float:
    module = weft.parse(listing)
    dag = Dag(module.graph)
    prices = price(dag, read_groups(module), cluster)
    (i,) = prices.collective_ns
    assert prices.sources[i] == "symmetric"
    return prices.collective_ns[i] / 1000


def slower(gbps: float, sm_share: float = 0.0) -> Cluster:
    """The cluster with slower copies."""
    level = H100.levels[0]
    assert level.symmetric is not None
    link = replace(level.symmetric.link, bandwidth_gbps=gbps)
    return replace(H100, levels=(replace(level, symmetric=replace(level.symmetric, link=link, sm_share=sm_share)),))


def test_large_products_hide_the_copies_of_a_gather():
    one, two = (fused_us(gathered(*rights)) for rights in ("b", "bc"))
    assert two == pytest.approx(2 * one, rel=0.05)
    assert fused_us(gathered("b"), slower(300.0)) == one


def test_slow_copies_determine_the_time_of_a_gather():
    num_bytes = 4096 * 4096 * 2
    found = fused_us(gathered("b"), slower(10.0))
    copies = 3 * (7.1 + num_bytes / 10e3)
    assert copies < found < copies + fused_us(gathered("b"))


def test_a_scatter_sums_the_parts_of_all_ranks():
    device = H100.device
    assert device.memory_gbps is not None
    summed = 5 * 1024 * 4096 * 2 / (device.memory_gbps * device.memory_efficiency) / 1e3
    product = 2 * 4096 * (8192 + device.product_overhead_terms) * 4096 / (989.5e6 * device.matmul_efficiency)
    kernels = 5 * device.kernel_us
    assert fused_us(SCATTER.format(rows=4096)) == pytest.approx(product + summed + kernels, rel=0.001)


def test_copies_by_multiprocessors_slow_the_products():
    copied, multiplied = (fused_us(SCATTER.format(rows=4096), slower(332.0, share)) for share in (0.0, 0.1))
    assert copied < multiplied < copied / 0.9 + 1


def test_products_slow_only_while_copies_run():
    level = H100.levels[0]
    assert level.symmetric is not None
    slowed = replace(H100, levels=(replace(level, symmetric=replace(level.symmetric, slowdown=0.25)),))
    product_us = 2 * 4096 * 8192 * 4096 / (989.5e6 * H100.device.matmul_efficiency) / 4
    copy_us = 7.1 + 1024 * 4096 * 2 / 332e3
    assert copy_us < product_us
    added = fused_us(SCATTER.format(rows=4096), slowed) - fused_us(SCATTER.format(rows=4096))
    assert added == pytest.approx(3 * copy_us * (1 - 1 / 1.25), rel=0.01)
    fast = {"slowdown": 0.25, "link": replace(level.symmetric.link, bandwidth_gbps=10.0)}
    waiting = replace(H100, levels=(replace(level, symmetric=replace(level.symmetric, **fast)),))
    assert fused_us(SCATTER.format(rows=4096), waiting) == fused_us(SCATTER.format(rows=4096), slower(10.0))
