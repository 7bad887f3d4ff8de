"""Private or version-dependent names of torch's compilers: Dynamo, AOTAutograd, Inductor (2.11 to 2.15).

Contract: as for `compat`. The compilers are imported late: together they take longer to import than the rest of torch.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch.fx import Graph, GraphModule


def settings_of(compiler: Literal["dynamo", "inductor"]) -> Any:
    """The module of a compiler's settings; names with dots (`triton.cudagraphs`) are attributes too."""
    return importlib.import_module(f"torch._{compiler}.config")


def inductor_settings(mode: str | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of Inductor that torch.compile would compile under; RuntimeError for invalid ones."""
    return dict(torch._TorchCompileInductorWrapper(mode, dict(options), None).config)


SCHEDULER_PASS = "_pre_fusion_custom_pass"
"""The setting of Inductor that holds a pass of its scheduler, called before it fuses."""
OVERLAP_SETTINGS = ("aten_distributed_optimizations.enable_simple_overlap",)
"""Settings by which Inductor reorders collectives after Weft; on by default from 2.14."""
RIVAL_SETTINGS = (
    "_fuse_ddp_communication",
    "reorder_for_compute_comm_overlap",
    "aten_distributed_optimizations.enable_overlap_scheduling",
)
"""Settings by which Inductor reorders or merges collectives; off unless someone, such as DDP, switches them on."""


def register_inductor_pass(cls: type, *, scheduler: bool = False) -> None:
    """Let Inductor's caches take a class for a graph pass, or a scheduler pass (a graph pass to 2.11), by its uuid."""
    from torch._inductor import custom_graph_pass as home

    base = home.CustomGraphPass
    (getattr(home, "CustomSchedulerPass", base) if scheduler else base).register(cls)


def call_inductor_pass(hook: Any, graph: Graph, is_inference: bool) -> None:
    """Call a graph pass as Inductor would: some (from 2.12) also take whether the graph is for inference."""
    from torch._inductor import custom_graph_pass as home

    aware = getattr(home, "CustomInferenceAwareGraphPass", None)
    hook(graph, is_inference) if aware is not None and isinstance(hook, aware) else hook(graph)


_held: list[tuple[dict[str, Any], dict[str, Any]]] = []


def hold_inductor_settings(values: Mapping[str, Any]) -> bool:
    """Change settings until the current compilation ends; False if Dynamo is not compiling, so no end would be seen."""
    from torch._dynamo.callback import callback_handler

    if not getattr(callback_handler, "_CompilationCallbackHandler__pending_callbacks_counter", 0):
        return False
    if release_inductor_settings not in callback_handler.end_callbacks:
        callback_handler.register_end_callback(release_inductor_settings)
    config = settings_of("inductor")
    _held.append((dict(values), {name: getattr(config, name) for name in values}))
    for name, value in values.items():
        setattr(config, name, value)
    return True


def release_inductor_settings(_: Any = None) -> None:
    """Restore the settings that are held now."""
    config = settings_of("inductor")
    while _held:
        values, before = _held.pop()
        for name, value in values.items():
            if getattr(config, name) is value:  # otherwise someone changed it in between, and their value stays
                setattr(config, name, before[name])


def keep_kernel_order(nodes: Sequence[Any], loops_too: bool) -> Callable[[], None] | None:
    """Fix the order of the kernels that Inductor's scheduler does not generate (collectives, waits, matmuls).

    Otherwise fusion pulls a wait up to a loop that is fused with one of its users. `loops_too` also keeps Inductor from
    moving loops to save memory; its setting stays changed. Returns what undoes this; None without collectives, where
    Inductor decides everything. On an error nothing is changed.
    """
    from torch._inductor.dependencies import WeakDep
    from torch._inductor.utils import contains_collective

    if not any(map(contains_collective, nodes)):
        return None
    config = settings_of("inductor")
    fixed = [node for node in nodes if (node.is_extern() or node.is_template()) and node.get_buffer_names()]
    before = [(node, node.read_writes) for node in fixed]
    moves_loops = config.reorder_for_peak_memory

    def undo() -> None:
        for node, read_writes in before:
            node.set_read_writes(read_writes)
        nodes[0].scheduler.compute_ancestors()
        config.reorder_for_peak_memory = moves_loops

    try:
        for earlier, later in itertools.pairwise(fixed):
            for buffer in earlier.get_buffer_names():  # this only orders: no buffer of that name is written
                later.add_fake_dep(WeakDep(buffer, mutating_buf=later.get_name(), is_fake=True))
        nodes[0].scheduler.nodes = nodes
        nodes[0].scheduler.compute_ancestors()
        if loops_too:
            config.reorder_for_peak_memory = False
    except Exception:
        undo()
        raise
    return undo


def compile_with_inductor(
    module: GraphModule, inputs: Sequence[Any], settings: Mapping[str, Any], then: Callable[[], None]
) -> Any:
    """Compile a Dynamo graph by Inductor under some settings, its backward too when that is compiled later.

    `then` is called after each graph, whether Inductor compiled it or found it in its cache.
    """
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    @functools.wraps(compile_fx_inner)
    def compile_one(*args: Any, **keywords: Any) -> Any:
        compiled = compile_fx_inner(*args, **keywords)
        then()
        return compiled

    return compile_fx(module, inputs, inner_compile=compile_one, config_patches=dict(settings))


def compile_with_aot(
    module: GraphModule,
    inputs: Sequence[Any],
    rewrite: Callable[..., Any],
    partition: Callable[..., Any] | None = None,
) -> Any:
    """Compile a Dynamo graph as torch's `aot_eager` does, each graph of AOTAutograd rewritten before it is run.

    `partition` cuts joint graphs; None: the min-cut, as in `aot_eager`.
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.debugging import boxed_nop

    def compiler(graph: GraphModule, args: Sequence[Any]) -> Any:
        return boxed_nop(rewrite(graph, args), list(args))

    compiled = aot_autograd(
        fw_compiler=compiler,
        bw_compiler=compiler,
        partition_fn=partition or cut_for_least_work,
        keep_inference_input_mutations=True,
    )
    return compiled(module, list(inputs))


PARTITIONER = "custom_partitioner_fn"
"""The setting of Inductor that holds the function which cuts joint graphs."""


def register_partitioner(cls: type) -> None:
    """Let Inductor take a class for a partitioner, and its caches rely on its uuid."""
    from torch._inductor.custom_graph_pass import CustomPartitionerFn

    CustomPartitionerFn.register(cls)


def cut_for_least_work(joint: GraphModule, inputs: Any, **arguments: Any) -> tuple[GraphModule, GraphModule]:
    """Forward and backward by AOTAutograd's min-cut."""
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    return min_cut_rematerialization_partition(joint, inputs, **arguments)


def cut_by_order(joint: GraphModule, inputs: Any, **arguments: Any) -> tuple[GraphModule, GraphModule]:
    """Forward and backward by AOTAutograd's default: the nodes up to the last one of forward, and the rest."""
    from torch._functorch.partitioners import default_partition

    arguments.pop("compiler", None)
    return default_partition(joint, inputs, **arguments)


def compiled_autograd(compiler: Callable[[GraphModule], Any]) -> contextlib.AbstractContextManager[None]:
    """Let a compiler compile the backward graph of every `backward()` inside the block, for the sizes that it finds."""
    from torch._dynamo.compiled_autograd import _enable

    return _enable(compiler, dynamic=False)


def compilation() -> tuple[str, str]:
    """The current compilation: Dynamo's id (`0/1`; `!0/0/0` by compiled autograd) and AOT's graph (`forward`)."""
    from torch._functorch._aot_autograd.logging_utils import get_aot_compilation_context
    from torch._guards import CompileContext

    graphs = get_aot_compilation_context()[0]
    graph = graphs[-1].rpartition("_")[2] if graphs else ""  # they are called `0_forward`
    return str(CompileContext.current_compile_id() or ""), graph


def inductor_cache_folder() -> str:
    """Where Inductor keeps its caches."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return cache_dir()


def emit_artifact(name: str, text: Callable[[], str], encoding: str = "string") -> None:
    """Write an artifact to the structured trace (TORCH_TRACE), where tlparse shows it; does nothing without a trace."""
    from torch._logging import trace_structured

    metadata = {"name": name, "encoding": encoding}
    trace_structured("artifact", metadata_fn=lambda: metadata, payload_fn=text, expect_trace_id=False)


def count(name: str, amount: int = 1) -> None:
    """Add to one of our counters among Dynamo's."""
    from torch._dynamo.utils import counters

    counters["weft"][name] += amount


def timed(name: str) -> contextlib.AbstractContextManager[Any]:
    """Count what is done inside among the compile times of Dynamo."""
    from torch._dynamo.utils import dynamo_timed

    return dynamo_timed(name, log_pt2_compile_event=True)
