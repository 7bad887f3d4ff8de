"""The one home of private or version-dependent torch names (2.11 to 2.15).

Contract: nothing outside this package names a private part of torch. Each function says what it hides.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import os
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any

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
from torch.utils._pytree import tree_leaves, tree_map

__all__ = [
    "CONTROL_DEPS",
    "ENABLE_SYMMETRIC_MEMORY",
    "FUNCTIONAL",
    "FakeTensor",
    "FakeTensorMode",
    "HigherOrderOperator",
    "INVOKE",
    "OpOverload",
    "OpOverloadPacket",
    "ShapeEnv",
    "with_bits",
]

FUNCTIONAL = "_c10d_functional"
ENABLE_SYMMETRIC_MEMORY = "torch.distributed._symmetric_memory.enable_symm_mem_for_group"
"""The function that shares the memory of a group."""


def schema_of(op: OpOverload) -> Any:
    """The parsed schema: `.arguments` and `.returns`, each with `.name`, `.type`, `.alias_info`."""
    return op._schema


def find_op(namespace: str, name: str, overload: str) -> OpOverload | None:
    """The operator by its three names, or None. Looks only in torch's table of registered operators.

    Names that only TorchScript's interpreter knows (`prim::rpc_sync`, `aten::save`) do not count: called from Python
    they end the process or reach outside of it.
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
    """Whether torch lists the operator among those with side effects."""
    return op in _side_effectful_functions


def input_nodes(node: Node) -> Collection[Node]:
    """The distinct input nodes in argument order, without the copy that `all_input_nodes` makes."""
    return node._input_nodes


def described_input(description: Any) -> str | int | None:
    """The input of AOTAutograd that an input of its graph is, or is a part of: a parameter's path, or an index."""
    while hasattr(description, "base"):  # a part of a subclass, such as the local shard of a DTensor
        description = description.base
    kind = type(description).__name__
    return description.target if kind == "ParamAOTInput" else description.idx if kind == "PlainAOTInput" else None


def described_gradient(description: Any) -> str | int | None:
    """The input of AOTAutograd whose gradient an output of its graph is, or is a part of, as `described_input` says."""
    while hasattr(description, "base"):
        description = description.base
    return described_input(getattr(description, "grad_of", None))


def storage_key(tensor: Tensor) -> int:
    """Equal exactly for tensors that share a storage, while both are alive."""
    return tensor.untyped_storage()._cdata


def storage_span(tensor: Tensor) -> tuple[str, int, int] | None:
    """Device, first address and end address of a real tensor's storage; None if it has no such memory.

    Two storages may cover the same memory, for instance by `torch.from_numpy`.
    """
    storage = tensor.untyped_storage()
    if isinstance(tensor, FakeTensor) or storage.device.type == "meta":
        return None
    start, size = storage.data_ptr(), storage.nbytes()
    return (str(storage.device), start, start + size) if start and size else None


def keys_of_real_storages(mode: FakeTensorMode) -> frozenset[int] | None:
    """The keys of the fake storages that a mode converted from real ones; None if it never saw a real tensor.

    A mode makes one fake storage for each real one, so the keys show which of the real tensors shared memory.
    """
    try:
        converter: Any = mode.fake_tensor_converter.meta_converter
        if not converter.describer.next_storage_id:
            return None
        return frozenset(storage._cdata for storage in list(converter.storage_memo.values()))
    except AttributeError:
        return frozenset()


def fake_storage_key(mode: FakeTensorMode, tensor: Tensor) -> int | None:
    """The key of the fake storage that a mode converted from a real tensor's storage; None if it has none."""
    try:
        converter: Any = mode.fake_tensor_converter.meta_converter
        number = converter.describer.lookup_storage.get(tensor.untyped_storage())
        made = None if number is None else converter.storage_memo.get(number)
        return None if made is None else made._cdata
    except AttributeError:
        return None


def fake_tensor(
    mode: FakeTensorMode, size: Sequence[Any], stride: Sequence[Any], dtype: torch.dtype, device: torch.device
) -> FakeTensor:
    """A new fake tensor, made without the dispatcher."""
    if all(type(s) is int for s in size):
        return FakeTensor(mode, torch.empty_strided(size, stride, dtype=dtype, device="meta"), device)
    with mode:
        return torch.empty_strided(size, stride, dtype=dtype, device=device)  # type: ignore[return-value]


