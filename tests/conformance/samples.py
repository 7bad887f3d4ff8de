"""Calls of operators to look at: from torch's own samples, and made from schemas."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from weft.compat import find_op, register_operators
from weft.graph.ops import bind_arguments

MODULES = ("prims", "rngprims", "symm_mem", "_dtensor", "fsdp", "bucketing", "quantized_decomposed")
SHAPES = ((4,), (2, 3), (3, 3), (2, 3, 4), (2, 3, 4, 4), (1, 2, 3, 4, 4), (), (1,), (2, 2))
DTYPES = (torch.float32, torch.int64, torch.float32, torch.bool, torch.complex64, torch.uint8, torch.float64)
TRIES = 60
"""How many times arguments are made for an operator before it is left."""

Call = tuple[tuple[Any, ...], dict[str, Any]]


def operators() -> list[OpOverload]:
    """Every operator of torch that a graph can hold, by name."""
    for namespace in MODULES:
        register_operators(namespace)
    found: list[OpOverload] = []
    for full in sorted(torch._C._dispatch_get_all_op_names()):
        namespace, _, rest = full.partition("::")
        name, _, overload = rest.partition(".")
        op = find_op(namespace, name, overload or "default")
        if op is not None:
            found.append(op)
    return found


class Recorder(TorchDispatchMode):
    """Hands each operator that runs, with its arguments, to a function that calls it."""

    def __init__(self, look: Callable[[OpOverload, Sequence[Any], Mapping[str, Any]], Any]) -> None:
        super().__init__()
        self.look = look

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.look(func, *tree_map(_copy, (args, kwargs or {})))
        return func(*args, **(kwargs or {}))


def _copy(value: Any) -> Any:
    """A tensor of its own with the same strides: what is looked at must not change the sample."""
    if not isinstance(value, Tensor) or value.layout is not torch.strided or value.device.type == "meta":
        return value
    storage = value.detach().untyped_storage().clone()
    made = torch.empty(0, dtype=value.dtype, device=value.device)
    made.set_(storage, value.storage_offset(), value.size(), value.stride())
    made = torch._conj(made) if value.is_conj() else made
    return torch._neg_view(made) if value.is_neg() else made


def run_info(info: Any, recorder: Recorder, know: Callable[..., None], num_samples: int) -> None:
    """Run torch's samples of one operator as they are, with the backward pass, and in place; `know` hears of them."""
    packet = getattr(torch.ops.aten, info.aten_name or info.name.rpartition(".")[2], None)
    overloads = [getattr(packet, name) for name in packet.overloads()] if packet is not None else []
    supported = info.supported_dtypes("cpu")
    dtypes = [d for d in (torch.float32, torch.int64, torch.complex64, torch.bool) if d in supported][:1]
    for dtype in dtypes:
        grad = dtype is torch.float32 and info.supports_autograd
        try:
            samples = list(itertools.islice(info.sample_inputs("cpu", dtype, requires_grad=grad), num_samples))
        except Exception:  # some samples need what this build lacks
            continue
        for sample in samples:
            for call in (info.op, info.inplace_variant):
                _run(call, sample, recorder, grad)
            for op in overloads:  # composite operators are taken apart before a recorder sees them
                know(op, *tree_map(_copy, ((sample.input, *sample.args), dict(sample.kwargs))))


def _run(call: Any, sample: Any, recorder: Recorder, grad: bool) -> None:
    if call is None:
        return
    given = tree_map(_leaf, (sample.input, sample.args, sample.kwargs))
    try:
        with recorder:
            result = call(given[0], *given[1], **given[2])
            ends = [t for t in tree_leaves(result) if isinstance(t, Tensor) and t.requires_grad]
            if grad and ends:
                torch.autograd.backward(ends, [torch.ones_like(t) for t in ends])
    except Exception:  # an in-place form may refuse what the operator takes
        return


def _leaf(value: Any) -> Any:
    return value.detach().clone().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value


