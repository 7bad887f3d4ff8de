"""Weft as a pass pipeline of torchtitan's graph trainer.

    from weft.integrations.torchtitan import add_pipeline

    add_pipeline(cluster="h100-8x8")                 # in the module of your configs
    config.compile.pass_pipeline = "weft"            # or --compile.pass_pipeline weft

Contract: the pipeline is torchtitan's default, with Weft's pass in place of the one that merges collectives by layer.
As in `torch.compile`, a fault of Weft leaves the graph unchanged, and `weft.run_report()` has every graph.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.fx import GraphModule

from weft.errors import PipelineError, compose
from weft.frontends.options import make_options
from weft.frontends.session import SESSION

HOME = "torchtitan.experiments.graph_trainer"
NAME = "weft"
REPLACED = "joint_transformer_block_bucketing_reordering_pass"
RIVALS = ("enable_fsdp_ag_rs_overlap", "enable_fsdp_dense_region_overlap")
"""Settings of `compile` that add passes which move the collectives again, by their own plan."""


def add_pipeline(**options: Any) -> None:
    """Register the pipeline `weft` with torchtitan, with Weft's options of `torch.compile`, without their prefix."""
    mine = make_options(options)
    folder = Path(mine.report) if mine.report is not None else None

    def make_passes(traced: Any, config: Any, *, parallel_dims: Any = None) -> list[Callable[..., GraphModule]]:
        _check(config.compile)
        fuses = config.compile.inductor_compilation == "full"

        def weft_pass(module: GraphModule, example_inputs: Any = None) -> GraphModule:
            # The parameters are inputs of the graph, and tied ones are passed twice.
            SESSION.weave(module, mine, mine.identity, folder, fuses=fuses, apart=False)
            return module

        construct = importlib.import_module(f"{HOME}.passes").construct_default_graph_passes
        theirs = construct(traced, config, parallel_dims=parallel_dims)
        names = [_name(one) for one in theirs]
        if REPLACED not in names:
            found = f"torchtitan's default passes are {', '.join(names)}, expected {REPLACED} among them"
            raise PipelineError(compose("torchtitan", found, do="use torchtitan 0.3.0"))
        return [weft_pass if name == REPLACED else one for name, one in zip(names, theirs, strict=True)]

    importlib.import_module(f"{HOME}.registry").register_pass_pipeline(NAME)(make_passes)


def _check(settings: Any) -> None:
    rivals = [name for name in RIVALS if getattr(settings, name)]
    rivals += ["ep_overlap.enabled"] if settings.ep_overlap.enabled else []
    if rivals:
        found = f"compile.{rivals[0]} is set, which schedules the collectives that Weft schedules"
        raise PipelineError(compose("torchtitan", found, do="switch it off, or use another compile.pass_pipeline"))


def _name(one: Any) -> str:
    """The name of a pass, which may be a partial function."""
    return getattr(one, "__name__", None) or _name(one.func)