def with_bits(value: Tensor, *, conj: bool, neg: bool) -> Tensor:
    """A view of the same memory that torch conjugates or negates when it reads it, or that it does not."""
    value = torch.conj(value) if value.is_complex() and value.is_conj() != conj else value
    return torch._neg_view(value) if value.is_neg() != neg else value


def dtype_of(value: torch.dtype | int) -> torch.dtype:
    """A dtype in a list of them, which an operator in Python is given as a number up to torch 2.12."""
    return value if isinstance(value, torch.dtype) else _dtype_numbered(value)


@functools.cache
def _dtype_numbered(number: int) -> torch.dtype:
    """The dtype that torch encodes as a number; only for numbers that come from torch."""
    return torch.ops.aten.empty.memory_format([0], dtype=number, device="meta").dtype


def foreach_copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy tensors into others, with a multi-tensor kernel if the device has one."""
    torch._foreach_copy_(list(targets), list(sources))


def foreach_scale(tensors: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply tensors in place by a factor, with a multi-tensor kernel if the device has one."""
    torch._foreach_mul_(list(tensors), factor)


def scaled_product(first: Tensor, second: Tensor, scale: Tensor, second_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The product of two 8-bit tensors, times their scales, in another dtype; `second` must be stored by columns."""
    return torch._scaled_mm(first, second, scale_a=scale, scale_b=second_scale, out_dtype=dtype)


def grouped_product(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """The product of each group of rows, which ends at one of `ends`, with the weight of that group."""
    return torch._grouped_mm(rows, weights, offs=ends)


def fake_view(
    base: FakeTensor, size: Sequence[Any], stride: Sequence[Any], offset: Any, dtype: torch.dtype | None = None
) -> FakeTensor:
    """A fake tensor on the storage of another, made without the dispatcher. The storage grows if it is too small."""
    view = torch.empty(0, dtype=dtype or base.dtype, device="meta")
    view.set_(base.untyped_storage(), offset, size, stride)  # type: ignore[arg-type]
    return FakeTensor(base.fake_mode, view, base.device)


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


def real_values() -> contextlib.AbstractContextManager[Any]:
    """Compute with real tensors inside the block, even while a compiler traces with fake ones around it."""
    from torch.utils._python_dispatch import _disable_current_modes

    return _disable_current_modes()


def new_fake_mode() -> FakeTensorMode:
    """A mode with symbols, in which real constants may appear."""
    return FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())


def new_symbol(env: ShapeEnv, name: str, hint: int | None) -> torch.SymInt:
    """A symbolic size: backed by `hint`, or unbacked without one."""
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
    """The concrete value of a size: itself, its hint, or None if torch has no hint."""
    if isinstance(value, int):
        return value
    if isinstance(value, torch.SymInt):
        expression = value.node.expr
        if expression.is_number:
            return int(expression)
        return value.node.hint if value.node.has_hint() else None
    return None


def resolve_group(name: str) -> dist.ProcessGroup | None:
    """The live process group of a run-time name, or None."""
    from torch.distributed.distributed_c10d import _resolve_process_group

    try:
        return _resolve_process_group(name)  # type: ignore[arg-type]
    except (RuntimeError, ValueError, KeyError):
        return None


def shared_store() -> Any | None:
    """The store that all ranks of this run see; None if no process group with other processes is set up."""
    from torch.distributed.distributed_c10d import _get_default_store

    if not dist.is_initialized() or dist.get_backend() == "fake":
        return None
    return _get_default_store()


def live_groups() -> list[dist.ProcessGroup]:
    """The process groups that this rank is in, in the order of their creation."""
    from torch.distributed.distributed_c10d import _world

    return list(_world.pg_names)


def has_symmetric_memory(name: str, *, enabled: bool) -> bool:
    """Whether the group of a run-time name is live on CUDA; with `enabled` also whether its memory has been shared."""
    group = resolve_group(name)
    if group is None or not torch.cuda.is_available() or not register_operators("symm_mem"):
        return False
    from torch.distributed._symmetric_memory import is_symm_mem_enabled_for_group

    return is_symm_mem_enabled_for_group(name) if enabled else True  # type: ignore[arg-type]


def shared_memory(group_name: str, num_bytes: int) -> Any:
    """The symmetric memory of a group, with at least this size."""
    from torch.distributed._symmetric_memory import get_symm_mem_workspace

    return get_symm_mem_workspace(group_name, num_bytes)  # type: ignore[arg-type]


def copy_stream() -> torch.cuda.Stream:
    """The side stream of torch's operators over symmetric memory."""
    from torch.distributed._symmetric_memory import _get_backend_stream

    return _get_backend_stream()


def register_copy(output: Tensor) -> None:
    """Let `wait_tensor` of a tensor wait for the work that is now on the current stream."""
    from torch.distributed._symmetric_memory import Work

    torch._C._distributed_c10d._register_work(output, Work())  # pyright: ignore[reportAttributeAccessIssue]


def group_ranks(group: dist.ProcessGroup) -> list[int]:
    """The global ranks of a process group."""
    return dist.get_process_group_ranks(group)


def codegen_of(graph: torch.fx.Graph) -> Any:
    """How the graph's Python code takes its inputs and returns its outputs."""
    return graph._codegen


def lazy_graph_module(root: Any, graph: torch.fx.Graph) -> torch.fx.GraphModule:
    """A graph module whose Python code is generated when it is first called, not each time a pass is done."""
    from torch.fx._lazy_graph_module import _LazyGraphModule

    return _LazyGraphModule(root, graph)


def set_node_order(graph: torch.fx.Graph, order: Sequence[Node], displaced: set[Node]) -> None:
    """Relink the nodes of `graph` in `order`; only the `displaced` ones are moved."""
    previous = graph._root
    for node in order:
        if node in displaced:
            previous.append(node)
        previous = node


def revive_node(node: Node) -> None:
    """Put a node that was erased from its graph back, at the end and without arguments; nothing for one still there."""
    graph = node.graph
    if not node._erased:
        return
    node._erased = False
    node._prev = node._next = node  # otherwise it would be unlinked a second time, from neighbours that have changed
    graph._root._prev.append(node)
    graph._find_nodes_lookup_table.insert(node)
    graph._len += 1


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
    values = env.backed_var_to_val if hasattr(env, "backed_var_to_val") else getattr(env, "var_to_val", {})
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


def run_gloo_in_order() -> None:
    """Give each gloo group that this process creates from now on one thread, which runs its collectives one by one.

    By default a group has two threads (2.13). Both write the name of the collective that they have run to the same C++
    string without a lock. Functional all-gathers have names that live on the heap, so two of them that end at the same
    time corrupt it: `tests/distributed/gloo_race.py` shows it without Weft.
    """
    gloo: Any = dist.ProcessGroupGloo
    create = gloo.__init__

    def create_in_order(self: Any, *args: Any, timeout: timedelta | None = None, **kwargs: Any) -> None:
        if timeout is None:  # explicit options take precedence
            create(self, *args, **kwargs)
            return
        interface = os.environ.get("GLOO_SOCKET_IFNAME")
        options = gloo._Options()
        options._timeout, options._threads = timeout, 1
        options._devices = [gloo.create_device(interface=interface) if interface else gloo.create_default_device()]
        create(self, *args, options)

    gloo.__init__ = create_in_order


def forward_sequence() -> int:
    """The number that autograd gave to the operator that is running, or to the last one that has a gradient."""
    return torch.autograd._get_sequence_nr() - 1


def backward_sequence() -> int | None:
    """The number of the forward operator whose gradient is being computed; None outside of a backward pass."""
    node: Any = torch._C._current_autograd_node()
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


def min_cut_partition(
    joint: torch.fx.GraphModule, num_forward_outputs: int, memory_budget: float, runtime_of: Callable[[Node], float]
) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
    """Forward and backward as AOTAutograd cuts a joint graph; every node keeps its name.

    Inputs called `tangents...` are gradients. AOTAutograd's own removal of common subexpressions is off. With a
    `memory_budget` below 1 it weighs the bytes of results against `runtime_of`, which replaces its own count of flops:
    that runs the operators.
    """
    from torch._functorch import config, partitioners

    own = partitioners.estimate_runtime
    partitioners.estimate_runtime = runtime_of
    try:
        with config.patch(cse=False, activation_memory_budget=memory_budget):  # type: ignore[attr-defined]
            return partitioners.min_cut_rematerialization_partition(joint, None, num_fwd_outputs=num_forward_outputs)
    finally:
        partitioners.estimate_runtime = own


def strided_shard(dim: int, split_factor: int) -> Any:
    """The placement of a dim that an inner mesh axis has split first: shards of this axis are strided in the whole."""
    from torch.distributed.tensor.placement_types import _StridedShard

    return _StridedShard(dim, split_factor=split_factor)


def refresh_names(graph: torch.fx.Graph) -> None:
    """Forget the names of erased nodes: new nodes then get the names that they would get in a copy of the graph."""
    fresh = type(graph._graph_namespace)()
    for node in graph.nodes:
        fresh.create_name(node.name, node)
    graph._graph_namespace = fresh


# Printed graphs.

# Modules that register operators when they are imported, by the namespace of the operators.
_OPERATOR_HOMES = {
    "prims": "torch._inductor.inductor_prims",
    "rngprims": "torch._prims.rng_prims",
    "symm_mem": "torch.distributed._symmetric_memory",
    "_dtensor": "torch.distributed.tensor",
    "fsdp": "torch.distributed.fsdp",
    "bucketing": "torch._inductor.compile_fx",
    "higher_order": "torch._inductor.compile_fx",
    "quantized_decomposed": "torch.ao.quantization.fx._decomposed",
}


def register_operators(namespace: str) -> bool:
    """Import the part of torch that registers the late operators of a namespace; False if torch has no such part."""
    if namespace not in _OPERATOR_HOMES:
        return False
    with contextlib.suppress(ImportError):
        importlib.import_module(_OPERATOR_HOMES[namespace])
    return True


CONTROL_DEPS = "control_deps"
"""The higher-order operator `(nodes to come after, nested graph, *operands)`: it runs the graph on the operands."""
INVOKE = "invoke_subgraph"
"""The higher-order operator `(nested graph, its name, *operands)`: it runs the graph on the operands."""


def higher_order_op(name: str) -> HigherOrderOperator | None:
    """The higher-order operator of that name, or None. Those with a home of their own are registered when asked."""
    homes = ["torch._higher_order_ops.triton_kernel_wrap"] if name.startswith("triton_kernel_") else []
    homes += ["torch._inductor.fx_utils", "torch._inductor.lowering"] if name == CONTROL_DEPS else []  # second: to 2.12
    for home in homes:
        if not hasattr(torch.ops.higher_order, name):
            with contextlib.suppress(ImportError):
                importlib.import_module(home)
    found = getattr(torch.ops.higher_order, name, None)
    return found if isinstance(found, HigherOrderOperator) else None


def lacks_fake_kernel(error: BaseException | None) -> bool:
    """Whether a call on fake values failed for want of a kernel, of data or of a device, not for its arguments."""
    from torch._subclasses import fake_tensor as home
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    kinds = (
        home.DataDependentOutputException,
        home.DynamicOutputShapeException,
        home.UnsupportedFakeTensorException,
        home.UnsupportedOperatorException,
        GuardOnDataDependentSymNode,
        NotImplementedError,
    )
    return isinstance(error, kinds) or _lacks_device(error)


def _lacks_device(error: BaseException | None) -> bool:
    return "not compiled with" in str(error) or "not linked with support" in str(error)


def call_fake(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], mode: FakeTensorMode) -> Any:
    """Call an operator on fake values; if this build of torch lacks their device, on equivalent tensors on the CPU."""
    with mode, torch.no_grad(), quiet_fake_kernels():
        try:
            return target(*args, **kwargs)
        except (RuntimeError, AssertionError) as error:
            found = {leaf.device for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
            if len(found) != 1 or not _lacks_device(error):
                raise
        device, cpu = found.pop(), torch.device("cpu")

        def to(place: torch.device) -> Callable[[Any], Any]:
            return lambda value: (
                fake_tensor(mode, value.shape, value.stride(), value.dtype, place)
                if isinstance(value, Tensor)
                else value
            )

        twins, twin_kwargs = tree_map(to(cpu), (args, kwargs))
        return tree_map(to(device), target(*twins, **twin_kwargs))
