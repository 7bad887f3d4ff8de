"""The one home of private or version-dependent torch names (2.11 to 2.15).

Contract: nothing outside this file names a private part of torch. Each function says what it hides.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import logging
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any, Literal

import sympy
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives  # pyright: ignore[reportUnusedImport]  # registers fake kernels
from torch import Tensor
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.fx.node import _side_effectful_functions

__all__ = [
    "FUNCTIONAL",
    "FakeTensor",
    "FakeTensorMode",
    "HigherOrderOperator",
    "OpOverload",
    "OpOverloadPacket",
    "ShapeEnv",
]

FUNCTIONAL = "_c10d_functional"


def schema_of(op: OpOverload) -> Any:
    """The parsed schema: `.arguments` and `.returns`, each with `.name`, `.type`, `.alias_info`."""
    return op._schema


def find_op(namespace: str, name: str, overload: str) -> OpOverload | None:
    """The operator by its three names, or None. Looks only in torch's table of registered operators.

    Names that only TorchScript's interpreter knows (`prim::rpc_sync`, `aten::save`) are none: called from Python they
    end the process or reach outside of it.
    """
    try:
        torch._C._get_schema(f"{namespace}::{name}", "" if overload == "default" else overload)
        found = getattr(getattr(getattr(torch.ops, namespace), name), overload)
    except (AttributeError, RuntimeError):
        return None
    return found if isinstance(found, OpOverload) and torch._C._dispatch_has_kernel(found.name()) else None


def may_return_its_argument(op: OpOverload) -> bool:
    """A composite operator such as reshape or contiguous: a view where it can be, a copy where it cannot."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd")


def has_side_effect(op: OpOverload) -> bool:
    """Whether torch has the operator in its list of those that touch the outside."""
    return op in _side_effectful_functions


def input_nodes(node: Node) -> Iterable[Node]:
    """The distinct input nodes in argument order, without the copy that `all_input_nodes` makes."""
    return node._input_nodes


def storage_key(tensor: Tensor) -> int:
    """Equal exactly for tensors that share a storage, for as long as both are alive."""
    return tensor.untyped_storage()._cdata


def fake_tensor(
    mode: FakeTensorMode, size: Sequence[Any], stride: Sequence[Any], dtype: torch.dtype, device: torch.device
) -> FakeTensor:
    """A new fake tensor without a trip through the dispatcher."""
    if all(type(s) is int for s in size):
        return FakeTensor(mode, torch.empty_strided(size, stride, dtype=dtype, device="meta"), device)
    with mode:
        return torch.empty_strided(size, stride, dtype=dtype, device=device)  # type: ignore[return-value]


def fake_mode_of(values: Iterable[Any]) -> FakeTensorMode | None:
    """The mode of the first fake tensor among `values`."""
    for value in values:
        if isinstance(value, FakeTensor):
            return value.fake_mode
    return None


@contextlib.contextmanager
def quiet_fake_kernels() -> Generator[None]:
    """Keep torch from logging the traceback of a fake kernel that refuses its arguments: we report that ourselves."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    was, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = was


def new_fake_mode() -> FakeTensorMode:
    """A mode with symbols, in which real constants may appear."""
    return FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())


def new_symbol(env: ShapeEnv, name: str, hint: int | None) -> torch.SymInt:
    """A symbolic size: backed by `hint`, or unbacked where there is none."""
    if hint is None:
        return env.create_unbacked_symint()
    from torch._dynamo.source import ConstantSource

    source = ConstantSource(name)
    symbol = env.create_symbol(hint, source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None)
    return env.create_symintnode(symbol, hint=hint, source=source)  # type: ignore[return-value]


def expression_of(value: torch.SymInt | torch.SymFloat | torch.SymBool) -> sympy.Expr:
    """The sympy expression behind a symbolic number."""
    return value.node.expr


def symbols_of(value: torch.SymInt | torch.SymFloat | torch.SymBool) -> list[sympy.Symbol]:
    """The symbols in a symbolic number, in an order that does not depend on hashes."""
    found = [symbol for symbol in value.node.expr.free_symbols if isinstance(symbol, sympy.Symbol)]
    return sorted(found, key=lambda symbol: (len(symbol.name), symbol.name))


def hint_of(value: Any) -> int | None:
    """The concrete size a number stands for: itself, its hint, or None where torch has none."""
    if isinstance(value, int):
        return value
    if isinstance(value, torch.SymInt):
        expression = value.node.expr
        if expression.is_number:
            return int(expression)
        return value.node.hint if value.node.has_hint() else None
    return None


def resolve_group(name: str) -> dist.ProcessGroup | None:
    """The live process group of a run-time name, or None where there is none."""
    from torch.distributed.distributed_c10d import _resolve_process_group

    try:
        return _resolve_process_group(name)  # type: ignore[arg-type]
    except (RuntimeError, ValueError, KeyError):
        return None


def group_ranks(group: dist.ProcessGroup) -> list[int]:
    """The global ranks of a process group."""
    return dist.get_process_group_ranks(group)


def codegen_of(graph: torch.fx.Graph) -> Any:
    """How the graph's Python code takes its inputs and returns its outputs."""
    return graph._codegen


