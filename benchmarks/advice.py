"""The time that `weft advise` takes: models of the zoo, a Llama of Hugging Face, and a decoder like nanoGPT.

    python benchmarks/advice.py [--cases nanogpt,llama-8b-64] [--workers 2] [--json FILE]
    python benchmarks/advice.py --docs benchmarks/results/advice-DATE.json      writes its table into docs/advice.md

Processor seconds of all processes are what to compare on a machine that others use too. Each case that ends is added to
the file, in place of its earlier row. The Llama needs the package `transformers`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from bench_table import fill
from torch import Tensor, nn

import weft
from weft.quantities import duration_text

Made = tuple[Callable[[], nn.Module], tuple[Tensor, ...]]
PAGE = Path(__file__).parent.parent / "docs" / "advice.md"
BEGIN, END = "<!-- advice times: begin -->", "<!-- advice times: end -->"


@dataclass(frozen=True)
class Case:
    """One question to the advisor."""

    title: str
    model: str
    cluster: str
    num_tokens: int


CASES = {
    "nanogpt": Case("nanoGPT, 124M", "advice:nanogpt", "h100-1x8", 512 << 10),
    "llama-8b-64": Case("`zoo:llama-8b`", "zoo:llama-8b", "h100-8x8", 4 << 20),
    "llama-8b-256": Case("`zoo:llama-8b`", "zoo:llama-8b", "h100-32x8", 4 << 20),
    "hugging-face": Case("Llama 8B of Hugging Face", "advice:llama", "h100-8x8", 4 << 20),
    "deepseek-16b": Case("`zoo:deepseek-16b`", "zoo:deepseek-16b", "h100-4x8", 1 << 20),
}


class CausalSelfAttention(nn.Module):
    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.n_head = num_heads

    def forward(self, x: Tensor) -> Tensor:
        heads = (*x.shape[:2], self.n_head, -1)
        q, k, v = (part.view(heads).transpose(1, 2) for part in self.c_attn(x).chunk(3, 2))
        return self.c_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.c_fc, self.c_proj = nn.Linear(dim, 4 * dim, bias=False), nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(F.gelu(self.c_fc(x)))


class Block(nn.Module):
    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(dim, bias=False), nn.LayerNorm(dim, bias=False)
        self.attn, self.mlp = CausalSelfAttention(dim, num_heads), MLP(dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class NanoGPT(nn.Module):
    """GPT-2 124M without biases, with the names of nanoGPT's modules."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(50304, 768), nn.Embedding(1024, 768)
        self.h = nn.ModuleList(Block(768, 12) for _ in range(12))
        self.ln_f, self.lm_head = nn.LayerNorm(768, bias=False), nn.Linear(768, 50304, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.h:
            x = block(x)
        return F.cross_entropy(self.lm_head(self.ln_f(x)).flatten(0, 1).float(), targets.flatten())


def nanogpt(batch: int) -> Made:
    tokens = torch.zeros(batch, 1024, dtype=torch.long)
    return NanoGPT, (tokens, tokens)


class WithLoss(nn.Module):
    """A model of Hugging Face that returns its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        return self.model(input_ids=tokens, labels=labels, use_cache=False).loss


def llama(batch: int) -> Made:
    """The shape of Llama 3.1 8B."""
    home: Any = importlib.import_module("transformers")
    shape = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "vocab_size": 128256}
    config = home.LlamaConfig(**shape, num_attention_heads=32, num_key_value_heads=8)
    tokens = torch.zeros(batch, 4096, dtype=torch.long)
    return lambda: WithLoss(home.LlamaForCausalLM(config)), (tokens, tokens)


def processor_seconds() -> float:
    """Of this process, and of those that it started and that ended."""
    used = [resource.getrusage(each) for each in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def measure(name: str, workers: int) -> dict[str, Any]:
    """One row: the time, and what was advised."""
    case = CASES[name]
    num_planned = 0

    def told(text: str, done: int, total: int) -> None:
        nonlocal num_planned
        num_planned += text.startswith("planned")
        print(f"{done}/{total} {processor_seconds():.0f} s: {text}", flush=True)

    wall, used = time.perf_counter(), processor_seconds()
    found = weft.advise(case.model, case.cluster, case.num_tokens, workers=workers, told=told)
    row: dict[str, Any] = {"case": name, "workers": workers, "cores": os.cpu_count(), "torch": torch.__version__}
    row |= {"wall_s": time.perf_counter() - wall, "processor_s": processor_seconds() - used}
    row |= {"num_layouts": len(found.ranked) + len(found.left_out), "num_planned": num_planned}
    row |= {"best": found.best.layout.text, "step_us": found.best.found.step_us, "load": os.getloadavg()[0]}
    print("\n".join(found.lines()), flush=True)
    return row


def page(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as a table in Markdown."""
    lines = [
        "| model | cluster | tokens | layouts | planned | processor time | best | step |",
        "|---|---|--:|--:|--:|--:|---|--:|",
    ]
    for row in rows:
        case = CASES[row["case"]]
        tokens = f"{case.num_tokens >> 20}M" if case.num_tokens >= 1 << 20 else f"{case.num_tokens >> 10}K"
        lines.append(
            f"| {case.title} | `{case.cluster}` | {tokens} | {row['num_layouts']} | {row['num_planned']}"
            f" | {row['processor_s']:.0f} s | {row['best']} | {duration_text(row['step_us'])} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--json", type=Path, help="add the rows to this file")
    parser.add_argument("--docs", type=Path, help="write the rows of this file into the page")
    options = parser.parse_args()
    if options.docs is not None:
        fill(PAGE, page(json.loads(options.docs.read_text())), BEGIN, END)
        return
    for name in options.cases.split(","):
        row = measure(name, options.workers)
        print(json.dumps(row, indent=1), flush=True)
        if options.json is not None:
            known = json.loads(options.json.read_text()) if options.json.exists() else []
            rows = {each["case"]: each for each in [*known, row]}
            ordered = [rows[case] for case in CASES if case in rows]
            options.json.write_text(json.dumps(ordered, indent=1) + "\n")


if __name__ == "__main__":
    main()
