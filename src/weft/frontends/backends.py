"""The backends of torch.compile, found by entry point.

    torch.compile(model, backend="weft", options={"weft.cluster": "h100-8", "max_autotune": True})
    torch.compile(model, backend="weft_eager", options={"weft.pipeline": "sink-waits"})

Contract: `weft` is Inductor with Weft's hook after any hook of the user, and with Inductor's own reordering of
collectives switched off; options without `weft.` go to Inductor. `weft_eager` runs the graphs of AOTAutograd as torch's
`aot_eager` does, so it needs no compiler for C++ or Triton. Both work on the forward and on the backward graph.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.fx import GraphModule

from weft.compat import compilers as compat
from weft.errors import PipelineError, compose, nearest
from weft.frontends.inductor import InductorPass, KeepOrder, hooks_in
from weft.frontends.options import option_names, split_options
from weft.frontends.partitioner import Partitioner
from weft.frontends.session import NOT_CALLED, SESSION

HOOK = "post_grad_custom_post_pass"
MEMORY_ORDER = "reorder_for_peak_memory"
_MEMBERS = re.compile("_(?:modules|parameters)_")
"""Separators in the names that Dynamo gives to parameters: `L_self_modules_layers_modules_0_parameters_w1_`. Attributes
whose own names contain a separator, such as `sub_modules_list`, get a wrong path; paths only serve reports."""


def weft(
    module: GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Any:
    """Optimize each graph inside Inductor, which generates the code."""
    mine, theirs = split_options(options)
    config = compat.settings_of("inductor")
    _check_known(theirs, config.get_config_copy())
    given = compat.inductor_settings(mode, theirs)
    settings: dict[str, Any] = {
        name: False for name in (*compat.RIVAL_SETTINGS, *compat.OVERLAP_SETTINGS) if hasattr(config, name)
    }
    settings[MEMORY_ORDER] = getattr(
        config, MEMORY_ORDER
    )  # listed here so that it is restored after `KeepOrder` changes it
    settings |= given
    if not settings.get("use_post_grad_passes", config.use_post_grad_passes):
        SESSION.say(NOT_CALLED)
    scheduler_pass = settings.get(compat.SCHEDULER_PASS) or getattr(config, compat.SCHEDULER_PASS)
    settings[compat.SCHEDULER_PASS] = KeepOrder(scheduler_pass, loops_too=MEMORY_ORDER not in given)
    hooks = hooks_in(given.get(HOOK)) or hooks_in(getattr(config, HOOK))
    inputs = _paths_of_inputs(module)
    hook = settings[HOOK] = InductorPass(mine, hooks, is_cut=mine.memory_limit_bytes is not None, inputs=inputs)
    if mine.memory_limit_bytes is not None:
        settings[compat.PARTITIONER] = Partitioner(mine, hook.folder, fuses=True, inputs=inputs)
    with SESSION.contained("the name of a frame", mine.strict):
        SESSION.note_frame(module, example_inputs)
    compiled = compat.compile_with_inductor(module, example_inputs, settings, SESSION.note_compiled)
    SESSION.note_all_compiled()
    return compiled


def _check_known(names: Iterable[str], known: Iterable[str]) -> None:
    known = [*known, *option_names()]
    for name in names:
        if name.replace("-", "_") not in known:
            do = nearest(name, known) or "options of Weft begin with 'weft.', others must be settings of Inductor"
            raise PipelineError(compose("backend weft", f"no option is called {name!r}", do=do))


def weft_eager(
    module: GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Any:
    """Optimize each graph of AOTAutograd and run it eagerly."""
    mine, theirs = split_options(options)
    if theirs or mode:
        found = f"option {next(iter(theirs))!r}" if theirs else f"mode {mode!r}"
        what = f"{found} is for Inductor, which this backend does not use"
        raise PipelineError(compose("backend weft_eager", what, do="leave it out, or use backend='weft'"))
    folder = Path(mine.report) if mine.report is not None else None
    identity, inputs = "", _paths_of_inputs(module)
    with SESSION.contained("the name of a frame", mine.strict):
        SESSION.note_frame(module, example_inputs)
        identity = mine.identity

    def rewrite(graph: GraphModule, _inputs: Sequence[Any]) -> GraphModule:
        SESSION.weave(graph, mine, identity, folder, fuses=False, is_cut=partition is not None, inputs=inputs)
        return graph

    partition = Partitioner(mine, folder, fuses=False, inputs=inputs) if mine.memory_limit_bytes is not None else None
    return compat.compile_with_aot(module, example_inputs, rewrite, partition)


def _paths_of_inputs(module: GraphModule) -> tuple[str, ...]:
    """The path of each input of a Dynamo graph that is a parameter, by its name; empty for other inputs."""
    names = [str(node.target) for node in module.graph.nodes if node.op == "placeholder"]
    paths = [".".join(_MEMBERS.split(name.removesuffix("_"))[1:]) for name in names]
    return tuple(path if "_parameters_" in name else "" for path, name in zip(paths, names, strict=True))
