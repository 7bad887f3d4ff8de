"""What a call of an operator does to memory, generators and the host, seen from outside."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves

from weft.graph import host
from weft.graph.operator_effects import profile
from weft.graph.ops import bind_arguments, parameters


@dataclass(frozen=True)
class Seen:
    """What one call did."""

    written: frozenset[str]
    """Arguments whose storage changed: contents, size or place."""
    shared: frozenset[str]
    """Arguments whose storage a result shares."""
    results_share: bool
    """Two results lie in one new storage."""
    drew: bool


def tensors(value: Any) -> list[Tensor]:
    """The dense tensors in a value."""
    leaves = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    return [leaf for leaf in leaves if leaf.layout is torch.strided and leaf.device.type != "meta"]


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _state(tensor: Tensor) -> tuple[int, int, bytes]:
    storage = tensor.untyped_storage()
    raw = torch.empty(0, dtype=torch.uint8).set_(storage)
    return storage.data_ptr(), storage.nbytes(), raw.clone().numpy().tobytes()  # numpy would pin the storage


def observe(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Seen:
    """Call an operator and tell what it did; raises whatever the call raises."""
    bound = bind_arguments(op, args, kwargs)
    given = {name: tensors(value) for name, value in bound.items()}
    given = {name: found for name, found in given.items() if found}
    before = {name: [_state(t) for t in found] for name, found in given.items()}
    keys = {name: {_key(t) for t in found} for name, found in given.items()}
    generators = [torch.default_generator, *(g for g in tree_leaves(bound) if isinstance(g, torch.Generator))]
    drawn = [g.get_state() for g in generators]
    result = op(*args, **kwargs)
    after = {name: [_state(t) for t in found] for name, found in given.items()}
    moved = {name for name, found in given.items() if {_key(t) for t in found} != keys[name]}
    results = [t for t in tensors(result) if t.untyped_storage().nbytes()]
    fresh = [_key(t) for t in results if not any(_key(t) in found for found in keys.values())]
    return Seen(
        frozenset(name for name in given if before[name] != after[name]) | moved,
        frozenset(name for name, found in keys.items() if any(_key(t) in found for t in results)),
        len(set(fresh)) != len(fresh) and len({id(t) for t in results}) > 1,
        any(not torch.equal(g.get_state(), state) for g, state in zip(generators, drawn, strict=True)),
    )


def misjudged(op: OpOverload, seen: Seen) -> Iterator[str]:
    """What a call did that Weft does not believe of its operator."""
    believed = profile(op)
    if believed.opaque:
        return
    for name in sorted(seen.written - set(believed.writes)):
        yield f"writes {name}"
    for name in sorted(seen.shared - {*believed.aliases, *believed.may_share}):
        yield f"returns memory of {name}"
    if seen.results_share and believed.several:
        yield "returns two tensors in one memory"
    if seen.drew and not believed.random:
        yield "draws random numbers"


def reads_on_host(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a number that an operator returns depends on the data of its tensors, and Weft does not know it."""
    if host.may_transfer(op) or profile(op).opaque or not parameters(op):
        return False

    def numbers(value: Any) -> list[Any]:
        return [leaf for leaf in tree_leaves(value) if isinstance(leaf, int | float | complex)]

    found: list[list[Any]] = []
    for fill in (None, 0, 1):
        copies = [t.clone() for t in tensors((args, kwargs))]
        if fill is not None:
            for t in tensors((args, kwargs)):
                t.fill_(fill)
        try:
            found.append(numbers(op(*args, **kwargs)))
        except Exception:  # an operator may refuse the data
            continue
        finally:
            for t, copy in zip(tensors((args, kwargs)), copies, strict=True):
                t.copy_(copy)
    return any(other != found[0] for other in found[1:])
