"""Activation checkpointing of blocks: which results backward finds saved, and which it computes again.

none        backward finds everything that it needs
full        a block keeps only its input
selective   the policy of torchtitan for single operators: of the matrix products of a block, in the order of forward,
            the first, third, fifth ... are saved, and the others are computed again; results of attention and of
            reduce-scatters, and the largest magnitudes that scale fp8 products, are saved; everything else, the fp8
            products included, is computed again
products    as selective, but every matrix product is saved: the default policy of torchtitan's graph trainer
attention   as full, but the results of attention are saved: the policy `full` of that trainer, which saves every
            operator that torch tags as random
layer       every second block is `full`

FSDP gathers the weights of a block once more in backward, or keeps them. Checkpointing never changes that number:
FSDP2 computes a block again while its weights are gathered.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from weft.zoo.parallel.collectives import ALL_GATHER, REDUCE_SCATTER, WAIT

__tracebackhide__ = True  # errors should show a line of the model

CHECKPOINTS = ("none", "full", "selective", "products", "attention", "layer")
PRODUCTS = frozenset({torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default})
SAVED = frozenset({REDUCE_SCATTER, torch.ops.aten.max.default})
ATTENTION = "aten::_scaled_dot_product_"
"""Start of the names of all attention kernels: flash, efficient, cuDNN, and that of the CPU."""


@dataclass(frozen=True)
class Recomputation:
    """The part of a block that backward computes again."""

    mode: str
    """`full`, `selective`, `products` or `attention`."""
    kept_groups: frozenset[str] = frozenset()
    """Run-time names of the groups whose gathered weights are kept."""


def recomputation_of(mode: str, block: int) -> Recomputation | None:
    """The part of the block of this number that backward computes again under a mode of checkpointing."""
    if mode == "none" or (mode == "layer" and block % 2 == 0):
        return None
    return Recomputation("full" if mode == "layer" else mode)


def keep_gathered(block: nn.Module, groups: frozenset[str]) -> None:
    """Let a checkpointed block keep the weights that it gathers in these groups."""
    recomputation = recomputation_in(block)
    if recomputation is not None:
        block.recomputation = replace(recomputation, kept_groups=groups)  # type: ignore[assignment]


def recomputation_in(block: nn.Module) -> Recomputation | None:
    """The part of a module that backward computes again; None if the module saves all that backward needs."""
    return getattr(block, "recomputation", None)


def run_block(block: nn.Module, *args: Any) -> Any:
    """The result of a block, which saves what its recomputation leaves."""
    recomputation = recomputation_in(block)
    return block(*args) if recomputation is None else run_again(recomputation, block, args, {})


def run_again(
    recomputation: Recomputation,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    changes_values: bool = False,
) -> Any:
    """The result of a function; backward computes a part of it again.

    `changes_values` allows operators in place, which torch refuses in checkpointed functions. Graphs may have them: in
    a graph, what is computed again is found by its values. Eager execution would change saved tensors.
    """
    contexts = partial(_contexts, recomputation, changes_values)
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False, context_fn=contexts, **kwargs)


def _contexts(recomputation: Recomputation, changes_values: bool) -> Any:
    # The policy is made here: Dynamo breaks the graph at a context_fn that holds an object which the graph makes.
    return create_selective_checkpoint_contexts(_Policy(recomputation), allow_cache_entry_mutation=changes_values)


class _Policy:
    """Decides for each operator of one run of a block."""

    def __init__(self, recomputation: Recomputation) -> None:
        self.recomputation = recomputation
        self.num_products = {False: 0, True: 0}
        """Products so far, in forward and in the second run."""
        self.saves_launch = False

    def __call__(self, context: Any, op: Any, *args: Any, **_kwargs: Any) -> CheckpointPolicy:
        if op is not WAIT:  # a wait follows its launch, which is the last operator but for tensors of DTensor in eager
            self.saves_launch = self._saves(context, op, args)
        return CheckpointPolicy.MUST_SAVE if self.saves_launch else CheckpointPolicy.MUST_RECOMPUTE

    def _saves(self, context: Any, op: Any, args: tuple[Any, ...]) -> bool:
        if op is ALL_GATHER:
            return args[2] in self.recomputation.kept_groups
        mode = self.recomputation.mode
        if op.name().startswith(ATTENTION):
            return mode != "full"
        if mode not in ("selective", "products"):
            return False
        if op in PRODUCTS:
            self.num_products[context.is_recompute] += 1
            return mode == "products" or self.num_products[context.is_recompute] % 2 == 1
        return op in SAVED
