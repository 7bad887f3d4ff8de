"""Blocks of a user's model: its equal layers, found, cut for probes, and checkpointed.

Contract: blocks are the children of one container, all of one class. Children of equal kind have equal submodules,
shapes and flags. Numbers such as the index of a layer do not count, so a step may still treat blocks of one kind
differently; `is_on_line` finds that out from graphs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate

from weft.graph import ops
from weft.zoo.checkpointing import recomputation_in, recomputation_of, run_again

Container = nn.ModuleList | nn.ModuleDict | nn.Sequential
"""A module whose children can be cut off from the end."""


def few_layers(kinds: Sequence[object]) -> tuple[int, int] | None:
    """Two numbers of layers; all further layers repeat what the second one adds. None if there are no such numbers.

    One dense layer before equal ones with experts: 1 and 2. Two kinds of layers in turn: 2 and 4, or 1 and 3.
    """
    count = len(kinds)
    for more in range(2, count):
        for few in range(more - 1, 0, -1):
            period = more - few
            repeats = all(kinds[k] == kinds[k - period] for k in range(more, count))
            if few + more <= count and (count - few) % period == 0 and repeats:
                return few, more
    return None


def blocks_of(model: nn.Module) -> Container | None:
    """The container with the most blocks, among those that no other one contains; None if there is none."""
    best: Container | None = None
    inside: str | None = None
    for path, module in model.named_modules():
        if inside is not None and path.startswith(inside):
            continue
        children = list(module.children())
        if isinstance(module, Container) and len(children) > 1 and len({*map(type, children)}) == 1:
            inside = f"{path}."
            if best is None or len(children) > len(best):
                best = module
    return best


def kind_of(block: nn.Module) -> object:
    """A value that is equal for equal blocks."""
    return tuple(
        (path, type(module).__qualname__, _shapes(module), _flags(module)) for path, module in block.named_modules()
    )


def _shapes(module: nn.Module) -> tuple[object, ...]:
    tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    return tuple((name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors)


def _flags(module: nn.Module) -> tuple[object, ...]:
    """Truth values and words by name; of anything else only the type."""
    return tuple(
        (name, value if isinstance(value, bool | str) else type(value).__qualname__)
        for name, value in vars(module).items()
        if not name.startswith("_")
    )


def cut(blocks: Container, num_layers: int) -> None:
    """Leave a container its first blocks."""
    if isinstance(blocks, nn.ModuleDict):
        for name in list(blocks)[num_layers:]:
            del blocks[name]
    else:
        del blocks[num_layers:]


def checkpoint(blocks: Container, mode: str) -> None:
    """Let every block save what a mode of checkpointing leaves."""
    for number, block in enumerate(blocks.children()):
        recomputation = recomputation_of(mode, number)
        if recomputation is not None:
            kind = type(block)
            block.recomputation = recomputation  # type: ignore[assignment]
            block.__class__ = type(kind.__name__, (kind,), {"forward": _recomputed(kind.forward)})


def _recomputed(forward: Any) -> Any:
    def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        recomputation = recomputation_in(self)
        if recomputation is None:
            return forward(self, *args, **kwargs)
        return run_again(recomputation, partial(forward, self), args, kwargs, changes_values=True)

    return run


def is_on_line(few: GraphModule, more: GraphModule, whole: GraphModule, counts: tuple[int, int, int]) -> bool:
    """Whether the nodes of a graph of all layers are those on the line through the graphs of fewer layers.

    Nodes count as equal if they do the same with values of the same types. `counts` are the numbers of layers.
    """
    first, second, last = (Counter(map(_signature, module.graph.nodes)) for module in (few, more, whole))
    times = (counts[2] - counts[0]) // (counts[1] - counts[0])
    return all(last[key] == first[key] + times * (second[key] - first[key]) for key in {**first, **second, **last})


def _signature(node: Node) -> object:
    if node.op == "output":
        return node.op
    target = str(node.target) if node.op == "call_function" else ""
    return node.op, target, str(map_aggregate((node.args, node.kwargs, ops.value_of(node)), _type_of))


def _type_of(value: Any) -> Any:
    """The properties of a value that decide how long a node takes."""
    if isinstance(value, Node):
        return str(map_aggregate(ops.value_of(value), _type_of))
    if isinstance(value, Tensor):
        return f"{value.dtype} {tuple(value.shape)} {value.stride()}"
    return "a number" if isinstance(value, float) else value