def set_node_order(graph: torch.fx.Graph, order: Sequence[Node], displaced: set[Node]) -> None:
    """Relink the nodes of `graph` in `order`; only the `displaced` ones are moved."""
    previous = graph._root
    for node in order:
        if node in displaced:
            previous.append(node)
        previous = node


def is_process_group(value: Any) -> bool:
    """A process group, or the opaque wrapper in which one is traced."""
    return isinstance(value, dist.ProcessGroup) or isinstance(getattr(value, "real_obj", None), dist.ProcessGroup)


def symbol_hint(module: torch.fx.GraphModule, symbol: sympy.Symbol) -> int | None:
    """The concrete value that stands for a symbol in the fake values of a module, or None."""
    for node in module.graph.nodes:
        value = node.meta.get("val")
        sizes = [*value.shape, *value.stride()] if isinstance(value, Tensor) else [value]
        for size in sizes:
            if isinstance(size, torch.SymInt) and size.node.expr == symbol:
                return hint_of(size)
            if isinstance(size, torch.SymInt) and symbol in size.node.expr.free_symbols and size.node.shape_env:
                return env_hint(size.node.shape_env, symbol)
    return None


def env_hint(env: ShapeEnv, symbol: sympy.Symbol) -> int | None:
    """The value a shape environment was given for a symbol (the attribute was renamed in 2.12)."""
    values = getattr(env, "backed_var_to_val", None) or getattr(env, "var_to_val", {})
    return int(values[symbol]) if symbol in values else None


def version_of(tensor: Tensor) -> int:
    """How often the memory of a tensor was written in place; shared by its views."""
    return tensor._version


@contextlib.contextmanager
def intercept(before: Callable[[OpOverload], None]) -> Generator[None]:
    """Call `before` with each operator that is about to run inside, however deep; it may raise."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            before(func)
            return func(*args, **(kwargs or {}))

    with Mode():
        yield


# Capturing: a fake world, and what is known about an operator while it is traced.


def fake_store() -> dist.Store:
    """The store of a process group whose backend is "fake"; loading its module registers that backend."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def forward_sequence() -> int:
    """The number that autograd gave to the operator that is running, or to the last one that has a gradient."""
    return torch.autograd._get_sequence_nr() - 1


def backward_sequence() -> int | None:
    """The number of the forward operator whose gradient is being computed; None outside of a backward pass."""
    node = torch._C._current_autograd_node()
    return None if node is None else node._sequence_nr()


def python_kernels() -> contextlib.AbstractContextManager[Any]:
    """Prefer kernels written in Python, which keep symbolic sizes."""
    from torch._dispatch.python import enable_python_dispatcher

    return enable_python_dispatcher()


@contextlib.contextmanager
def as_if_compiled() -> Generator[None]:
    """Let optimizers take the branch that reads no values: without it they ask a step counter for its number."""
    was = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = was


def strided_shard(dim: int, split_factor: int) -> Any:
    """The placement of a dim that an inner mesh axis has split first: shards of this axis are strided in the whole."""
    from torch.distributed.tensor.placement_types import _StridedShard

    return _StridedShard(dim, split_factor=split_factor)


# Compilers. Dynamo, AOTAutograd and Inductor are imported late: together they take longer to import than torch.


def settings_of(compiler: Literal["dynamo", "inductor"]) -> Any:
    """The module of a compiler's settings; names with dots (`triton.cudagraphs`) are attributes too."""
    return importlib.import_module(f"torch._{compiler}.config")


def mode_settings(mode: str) -> dict[str, Any]:
    """The settings of Inductor that a mode of torch.compile stands for; RuntimeError where there is no such mode."""
    from torch._inductor import list_mode_options

    return dict(list_mode_options(mode))


def register_inductor_pass(cls: type, *, scheduler: bool = False) -> None:
    """Let Inductor's caches take a class for a graph pass, or a scheduler pass (a graph pass to 2.11), by its uuid."""
    from torch._inductor import custom_graph_pass as home

    base = home.CustomGraphPass
    (getattr(home, "CustomSchedulerPass", base) if scheduler else base).register(cls)


def call_inductor_pass(hook: Any, graph: torch.fx.Graph, is_inference: bool) -> None:
    """Call a graph pass as Inductor would: some (from 2.12) also take whether the graph is for inference."""
    from torch._inductor import custom_graph_pass as home

    aware = getattr(home, "CustomInferenceAwareGraphPass", None)
    hook(graph, is_inference) if aware is not None and isinstance(hook, aware) else hook(graph)


