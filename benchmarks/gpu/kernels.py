"""Times of single kernels on one GPU, by shape and dtype: what the constants of a device are fitted to.

    PYTHONPATH=src python benchmarks/gpu/kernels.py --json kernels.json [--only products attention ...]
    PYTHONPATH=src python benchmarks/gpu/kernels.py --device cpu --tiny      # the whole flow, without a GPU

Every time is the median of several timed batches of launches on random data, in microseconds for one launch. Inputs
rotate among copies that exceed the cache together. Products run in the three layouts of training: forward (x W^T),
input gradient (g W) and weight gradient (g^T x). Host times are the time to issue an operator without waiting for it.
"""
# ruff: noqa: B023, E731 -- closures over loop variables run before the next iteration

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed.fsdp  # registers the operators of sharded training
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

CACHE_BYTES = 256 << 20
"""Inputs rotate among copies of at least this size in total: several times the cache of a GPU."""
BATCHES, BATCH_MS = 5, 12.0
"""Timed batches for each kernel, and their target length."""

TOKENS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
LINEARS = (
    (512, 512),
    (1024, 1024),
    (1024, 4096),
    (2048, 2048),
    (2048, 5632),
    (2048, 8192),
    (4096, 1024),
    (4096, 4096),
    (4096, 14336),
    (14336, 4096),
    (8192, 1024),
    (8192, 3584),
    (8192, 8192),
    (8192, 28672),
    (28672, 8192),
    (4096, 131072),
)
"""Features in and out of linear layers of decoders, some as tensor parallelism splits them."""
ODD = (
    (4096, 4096, 4000),
    (4096, 4224, 4096),
    (4224, 4224, 4096),
    (1000, 4096, 4096),
    (132 * 128, 4096, 4096),
    (17000, 4096, 4096),
)
ATTENTION = (
    (8, 12, 12, 1024, 64),
    (4, 16, 16, 2048, 128),
    (2, 32, 8, 2048, 128),
    (1, 32, 8, 4096, 128),
    (4, 32, 32, 4096, 64),
    (1, 32, 8, 8192, 128),
    (2, 32, 32, 8192, 128),
    (1, 64, 8, 8192, 128),
    (1, 4, 1, 8192, 128),
    (1, 32, 8, 16384, 128),
)
"""Batch, query heads, key heads, positions, width."""
SIZES = tuple(1 << k for k in (10, 16, 18, 20, 21, 22, 23, 24, 26, 28))
"""Elements of memory-bound kernels."""


