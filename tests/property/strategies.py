"""Random SPMD programs as listings: the only home of generators.

A program mixes several groups, dtypes, views, writes, draws, dependent collectives in all their forms, repeated
waits, results that escape, and collectives in flight. It is valid by construction: the builder follows storages and
flights with a model of its own, which knows nothing of `weft.graph.effects`.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from random import Random
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves

from tests.golden import operators  # noqa: F401  (programs name them)
from weft.simulation.program import OpKind, Program, Queue

DTYPES = ("f32", "bf16", "f64")
MESHES = (
    {"dp": (2, 1)},
    {"dp": (4, 1)},
    {"dp": (2, 2), "tp": (2, 1)},
    {"dp": (2, 2), "tp": (2, 1), "all": (4, 1)},
)


@dataclass
class Value:
    name: str
    shape: tuple[int, ...]
    dtype: str
    storages: frozenset[int]
    contiguous: bool = True


@dataclass
class Flight:
    """A launch under way: the values to wait for, and the storages that nobody may touch until then."""

    pending: list[Value]
    reads: frozenset[int]
    writes: frozenset[int]


@dataclass
class Builder:
    rng: Random
    groups: dict[str, tuple[int, int]]
    lines: list[str] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    waited: list[Value] = field(default_factory=list)
    flights: list[Flight] = field(default_factory=list)
    returned: list[Value] = field(default_factory=list)
    counter: int = 0

    # Naming and choosing.

    def new(
        self, shape: tuple[int, ...], dtype: str, of: frozenset[int] | None = None, contiguous: bool = True
    ) -> Value:
        self.counter += 1
        storages = frozenset({self.counter}) if of is None else of
        return Value(f"n{self.counter}", shape, dtype, storages, contiguous)

    def like(self, value: Value, dtype: str | None = None) -> Value:
        """A new value of the same shape; elementwise operators keep strides."""
        return self.new(value.shape, dtype or value.dtype, contiguous=value.contiguous)

    def emit(self, value: Value, text: str) -> Value:
        self.lines.append(f"    {value.name} = {text}")
        self.values.append(value)
        return value

    @property
    def unreadable(self) -> frozenset[int]:
        return frozenset().union(*(f.writes for f in self.flights))

    @property
    def unwritable(self) -> frozenset[int]:
        return self.unreadable.union(*(f.reads for f in self.flights))

    def pick(self, **wanted: object) -> Value | None:
        """A readable value; newer ones more often, so that programs grow deep."""
        found = [
            v
            for v in self.values
            if not v.storages & self.unreadable and all(getattr(v, key) == value for key, value in wanted.items())
        ]
        if not found:
            return None
        return self.rng.choice(found[-6:] if self.rng.random() < 0.5 else found)

    def group(self) -> tuple[str, int]:
        name = self.rng.choice(sorted(self.groups))
        return name, self.groups[name][0]

    # Compute.

    def pointwise(self) -> None:
        if value := self.pick():
            op = self.rng.choice(["relu({})", "neg({})", "sigmoid({})", "mul({}, 0.5)", "add({}, 1.0)"])
            self.emit(self.like(value), op.format(value.name))

    def binary(self) -> None:
        if (a := self.pick()) and (b := self.pick(shape=a.shape, dtype=a.dtype)):
            result = self.new(a.shape, a.dtype, contiguous=a.contiguous and b.contiguous)
            self.emit(result, f"{self.rng.choice(['add', 'mul', 'sub'])}({a.name}, {b.name})")

    def matmul(self) -> None:
        a = self.pick()
        if (
            a
            and len(a.shape) == 2
            and (b := self.pick(dtype=a.dtype))
            and len(b.shape) == 2
            and b.shape[0] == a.shape[1]
        ):
            product = self.emit(self.new((a.shape[0], b.shape[1]), a.dtype), f"mm({a.name}, {b.name})")
            self.emit(self.new(product.shape, a.dtype), f"sigmoid({product.name})")

    def cast(self) -> None:
        if value := self.pick():
            dtype = self.rng.choice(DTYPES)
            self.emit(self.like(value, dtype), f"_to_copy({value.name}, dtype={dtype})")

    def draw(self) -> None:
        if value := self.pick():
            self.emit(self.like(value), f"rand_like({value.name})")

    def concatenate(self) -> None:
        if (a := self.pick()) and a.shape and a.shape[0] <= 16 and (b := self.pick(shape=a.shape, dtype=a.dtype)):
            self.emit(self.new((2 * a.shape[0], *a.shape[1:]), a.dtype), f"cat([{a.name}, {b.name}])")

    # Views and copies.

    def view(self) -> None:
        value = self.pick(contiguous=True)
        if value and value.shape:
            numel = value.shape[0] * (value.shape[1] if len(value.shape) == 2 else 1)
            shape = self.rng.choice([(numel,), (numel // 2, 2), (2, numel // 2)]) if numel % 2 == 0 else (numel,)
            op = self.rng.choice(["view", "reshape", "_unsafe_view"])
            self.emit(self.new(shape, value.dtype, value.storages), f"{op}({value.name}, {list(shape)})")

    def transpose(self) -> None:
        value = self.pick(contiguous=True)
        if value and len(value.shape) == 2:
            turned = self.new(value.shape[::-1], value.dtype, value.storages, contiguous=False)
            self.emit(turned, f"t({value.name})")

    def copy(self) -> None:
        if value := self.pick():
            op = self.rng.choice(["clone({}, memory_format=memory_format.contiguous_format)", "contiguous({})"])
            storages = value.storages if op.startswith("contiguous") else None
            self.emit(self.new(value.shape, value.dtype, storages), op.format(value.name))

    def slice(self) -> None:
        value = self.pick()
        if value and value.shape and value.shape[0] % 2 == 0:
            half = value.shape[0] // 2
            start = self.rng.choice([0, half])
            part = self.new((half, *value.shape[1:]), value.dtype, value.storages, value.contiguous)
            self.emit(part, f"slice({value.name}, 0, {start}, {start + half})")

    def split(self) -> None:
        value = self.pick()
        if value and value.shape and value.shape[0] % 2 == 0:
            half = (value.shape[0] // 2, *value.shape[1:])
            self.counter += 1
            name = f"n{self.counter}"
            self.lines.append(f"    {name} = split({value.name}, {half[0]})")
            for item in self.rng.sample([0, 1], self.rng.choice([1, 2])):
                self.emit(self.new(half, value.dtype, value.storages, value.contiguous), f"{name}[{item}]")

    # Writes.

    def write(self) -> None:
        target = self.pick()
        if target is None or target.storages & self.unwritable:
            return
        source = self.pick(shape=target.shape, dtype=target.dtype) or target
        op = self.rng.choice(["mul_({0}, 0.5)", "add_({0}, {1})", "copy_({0}, {1})", "zero_({0})"])
        if source.storages & target.storages and source is not target:
            op = "mul_({0}, 0.5)"  # overlapping source and target are not defined
        written = self.new(target.shape, target.dtype, target.storages, target.contiguous)
        self.emit(written, op.format(target.name, source.name))

    # Communication.

    def sendable(self) -> Value | None:
        value = self.pick(contiguous=True)
        return value if value and value.shape and value.shape[0] <= 64 else None

    def fly(self, text: str, sent: list[Value], results: list[Value]) -> None:
        reads = frozenset().union(*(v.storages for v in sent))
        writes = frozenset().union(*(v.storages for v in results))
        self.lines.append(text)
        self.flights.append(Flight(list(results), reads, writes))

    def all_gather(self) -> None:
        if value := self.sendable():
            group, size = self.group()
            result = self.new((value.shape[0] * size, *value.shape[1:]), value.dtype)
            if self.rng.random() < 0.2:
                self.counter += 1
                out = f"n{self.counter}"
                shape = list(result.shape)
                self.lines.append(f"    {out} = empty.memory_format({shape}, dtype={value.dtype})")
                call = f"all_gather_out({value.name}, {size}, {group!r}, out={out})"
            else:
                call = f"all_gather({value.name}, {size}, {group!r})"
            self.fly(f"    {result.name} = {call}", [value], [result])

    def reduce_scatter(self) -> None:
        value = self.sendable()
        group, size = self.group()
        if value and value.shape[0] % size == 0:
            result = self.new((value.shape[0] // size, *value.shape[1:]), value.dtype)
            op = self.rng.choice(["sum", "avg", "max"])
            self.fly(f"    {result.name} = reduce_scatter({value.name}, {op!r}, {size}, {group!r})", [value], [result])

    def all_reduce(self) -> None:
        value = self.sendable()
        if value is None:
            return
        group, _ = self.group()
        op = self.rng.choice(["sum", "avg", "max", "min"])
        if self.rng.random() < 0.3 and not value.storages & self.unwritable:
            result = self.new(value.shape, value.dtype, value.storages)
            self.fly(f"    {result.name} = all_reduce_({value.name}, {op!r}, {group!r})", [value], [result])
        else:
            result = self.new(value.shape, value.dtype)
            keywords = f"reduce_op={op!r}, group_name={group!r}" if self.rng.random() < 0.2 else f"{op!r}, {group!r}"
            self.fly(f"    {result.name} = all_reduce({value.name}, {keywords})", [value], [result])

    def broadcast(self) -> None:
        if value := self.sendable():
            group, size = self.group()
            result = self.new(value.shape, value.dtype)
            source = self.rng.randrange(size)
            self.fly(f"    {result.name} = broadcast({value.name}, {source}, {group!r})", [value], [result])

    def all_to_all(self) -> None:
        value = self.sendable()
        group, size = self.group()
        if value and value.shape[0] % size == 0:
            result = self.new(value.shape, value.dtype)
            splits = [value.shape[0] // size] * size
            self.fly(f"    {result.name} = all_to_all({value.name}, {splits}, {splits}, {group!r})", [value], [result])

    def coalesced(self) -> None:
        first = self.sendable()
        second = self.pick(contiguous=True, dtype=first.dtype) if first else None
        if not first or not second or not second.shape or second.shape[0] > 64:
            return
        group, size = self.group()
        self.counter += 1
        name = f"n{self.counter}"
        if self.rng.random() < 0.5:
            call = f"all_reduce_coalesced([{first.name}, {second.name}], 'sum', {group!r})"
            shapes = [first.shape, second.shape]
        else:
            call = f"all_gather_coalesced([{first.name}, {second.name}], {size}, {group!r})"
            shapes = [(v.shape[0] * size, *v.shape[1:]) for v in (first, second)]
        results = [self.new(shape, first.dtype) for shape in shapes]
        self.lines.append(f"    {name} = {call}")
        for item, result in enumerate(results):
            sent = (first, second)[item]
            self.fly(f"    {result.name} = {name}[{item}]", [sent], [result])

    def wait(self) -> None:
        if not self.flights:
            return
        flight = self.flights.pop(0 if self.rng.random() < 0.5 else self.rng.randrange(len(self.flights)))
        for result in flight.pending:
            source = result
            if self.rng.random() < 0.1 and result.shape:
                numel = result.shape[0] * (result.shape[1] if len(result.shape) == 2 else 1)
                source = self.new((numel,), result.dtype, result.storages)
                self.lines.append(f"    {source.name} = view({result.name}, [{numel}])")
            done = self.new(source.shape, source.dtype, result.storages)
            self.emit(done, f"wait({source.name})")
            self.waited.append(source)

    def wait_again(self) -> None:
        if self.waited:
            source = self.rng.choice(self.waited)
            if not source.storages & self.unreadable:
                self.emit(self.new(source.shape, source.dtype, source.storages), f"wait({source.name})")

    def gather_again(self) -> None:
        """The same collective once more, as FSDP does in backward."""
        launches = [line for line in self.lines if "= all_gather(" in line]
        if not launches:
            return
        text = self.rng.choice(launches[-4:]).partition(" = ")[2]
        source = next(v for v in self.values if f"({v.name}," in text)
        if source.storages & self.unreadable:
            return
        size = int(text.split(", ")[1])
        result = self.new((source.shape[0] * size, *source.shape[1:]), source.dtype)
        self.fly(f"    {result.name} = {text}", [source], [result])

    def scatter_and_gather(self) -> None:
        """A reduction that is scattered and gathered again, maybe over another group, maybe with another user."""
        value = self.sendable()
        (group, size), (again, again_size) = self.group(), self.group()
        again, again_size = (group, size) if self.rng.random() < 0.8 else (again, again_size)
        if not value or value.shape[0] % size:
            return
        part = self.new((value.shape[0] // size, *value.shape[1:]), value.dtype)
        self.lines.append(f"    {part.name} = reduce_scatter({value.name}, 'sum', {size}, {group!r})")
        done = self.new(part.shape, value.dtype, part.storages)
        self.lines.append(f"    {done.name} = wait({part.name})")
        whole = self.new((part.shape[0] * again_size, *part.shape[1:]), value.dtype)
        self.lines.append(f"    {whole.name} = all_gather({done.name}, {again_size}, {again!r})")
        self.emit(self.new(whole.shape, value.dtype, whole.storages), f"wait({whole.name})")
        if self.rng.random() < 0.3:
            self.values.append(done)

    def reduce_and_scatter(self) -> None:
        """A sum over one group that is scattered over another, maybe padded or moved between, maybe used elsewhere."""
        value = self.sendable()
        (group, _), (over, size) = self.group(), self.group()
        if not value or not value.shape[0]:
            return
        first, second = (self.rng.choice(["sum", "sum", "avg", "max"]) for _ in range(2))
        launch = self.new(value.shape, value.dtype)
        self.lines.append(f"    {launch.name} = all_reduce({value.name}, {first!r}, {group!r})")
        whole = self.new(value.shape, value.dtype, launch.storages)
        self.lines.append(f"    {whole.name} = wait({launch.name})")
        if self.rng.random() < 0.2:
            self.values.append(whole)
        sent = whole
        if len(value.shape) == 2 and self.rng.random() < 0.3:
            turned = self.new(value.shape[::-1], value.dtype, launch.storages)
            self.lines.append(f"    {turned.name} = t({whole.name})")
            sent = self.new(turned.shape, value.dtype)
            self.lines.append(f"    {sent.name} = clone({turned.name}, memory_format=memory_format.contiguous_format)")
        missing = -sent.shape[0] % size
        if missing or self.rng.random() < 0.2:
            padded = self.new((sent.shape[0] + missing, *sent.shape[1:]), value.dtype)
            pad = [*[0] * (2 * len(sent.shape) - 1), missing]
            number = self.rng.choice([0.0, 0.0, 0.0, 1.0])
            self.lines.append(f"    {padded.name} = constant_pad_nd({sent.name}, {pad}, {number})")
            sent = padded
        part = self.new((sent.shape[0] // size, *sent.shape[1:]), value.dtype)
        self.lines.append(f"    {part.name} = reduce_scatter({sent.name}, {second!r}, {size}, {over!r})")
        self.emit(self.new(part.shape, value.dtype, part.storages), f"wait({part.name})")

    def gram(self) -> None:
        """A gathered tensor, pointwise operators on it, and its product with itself or with data."""
        value = self.sendable()
        if not value or len(value.shape) != 2 or value.shape[0] > 16:
            return
        group, size = self.group()
        launch = self.new((value.shape[0] * size, value.shape[1]), value.dtype)
        self.lines.append(f"    {launch.name} = all_gather({value.name}, {size}, {group!r})")
        whole = self.emit(self.new(launch.shape, value.dtype, launch.storages), f"wait({launch.name})")
        for op in self.rng.choices(["sigmoid({})", "mul({}, 0.5)", "neg({})"], k=self.rng.randint(0, 2)):
            whole = self.emit(self.like(whole), op.format(whole.name))
        turned = self.new(whole.shape[::-1], value.dtype, whole.storages, contiguous=False)
        self.lines.append(f"    {turned.name} = t({whole.name})")
        factor = self.pick(dtype=value.dtype, contiguous=True) if self.rng.random() < 0.3 else whole
        if factor and len(factor.shape) == 2 and factor.shape[0] == whole.shape[0]:
            product = self.new((whole.shape[1], factor.shape[1]), value.dtype)
            self.lines.append(f"    {product.name} = mm({turned.name}, {factor.name})")
            self.emit(self.new(product.shape, value.dtype), f"sigmoid({product.name})")
        if self.rng.random() < 0.5:
            self.emit(self.new((), value.dtype), f"sum({whole.name})")

    def put(self) -> None:
        """A tensor with a part replaced, maybe copied back."""
        value = self.pick(contiguous=True)
        if not value or not value.shape or value.shape[0] % 2:
            return
        half = value.shape[0] // 2
        part = self.pick(shape=(half, *value.shape[1:]), dtype=value.dtype)
        if part is None:
            part = self.emit(self.new((half, *value.shape[1:]), value.dtype), f"slice({value.name}, 0, 0, {half})")
            part.storages = value.storages
        start = self.rng.choice([0, half])
        put = self.emit(self.like(value), f"slice_scatter({value.name}, {part.name}, 0, {start}, {start + half})")
        if self.rng.random() < 0.3 and not value.storages & self.unwritable:
            back = self.new(value.shape, value.dtype, value.storages, value.contiguous)
            self.emit(back, f"copy_({value.name}, {put.name})")

    def towers(self) -> None:
        """Several products of one shape or with one input, and activations behind them."""
        factors = [v for v in self.values if len(v.shape) == 2 and not v.storages & self.unreadable and v.contiguous]
        for _ in range(self.rng.randint(2, 4) if factors else 0):
            a = self.rng.choice(factors)
            fits = [b for b in factors if b.shape[0] == a.shape[1] and b.dtype == a.dtype]
            if fits:
                product = self.emit(self.new((a.shape[0], (b := self.rng.choice(fits)).shape[1]), a.dtype), "")
                self.lines[-1] = f"    {product.name} = mm({a.name}, {b.name})"
                self.emit(self.new(product.shape, a.dtype), f"sigmoid({product.name})")

    def viewed_cat(self) -> None:
        """Views of tensors, laid side by side."""
        value = self.pick(contiguous=True)
        other = self.pick(shape=value.shape, dtype=value.dtype, contiguous=True) if value else None
        if not value or not other or len(value.shape) != 2 or value.shape[1] % 2 or value.shape[0] > 16:
            return
        rows, columns = value.shape
        shape = self.rng.choice([(rows, 2, columns // 2), (rows, 2, columns // 2), (rows * 2, columns // 2)])
        views = [self.new(shape, value.dtype, v.storages) for v in (value, other)]
        for view, source in zip(views, (value, other), strict=True):
            self.lines.append(f"    {view.name} = view({source.name}, {list(shape)})")
        whole = self.new((2 * shape[0], *shape[1:]), value.dtype)
        self.lines.append(f"    {whole.name} = cat([{views[0].name}, {views[1].name}])")
        flat = self.new((2 * rows * columns,), value.dtype, whole.storages)
        self.emit(flat, f"view({whole.name}, [{2 * rows * columns}])")

    def add_rows(self) -> None:
        """Many rows added to few."""
        value = self.pick(contiguous=True)
        if not value or len(value.shape) != 2:
            return
        count, index, row = (self.new((), value.dtype) for _ in range(3))
        self.lines.append(f"    {count.name} = arange.default(32)")
        self.lines.append(f"    {index.name} = remainder.Scalar({count.name}, {value.shape[0]})")
        self.lines.append(f"    {row.name} = slice({value.name}, 0, 0, 1)")
        self.emit(self.like(value), f"index_put({value.name}, [{index.name}], {row.name}, True)")

    # What rewrites look for.

    def disturb(self, *values: Value) -> None:
        """Write to one of the values, at times: what was read before is then not what is read later."""
        value = self.rng.choice(values)
        if self.rng.random() < 0.25 and not value.storages & self.unwritable:
            written = self.new(value.shape, value.dtype, value.storages, value.contiguous)
            self.emit(written, f"mul_({value.name}, 0.5)")

    def arithmetic(self) -> None:
        """Arithmetic that does nothing, or nearly."""
        if value := self.pick():
            ops = ["mul({}, 1.0)", "div({}, 1)", "add({}, 0.0)", "sub({}, 0.0)", "add({}, -0.0)", "mul({}, 0)"]
            self.emit(self.like(value), self.rng.choice([*ops, "abs({})", "relu({})", "neg({})"]).format(value.name))

    def cast_back(self) -> None:
        """A cast and one back, or on."""
        if value := self.pick():
            dtype = self.rng.choice(DTYPES)
            wide = self.emit(self.like(value, dtype), f"_to_copy({value.name}, dtype={dtype})")
            self.disturb(value, wide)
            back = self.rng.choice([value.dtype, *DTYPES])
            self.emit(self.like(wide, back), f"_to_copy({wide.name}, dtype={back})")

    def view_back(self) -> None:
        """A view and its inverse, or another view."""
        value = self.pick(contiguous=True)
        if value and len(value.shape) == 2:
            rows, columns = value.shape
            flat = self.new((rows * columns,), value.dtype, value.storages)
            self.emit(flat, f"view({value.name}, [{rows * columns}])")
            shape = self.rng.choice([(rows, columns), (columns, rows)])
            self.emit(self.new(shape, value.dtype, value.storages), f"reshape({flat.name}, {list(shape)})")

    def turn_back(self) -> None:
        """A permutation, and once more."""
        value = self.pick(contiguous=True)
        if value and len(value.shape) == 2:
            turned = self.new(value.shape[::-1], value.dtype, value.storages, contiguous=False)
            self.emit(turned, f"permute({value.name}, [1, 0])")
            self.emit(self.new(value.shape, value.dtype, value.storages), f"t({turned.name})")

    def biased(self) -> None:
        """A matmul with something added to it: a row, a whole tensor, another matmul."""
        a = self.pick()
        if not a or len(a.shape) != 2:
            return
        b = self.pick(dtype=a.dtype)
        if not b or len(b.shape) != 2 or b.shape[0] != a.shape[1]:
            return
        product = self.emit(self.new((a.shape[0], b.shape[1]), a.dtype), f"mm({a.name}, {b.name})")
        self.disturb(a, b, product)
        bias = self.pick(shape=self.rng.choice([product.shape, product.shape[1:]]), dtype=a.dtype) or product
        names = self.rng.sample([product.name, bias.name], 2)
        total = self.emit(self.new(product.shape, a.dtype), f"add({names[0]}, {names[1]})")
        self.emit(self.new(product.shape, a.dtype), f"sigmoid({total.name})")

    def summed(self) -> None:
        """The sum of two matmuls, and an addmm."""
        a, b = self.pick(), self.pick()
        fits = a and b and a.dtype == b.dtype and len(a.shape) == len(b.shape) == 2 and a.shape[1] == b.shape[0]
        if a and b and fits:
            shape = (a.shape[0], b.shape[1])
            other = self.pick(shape=a.shape, dtype=a.dtype) or a
            first = self.emit(self.new(shape, a.dtype), f"mm({a.name}, {b.name})")
            self.disturb(a, b, other)
            second = self.emit(self.new(shape, a.dtype), f"mm({other.name}, {b.name})")
            total = self.emit(self.new(shape, a.dtype), f"add({first.name}, {second.name})")
            both = self.emit(self.new(shape, a.dtype), f"addmm({total.name}, {a.name}, {b.name})")
            self.emit(self.new(shape, a.dtype), f"sigmoid({both.name})")

    def join_again(self) -> None:
        """Pieces of a tensor, put together in order or not."""
        value = self.pick()
        if not value or not value.shape or value.shape[0] % 2:
            return
        half = (value.shape[0] // 2, *value.shape[1:])
        self.counter += 1
        name = f"n{self.counter}"
        self.lines.append(f"    {name} = split({value.name}, {half[0]})")
        parts = [self.new(half, value.dtype, value.storages, value.contiguous) for _ in range(2)]
        a, b = (self.emit(part, f"{name}[{k}]") for k, part in enumerate(parts))
        self.disturb(a, b, value)
        pieces = self.rng.choice([(a, b), (a, b), (b, a), (a, a), (a, b, a)])
        shape = (half[0] * len(pieces), *half[1:])
        if shape[0] <= 32:
            self.emit(self.new(shape, value.dtype), f"cat([{', '.join(p.name for p in pieces)}])")

    def cut_again(self) -> None:
        """Tensors put together, and cut again where they meet or not."""
        if (a := self.pick()) and a.shape and a.shape[0] <= 8 and (b := self.pick(shape=a.shape, dtype=a.dtype)):
            rows = a.shape[0]
            whole = self.emit(self.new((2 * rows, *a.shape[1:]), a.dtype), f"cat([{a.name}, {b.name}])")
            self.disturb(a, b, whole)
            start = self.rng.choice([0, rows, rows // 2])
            part = self.new(a.shape, a.dtype, whole.storages)
            self.emit(part, f"slice({whole.name}, 0, {start}, {start + rows})")
            self.emit(self.like(part), f"relu({part.name})")
            if rows <= 4:
                self.emit(self.new((3 * rows, *a.shape[1:]), a.dtype), f"cat([{whole.name}, {a.name}])")

    def reduce_twice(self) -> None:
        """The largest of each row, and of all."""
        value = self.pick()
        if value and len(value.shape) == 2:
            rows = self.emit(self.new((value.shape[0],), value.dtype), f"amax({value.name}, [1])")
            self.disturb(value, rows)
            self.emit(self.new((), value.dtype), f"amax({value.name})")

    def count_up(self) -> None:
        """The running sum of a constant."""
        size, dtype = self.rng.choice([4, 8]), self.rng.choice(DTYPES)
        ones = self.emit(self.new((size,), dtype), f"full([{size}], {self.rng.choice([1, 2, 0.5])}, dtype={dtype})")
        self.disturb(ones)
        self.emit(self.new((size,), dtype), f"cumsum({ones.name}, 0)")

    # What is functional by a wrapper, and what runs in rounds.

    def functionalized(self) -> None:
        """An operator that writes what it is given, in a wrapper that copies that first."""
        value = self.pick(contiguous=True)
        other = self.pick(shape=value.shape, dtype=value.dtype) if value and value.shape else None
        if not value or not other:
            return
        kind = f"{value.dtype}[{', '.join(map(str, value.shape))}]"
        name = self.new((), value.dtype).name
        match self.rng.randrange(3):
            case 0:
                call = f"auto_functionalized(operator('weft_test.bump_.default'), x={value.name}, y={other.name})"
                types, items = f"(None, {kind})", [1]
            case 1:
                third = self.pick(shape=value.shape, dtype=value.dtype, contiguous=True) or value
                given = f"x={value.name}, z={third.name}, y={other.name}"
                call = f"auto_functionalized(operator('weft_test.exchange_.default'), {given})"
                types, items = f"({kind}, {kind}, {kind})", [0, 1, 2]
            case _:
                half = value.shape[0] // 2
                shape = (half, *value.shape[1:])
                part = self.new(shape, value.dtype, other.storages, other.contiguous)
                self.emit(part, f"slice({other.name}, 0, 0, {half})")
                bounds = f"_x_slice_dim=0, _x_slice_start={half}, _x_slice_end={2 * half}"
                given = f"y={part.name}, _x_base_index=0, {bounds}, _all_bases=[{value.name}]"
                call = f"auto_functionalized_v2(operator('weft_test.bump_.default'), {given})"
                types, items = f"(None, {kind})", [1]
        self.lines.append(f"    {name}: {types} = higher_order.{call}")
        taken = [self.emit(self.new(value.shape, value.dtype), f"{name}[{k}]") for k in items]
        if self.rng.random() < 0.4 and not value.storages & self.unwritable:
            back = self.new(value.shape, value.dtype, value.storages, value.contiguous)
            self.emit(back, f"copy_({value.name}, {taken[-1 if len(items) == 1 else 1].name})")

    def scanned(self) -> None:
        """A scan or a map over the rows of a tensor."""
        value = self.pick(contiguous=True)
        if not value or len(value.shape) != 2:
            return
        carried = self.pick(shape=value.shape[1:], dtype=value.dtype, contiguous=True)
        row, rows = f"{value.dtype}[{value.shape[1]}]", f"{value.dtype}[{value.shape[0]}, {value.shape[1]}]"
        body, found = (self.new((), value.dtype).name for _ in range(2))
        inputs, known = ("h", "x") if carried else ("x",), ["x", *(["h"] if carried else [])]
        lines: list[str] = []
        for k in range(self.rng.randint(1, 4)):
            op = self.rng.choice(["add({}, {})", "mul({}, {})", "neg({})", "sigmoid({})", "rand_like({})", "clone({})"])
            lines.append(f"        y{k} = {op.format(*(self.rng.choice(known) for _ in range(2)))}")
            known.append(f"y{k}")
        made = known[2 if carried else 1 :]  # what a round returns shares no memory with what it is given
        results = [self.rng.choice(made), made[-1]] if carried else [made[-1]]
        self.lines.append(f"    def {body}({', '.join(f'{name}: {row}' for name in inputs)}):")
        self.lines += [*lines, f"        return [{', '.join(results)}]", f"    {body} = attribute('{body}')"]
        call = (
            f"scan({body}, [{carried.name}], [{value.name}], [])"
            if carried
            else f"map_impl({body}, [{value.name}], [])"
        )
        types = f"({row}, {rows})" if carried else f"({rows},)"
        self.lines.append(f"    {found}: {types} = higher_order.{call}")
        if carried:
            self.emit(self.new(value.shape[1:], value.dtype), f"{found}[0]")
        self.emit(self.new(value.shape, value.dtype), f"{found}[{1 if carried else 0}]")


STEPS = (
    *(("pointwise", 6), ("binary", 5), ("matmul", 4), ("cast", 3), ("draw", 3), ("concatenate", 2)),
    *(("view", 4), ("transpose", 2), ("copy", 2), ("slice", 3), ("split", 2), ("write", 10)),
    *(("all_gather", 4), ("reduce_scatter", 3), ("all_reduce", 4), ("broadcast", 1), ("all_to_all", 1)),
    *(("coalesced", 1), ("wait", 7), ("wait_again", 1), ("gather_again", 2)),
)


REWRITE_STEPS = (
    *(("arithmetic", 8), ("cast_back", 5), ("view_back", 5), ("turn_back", 4), ("biased", 6), ("join_again", 5)),
    *(
        ("cut_again", 4),
        ("reduce_twice", 2),
        ("count_up", 1),
        ("copy", 6),
        ("pointwise", 3),
        ("matmul", 2),
        ("slice", 2),
    ),
    *(("summed", 4), ("write", 4), ("draw", 1), ("all_gather", 1), ("all_reduce", 1), ("wait", 4)),
)
"""Programs with much that can be rewritten, and writes and collectives in between."""


ALGEBRA_STEPS = (
    *(("scatter_and_gather", 6), ("gram", 6), ("all_reduce", 6), ("all_gather", 2), ("reduce_scatter", 2)),
    *(("coalesced", 2), ("broadcast", 1), ("all_to_all", 1), ("wait", 12), ("wait_again", 1), ("slice", 2)),
    *(("pointwise", 3), ("binary", 2), ("matmul", 2), ("write", 3), ("draw", 1), ("view", 2), ("copy", 1)),
)
"""Programs with collectives that others can stand for."""
SCATTER_STEPS = (("reduce_and_scatter", 12), *ALGEBRA_STEPS)
"""The same, with sums over one group that are scattered over another."""
MUTATION_STEPS = (
    *(("put", 8), ("pointwise", 6), ("binary", 3), ("view", 3), ("transpose", 1), ("slice", 2), ("split", 1)),
    *(("copy", 2), ("write", 3), ("draw", 1), ("matmul", 2), ("cast", 1)),
    *(("all_gather", 2), ("all_reduce", 2), ("reduce_scatter", 1), ("coalesced", 1), ("wait", 5), ("wait_again", 1)),
)
"""Programs with much that can be written in place, and much that must not."""
BATCH_STEPS = (
    *(("towers", 6), ("pointwise", 10), ("binary", 6), ("view", 2), ("transpose", 1), ("slice", 2), ("write", 3)),
    *(("viewed_cat", 4), ("add_rows", 4), ("draw", 1), ("all_gather", 1), ("all_reduce", 1), ("wait", 2)),
)
"""Programs with much that is alike."""
WRAPPED_STEPS = (
    *(
        ("functionalized", 10),
        ("pointwise", 4),
        ("binary", 3),
        ("view", 3),
        ("slice", 2),
        ("transpose", 1),
        ("write", 2),
    ),
    *(("copy", 1), ("draw", 1), ("all_gather", 1), ("all_reduce", 1), ("coalesced", 1), ("wait", 4)),
)
"""Programs with operators that write, in wrappers that copy."""
SCAN_STEPS = (
    *(("scanned", 8), ("pointwise", 3), ("binary", 3), ("view", 3), ("slice", 2), ("transpose", 1), ("write", 2)),
    *(("draw", 2), ("all_gather", 1), ("all_reduce", 1), ("wait", 3)),
)
"""Programs with rounds."""
ONE_RANK_MESHES = ({"dp": (1, 1)}, {"dp": (2, 1), "tp": (1, 1)}, {"dp": (1, 1), "tp": (4, 1)})
"""With groups of one rank."""


BUCKET_STEPS = (
    *(("pointwise", 5), ("binary", 3), ("matmul", 2), ("cast", 3), ("draw", 1), ("concatenate", 1)),
    *(("view", 2), ("transpose", 1), ("slice", 1), ("write", 3)),
    *(("all_gather", 8), ("reduce_scatter", 8), ("all_reduce", 8), ("broadcast", 5), ("all_to_all", 4)),
    *(("coalesced", 3), ("wait", 20), ("wait_again", 1), ("gather_again", 2)),
)
"""Programs with many collectives of few kinds, for passes that merge them."""


def random_listing(
    rng: Random,
    num_steps: int | None = None,
    steps: tuple[tuple[str, int], ...] = STEPS,
    dtypes: Sequence[str] = DTYPES,
    meshes: Sequence[dict[str, tuple[int, int]]] = MESHES,
) -> str:
    """A random valid program. Its types are left out: reading it computes them."""
    builder = Builder(rng, rng.choice(meshes))
    for _ in range(rng.randint(2, 5)):
        shape = rng.choice([(4, 4), (8, 4), (4, 8), (8,), (8, 8)])
        builder.values.append(builder.new(shape, rng.choice(dtypes)))
    inputs = ", ".join(f"{v.name}: {v.dtype}[{', '.join(map(str, v.shape))}]" for v in builder.values)
    names, weights = zip(*steps, strict=True)
    for step in rng.choices(names, weights, k=num_steps or rng.randint(10, 60)):
        getattr(builder, step)()
    for flight in list(builder.flights):
        if rng.random() < 0.2:
            builder.returned += flight.pending
        else:
            builder.flights = [flight, *(f for f in builder.flights if f is not flight)]
            while flight in builder.flights:
                builder.wait()
    ready = [v for v in builder.values if not v.storages & builder.unreadable]
    builder.returned += rng.sample(ready, min(len(ready), rng.choice([1, 4, len(ready)])))
    header = [f"group({n!r}, size={size}, stride={stride})" for n, (size, stride) in builder.groups.items()]
    result = ", ".join(v.name for v in builder.returned)
    return "\n".join([*header, "", f"def graph({inputs}):", *builder.lines, f"    return [{result}]"]) + "\n"


def random_constants(rng: Random) -> str:
    """A program of two devices: constants of the host, what is made of them there, and copies to the device."""
    host, there, lines = ["h"], ["x"], list[str]()

    def add(text: str, where: list[str]) -> None:
        lines.append(f"    n{len(lines)} = {text}")
        where.append(f"n{len(lines) - 1}")

    for _ in range(rng.randint(6, 24)):
        a, b, c, d = rng.choice(host), rng.choice(host), rng.choice(there), rng.choice(there)
        match rng.randrange(9):
            case 0 | 1 | 2:
                made = rng.choice(["full([4], 2.0, dtype=f32", "ones([4], dtype=f32", "arange(4, dtype=f32"])
                add(f"{made}, device=device('cpu'))", host)
            case 3:
                add(rng.choice([f"add({a}, {b})", f"neg({a})", f"mul({a}, 0.5)", f"view({a}, [4])"]), host)
            case 4 | 5:
                add(f"_to_copy({a}, device=device('cuda:0'))", there)
            case 6:
                add(rng.choice([f"add({c}, {d})", f"mul({c}, {d})", f"sigmoid({c})"]), there)
            case 7:
                add(f"_to_copy({rng.choice([a, c])}, device=device('cpu'))", host)
            case _:
                add(f"mul_({a}, 0.5)", host)
    returned = [*rng.sample(there, min(3, len(there))), *rng.sample(host, rng.choice([0, 0, 1]))]
    header = "device('cuda:0')\n\ndef graph(x: f32[4], h: f32[4](device='cpu')):\n"
    return header + "\n".join([*lines, f"    return [{', '.join(returned)}]"]) + "\n"


def random_aliased(rng: Random) -> str:
    """A listing whose inputs and constants share memory, with reads, writes and launches of them.

    No part of a memory is written while it is in flight. Where the listing says that its inputs may share memory, all
    inputs and constants count as one memory.
    """
    may_share = rng.random() < 0.3
    held = [round(rng.uniform(-2, 2), 2) for _ in range(12)]
    head = ["group('dp', size=2)", *(["inputs('may share memory')"] if may_share else [])]
    starts = [rng.randint(0, 8) for _ in range(rng.randint(2, 4))]
    memories: dict[str, str] = {}
    inputs: list[str] = []
    lines: list[str] = []
    for k, start in enumerate(starts):
        extras = [f"offset={start}"] * (start > 0) + ["base='c0'"] * (k > 0)
        placed = f"({', '.join(extras)})" if extras else ""
        head.append(f"tensor('c{k}', f32[4]{placed}, {held[start : start + 4]})")
        lines.append(f"c{k} = attribute('c{k}')")
        memories[f"c{k}"] = "constants"
    for k in range(rng.randint(2, 4)):
        place = rng.choice(["own", "inputs", "constants"])
        offset = rng.choice(starts) if place == "constants" else rng.randint(0, 4)
        words = {"own": "", "inputs": f"offset={offset}, base='x0'", "constants": f"offset={offset}, constant='c0'"}
        is_first = k == 0 or place == "own" or (place == "inputs" and memories["x0"] == "constants")
        inputs.append(f"x{k}: f32[4]" if is_first else f"x{k}: f32[4]({words[place]})")
        memories[f"x{k}"] = f"x{k}" if is_first else {"inputs": "x0", "constants": "constants"}[place]
    if may_share:
        memories = dict.fromkeys(memories, "any")
    shared, fresh = list(memories), ["v"]
    lines.append("v = neg(x0)")
    flights: list[tuple[str, str, bool]] = []

    def land(flight: tuple[str, str, bool]) -> None:
        flights.remove(flight)
        name, _, is_gather = flight
        lines.append(f"{name}_w = wait({name})")
        lines.extend([f"{name}_s = slice({name}_w, 0, 2, 6)"] if is_gather else [])
        fresh.append(f"{name}_s" if is_gather else f"{name}_w")

    for k in range(rng.randint(6, 24)):
        step = rng.choice(["write", "write", "read", "read", "launch", "launch", "wait", "compute"])
        name = rng.choice(shared)
        if step == "write":
            for flight in [flight for flight in flights if flight[1] == memories[name]]:
                land(flight)
            right = [f"add_({name}, {rng.choice(fresh)})", f"copy_({name}, {rng.choice(fresh)})", f"mul_({name}, 0.5)"]
            lines.append(f"n{k} = {rng.choice(right)}")
        elif step == "read":
            lines.append(f"n{k} = add({name}, {rng.choice([*fresh, *shared])})")
            fresh.append(f"n{k}")
        elif step == "launch":
            is_gather = rng.random() < 0.5
            sent = rng.choice([name, name, rng.choice(fresh)])
            lines.append(
                f"n{k} = all_gather({sent}, 2, 'dp')" if is_gather else f"n{k} = all_reduce({sent}, 'sum', 'dp')"
            )
            flights.append((f"n{k}", memories.get(sent, ""), is_gather))
        elif step == "wait" and flights:
            land(rng.choice(flights))
        else:
            lines.append(f"n{k} = relu({rng.choice(fresh)})")
            fresh.append(f"n{k}")
    for flight in list(flights):
        land(flight)
    results = rng.sample(fresh, min(len(fresh), 4)) + [name for name in shared if rng.random() < 0.2]
    body = "".join(f"    {line}\n" for line in lines)
    return "\n".join(head) + f"\n\ndef graph({', '.join(inputs)}):\n{body}    return [{', '.join(results)}]\n"


def random_quantised(rng: Random) -> str:
    """A program of products with int8 weights that are cast, in ways that fit or not, and with packed int4 weights."""
    inputs = ["x: bf16[8, 64]", "y: bf16[2, 4, 64]", "z: bf16[4, 128]"]
    lines: list[str] = []
    results: list[str] = []

    def line(text: str) -> str:
        lines.append(f"    n{len(lines)} = {text}")
        return f"n{len(lines) - 1}"

    for k in range(rng.randint(2, 5)):
        rows = rng.choice([32, 64, 128])
        if rng.random() < 0.5:
            rows = rng.choice([64, 64, 32, 128])
            inputs += [f"w{k}: u8[{rows}, 64]", f"s{k}: bf16[4, {rows}, 2]"]
            results.append(line(f"_weight_int4pack_mm_for_cpu(z, w{k}, 32, s{k})"))
            if rng.random() < 0.3:
                results[-1] = line(f"relu({results[-1]})")
            continue
        inputs += [f"w{k}: i8[{rows}, 64]", f"s{k}: bf16[{rng.choice([rows, rows, rows, 1])}]"]
        cast = "_to_copy({}, dtype=bf16)" if rng.random() < 0.5 else "prims.convert_element_type.default({}, bf16)"
        turn = rng.choice(["t({})", "permute({}, [1, 0])"])
        first, second = (cast, turn) if rng.random() < 0.5 else (turn, cast)
        weight = line(second.format(line(first.format(f"w{k}"))))
        if rng.random() < 0.15:
            line(f"neg_(w{k})")
        is_deep = rng.random() < 0.4
        product = line(f"mm({line('view(y, [8, 64])') if is_deep else 'x'}, {weight})")
        if rng.random() < 0.15:
            results.append(product)
        product = line(f"view({product}, [2, 4, {rows}])") if is_deep else product
        pair = [product, f"s{k}"] if rng.random() < 0.5 else [f"s{k}", product]
        results.append(line(f"mul({', '.join(pair)})"))
    return f"def graph({', '.join(inputs)}):\n" + "\n".join([*lines, f"    return [{', '.join(results)}]"]) + "\n"


listings = st.randoms(use_true_random=False).map(random_listing)
"""Random programs for hypothesis, which shrinks them."""


# Programs: what the simulator and the bounds see of a graph.


def random_program(rng: Random, max_ops: int = 40, is_plain: bool = False) -> Program:
    """A program of all sorts of operations, with memory; a plain one has a link per queue, no gap and no slowdown."""
    num_queues = rng.randint(1, 4)
    num_links = num_queues if is_plain else rng.randint(1, num_queues)
    wanted = [*[OpKind.COMPUTE] * rng.randint(2, 4), *[OpKind.LAUNCH] * rng.randint(1, 3), OpKind.NOTHING]
    density, longest = rng.choice((0.5, 1.0, 2.0)), rng.choice((30, 30, 300))
    kinds: list[OpKind] = []
    preds: list[tuple[int, ...]] = []
    waits: list[tuple[int, ...]] = []
    durations: list[int] = []
    for op in range(rng.randint(max(1, max_ops // 3), max_ops)):
        launched = [before for before in range(op) if kinds[before] is OpKind.LAUNCH]
        kind = rng.choice([*wanted, *[OpKind.WAIT] * (2 * bool(launched))])
        needs = {other for other in range(op) if rng.random() < density / (op + 1)}
        needs |= {rng.randrange(op)} if op and rng.random() < 0.5 else set()
        landed = rng.sample(launched, rng.randint(1, min(2, len(launched)))) if kind is OpKind.WAIT else []
        is_timed = kind in (OpKind.COMPUTE, OpKind.LAUNCH)
        kinds.append(kind)
        preds.append(tuple(sorted(needs | {*landed})))
        waits.append(tuple(sorted(landed)))
        durations.append(rng.choice((0, 1, *[rng.randint(1, longest)] * 8)) if is_timed else 0)
    launches = [kind is OpKind.LAUNCH for kind in kinds]
    made = {op: rng.randint(1, 100) for op in range(len(kinds)) if rng.random() < 0.7}
    given = {op for op in made if kinds[op] is OpKind.NOTHING and rng.random() < 0.5}
    return Program(
        names=tuple(f"op{op}" for op in range(len(kinds))),
        kinds=tuple(kinds),
        duration_ns=tuple(durations),
        preds=tuple(preds),
        queue=tuple(rng.randrange(num_queues) if is_launch else -1 for is_launch in launches),
        waits_for=tuple(waits),
        queues=tuple(Queue(f"g{queue}", queue % num_links) for queue in range(num_queues)),
        links=tuple(f"link{link}" for link in range(num_links)),
        drains=tuple(rng.random() < 0.05 and kind is not OpKind.WAIT for kind in kinds),
        launch_gap_ns=0 if is_plain else rng.choice((0, 0, 1, 5)),
        slowdown_ppm=0 if is_plain else rng.choice((0, 0, 189_000, 1_000_000)),
        allocates=tuple(((op, made[op]),) if op in made else () for op in range(len(kinds))),
        uses=tuple(tuple(pred for pred in before if pred in made) for before in preds),
        kept=frozenset({*given, *(op for op in made if rng.random() < 0.1)}),
        given=frozenset(given),
        latency_ns=tuple(rng.randint(0, ns) if launch else 0 for ns, launch in zip(durations, launches, strict=True)),
        kernel=random_kernels(rng, kinds),
        collective_slowdown_ppm=0 if is_plain else Random(sum(durations)).choice((0, 0, 150_000, 1_000_000)),
    )


def random_gradients(rng: Random, max_layers: int = 3, is_plain: bool = False) -> Program:
    """Layers backwards: each may need a gathered weight, and has gradients that are reduced, maybe over two queues."""
    kinds: list[OpKind] = []
    preds: list[tuple[int, ...]] = []
    waits: list[tuple[int, ...]] = []
    queue: list[int] = []

    def add(kind: OpKind, needs: list[int], on: int = -1) -> int:
        kinds.append(kind)
        preds.append(tuple(needs))
        waits.append(tuple(needs) if kind is OpKind.WAIT else ())
        queue.append(on)
        return len(kinds) - 1

    last: list[int] = []
    for _ in range(rng.randint(1, max_layers)):
        if rng.random() < 0.5:
            last = [*last, add(OpKind.WAIT, [add(OpKind.LAUNCH, [], 0)])]
        for _ in range(rng.randint(1, 2)):
            gradient = add(OpKind.COMPUTE, last)
            reduced = add(OpKind.LAUNCH, [gradient], 1)
            if rng.random() < 0.3:
                add(OpKind.LAUNCH, [add(OpKind.WAIT, [reduced])], 2)
        last = [add(OpKind.COMPUTE, last)]
    if rng.random() < 0.5:
        add(OpKind.LAUNCH, last, 1)
    links = (0, 1, 2) if is_plain else rng.choice(((0, 0, 0), (0, 0, 1), (0, 1, 1), (0, 1, 2)))
    longest = {OpKind.COMPUTE: rng.choice((10, 30)), OpKind.LAUNCH: rng.choice((10, 30))}
    durations = [rng.randint(1, longest[kind]) if kind in longest else 0 for kind in kinds]
    latency = [
        rng.randint(0, ns // 2) if kind is OpKind.LAUNCH else 0 for kind, ns in zip(kinds, durations, strict=True)
    ]
    return Program(
        names=tuple(f"op{op}" for op in range(len(kinds))),
        kinds=tuple(kinds),
        duration_ns=tuple(durations),
        preds=tuple(preds),
        queue=tuple(queue),
        waits_for=tuple(waits),
        queues=tuple(Queue(f"g{number}", link) for number, link in enumerate(links)),
        links=tuple(f"link{link}" for link in sorted(set(links))),
        drains=(False,) * len(kinds),
        launch_gap_ns=0 if is_plain else rng.choice((0, 0, 1, 5)),
        slowdown_ppm=0 if is_plain else rng.choice((0, 0, 189_000, 1_000_000)),
        allocates=((),) * len(kinds),
        uses=((),) * len(kinds),
        latency_ns=tuple(latency),
        collective_slowdown_ppm=0 if is_plain else Random(sum(durations)).choice((0, 0, 150_000, 1_000_000)),
    )


def random_kernels(rng: Random, kinds: Sequence[OpKind]) -> tuple[int, ...]:
    """One each, parts beside each other, or parts anywhere."""
    match rng.randrange(3):
        case 0:
            return ()
        case 1:
            starts = [op for op in range(len(kinds)) if op == 0 or rng.random() < 0.8]
            return tuple(max(start for start in starts if start <= op) for op in range(len(kinds)))
        case _:
            return tuple(rng.randint(-1, len(kinds) // 2) for _ in kinds)


def random_order(rng: Random, program: Program) -> list[int]:
    """An order that the edges allow."""
    left = [len(set(preds)) for preds in program.preds]
    succs: list[list[int]] = [[] for _ in left]
    for op, preds in enumerate(program.preds):
        for pred in set(preds):
            succs[pred].append(op)
    ready = [op for op, count in enumerate(left) if not count]
    order: list[int] = []
    while ready:
        order.append(ready.pop(rng.randrange(len(ready))))
        for after in succs[order[-1]]:
            left[after] -= 1
            if not left[after]:
                ready.append(after)
    return order


# Collectives beside products.


@dataclass
class Streams:
    """Writes random tensor-parallel programs: gathers, products of what was gathered, scatters of products."""

    rng: Random
    num_ranks: int
    inputs: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    results: list[str] = field(default_factory=list)
    counter: int = 0

    def name(self) -> str:
        self.counter += 1
        return f"n{self.counter}"

    def line(self, text: str) -> str:
        name = self.name()
        self.lines.append(f"{name} = {text}")
        return name

    def input(self, *shape: int) -> str:
        name = f"i{len(self.inputs)}"
        self.inputs.append(f"{name}: f32{list(shape)}")
        return name

    def gather(self, source: str, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
        """Gather along a random dim, written in a random way; sometimes the parts are taken in a wrong order."""
        rng, ranks = self.rng, self.num_ranks
        launch = self.line(f"all_gather({source}, {ranks}, 'tp')")
        dim = rng.randrange(len(shape))
        whole = tuple(n * ranks if d == dim else n for d, n in enumerate(shape))
        waited = self.line(f"wait({launch})")
        if rng.random() < 0.15:
            self.results.append(rng.choice([launch, waited]))
        if dim == 0 and rng.random() < 0.7:
            return waited, whole
        if rng.random() < 0.5:
            seen = self.line(f"view({waited}, {[ranks, *shape]})")
            order = [*range(1, dim + 1), 0, *range(dim + 1, len(shape) + 1)]
            turned = self.line(f"permute({seen}, {order})")
            return self.line(f"reshape({turned}, {list(whole)})"), whole
        if rng.random() < 0.5:
            split = self.line(f"split({waited}, {shape[0]})")
            parts = [self.line(f"{split}[{k}]") for k in range(ranks)]
        else:
            parts = [self.line(f"slice({waited}, 0, {k * shape[0]}, {(k + 1) * shape[0]})") for k in range(ranks)]
        if rng.random() < 0.15:
            rng.shuffle(parts)
        if rng.random() < 0.1:
            parts[0] = parts[1]
        return self.line(f"cat([{', '.join(parts)}], {dim})"), whole

    def between(self, source: str, shape: tuple[int, ...]) -> str:
        """A few operators that work by rows."""
        for _ in range(self.rng.choice((0, 0, 1, 2))):
            match self.rng.randrange(6):
                case 0:
                    source = self.line(f"mul({source}, 2.0)")
                case 1:
                    source = self.line(f"add({source}, {self.input(*shape)})")
                case 2:
                    source = self.line(f"mul({source}, {self.input(shape[-1])})")
                case 3:
                    source = self.line(f"relu({source})")
                case 4:
                    source = self.line(f"mul({source}, {self.input(*shape[:-1], 1)})")
                case _:
                    wide = self.line(f"_to_copy({source}, dtype=f64)")
                    source = self.line(f"_to_copy({wide}, dtype=f32)")
        if self.rng.random() < 0.1:
            self.results.append(source)
        return source

    def product(self, source: str, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
        """A product of the rows of a tensor with a new weight."""
        rng, inner, columns = self.rng, shape[-1], self.rng.choice((2, 4, 8))
        out = (*shape[:-1], columns)
        if len(shape) == 3 and rng.random() < 0.3:
            return self.line(f"bmm({source}, {self.input(shape[0], inner, columns)})"), out
        if rng.random() < 0.3:
            bias = rng.choice(["None", self.input(columns)])
            return self.line(f"linear({source}, {self.input(columns, inner)}, {bias})"), out
        rows = prod(shape[:-1])
        flat = self.line(f"{rng.choice(['reshape', 'view'])}({self._contiguous(source)}, {[rows, inner]})")
        weight = self.input(inner, columns)
        if rng.random() < 0.3:
            bias = self.input(*rng.choice([(columns,), (1, columns), (rows, columns)]))
            made = self.line(f"addmm({bias}, {flat}, {weight})")
        else:
            made = self.line(f"mm({flat}, {weight})")
        if rng.random() < 0.1:
            self.lines.append(f"{self.name()} = neg_({weight})")
        if rng.random() < 0.1:
            self.results.append(made)
        return self.line(f"view({made}, {list(out)})"), out

    def _contiguous(self, source: str) -> str:
        return self.line(f"clone({source}, memory_format=memory_format.contiguous_format)")

    def reduced(self, shape: tuple[int, ...]) -> None:
        """A product of which every rank needs the sum, maybe with another user, and a product of that."""
        made, size = self.product(self.between(self.input(*shape), shape), shape)
        sent = self._contiguous(self.between(made, size))
        kind = self.rng.choice(("sum", "sum", "max"))
        whole = self.line(f"wait({self.line(f'all_reduce({sent}, {kind!r}, ' + repr('tp') + ')')})")
        self.results.append(self.product(self.between(whole, size), size)[0])
        if self.rng.random() < 0.3:
            self.results.append(self.rng.choice([made, whole]))

    def scatter(self, source: str, shape: tuple[int, ...]) -> str:
        """Scatter along a random dim that splits."""
        rng, ranks = self.rng, self.num_ranks
        dims = [d for d, n in enumerate(shape) if n % ranks == 0]
        if not dims:
            return source
        dim = rng.choice(dims)
        part = shape[dim] // ranks
        if dim:
            split = self.line(f"split({source}, {part}, {dim})")
            parts = [self.line(f"{split}[{k}]") for k in range(ranks)]
            if rng.random() < 0.1:
                rng.shuffle(parts)
            source = self.line(f"cat([{', '.join(parts)}])")
        # No maxima: of 0.0 and -0.0, which a product may be either of, they take whichever comes first.
        sent, reduce_op = self._contiguous(source), rng.choice(["sum", "avg"])
        launch = self.line(f"reduce_scatter({sent}, '{reduce_op}', {ranks}, 'tp')")
        return self.line(f"wait({launch})")


def random_streams(rng: Random) -> str:
    """A program of gathers and scatters beside products."""
    made = Streams(rng, rng.choice((2, 4)))
    for _ in range(rng.randint(1, 2)):
        shape = rng.choice([(4, 4), (8, 4), (2, 4, 4), (4, 2, 4), (1, 4, 8), (3, 4, 4)])
        source = made.input(*shape)
        gathered, whole = made.gather(source, shape)
        ends: list[tuple[str, tuple[int, ...]]] = []
        for _ in range(rng.randint(1, 3)):
            ends.append(made.product(made.between(gathered, whole), whole))
        for end, size in ends:
            hidden, size = made.product(made.between(end, size), size) if rng.random() < 0.6 else (end, size)
            made.results.append(made.scatter(made.between(hidden, size), size) if rng.random() < 0.8 else hidden)
        if rng.random() < 0.2:
            made.lines.append(f"{made.name()} = neg_({source})")
    if rng.random() < 0.6:
        made.reduced(rng.choice([(8, 4), (4, 2, 4), (1, 8, 4), (6, 4)]))
    head = f"group('tp', size={made.num_ranks})\n\ndef graph({', '.join(made.inputs)}):\n"
    return head + "".join(
        f"    {line}\n" for line in [*made.lines, f"return [{', '.join(dict.fromkeys(made.results))}]"]
    )


# Arithmetic on values that are seldom drawn.

SPECIAL = (0.0, -0.0, 1.0, -1.0, 2.5, -0.5, float("inf"), float("-inf"), float("nan"), 1e-40, 1e30, -1e30, 65504.0)
LAYOUTS = ("contiguous", "columns of a wider one", "turned", "every second", "moved by one")


def special_tensor(seed: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of infinite, signed, tiny, largest and everyday values of a dtype."""
    rng = torch.Generator().manual_seed(seed)
    if dtype.is_complex:
        parts = [special_tensor(2 * seed + k, shape, dtype.to_real()) for k in (1, 2)]
        return torch.complex(*parts)
    if not dtype.is_floating_point:
        low, high = (0, 1) if dtype is torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
        chosen = torch.tensor([low, high, 0, 1, 2, 3], dtype=torch.int64)
        return chosen[torch.randint(0, len(chosen), tuple(shape), generator=rng)].to(dtype)
    chosen = torch.tensor(SPECIAL, dtype=torch.float64)[torch.randint(0, len(SPECIAL), tuple(shape), generator=rng)]
    usual = 3 * torch.randn(tuple(shape), generator=rng, dtype=torch.float64)
    return torch.where(torch.rand(tuple(shape), generator=rng) < 0.5, chosen, usual).to(dtype)