_held: list[tuple[dict[str, Any], dict[str, Any]]] = []


def hold_inductor_settings(values: Mapping[str, Any]) -> bool:
    """Set settings until the compilation under way ends; False where Dynamo runs none, so that nobody would tell us."""
    from torch._dynamo.callback import callback_handler

    if not getattr(callback_handler, "_CompilationCallbackHandler__pending_callbacks_counter", 0):
        return False
    if _release_inductor_settings not in callback_handler.end_callbacks:
        callback_handler.register_end_callback(_release_inductor_settings)
    config = settings_of("inductor")
    _held.append((dict(values), {name: getattr(config, name) for name in values}))
    for name, value in values.items():
        setattr(config, name, value)
    return True


def _release_inductor_settings(_: Any) -> None:
    config = settings_of("inductor")
    while _held:
        values, before = _held.pop()
        for name, value in values.items():
            if getattr(config, name) is value:  # else somebody set it in between, and it is theirs
                setattr(config, name, before[name])


def keep_kernel_order(nodes: Sequence[Any]) -> Sequence[Any]:
    """Chain the kernels of Inductor's scheduler that are no loops of its own (collectives, waits, matmuls) as they are.

    Fusion would pull a wait up to a kernel that is fused with one of its users. Without collectives nothing is chained.
    """
    from torch._inductor.dependencies import WeakDep
    from torch._inductor.utils import contains_collective

    if not any(map(contains_collective, nodes)):
        return nodes
    fixed = [node for node in nodes if (node.is_extern() or node.is_template()) and node.get_buffer_names()]
    for earlier, later in itertools.pairwise(fixed):
        name = next(iter(later.get_buffer_names()))
        for buffer in earlier.get_buffer_names():
            later.add_fake_dep(WeakDep(buffer, mutating_buf=name, is_fake=True))
    nodes[0].scheduler.nodes = nodes
    nodes[0].scheduler.compute_ancestors()
    return nodes


def compile_with_inductor(module: torch.fx.GraphModule, inputs: Sequence[Any], settings: Mapping[str, Any]) -> Any:
    """Compile a Dynamo graph by Inductor under some settings, its backward too when that is compiled later."""
    from torch._inductor.compile_fx import compile_fx

    return compile_fx(module, inputs, config_patches=dict(settings))


def compile_with_aot(module: torch.fx.GraphModule, inputs: Sequence[Any], rewrite: Callable[..., Any]) -> Any:
    """Compile a Dynamo graph as torch's `aot_eager` does, each graph of AOTAutograd rewritten before it is run."""
    from torch._dynamo.backends.debugging import aot_eager, boxed_nop

    def compiler(graph: torch.fx.GraphModule, args: Sequence[Any]) -> Any:
        return boxed_nop(rewrite(graph, args), list(args))

    return aot_eager(module, list(inputs), fw_compiler=compiler, bw_compiler=compiler)


def compilation() -> tuple[str, str]:
    """What is being compiled: Dynamo's id (`0/1`; `!0/0/0` by compiled autograd) and the graph of AOTAutograd (`forward`)."""
    from torch._functorch._aot_autograd.logging_utils import get_aot_compilation_context
    from torch._guards import CompileContext

    graphs = get_aot_compilation_context()[0]
    return str(CompileContext.current_compile_id() or ""), graphs[-1] if graphs else ""


def inductor_cache_folder() -> str:
    """Where Inductor keeps its caches."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return cache_dir()


def emit_artifact(name: str, text: str, encoding: str = "string") -> None:
    """Write an artifact to the structured trace (TORCH_TRACE), where tlparse shows it."""
    from torch._logging import trace_structured

    metadata = {"name": name, "encoding": encoding}
    trace_structured("artifact", metadata_fn=lambda: metadata, payload_fn=lambda: text, expect_trace_id=False)


def count(name: str, amount: int = 1) -> None:
    """Add to one of our counters among Dynamo's."""
    from torch._dynamo.utils import counters

    counters["weft"][name] += amount


def timed(name: str) -> contextlib.AbstractContextManager[Any]:
    """Count what is done inside among the compile times of Dynamo."""
    from torch._dynamo.utils import dynamo_timed

    return dynamo_timed(name, log_pt2_compile_event=True)


def refresh_names(graph: torch.fx.Graph) -> None:
    """Forget the names of erased nodes: new nodes then get the names that they would get in a copy of the graph."""
    fresh = type(graph._graph_namespace)()
    for node in graph.nodes:
        fresh.create_name(node.name, node)
    graph._graph_namespace = fresh