class Bench:
    """Times kernels on one device."""

    def __init__(self, device: str, tiny: bool) -> None:
        self.device, self.tiny = device, tiny

    def random(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(*shape, device=self.device, dtype=dtype)

    def us(self, run: Callable[[int], Any]) -> dict[str, float]:
        """Median, least and most of the time of `run(k)` for k = 0, 1, 2 ..."""
        for k in range(3):
            run(k)
        once = self._timed(run, 3)
        num = max(1, min(2000, round(BATCH_MS * 1000 / max(once, 1.0)))) if not self.tiny else 1
        found = sorted(self._timed(run, num) for _ in range(BATCHES))
        return {"us": statistics.median(found), "min_us": found[0], "max_us": found[-1]}

    def _timed(self, run: Callable[[int], Any], num: int) -> float:
        if self.device == "cpu":
            start = time.perf_counter()
            for k in range(num):
                run(k)
            return (time.perf_counter() - start) / num * 1e6
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        for k in range(num):
            run(k)
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / num * 1e3

    def graphed_us(self, run: Callable[[int], Any]) -> dict[str, float]:
        """The same, replayed from a CUDA graph, so that issuing takes no time: for short kernels."""
        if self.device == "cpu":
            return self.us(run)
        run(0)
        torch.cuda.synchronize()
        graph, num = torch.cuda.CUDAGraph(), 100
        with torch.cuda.graph(graph):
            for k in range(num):
                run(k)
        timed = self.us(lambda _: graph.replay())
        return {key: us / num for key, us in timed.items()}

    def copies(self, make: Callable[[], Any], num_bytes: int) -> list[Any]:
        """Copies of the inputs that exceed the cache together."""
        return [make() for _ in range(1 if self.tiny else max(1, min(16, CACHE_BYTES // max(num_bytes, 1))))]


def products(bench: Bench) -> Iterator[dict[str, Any]]:
    """bf16 products of training, and a few of other dtypes."""
    shapes = [(m, n, k, "linear") for (k, n), m in itertools.product(LINEARS, TOKENS)]
    shapes += [(m, n, k, "odd") for m, n, k in ODD]
    if bench.tiny:
        shapes = [(64, 32, 16, "linear")]
    for m, n, k, what in shapes:
        if m * n > 1 << 32:
            continue
        num_bytes = 2 * (m * k + n * k + m * n)
        sets = bench.copies(lambda: (bench.random(m, k), bench.random(n, k), bench.random(m, n)), num_bytes)

        def pick(i: int) -> tuple[Tensor, Tensor, Tensor]:
            return sets[i % len(sets)]

        for layout, run in (
            ("forward", lambda i: torch.mm(pick(i)[0], pick(i)[1].t())),
            ("input", lambda i: torch.mm(pick(i)[2], pick(i)[1])),
            ("weight", lambda i: torch.mm(pick(i)[2].t(), pick(i)[0])),
        ):
            if what == "odd" and layout != "forward":
                continue
            yield {"m": m, "n": n, "k": k, "layout": layout, "dtype": "bf16", **bench.us(run)}
    for dtype, name in ((torch.float32, "f32"), (torch.float16, "f16")):
        for size in (64,) if bench.tiny else (1024, 2048, 4096, 8192):
            a, b = bench.random(size, size, dtype=dtype), bench.random(size, size, dtype=dtype)
            yield {
                "m": size,
                "n": size,
                "k": size,
                "layout": "input",
                "dtype": name,
                **bench.us(lambda _: torch.mm(a, b)),
            }


def fp8(bench: Bench) -> Iterator[dict[str, Any]]:
    """fp8 products with tensor-wise scales."""
    scale = torch.ones((), device=bench.device)
    for m, n, k in (
        (1024, 4096, 4096),
        (4096, 4096, 4096),
        (8192, 4096, 14336),
        (16384, 14336, 4096),
        (16384, 28672, 8192),
        (16384, 8192, 28672),
    ):
        a = bench.random(m, k).to(torch.float8_e4m3fn)
        b = bench.random(n, k).to(torch.float8_e4m3fn)
        run = lambda _, a=a, b=b: torch._scaled_mm(a, b.t(), scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16)
        yield {"m": m, "n": n, "k": k, "layout": "forward", "dtype": "fp8", **bench.us(run)}


def grouped(bench: Bench) -> Iterator[dict[str, Any]]:
    """Products of several experts in one kernel."""
    for groups, rows, n, k in (
        (8, 2048, 14336, 4096),
        (64, 256, 1408, 2048),
        (64, 1024, 1408, 2048),
        (8, 8192, 1408, 2048),
    ):
        a, b = bench.random(groups * rows, k), bench.random(groups, n, k)
        ends = torch.arange(rows, rows * groups + 1, rows, device=bench.device, dtype=torch.int32)
        run = lambda _, a=a, b=b, ends=ends: torch._grouped_mm(a, b.transpose(-2, -1), offs=ends)
        yield {"groups": groups, "m": rows, "n": n, "k": k, "dtype": "bf16", **bench.us(run)}


def attention(bench: Bench) -> Iterator[dict[str, Any]]:
    """Causal attention, forward and backward, by kernel."""
    backends = {"flash2": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
    if bench.device == "cpu":
        backends = {"flash2": SDPBackend.FLASH_ATTENTION}
    for shape, (name, backend) in itertools.product(
        ((1, 4, 2, 64, 16),) if bench.tiny else ATTENTION, backends.items()
    ):
        batch, heads, kv_heads, length, width = shape
        q, k, v = (
            bench.random(batch, length, each, width).transpose(1, 2).requires_grad_()
            for each in (heads, kv_heads, kv_heads)
        )

        def forward(
            q: Tensor = q, k: Tensor = k, v: Tensor = v, heads: int = heads, kv_heads: int = kv_heads
        ) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=heads != kv_heads)

        row = dict(zip(("batch", "heads", "kv_heads", "positions", "width"), shape, strict=True))
        try:
            with sdpa_kernel(backend):
                with torch.no_grad():
                    yield {**row, "kernel": name, "pass": "forward", **bench.us(lambda _: forward())}
                out = forward()
                grad = torch.randn_like(out)
                run = lambda _, out=out, grad=grad, inputs=(q, k, v): torch.autograd.grad(
                    out, inputs, grad, retain_graph=True
                )
                yield {**row, "kernel": name, "pass": "backward", **bench.us(run)}
        except RuntimeError as error:
            yield {**row, "kernel": name, "pass": "failed", "error": str(error)[:200]}


def memory(bench: Bench) -> Iterator[dict[str, Any]]:
    """Memory-bound operators as eager runs them, with the bytes that they read and write."""
    for num in (64,) if bench.tiny else SIZES:
        pairs = bench.copies(
            lambda: (bench.random(num), bench.random(num), bench.random(num, dtype=torch.float32)), 8 * num
        )
        rows = max(1, num // 4096)
        for name, num_bytes, run in (
            ("copy", 4 * num, lambda i: pairs[i % len(pairs)][0].clone()),
            ("add", 6 * num, lambda i: torch.add(*pairs[i % len(pairs)][:2])),
            ("widen", 6 * num, lambda i: pairs[i % len(pairs)][0].float()),
            ("narrow", 6 * num, lambda i: pairs[i % len(pairs)][2].bfloat16()),
            ("silu", 4 * num, lambda i: F.silu(pairs[i % len(pairs)][0])),
            ("f32 mul", 8 * num, lambda i: pairs[i % len(pairs)][2] * 1.5),
            ("f32 row mean", 4 * num, lambda i: pairs[i % len(pairs)][2].view(rows, -1).mean(-1)),
            ("transposed copy", 4 * num, lambda i: pairs[i % len(pairs)][0].view(rows, -1).t().contiguous()),
            ("column sum", 4 * num, lambda i: pairs[i % len(pairs)][2].view(rows, -1).sum(0)),
            ("fill", 2 * num, lambda i: torch.zeros_like(pairs[i % len(pairs)][0])),
        ):
            yield {
                "op": name,
                "elements": num,
                "bytes": num_bytes,
                **(bench.graphed_us(run) if num < 1 << 24 else bench.us(run)),
            }


def parts(bench: Bench) -> Iterator[dict[str, Any]]:
    """Parts of a decoder, eager and compiled, forward and backward together where they have a gradient."""
    tokens, dim, ffn, vocabulary = (64, 32, 64, 128) if bench.tiny else (16384, 4096, 14336, 131072)

    def norm(x: Tensor, w: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype) * w

    def fused_norm(x: Tensor, w: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), w, 1e-5)

    def gate(a: Tensor, b: Tensor) -> Tensor:
        return F.silu(a) * b

    def rope(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        return (x * cosines + x.roll(x.shape[-1] // 2, -1) * sines).to(x.dtype)

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.float(), targets)

    x, w = bench.random(tokens, dim), bench.random(dim)
    heads = bench.random(1, tokens, dim // 16 if bench.tiny else dim // 128, 16 if bench.tiny else 128)
    table = bench.random(tokens, 1, heads.shape[-1], dtype=torch.float32)
    cases: list[tuple[str, Any, list[Tensor]]] = [
        ("rms norm", norm, [x, w]),
        ("fused rms norm", fused_norm, [x, w]),
        ("swiglu", gate, [bench.random(tokens, ffn), bench.random(tokens, ffn)]),
        ("rope", rope, [heads, table, table]),
        (
            "cross entropy",
            loss,
            [bench.random(tokens // 2, vocabulary), torch.randint(0, vocabulary, (tokens // 2,), device=bench.device)],
        ),
        (
            "embedding",
            lambda t, i: F.embedding(i, t),
            [bench.random(vocabulary, dim), torch.randint(0, vocabulary, (tokens,), device=bench.device)],
        ),
    ]
    for name, function, inputs in cases:
        for way in ("eager", "compiled"):
            torch._dynamo.reset()
            call = torch.compile(function) if way == "compiled" else function
            given = [each.detach().requires_grad_(each.dtype == torch.bfloat16) for each in inputs]
            with torch.no_grad():
                yield {
                    "part": name,
                    "way": way,
                    "pass": "forward",
                    **bench.us(lambda _, call=call, given=given: call(*given)),
                }
            wanted = [each for each in given if each.requires_grad]

            def both(_: int, call: Any = call, given: list[Tensor] = given, wanted: list[Tensor] = wanted) -> None:
                out = call(*given)
                torch.autograd.grad(out, wanted, torch.ones_like(out))

            yield {"part": name, "way": way, "pass": "both", **bench.us(both)}


def optimizers(bench: Bench) -> Iterator[dict[str, Any]]:
    """AdamW over tensors of one size."""
    for num, size in ((2, 64),) if bench.tiny else ((100, 1 << 14), (100, 1 << 20), (20, 1 << 24), (10, 1 << 26)):
        for way in ("foreach", "fused", "single"):
            tensors = [torch.nn.Parameter(bench.random(size, dtype=torch.float32)) for _ in range(num)]
            for each in tensors:
                each.grad = torch.randn_like(each)
            options: dict[str, Any] = {"foreach": way == "foreach", "fused": way == "fused"}
            adam = torch.optim.AdamW(tensors, lr=1e-3, **options)
            yield {"optimizer": way, "tensors": num, "elements": size, **bench.us(lambda _, adam=adam: adam.step())}
            start = time.perf_counter()
            adam.step()
            yield {
                "optimizer": f"{way}, host",
                "tensors": num,
                "elements": size,
                "us": (time.perf_counter() - start) * 1e6,
            }


def exchanges(bench: Bench) -> Iterator[dict[str, Any]]:
    """The copies that sharded training makes around its collectives."""
    ranks = 8
    sizes = (
        [64, 128]
        if bench.tiny
        else [4096 * 4096, 1024 * 4096, 1024 * 4096, 4096 * 4096, 14336 * 4096, 14336 * 4096, 14336 * 4096]
    )
    flat = bench.random(ranks * sum(sizes) // ranks)
    outs = [torch.empty(ranks, size // ranks, device=bench.device, dtype=torch.bfloat16) for size in sizes]
    splits = [size // ranks for size in sizes]
    split = lambda _: torch.ops.fsdp.split_with_sizes_copy(flat.view(ranks, -1), splits, dim=1, out=outs)
    try:
        yield {"copy": "out of a gathered buffer", "bytes": 4 * sum(sizes), **bench.us(split)}
    except (AttributeError, RuntimeError) as error:
        yield {"copy": "out of a gathered buffer", "error": str(error)[:200]}
    grads = [
        bench.random(size // 4096 if not bench.tiny else 8, 4096 if not bench.tiny else size // 8) for size in sizes
    ]
    cat = lambda _: torch._chunk_cat([each.float() for each in grads], 0, ranks)
    yield {"copy": "cast, then chunk_cat", "bytes": 16 * sum(sizes), **bench.us(cat)}
    out = torch.empty(ranks, sum(splits), device=bench.device, dtype=torch.float32)
    into = lambda _: torch._chunk_cat(grads, 0, ranks, out=out)
    try:
        yield {"copy": "chunk_cat with cast", "bytes": 6 * sum(sizes), **bench.us(into)}
    except RuntimeError as error:
        yield {"copy": "chunk_cat with cast", "error": str(error)[:200]}


def host(bench: Bench) -> Iterator[dict[str, Any]]:
    """Time to issue operators, and the gap between kernels."""
    small, wide = bench.random(64, 64).requires_grad_(), bench.random(64, 64)
    num = 2000 if not bench.tiny else 10

    def issue(run: Callable[[], Any]) -> float:
        for _ in range(20):
            run()
        found: list[float] = []
        for _ in range(5):
            if bench.device != "cpu":
                torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(num):
                run()
            found.append((time.perf_counter() - start) / num * 1e6)
        return statistics.median(found)

    def train() -> None:
        x = small
        for _ in range(10):
            x = x * 1.01
        torch.autograd.grad(x, small, wide)

    def module() -> None:
        F.linear(small, wide).relu_()

    yield {"host": "one add without gradient", "us": issue(lambda: torch.add(wide, wide))}
    yield {"host": "one product without gradient", "us": issue(lambda: torch.mm(wide, wide))}
    yield {"host": "ten multiplications, forward and backward", "us": issue(train)}
    yield {"host": "linear and relu with gradient", "us": issue(module)}
    yield {"host": "view with gradient", "us": issue(lambda: small.view(-1))}
    yield {"device": "one add from a graph", **bench.graphed_us(lambda _: torch.add(wide, wide))}
    yield {"device": "one add from the host", **bench.us(lambda _: torch.add(wide, wide))}


def sustained(bench: Bench) -> Iterator[dict[str, Any]]:
    """A product that runs for seconds: the clock after the power limit sets in."""
    size, seconds = (64, 0.1) if bench.tiny else (8192, 6.0)
    a, b = bench.random(size, size), bench.random(size, size)
    start = time.perf_counter()
    while (passed := time.perf_counter() - start) < seconds:
        yield {"m": size, "n": size, "k": size, "after_s": round(passed, 2), **bench.us(lambda _: torch.mm(a, b))}
        for _ in range(200 if not bench.tiny else 1):
            torch.mm(a, b)


PARTS = (products, attention, memory, parts, optimizers, exchanges, host, fp8, grouped, sustained)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the times here")
    parser.add_argument("--only", nargs="+", choices=[part.__name__ for part in PARTS], help="measure these parts")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small shapes, once: to try the script")
    given = parser.parse_args()
    bench = Bench(given.device, given.tiny)
    found: dict[str, Any] = {
        "date": datetime.now(UTC).date().isoformat(),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if given.device == "cuda" else "cpu",
    }
    for part in PARTS:
        name = part.__name__
        if (given.only and name not in given.only) or (given.device == "cpu" and name in ("fp8", "grouped")):
            continue
        start = time.perf_counter()
        try:
            found[name] = []
            for row in part(bench):
                found[name].append(row)
        except (RuntimeError, AttributeError, TypeError) as error:
            found[name].append({"error": f"{type(error).__name__}: {error}"[:300]})
        print(f"{name}: {len(found[name])} rows, {time.perf_counter() - start:.0f} s", flush=True)
        if given.json:
            given.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
