"""Events of a profiled step, as torch.profiler writes them."""

from __future__ import annotations

from typing import Any

from tests.unit.cost.measured import event

Event = dict[str, Any]
COMPUTE, COMMUNICATION = 7, 20
"""Streams."""


def kernel(ts: float, us: float, *, stream: int = COMPUTE, correlation: int | None = None) -> Event:
    """A compute kernel."""
    args = {"stream": stream} | ({} if correlation is None else {"correlation": correlation})
    return {"ph": "X", "cat": "kernel", "name": "gemm", "ts": ts, "dur": us, "args": args}


def issue(ts: float, correlation: int) -> Event:
    """The call with which the host issues a kernel."""
    args = {"correlation": correlation}
    return {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": ts, "dur": 1.0, "args": args}


def collective(
    kind: str, shard: int, ts: float, us: float, *, num_ranks: int = 2, correlation: int | None = None
) -> Event:
    """A kernel of NCCL, bf16; `shard` as in `event`."""
    told = {"stream": COMMUNICATION} | ({} if correlation is None else {"correlation": correlation})
    return event(kind, shard, range(num_ranks), us, ts=ts, **told)


def bare(kind: str, ts: float, us: float) -> Event:
    """A kernel of NCCL without arguments, as in a CUDA graph."""
    name = f"ncclDevKernel_{kind}_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
    return {"ph": "X", "cat": "kernel", "name": name, "ts": ts, "dur": us, "args": {"stream": COMMUNICATION}}


def mark(number: int, ts: float, us: float) -> Event:
    """The profiler's mark of a step."""
    return {"ph": "X", "cat": "user_annotation", "name": f"ProfilerStep#{number}", "ts": ts, "dur": us}
