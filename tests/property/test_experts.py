"""Random mixtures of experts, routed at random, to one rank, or to few experts: planned and split, nothing changes.

`make test` runs two programs of each kind; `make test-full` (WEFT_FUZZ=full) runs 250.
"""

from __future__ import annotations

import os
from math import prod
from random import Random
from typing import Any

import pytest
import torch
from torch.fx import GraphModule
from torch.utils._python_dispatch import TorchDispatchMode

import weft
from weft import zoo
from weft.graph.groups import read_groups
from weft.verification.comparison import example_inputs
from weft.verification.virtual.cluster import VirtualCluster

NUM_SEEDS = 250 if os.environ.get("WEFT_FUZZ") == "full" else 2
WIDE = {"compute_dtype": torch.float64, "reduce_dtype": torch.float64}
"""Rounding then never decides where a token goes."""
MAX_ERROR, MAX_EXPERT_ERROR = 1e-6, 2**-6
"""Relative errors of chunks that are added up: of all values, and of gradients of experts, whose products are bf16."""


def program(rng: Random) -> tuple[GraphModule, dict[str, int]]:
    """A training step of a small random mixture, and its mesh."""
    mesh = rng.choice([{"dp": 1, "ep": 2}, {"dp": 2, "ep": 2}, {"dp": 1, "ep": 4}])
    is_latent = rng.random() < 0.3
    heads = rng.choice([1, 2])
    shape = {
        "num_layers": rng.choice([1, 1, 2]),
        "dim": 16 * heads,
        "ffn_dim": rng.choice([16, 48]),
        "num_heads": heads,
        "num_kv_heads": heads if is_latent else 1,
        "vocabulary": 64,
        "sequence": rng.choice([8, 16]),
        "num_experts": mesh["ep"] * rng.choice([1, 2, 3]),
        "num_chosen": rng.choice([1, 2]),
        "num_shared": rng.choice([0, 1]),
    }
    if is_latent:
        shape |= {"num_dense": rng.choice([0, 1]), "dense_ffn_dim": 32, "query_latent_width": rng.choice([0, 8])}
    options: dict[str, Any] = {"batch": rng.choice([2, 4, 6]), "reshard": rng.choice(["always", "never"])}
    model, parallel = "deepseek-debug" if is_latent else "dropless-debug", "ep-fsdp"
    if heads == 2 and rng.random() < 0.3:
        parallel, mesh, shape["num_kv_heads"] = "ep-tp", {"ep": 2, "tp": 2}, 2
    return zoo.load(model, parallel, mesh=mesh, **shape, **options, **WIDE), mesh


def dense_program(rng: Random) -> tuple[GraphModule, dict[str, int]]:
    """A training step of a small random decoder without experts, under FSDP and tensor parallelism, and its mesh."""
    mesh = {"dp": rng.choice([1, 2]), "tp": 2}
    shape = {
        "num_layers": rng.choice([1, 2]),
        "dim": 32,
        "ffn_dim": rng.choice([16, 48]),
        "num_heads": 2,
        "num_kv_heads": 2,
        "vocabulary": 64,
        "sequence": rng.choice([8, 16]),
    }
    options: dict[str, Any] = {"batch": rng.choice([2, 4, 6]), "reshard": rng.choice(["always", "never"])}
    return zoo.load("llama-debug", "fsdp-tp", mesh=mesh, **shape, **options, **WIDE), mesh


def inputs_of(module: GraphModule, num_ranks: int, rng: Random) -> list[list[Any]]:
    """Random inputs. Equal scores send all tokens to the same experts; two of several rows favour two experts."""
    given = example_inputs(module, num_ranks, seed=rng.randrange(1000))
    routing = rng.choice(["random", "one rank", "few experts"])
    names = [node.name for node in module.graph.nodes if node.op == "placeholder"]
    for k in (k for k, name in enumerate(names) if "router" in name):
        for inputs in given:
            if routing == "one rank":
                inputs[k] = torch.zeros_like(inputs[k])
            elif routing == "few experts":
                inputs[k] = inputs[k].clone()
                inputs[k].view(-1)[inputs[k].numel() // 2 :] = 0.0
    return given


class ExactProducts(TorchDispatchMode):
    """Grouped products in f64, row by row: the kernel rounds a row differently in a group of another size."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten._grouped_mm.default:
            return func(*args, **(kwargs or {}))
        left, right, ends = args[0].double(), args[1].double(), args[2].tolist()
        groups = [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
        if right.dim() == 2:  # gradients of weights: the groups divide the sum
            return torch.stack([left[:, group] @ right[group] for group in groups]).to(args[0].dtype)
        parts = [(left[group, :, None] * right[k]).sum(1) for k, group in enumerate(groups)]
        rest = left.new_zeros(left.shape[0] - ends[-1], right.shape[2])
        return torch.cat([*parts, rest]).to(args[0].dtype)


def errors(before: GraphModule, after: GraphModule, num_ranks: int, inputs: list[list[Any]]) -> dict[str, float]:
    """The largest relative error of each output over the ranks."""
    names = ["loss", *(node.name for node in before.graph.nodes if node.op == "placeholder")]
    found: dict[str, float] = {}
    results = [VirtualCluster(num_ranks).run(module, inputs, read_groups(module)) for module in (before, after)]
    for old, new in zip(*results, strict=True):
        for name, first, second in zip(names, old.outputs, new.outputs, strict=False):
            error = float((first - second).abs().max() / first.abs().max().clamp_min(1e-30))
            found[name] = max(found.get(name, 0.0), error)
    return found


@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_a_planned_mixture_computes_the_same(seed: int):
    rng = Random(seed)
    module, mesh = program(rng)
    inputs = inputs_of(module, prod(mesh.values()), rng)
    planned = weft.optimize(module, "h100-8x8", verify="equivalence", sizes="balanced").module
    assert weft.verify(module, planned, mesh=mesh, inputs=inputs).equal


@pytest.mark.parametrize("seed", range(1000, 1000 + NUM_SEEDS))
def test_a_step_in_chunks_computes_the_same(seed: int):
    rng = Random(seed)
    module, mesh = dense_program(rng) if rng.random() < 0.2 else program(rng)
    num_ranks = prod(mesh.values())
    inputs = inputs_of(module, num_ranks, rng)
    batch = next(node.meta["val"].shape[0] for node in module.graph.nodes if node.name.endswith("tokens"))
    chunks = rng.choice([n for n in (2, 3, 4, 6) if batch % n == 0])
    split = weft.optimize(module, pipeline=f"split-batch{{chunks={chunks}}}")
    assert split.report.applied, [decision.sentence for decision in split.report.declined]
    planned = weft.optimize(split.module, "h100-8x8", verify="equivalence", sizes="balanced").module
    with ExactProducts():
        found = errors(module, planned, num_ranks, inputs)
    for name, error in found.items():
        assert error < (MAX_EXPERT_ERROR if "experts" in name else MAX_ERROR), name
