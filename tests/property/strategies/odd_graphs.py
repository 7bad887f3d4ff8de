"""Random graphs with all that makes a rewrite wrong: shared memory, nested graphs, odd dtypes, groups of one world."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves

from tests.property.strategies.tensors import SPECIAL

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