def laid_out(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """A matrix with the same elements in another layout of memory."""
    rows, columns = tensor.shape
    match layout:
        case "columns of a wider one":
            return torch.cat([tensor, tensor, tensor], 1)[:, columns : 2 * columns]
        case "turned":
            return tensor.t().contiguous().t()
        case "every second":
            return torch.stack([tensor, tensor], 2).view(rows, 2 * columns)[:, ::2]
        case "moved by one":
            flat = tensor.flatten()
            return torch.cat([flat[:1], flat])[1:].view(rows, columns)
        case _:
            return tensor.contiguous()


REALS, COMPLEX, WHOLE, BOOL = ("f32", "f64", "f16", "bf16"), ("c64",), ("i64", "i32", "i8", "u8"), ("b8",)
KEEPING = {
    REALS: (
        *("mul({x}, 1)", "mul({x}, 1.0)", "mul({x}, 0.0)", "div({x}, 1)", "add({x}, 0.0)", "add({x}, -0.0)"),
        *("sub({x}, 0)", "sub({x}, -0.0)", "neg({x})", "abs({x})", "relu({x})", "floor({x})", "trunc({x})"),
        *("maximum({x}, {x})", "maximum({x}, {y})", "minimum({x}, {y})", "add({x}, {y}, alpha=0.1)", "div({x}, {y})"),
        *("pow.Tensor_Scalar({x}, 1)", "clone({x})", "sqrt({x})", "tanh({x})", "add({x}, {zero})", "mul({x}, {one})"),
    ),
    COMPLEX: (
        "mul({x}, 1)",
        "div({x}, 1)",
        "add({x}, 0)",
        "sub({x}, 0.0)",
        "neg({x})",
        "mul({x}, {y})",
        "mul({x}, {one})",
    ),
    WHOLE: (
        *("mul({x}, 1)", "mul({x}, 0)", "add({x}, 0)", "sub({x}, 0)", "bitwise_or.Scalar({x}, 0)", "neg({x})"),
        *("bitwise_not({x})", "abs({x})", "floor({x})", "mul({x}, {y})", "maximum({x}, {y})", "mul({x}, {one})"),
    ),
    BOOL: ("logical_not({x})", "bitwise_not({x})", "mul({x}, {y})", "bitwise_and({x}, {x})", "bitwise_or({x}, {y})"),
}
"""Calls that keep the dtype of what they take, by dtype."""


def random_arithmetic(rng: Random) -> str:
    """A program of one shape and many dtypes: neutral numbers, casts, constants, and pieces of concatenations."""
    shape = rng.choice([[], [1], [5], [0], [4, 5], [9, 16], [3, 0]])
    size = f"[{', '.join(map(str, shape)) or '()'}]"
    kinds = {dtype: kind for kind in KEEPING for dtype in kind}
    inputs = [(f"x{k}", rng.choice(list(kinds))) for k in range(4)]
    values, lines = list(inputs), list[str]()

    def emit(text: str, dtype: str | None = None) -> str:
        lines.append(f"    n{len(lines)} = {text}")
        if dtype is not None:
            values.append((f"n{len(lines) - 1}", dtype))
        return f"n{len(lines) - 1}"

    for _ in range(rng.randint(4, 14)):
        x, dtype = rng.choice(values[-4:])
        y = rng.choice([name for name, other in values if other == dtype])
        dim = rng.randrange(len(shape)) if shape else 0
        match rng.randrange(10):
            case 0 | 1:
                other = rng.choice(list(kinds) if dtype not in COMPLEX else ["c64"])
                emit(f"_to_copy({x}, dtype={other})", other)
            case 2 if len(shape) == 2:
                turned = emit(f"t({x})")
                copied = emit(f"clone({turned}, memory_format=memory_format.contiguous_format)")
                emit(f"t({copied})", dtype)
            case 3 | 4 if shape:
                whole = emit(f"cat([{x}, {y}], {dim})")
                start = rng.choice([0, shape[dim]])
                emit(f"slice({whole}, {dim}, {start}, {start + shape[dim]})", dtype)
            case 5 if shape and shape[dim]:
                parts = emit(f"split({x}, 1, {dim})")
                items = [emit(f"{parts}[{k}]") for k in range(shape[dim])]
                emit(f"cat([{', '.join(items)}], {dim})", dtype)
            case 6 if shape and dtype not in BOOL:
                filled = emit(
                    f"full({shape}, {rng.choice([0, 1, 3, 257])}, dtype={rng.choice(['bf16', 'i64', dtype])})"
                )
                emit(f"cumsum({filled}, {dim}, dtype={dtype})", dtype)
            case _:
                zero = emit(
                    f"full({rng.choice([[], shape])}, {rng.choice(['0', '-0.0'])}, dtype={rng.choice([dtype, 'i64'])})"
                )
                one = emit(f"ones({rng.choice([[], shape])}, dtype={dtype})")
                emit(rng.choice(KEEPING[kinds[dtype]]).format(x=x, y=y, zero=zero, one=one), dtype)
    given = ", ".join(f"{name}: {dtype}{size}" for name, dtype in inputs)
    returned = ", ".join(rng.sample([name for name, _ in values[4:]], min(3, len(values) - 4)) or ["x0"])
    return "\n".join([f"def graph({given}):", *lines, f"    return [{returned}]"]) + "\n"


def random_products(rng: Random) -> str:
    """A program of products with biases of every shape, factors of zero, one and more, and sizes down to none."""
    dtype = rng.choice(["f32", "f64", "f16", "bf16", "c64", "i64"])
    rows, terms, columns = (rng.choice([0, 1, 3, 8]) for _ in range(3))
    biases = [[], [columns], [1], [1, columns], [rows, 1], [rows, columns]]
    inputs, lines, results = list[str](), list[str](), list[str]()

    def given(shape: Sequence[int]) -> str:
        inputs.append(f"a{len(inputs)}: {dtype}[{', '.join(map(str, shape)) or '()'}]")
        return f"a{len(inputs) - 1}"

    def emit(text: str) -> str:
        lines.append(f"    n{len(lines)} = {text}")
        return f"n{len(lines) - 1}"

    left, right = [given([rows, terms]) for _ in range(3)], [given([terms, columns]) for _ in range(3)]
    for _ in range(rng.randint(2, 6)):
        x, y, w, v = rng.choice(left), rng.choice(left), rng.choice(right), rng.choice(right)
        match rng.randrange(4):
            case 0:
                bias = given(rng.choice(biases))
                factors = [rng.choice([0, 1, 1, 2]) for _ in range(2)]
                result = emit(f"addmm({bias}, {x}, {w}, beta={factors[0]}, alpha={factors[1]})")
            case 1:
                result = emit(f"add({emit(f'mm({x}, {w})')}, {given(rng.choice(biases))})")
            case 2:
                result = emit(f"add({emit(f'mm({x}, {w})')}, {emit(f'mm({y}, {v})')})")
            case _:
                result = emit(f"mm({x}, {w})")
        results.append(emit(f"neg({result})"))
    return "\n".join([f"def graph({', '.join(inputs)}):", *lines, f"    return [{', '.join(results)}]"]) + "\n"


# Long chains and wide fans.


def _chain(step: Callable[[str, int], str], inputs: str = "x: f32[4, 6]") -> Callable[[int], str]:
    def listing(size: int) -> str:
        lines = [f"def graph({inputs}):", "    h = relu(x)", f"    a0 = {step('h', 0)}"]
        lines += [f"    a{k} = {step(f'a{k - 1}', k)}" for k in range(1, size)]
        return "\n".join([*lines, f"    r = neg(a{size - 1})", "    return [r]"]) + "\n"

    return listing


def _fan(*steps: str, whole: str = "", first: str = "") -> Callable[[int], str]:
    """Each step is made once for each member; `{k}` is its number, `{all}` the results of the last step."""

    def listing(size: int) -> str:
        lines = [f"def graph(x: f32[{4 * size}]):", "    h = relu(x)"]
        lines += [f"    {first.format(size=size)}"] if first else []
        lines += [f"    {step.format(k=k, a=4 * k, b=4 * k + 4)}" for k in range(size) for step in steps]
        every = ", ".join(f"{steps[-1].split('{')[0]}{k}" for k in range(size))
        last = [f"    r = {whole.format(all=every)}", "    return [r]"] if whole else [f"    return [{every}]"]
        return "\n".join([*lines, *last]) + "\n"

    return listing


CHAINS: dict[str, Callable[[int], str]] = {
    "slices": lambda size: _chain(lambda x, k: f"slice({x}, 0, 1, {2 * size - k})", f"x: f32[{2 * size}]")(size),
    "nested concatenations": _chain(lambda x, k: f"cat([{x}, x])"),
    "views": _chain(lambda x, k: f"view({x}, {[24] if k % 2 else [6, 4]})"),
    "reshapes": _chain(lambda x, k: f"reshape({x}, {[[24], [3, 8], [8, 3]][k % 3]})"),
    "permutations": _chain(lambda x, k: f"permute({x}, [1, 2, 0])", "x: f32[2, 3, 4]"),
    "transposes": _chain(lambda x, k: f"transpose.int({x}, 0, 1)"),
    "dims put in and taken out": _chain(lambda x, k: f"select.int({x}, 0, 0)" if k % 2 else f"unsqueeze({x}, 0)"),
    "expansions": _chain(lambda x, k: f"expand({x}, [4, 6])"),
    "copies": _chain(lambda x, k: f"clone({x})"),
    "casts": _chain(lambda x, k: f"_to_copy({x}, dtype={'f32' if k % 2 else 'f64'})"),
    "casts that round": _chain(lambda x, k: f"_to_copy({x}, dtype={'f32' if k % 2 else 'bf16'})"),
    "zeros that are added": _chain(lambda x, k: f"add({x}, 0.0)"),
    "zeros that are subtracted": _chain(lambda x, k: f"sub({x}, 0.0)"),
    "slices of concatenations": _chain(lambda x, k: f"cat([{x}, x])" if k % 2 else f"slice({x}, 0, 0, 4)"),
    "one node of many users": _fan("a{k} = neg(c)", first="c = clone(h)"),
    "views of one node": _fan("v{k} = view(h, [-1, 2])", "w{k} = view(v{k}, [-1])", "a{k} = neg(w{k})"),
    "one concatenation": _fan("v{k} = neg(h)", whole="cat([{all}])"),
    "a concatenation of copies": _fan("v{k} = neg(h)", "w{k} = clone(v{k})", whole="cat([{all}])"),
    "a concatenation of concatenations": _fan("v{k} = neg(h)", "w{k} = cat([v{k}, h])", whole="cat([{all}])"),
    "pieces put together": _fan("s{k} = slice(h, 0, {a}, {b})", whole="cat([{all}])"),
    "parts put together": _fan("s{k} = p[{k}]", whole="cat([{all}])", first="p = split(h, 4)"),
    "parts one by one": _fan("s{k} = p[{k}]", "t{k} = neg(s{k})", first="p = split(h, 4)"),
    "copies that are returned": _fan("v{k} = neg(h)", "w{k} = clone(v{k})"),
}
"""Programs of a given size by what they hold much of."""


# Graphs with whatever makes a rewrite wrong: shared memory, nested graphs, odd dtypes and values, groups of one world.

ODD_DTYPES = (torch.float32, torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.complex64)
WHOLE_DTYPES = (torch.int64, torch.int32, torch.uint8, torch.bool)
WORLD = 4
RANKS_OF = {
    "first": ((0, 1, 2, 3),),
    "second": ((0, 1, 2, 3),),
    "rows": ((0, 1), (2, 3)),
    "columns": ((0, 2), (1, 3)),
}
"""Groups of the odd graphs: two of the same ranks, and the two axes of a mesh."""
C10D = torch.ops._c10d_functional
ATEN = torch.ops.aten


@dataclass
class OddGraph:
    """A graph, and what its inputs and constants hold on each rank."""

    module: GraphModule
    make_inputs: Callable[[int], list[Tensor]]


class OddBuilder:
    """Builds one odd graph. Nodes are run as they are made, on real and on fake tensors; torch may refuse one."""

    def __init__(self, rng: Random, *, is_special: bool) -> None:
        self.rng, self.is_special = rng, is_special
        self.mode = FakeTensorMode()
        self.graph, self.root = Graph(), torch.nn.Module()
        self.values: list[Node] = []
        self.real: dict[Node, Any] = {}
        self.lost: list[Node] = []
        """Constants of which the graph does not say what they share."""
        self.flights: list[tuple[Node, frozenset[int], frozenset[int]]] = []
        """Launches under way: the result to wait for, and the storages that it reads and writes."""

    # Inputs and constants.

    def tensor(self, seed: int, dtype: torch.dtype, count: int) -> Tensor:
        rng = Random(seed)
        special = self.is_special and (dtype.is_floating_point or dtype.is_complex)
        numbers = [rng.choice(SPECIAL) if special and rng.random() < 0.2 else rng.randint(0, 3) for _ in range(count)]
        if dtype is torch.bool:
            return torch.tensor([n > 1 for n in numbers])
        return torch.tensor(numbers, dtype=torch.float64 if dtype.is_floating_point else None).to(dtype)

    def shared(self, count: int) -> list[Tensor]:
        """A few tensors, of which some are views of one memory."""
        found: list[Tensor] = []
        while len(found) < count:
            dtype = self.rng.choice(ODD_DTYPES + WHOLE_DTYPES)
            base = self.tensor(self.rng.randrange(1 << 30), dtype, 16)
            views = [base.view(4, 4), base, base[:8], base[4:12].view(4, 2), base.view(4, 4).t(), base[3], base[16:]]
            found += self.rng.sample(views, self.rng.choice((1, 2, 3)))
        return found[:count]

    def open(self) -> None:
        self.given = given = self.shared(self.rng.randint(1, 4))
        for k, tensor in enumerate(given):
            self.take(self.graph.placeholder(f"x{k}"), tensor)
        for k, tensor in enumerate(self.shared(self.rng.choice((0, 1, 2, 3)))):
            self.root.register_buffer(f"k{k}", tensor)
            node = self.graph.get_attr(f"k{k}")
            self.take(node, tensor)
            self.lost += [node] if self.rng.random() < 0.5 else []

    def take(self, node: Node, tensor: Tensor) -> None:
        self.real[node], node.meta["val"] = tensor, self.mode.from_tensor(tensor)
        self.values.append(node)

    def make_inputs(self, rank: int) -> list[Tensor]:
        """Fresh inputs of one rank that share memory as those of the graph do."""
        copies: dict[int, Tensor] = {}
        made: list[Tensor] = []
        for tensor in self.given:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in copies:
                count = storage.nbytes() // tensor.element_size()
                copies[storage.data_ptr()] = self.tensor(1000 * rank + len(copies), tensor.dtype, count)
            flat = copies[storage.data_ptr()]
            made.append(flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()))
        return made

    # Steps.

    def storages(self, *nodes: Node) -> frozenset[int]:
        leaves = [leaf for node in nodes for leaf in tree_leaves(self.real[node])]
        return frozenset(leaf.untyped_storage()._cdata for leaf in leaves if isinstance(leaf, Tensor))

    def pick(self, wanted: Callable[[Tensor], bool] = lambda _: True) -> Node | None:
        unreadable = frozenset().union(*(writes for _, _, writes in self.flights))
        found = [n for n in self.values if not self.storages(n) & unreadable and wanted(n.meta["val"])]
        some = self.rng.choice((found[-5:], found, [n for n in found if n.op != "call_function"] or found))
        return self.rng.choice(some) if some else None

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Node | None:
        """Add a call if torch accepts it."""

        if any(item is None for item in args):  # there was nothing to pick
            return None
        real = map_arg((args, kwargs), self.real.__getitem__)
        fake = map_arg((args, kwargs), lambda node: node.meta["val"])
        is_sent = getattr(target, "namespace", "") == "_c10d_functional"
        try:
            with torch.no_grad():
                made = None if is_sent else target(*real[0], **real[1])
            with self.mode, torch.no_grad():
                result = target(*fake[0], **fake[1])
        except Exception:  # whatever torch refuses is no program
            return None
        if is_sent:
            shares = target is C10D.wait_tensor.default or target is C10D.all_reduce_.default
            made = real[0][0] if shares else torch.zeros(result.shape, dtype=result.dtype)
        node = self.graph.call_function(target, args, kwargs)
        self.real[node], node.meta["val"] = made, result
        if isinstance(result, Tensor):
            self.values.append(node)
        return node

    def pointwise(self) -> None:
        x, y = self.pick(), self.pick()
        number = self.rng.choice((0, 1, 1.0, 0.0, -0.0, 2, True))
        unary = (ATEN.neg, ATEN.relu, ATEN.abs, ATEN.clone, ATEN.round, ATEN.sign, ATEN.nan_to_num, ATEN.floor)
        binary = (ATEN.add.Tensor, ATEN.sub.Tensor, ATEN.mul.Tensor, ATEN.div.Tensor, ATEN.maximum, ATEN.minimum)
        match self.rng.randrange(6):
            case 0:
                self.call(self.rng.choice(unary).default, x)
            case 1:
                self.call(self.rng.choice(binary[:4]), x, number)
            case 2:
                self.call(_overload(self.rng.choice(binary)), x, y)
            case 3:
                self.call(ATEN.round.decimals, x, decimals=self.rng.choice((0, 1, -1)))
            case 4:
                self.call(ATEN.clamp.default, x, self.rng.choice((0, -1)), max=self.rng.choice((None, 1, 2.5)))
            case _:
                self.call(ATEN.add.Tensor, x, y, alpha=self.rng.choice((0, 1, 2)))

    def cast(self) -> None:
        self.call(ATEN._to_copy.default, self.pick(), dtype=self.rng.choice(ODD_DTYPES + WHOLE_DTYPES))

    def view(self) -> None:
        x = self.pick()
        if x is None:
            return
        shape = x.meta["val"].shape
        dim, size = self.rng.randint(-1, max(len(shape) - 1, 0)), shape[0] if shape else 1
        start = self.rng.randint(0, size)
        match self.rng.randrange(11):
            case 0:
                self.call(ATEN.view.default, x, [x.meta["val"].numel()])
            case 1:
                self.call(ATEN.t.default, x)
            case 2:
                self.call(ATEN.slice.Tensor, x, dim, start, self.rng.choice((start, start + 1, size, 2**63 - 1)))
            case 3:
                self.call(ATEN.select.int, x, dim, 0)
            case 4:
                self.call(ATEN.unsqueeze.default, x, dim)
            case 5:
                self.call(ATEN.squeeze.default, x)
            case 6:
                self.call(ATEN.expand.default, x, [2, *shape])
            case 7:
                self.call(ATEN.permute.default, x, self.rng.sample(range(len(shape)), len(shape)))
            case 8:
                split = self.call(ATEN.split.Tensor, x, self.rng.randint(1, 3), dim)
                for k in range(len(split.meta["val"]) if split is not None else 0):
                    self.call(operator.getitem, split, k)
            case 9:
                self.call(ATEN.unfold.default, x, dim, 2, 1)
            case _:
                self.call(ATEN.alias.default, x)

    def combine(self) -> None:
        x = self.pick()
        if x is None:
            return
        like = self.pick(lambda v: v.dtype == x.meta["val"].dtype and v.dim() == x.meta["val"].dim())
        match self.rng.randrange(6):
            case 0:
                self.call(ATEN.cat.default, [x, like], self.rng.choice((0, -1)))
            case 1:
                self.call(ATEN.stack.default, [x, like], self.rng.choice((0, -1)))
            case 2:
                self.call(ATEN.mm.default, x, like)
            case 3:
                self.call(ATEN.sum.dim_IntList, x, [self.rng.choice((0, -1))], self.rng.random() < 0.3)
            case 4:
                self.call(ATEN.cumsum.default, x, self.rng.choice((0, -1)))
            case _:
                self.call(ATEN.constant_pad_nd.default, x, [0, 1], self.rng.choice((0, 1)))

    def write(self) -> None:
        busy = frozenset().union(*(reads | writes for _, reads, writes in self.flights))
        x, y = self.pick(lambda v: not _repeats(v)), self.pick()
        if x is None or self.storages(x) & busy:
            return
        match self.rng.randrange(5):
            case 0:
                self.call(ATEN.add_.Tensor, x, y)
            case 1:
                self.call(ATEN.mul_.Tensor, x, self.rng.choice((0, 1, 2)))
            case 2:
                self.call(ATEN.copy_.default, x, y)
            case 3:
                self.call(ATEN.zero_.default, x)
            case _:
                self.call(ATEN.neg_.default, x)

    def draw(self) -> None:
        match self.rng.randrange(3):
            case 0:
                self.call(ATEN.rand.default, [4], device=torch.device("cpu"))
            case 1:
                self.call(ATEN.randint.default, self.rng.choice((3, 10)), [4], device=torch.device("cpu"))
            case _:
                self.call(ATEN.bernoulli.p, self.pick(lambda v: v.is_floating_point()), 0.5)

    def launch(self) -> None:
        x = self.pick(lambda v: v.is_contiguous() and v.dim() > 0 and 0 < v.numel() <= 256)
        if x is None:
            return
        group = self.rng.choice(sorted(RANKS_OF))
        size, dtype = len(RANKS_OF[group][0]), x.meta["val"].dtype
        sums = ("sum", "sum", "max") if not dtype.is_complex and dtype is not torch.bool else ()
        kinds = ["gather", "broadcast", *(("reduce", "scatter", "in-place") if sums else ())]
        match self.rng.choice(kinds):
            case "gather":
                node = self.call(C10D.all_gather_into_tensor.default, x, size, group)
            case "broadcast":
                node = self.call(C10D.broadcast.default, x, self.rng.randrange(size), group)
            case "reduce":
                node = self.call(C10D.all_reduce.default, x, self.rng.choice(sums), group)
            case "scatter" if x.meta["val"].shape[0] % size == 0:
                node = self.call(C10D.reduce_scatter_tensor.default, x, self.rng.choice(sums), size, group)
            case "in-place" if not self.storages(x) & frozenset().union(*(r | w for _, r, w in self.flights)):
                node = self.call(C10D.all_reduce_.default, x, self.rng.choice(sums), group)
            case _:
                return
        if node is not None:
            self.values.remove(node)
            self.flights.append((node, self.storages(x), self.storages(node)))

    def wait(self) -> None:
        if self.flights:
            node, _, _ = self.flights.pop(self.rng.randrange(len(self.flights)))
            self.call(C10D.wait_tensor.default, node)

    def nest(self) -> None:
        """A call of a nested graph that returns new tensors, its arguments, views of them, or what it wrote."""
        x, y = self.pick(lambda v: not _repeats(v)), self.pick()
        busy = frozenset().union(*(reads | writes for _, reads, writes in self.flights))
        if x is None or y is None or (self.storages(x) | self.storages(y)) & busy:
            return
        inner = OddBuilder(self.rng, is_special=self.is_special)
        inner.mode = self.mode
        for name, node in (("a", x), ("b", y)):
            made = inner.graph.placeholder(name)
            inner.real[made], made.meta["val"] = self.real[node], node.meta["val"]
            inner.values.append(made)
        for _ in range(self.rng.randint(1, 3)):
            self.rng.choice((inner.pointwise, inner.view, inner.write, inner.view))()
        results = tuple(self.rng.choice(inner.values) for _ in range(2))
        if len({*results}) < 2 or any(n.op == "placeholder" for n in results):
            return  # torch's tracers return no argument as it is
        inner.graph.output(results)
        name = f"body{len(list(self.graph.nodes))}"
        setattr(self.root, name, GraphModule(inner.root, inner.graph))
        body = self.graph.get_attr(name)
        target = torch.ops.higher_order.wrap_with_set_grad_enabled
        node = self.graph.call_function(target, (self.rng.random() < 0.5, body, x, y))
        node.meta["val"] = tuple(result.meta["val"] for result in results)
        self.real[node] = tuple(inner.real[result] for result in results)
        for k in range(2):
            self.call(operator.getitem, node, k)

    def build(self, num_steps: int) -> OddGraph:
        self.open()
        steps = [*[self.pointwise] * 5, *[self.view] * 5, *[self.launch] * 4, *[self.wait] * 3, *[self.write] * 3]
        steps += [*[self.combine] * 3, self.cast, self.draw, self.nest]
        for _ in range(num_steps):
            self.rng.choice(steps)()
        while self.flights:
            self.wait()
        kept = [node for node in self.values if node.op == "call_function"] or self.values
        self.graph.output(self.rng.sample(kept, min(len(kept), self.rng.randint(1, 4))))
        for node in self.lost:  # tracers leave out the values of attributes, or make fakes of each alone
            node.meta = (
                {} if self.rng.random() < 0.5 else {"val": self.mode.from_tensor(copy.deepcopy(self.real[node]))}
            )
        return OddGraph(GraphModule(self.root, self.graph), self.make_inputs)


def _overload(packet: Any) -> Any:
    return packet if isinstance(packet, torch._ops.OpOverload) else packet.default


def _repeats(value: Tensor) -> bool:
    """Whether two elements of a tensor are one number in memory."""
    sizes = sorted((stride, size) for stride, size in zip(value.stride(), value.shape, strict=True) if size > 1)
    reach = 0
    for stride, size in sizes:
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def random_odd_graph(rng: Random, num_steps: int) -> OddGraph:
    """A graph with shared inputs and constants, nested graphs, writes, odd dtypes and values."""
    return OddBuilder(rng, is_special=rng.random() < 0.5).build(num_steps)
