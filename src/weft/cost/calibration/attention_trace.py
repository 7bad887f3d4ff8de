"""Attention in a Chrome trace of torch.profiler: the rate of each kernel and direction, from operators with shapes.

The rate of long sequences follows from each shape by the constants of a known kernel, which say how much slower short
sequences and narrow heads are.

Contract: malformed events are ignored.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from statistics import median
from typing import Any, cast

from weft.compat import find_op, schema_of
from weft.cost.device import UNDESCRIBED, Device
from weft.cost.flops import FUSED_ATTENTION
from weft.cost.kernels import AttentionKernel, AttentionRate, AttentionShape

KERNELS = {"flash": "flash2", "cudnn": "cudnn"}
"""The kernel that an operator runs, by a part of its name."""
NAMESPACE = "aten::"
DTYPES = ("c10::bfloat16", "c10::half")
MIN_FLOPS = 1e9
"""Smallest attention that is used, in flops: smaller ones measure launches."""
NO_RATE = AttentionRate(1.0)


@dataclass(frozen=True)
class AttentionRun:
    """One run of an attention."""

    kernel: str
    shape: AttentionShape
    us: float

    def tflops(self, known: AttentionRate) -> float:
        """The rate of long sequences that this run shows, if others differ from it as the known kernel says."""
        expected_ns = replace(known, tflops=1.0).ns(self.shape)
        return expected_ns / 1000 / self.us


def attention_of(name: str, args: Mapping[str, Any]) -> tuple[str, AttentionShape] | None:
    """The kernel and the shape of an operator of the host; None if it is not attention or has no shapes."""
    kernel = next((kernel for part, kernel in KERNELS.items() if part in name and "attention" in name), None)
    target = find_op("aten", name.removeprefix(NAMESPACE), "default") if kernel is not None else None
    if kernel is None or target is None or not name.startswith(NAMESPACE):
        return None
    place = {argument.name: i for i, argument in enumerate(schema_of(target).arguments)}
    shapes, types, given = (args.get(key) for key in ("Input Dims", "Input type", "Concrete Inputs"))
    if not isinstance(shapes, list) or not isinstance(types, list) or not isinstance(given, list):
        return None
    query, key, value = (_sizes(cast(list[Any], shapes), place.get(each)) for each in ("query", "key", "value"))
    dtypes, values = cast(list[Any], types), cast(list[Any], given)
    first, causal = place.get("query", 0), place.get("is_causal")
    is_known = first < len(dtypes) and str(dtypes[first]).lower() in DTYPES and causal is not None
    if not is_known or causal is None or causal >= len(values) or {len(query), len(key), len(value)} != {4}:
        return None
    positions = -3 if name.removeprefix(NAMESPACE).startswith(FUSED_ATTENTION) else -2
    flops = 2 * prod(query[:-1]) * key[positions] * (query[-1] + value[-1])
    flops //= 2 if str(values[causal]).lower() == "true" else 1
    is_backward = "backward" in name
    flops = flops * 5 // 2 if is_backward else flops
    if flops < MIN_FLOPS:
        return None
    heads = prod(query[:-1]) // query[positions]
    return kernel, AttentionShape(flops, heads, query[positions], query[-1], is_backward)


def fitted_attention(runs: Iterable[AttentionRun], base: Device = UNDESCRIBED) -> tuple[AttentionKernel, ...]:
    """The kernels of a device with the measured rates; a kernel that it lacks needs both directions."""
    runs = list(runs)
    known = {kernel.name: kernel for kernel in base.attention}
    found: list[AttentionKernel] = []
    for name in dict.fromkeys(run.kernel for run in runs):
        own = known.get(name, AttentionKernel(name, NO_RATE, NO_RATE))
        rates = [
            _rate(runs, name, rate, is_backward) for is_backward, rate in ((False, own.forward), (True, own.backward))
        ]
        if name in known or None not in rates:
            forward, backward = rates
            found.append(AttentionKernel(name, forward or own.forward, backward or own.backward))
    return tuple(sorted(found, key=lambda kernel: kernel.name))


def _rate(runs: Sequence[AttentionRun], name: str, known: AttentionRate, is_backward: bool) -> AttentionRate | None:
    best: dict[AttentionShape, AttentionRun] = {}
    for run in runs:
        if run.kernel == name and run.shape.is_backward == is_backward:
            best[run.shape] = min(best.get(run.shape, run), run, key=lambda each: each.us)
    return replace(known, tflops=median(run.tflops(known) for run in best.values())) if best else None


def _sizes(shapes: Sequence[Any], i: int | None) -> list[int]:
    shape = shapes[i] if i is not None and i < len(shapes) else None
    sizes = cast(list[Any], shape) if isinstance(shape, list) else []
    return sizes if all(type(size) is int and 0 < size < 1 << 40 for size in sizes) else []