def made_calls(op: OpOverload, known: Sequence[Call], seed: int) -> Iterator[Call]:
    """Calls to try: arguments that other overloads took, then arguments made from the schema."""
    draw = random.Random(f"{op.name()}:{seed}")
    torch.manual_seed(draw.randrange(1 << 30))
    for call in known:
        yield tree_map(_copy, _fit(op, call, draw))
    for _ in range(TRIES):
        shape, dtype = draw.choice(SHAPES), draw.choice(DTYPES)
        yield _arguments(op, {}, shape, dtype, draw)


def _fit(op: OpOverload, call: Call, draw: random.Random) -> Call:
    given = call[1]
    first = next((v for v in given.values() if isinstance(v, Tensor)), None)
    shape, dtype = (tuple(first.shape), first.dtype) if first is not None else ((2, 3), torch.float32)
    return _arguments(op, given, shape, dtype, draw)


def _arguments(
    op: OpOverload, given: Mapping[str, Any], shape: tuple[int, ...], dtype: torch.dtype, draw: random.Random
) -> Call:
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for a in op._schema.arguments:
        written_out = a.kwarg_only and a.alias_info is not None and a.alias_info.is_write
        if a.name in given and not written_out:
            value = given[a.name]
        elif a.has_default_value() and draw.random() < 0.6:
            value = a.default_value
        else:
            value = _value(str(a.type), a, shape, dtype, draw)
        if a.kwarg_only:
            kwargs[a.name] = value
        else:
            args.append(value)
    return tuple(args), kwargs


def _value(kind: str, a: Any, shape: tuple[int, ...], dtype: torch.dtype, draw: random.Random) -> Any:
    is_out = a.alias_info is not None and a.alias_info.is_write and a.kwarg_only
    if kind.startswith("Optional["):
        inner = kind[len("Optional[") : -1]
        return None if draw.random() < 0.5 else _value(inner, a, shape, dtype, draw)
    if kind.startswith("List["):
        inner = kind[len("List[") : -1]
        num = a.N or draw.choice((1, 2, len(shape)))
        return [_value(inner, a, shape, dtype, draw) for _ in range(num)]
    if kind == "Tensor":
        if is_out:
            return torch.empty(0, dtype=dtype)
        return _tensor(shape if draw.random() < 0.8 else draw.choice(SHAPES), _dtype(a.name, dtype, draw), draw)
    simple: dict[str, Callable[[], Any]] = {
        "int": lambda: draw.choice((0, 1, 1, 2, -1)),
        "SymInt": lambda: draw.choice((0, 1, 1, 2, 4)),
        "float": lambda: draw.choice((0.5, 0.1, 1.0)),
        "number": lambda: draw.choice((1, 2, 0.5)),
        "bool": lambda: draw.random() < 0.5,
        "str": lambda: draw.choice(("mean", "sum", "none", "linear", "nearest", "")),
        "Device": lambda: torch.device("cpu"),
        "Layout": lambda: torch.strided,
        "MemoryFormat": lambda: torch.contiguous_format,
        "ScalarType": lambda: draw.choice((torch.float32, torch.int64)),
        "Generator": lambda: None,
    }
    if kind in simple:
        return simple[kind]()
    raise NotImplementedError(kind)


def _dtype(name: str, dtype: torch.dtype, draw: random.Random) -> torch.dtype:
    if "mask" in name or name == "condition":
        return torch.bool
    if any(word in name for word in ("ind", "offset", "length", "target", "perm", "bucket", "size", "count", "split")):
        return torch.int64
    if name.startswith(("zero_point",)):
        return torch.int32
    return dtype


def _tensor(shape: tuple[int, ...], dtype: torch.dtype, draw: random.Random) -> Tensor:
    if dtype is torch.bool:
        return torch.rand(shape) < 0.5
    if dtype.is_floating_point or dtype.is_complex:
        return torch.rand(shape, dtype=dtype)
    return torch.zeros(shape, dtype=dtype) if draw.random() < 0.5 else torch.randint(0, 2, shape, dtype=dtype)


def bound_call(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
    """A call with all arguments by name, for other overloads of its operator."""
    return (), bind_arguments(op, args, kwargs)
