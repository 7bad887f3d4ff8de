"""All ranks of one graph in one process, written from what torch's operators and collectives mean.

An independent judge of rewritten graphs: it uses nothing of Weft. A collective can be carried out when it is launched
or when it is waited for; until then its result holds rubbish. A graph whose results depend on that choice has a race.

    run = Lockstep(module, 4, {"dp": [[0, 1], [2, 3]]}, late=True)
    outputs = run.run(inputs, seed=0)      # one for each rank; run.constants holds what each rank's constants are now
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

C10D = torch.ops._c10d_functional
WAIT = C10D.wait_tensor.default


@dataclass(eq=False)
class _Flight:
    """A collective under way: what each rank sent, where each receives it, and what it does."""

    sent: dict[int, Tensor]
    received: dict[int, Tensor]
    node: Node

    def storages(self) -> set[int]:
        return {tensor.untyped_storage().data_ptr() for tensor in self.received.values()}


class Lockstep:
    """One run of one graph on all ranks, each with constants of its own."""

    def __init__(
        self, module: GraphModule, num_ranks: int, ranks_of: Mapping[str, Sequence[Sequence[int]]], *, late: bool
    ) -> None:
        self.module, self.ranks_of, self.late = module, ranks_of, late
        self.constants = [copy.deepcopy(dict(module.named_buffers())) for _ in range(num_ranks)]
        self.flights: list[_Flight] = []
        self.values: list[dict[Node, Any]] = [{} for _ in range(num_ranks)]

    def run(self, inputs: Sequence[Sequence[Any]], seed: int) -> list[Any]:
        ranks = range(len(self.values))
        generators = [torch.Generator().manual_seed(seed + rank).get_state() for rank in ranks]
        given = [iter(each) for each in inputs]
        for node in self.module.graph.nodes:
            if node.op == "output":
                self._complete(self.flights)
                return [self._resolve(rank, node.args[0]) for rank in ranks]
            if node.op == "call_function" and getattr(node.target, "namespace", "") == "_c10d_functional":
                self._communicate(node)
                continue
            for rank in ranks:
                torch.set_rng_state(generators[rank])
                self.values[rank][node] = self._evaluate(rank, node, given[rank])
                generators[rank] = torch.get_rng_state()
        raise AssertionError("a graph ends with its output")

    def _resolve(self, rank: int, item: Any) -> Any:
        return map_arg(item, lambda source: self.values[rank][source])

    def _evaluate(self, rank: int, node: Node, given: Any) -> Any:
        if node.op == "placeholder":
            return next(given)
        if node.op == "get_attr":
            found = self.constants[rank].get(str(node.target))
            return found if found is not None else operator.attrgetter(str(node.target))(self.module)
        target: Any = node.target
        return target(*self._resolve(rank, node.args), **self._resolve(rank, dict(node.kwargs)))

    def _communicate(self, node: Node) -> None:
        if node.target is WAIT:
            for rank, values in enumerate(self.values):
                values[node] = self._resolve(rank, node.args[0])
            waited = {values[node].untyped_storage().data_ptr() for values in self.values}
            self._complete([flight for flight in self.flights if flight.storages() & waited])
            return
        bound = [self._bind(rank, node) for rank in range(len(self.values))]
        several = isinstance(bound[0].get("inputs"), list | tuple)
        sent = [each["inputs"] if several else [each.get("input", each.get("inp", each.get("self")))] for each in bound]
        in_place = str(node.target).split(".")[1].endswith("_")
        received: list[list[Tensor]] = []
        for rank, tensors in enumerate(sent):
            shapes = [_shape(node, bound[rank], tensor) for tensor in tensors]
            out = bound[rank].get("out")
            made = [_rubbish(shape, tensor) for shape, tensor in zip(shapes, tensors, strict=True)]
            received.append(tensors if in_place else [out] if out is not None else made)
            self.values[rank][node] = received[rank] if several else received[rank][0]
        for k in range(len(sent[0])):
            flight = _Flight({r: s[k] for r, s in enumerate(sent)}, {r: got[k] for r, got in enumerate(received)}, node)
            self.flights.append(flight)
            if not self.late:
                self._complete([flight])

    def _bind(self, rank: int, node: Node) -> dict[str, Any]:
        schema: Any = node.target
        names = [argument.name for argument in schema._schema.arguments]
        return {**dict(zip(names, self._resolve(rank, node.args), strict=False)), **self._resolve(rank, node.kwargs)}

    def _complete(self, flights: Sequence[_Flight]) -> None:
        for flight in list(flights):
            self.flights.remove(flight)
            bound = self._bind(0, flight.node)
            for ranks in self.ranks_of[bound["group_name"]]:
                sent = [flight.sent[rank].clone() for rank in ranks]
                for place, rank in enumerate(ranks):
                    flight.received[rank].copy_(_delivered(flight.node, bound, sent, place, len(ranks)))


def _rubbish(shape: Sequence[int], like: Tensor) -> Tensor:
    made = torch.empty(shape, dtype=like.dtype)
    return made.fill_(True if like.dtype is torch.bool else 77)


def _shape(node: Node, bound: Mapping[str, Any], tensor: Tensor) -> list[int]:
    name, size = str(node.target), bound.get("group_size", 1)
    if "all_gather" in name:
        return [tensor.shape[0] * size, *tensor.shape[1:]]
    if "reduce_scatter" in name:
        return [tensor.shape[0] // size, *tensor.shape[1:]]
    return list(tensor.shape)


def _delivered(node: Node, bound: Mapping[str, Any], sent: Sequence[Tensor], place: int, size: int) -> Tensor:
    name = str(node.target)
    if "all_gather" in name:
        return torch.cat(list(sent))
    if "broadcast" in name:
        return sent[bound["src"]]
    if "all_to_all" in name:
        rows = bound["input_split_sizes"]
        return torch.cat([tensor.split(rows)[place] for tensor in sent])
    total = _reduced(sent, bound["reduce_op"])
    return total.chunk(size)[place] if "reduce_scatter" in name and size > 1 else total


def _reduced(sent: Sequence[Tensor], reduce_op: str) -> Tensor:
    total = sent[0].clone()
    for tensor in sent[1:]:
        if reduce_op in ("sum", "avg"):
            total += tensor
        else:
            total = torch.maximum(total, tensor) if reduce_op == "max" else torch.minimum(total, tensor)
    return total / len(sent) if reduce_op == "avg" else total
