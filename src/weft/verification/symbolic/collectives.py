"""Rules for collectives: where each received element comes from.

Contract: derived from the meaning of the collectives, element by element, and from nothing else in Weft. A received
element is named by the kind, the group and the elements it was computed from. So the collective of a concatenation has
the names of the collectives of its parts. Moves of data commute with reinterpreting bytes; reductions do not. Moves
over one axis of a mesh after the other are named as one move over both; in real arithmetic, so are scatters.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from weft.errors import GraphError
from weft.graph.groups import Group
from weft.verification.symbolic.index_maps import Call, as_dtype, bytes_of, number_of
from weft.verification.symbolic.tensors import (
    Run,
    Segment,
    Size,
    Terms,
    Undecided,
    Value,
    align,
    cut,
    divide,
    join,
    product,
    settle,
)

REDUCE_SCATTER = "reduce_scatter"
ALL_REDUCE = "all_reduce"
ALL_TO_ALL = "all_to_all"
SENT = "sent"
"""The argument that holds the tensor a rule is applied to; a coalesced launch has several tensors."""
EVEN = 5
"""Length of the label of a scatter whose parts lie evenly spaced in one atom; its last item is the step."""


def alone(call: Call) -> list[Value] | None:
    """The only rank of a group receives what it sent."""
    value, group, shape = _sent(call), call.arguments["group"], call.results[0][0]
    if not (isinstance(group, tuple) and any(isinstance(part, Group) and part.size == 1 for part in group)):  # pyright: ignore[reportUnknownVariableType]
        return None
    if product(shape) != product(value.shape):
        raise Undecided
    return [Value(shape, value.dtype, value.runs)]


def _sent(call: Call) -> Value:
    """The tensor of a launch that this call is about."""
    value = call.arguments[SENT]
    if not isinstance(value, Value) or call.results[0][1] != value.dtype:
        raise Undecided
    return value


def _num_ranks(call: Call) -> int:
    number = call.arguments["group_size"]
    if type(number) is not int or number < 1:
        raise Undecided
    return number


def all_reduced(call: Call) -> list[Value]:
    """Element i of the result is the sum (or another reduction) of element i on every rank."""
    terms, value = call.terms, _sent(call)
    label = (ALL_REDUCE, call.arguments["reduce_op"], call.arguments["group"])
    runs = ((terms.atom(label, terms.sizes[a], value.dtype, ((a, 0),)), s, n) for a, s, n in value.runs)
    return [Value(call.results[0][0], value.dtype, join(runs))]


def all_reduced_in_real(call: Call) -> list[Value]:
    """Like `all_reduced`, where reductions over several axes of a mesh may be made in any order or at once."""
    value, reduce_op, group = _sent(call), call.arguments["reduce_op"], call.arguments["group"]
    runs = ((_reduced(call.terms, reduce_op, group, a, value.dtype), s, n) for a, s, n in value.runs)
    return [Value(call.results[0][0], value.dtype, join(runs))]


def _reduced(terms: Terms, reduce_op: Hashable, group: Hashable, atom: int, dtype: torch.dtype | None) -> int:
    """An atom reduced over a group, named by all ranks that a chain of reductions reaches; sums before averages.

    Zero is the reduction of zeros.
    """
    if _is_zero(terms, atom):
        return atom
    inner, reach = _label(terms, atom), _reach_of(group)
    if inner[0] == ALL_REDUCE and reach is not None and isinstance(inner[2], Reach):
        source = terms.operands[atom][0][0]
        joined = _joined(inner[2], reach) if _commute(inner[1], reduce_op, dtype) else None
        if joined is not None and inner[1] == reduce_op:
            return _reduced(terms, reduce_op, joined, source, dtype)
        if joined is not None and reduce_op == "sum":
            return _reduced(terms, inner[1], inner[2], _reduced(terms, reduce_op, reach, source, dtype), dtype)
    return terms.atom((ALL_REDUCE, reduce_op, reach or group), terms.sizes[atom], dtype, ((atom, 0),))


def _commute(first: Hashable, second: Hashable, dtype: torch.dtype | None) -> bool:
    """Whether reductions over two axes commute: `sum` and `avg` of floats do, all others only with themselves."""
    is_float = dtype is not None and (dtype.is_floating_point or dtype.is_complex)
    used = {first, second}
    return (len(used) == 1 or used <= {"sum", "avg"}) and ("avg" not in used or is_float)


@dataclass(frozen=True)
class Reach:
    """The ranks that each rank reduces over, however the groups are called and in whichever order they come."""

    parts: tuple[tuple[int, ...], ...]
    """The partition of the first ranks; it repeats for all others."""
    name: str = field(compare=False)

    def __str__(self) -> str:
        return self.name

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        return hash(self.parts)  # computed once: a part may have thousands of ranks, and labels are hashed often

    @staticmethod
    def of(members: Mapping[int, Sequence[int]], name: str) -> Reach:
        """The reach of a partition of ranks 0 to n."""
        parts = {tuple(sorted(ranks)) for ranks in members.values()}
        num_ranks = len(members)
        span = next(n for n in range(1, num_ranks + 1) if num_ranks % n == 0 and _repeats(parts, n, num_ranks))
        return Reach(tuple(sorted(ranks for ranks in parts if ranks[0] < span)), name)


def _repeats(parts: Collection[tuple[int, ...]], span: int, num_ranks: int) -> bool:
    """Whether parts of the ranks below `span` repeat for all ranks."""
    first = [ranks for ranks in parts if ranks[0] < span]
    moved = {tuple(base + rank for rank in ranks) for base in range(0, num_ranks, span) for ranks in first}
    return all(ranks[-1] < span for ranks in first) and moved == parts


def _reach_of(group: Hashable) -> Reach | None:
    """The reach of a group in a label, if its ranks are known and several."""
    return group if isinstance(group, Reach) else _reach_of_group(group)


@functools.cache
def _reach_of_group(group: Hashable) -> Reach | None:
    found = [part for part in group if isinstance(part, Group)] if isinstance(group, tuple) else []
    members = _members(group, found[0].span) if found else None
    return Reach.of(members, found[0].name) if members is not None else None


def _members(group: Hashable, num_ranks: int) -> dict[int, tuple[int, ...]] | None:
    """The ranks that each rank communicates with; None if the group does not divide all ranks into equal parts."""
    if isinstance(group, Reach):
        span = sum(map(len, group.parts))
        moved = (tuple(base + r for r in ranks) for base in range(0, num_ranks, span) for ranks in group.parts)
        return {rank: ranks for ranks in moved for rank in ranks}
    found = [part for part in group if isinstance(part, Group)] if isinstance(group, tuple) else []
    if len(found) != 1 or found[0].size < 2:
        return None
    try:
        partition = found[0].partition(num_ranks)
    except GraphError:
        return None
    members = {rank: ranks for ranks in partition for rank in ranks}
    is_whole = sorted(members) == list(range(num_ranks)) and all(len(ranks) == found[0].size for ranks in partition)
    return members if is_whole else None


@functools.cache
def _joined(first: Reach, second: Reach) -> Reach | None:
    """The reach of two reductions in turn; None if they do not reach each of the ranks of a partition once."""
    num_ranks = math.lcm(*(sum(map(len, each.parts)) for each in (first, second)))
    inner, outer = _members(first, num_ranks), _members(second, num_ranks)
    if inner is None or outer is None:
        return None
    reached = {rank: tuple(sorted(k for mate in outer[rank] for k in inner[mate])) for rank in range(num_ranks)}
    # Every rank reaches itself, so sets of ranks that are as many as the ranks in total do not overlap.
    parts = set(reached.values())
    is_partition = sum(map(len, parts)) == num_ranks and all(len(set(ranks)) == len(ranks) for ranks in parts)
    return Reach.of(reached, f"{first} {second}") if is_partition else None


def broadcast(call: Call) -> list[Value]:
    """Element i of the result is element i on the source rank."""
    value, source = _sent(call), call.arguments["src"]
    if type(source) is not int:
        raise Undecided
    label = ("broadcast", source, call.arguments["group"])
    runs = join((_moved(call.terms, label, a, 1), s, n) for a, s, n in value.runs)
    return [Value(call.results[0][0], value.dtype, runs)]


Piece = tuple[int, Hashable, int, int, Size, Size]
"""A part of a gathered tensor: the index of a rank in a group, the group and its size, and a run on that rank."""


def gathered(call: Call) -> list[Value]:
    """Part k of the result is the value on rank k.

    The elements of an atom on rank k follow those on rank k - 1 in one larger atom, so a whole gather is one run.
    """
    terms, dtype = call.terms, _sent(call).dtype
    moved: dict[tuple[int, int, Hashable], int] = {}  # a gather over many ranks has as many pieces
    runs: list[Run] = []
    for k, group, num_ranks, atom, start, length in _pieces(call):
        key = atom, num_ranks, group
        if key not in moved:
            moved[key] = _moved(terms, ("all_gather", num_ranks, group), atom, num_ranks)
        runs.append((moved[key], settle(k * terms.sizes[atom] + start), length))
    return [Value(call.results[0][0], dtype, join(runs))]


def _pieces(call: Call) -> Iterator[Piece]:
    """The parts of a gather in their order; those of a gather of a gather come from the ranks of both."""
    group, num_ranks = _named(call.arguments["group"]), _num_ranks(call)
    for k in range(num_ranks):
        for run in _sent(call).runs:
            yield from _pieces_of_run(call.terms, run, (k, group, num_ranks))


def _pieces_of_run(terms: Terms, run: Run, place: tuple[int, Hashable, int]) -> Iterator[Piece]:
    atom, start, length = run
    found = _gathered_from(terms, atom)
    merged = _merged(found[1], place[1]) if found is not None else None
    size = terms.sizes[found[2]] if found is not None else None
    if found is None or merged is None or not type(size) is type(start) is type(length) is int:
        yield (*place, *run)
        return
    num_ranks, _, source = found
    reach, order = merged
    while length > 0:
        mate, inside = divmod(start, size)
        taken = min(length, size - inside)
        yield order[place[0] * num_ranks + mate], reach, len(order), source, inside, taken
        start, length = start + taken, length - taken


def _gathered_from(terms: Terms, atom: int) -> tuple[int, Hashable, int] | None:
    """The number of ranks, the group and the source of a gathered atom; its bytes come from the bytes of the source."""
    label, dtype = _label(terms, atom), terms.dtypes[atom]
    if label[0] == "all_gather":
        return label[1], label[2], terms.operands[atom][0][0]
    if label[0] not in ("bytes", "of bytes"):
        return None
    found = _gathered_from(terms, terms.operands[atom][0][0])
    if found is None or label[0] == "bytes":
        return found and (*found[:2], bytes_of(terms, found[2]))
    size = terms.sizes[found[2]]
    if dtype is None or type(size) is not int or size % dtype.itemsize != 0:
        return None
    return *found[:2], as_dtype(terms, found[2], dtype)


@functools.cache
def _named(group: Hashable) -> Hashable:
    """A group by its ranks, if they are known and each part of the result is numbered in their order."""
    reach = _reach_of(group)
    if reach is None or isinstance(group, Reach):
        return group
    members = _members(group, sum(map(len, reach.parts))) or {}
    return reach if members and all(ranks == tuple(sorted(ranks)) for ranks in members.values()) else group


@functools.cache
def _merged(first: Hashable, second: Hashable) -> tuple[Reach, tuple[int, ...]] | None:
    """The ranks from which moves over two groups in turn fetch, and the index of each among them; None if unknown.

    The index at place k x n + i, where n is the size of the first group, belongs to the rank from which part i of part
    k comes. It must be the same on every rank.
    """
    reaches = _reach_of(first), _reach_of(second)
    joined = _joined(*reaches) if reaches[0] is not None and reaches[1] is not None else None
    if joined is None:
        return None
    world = math.lcm(*(sum(map(len, reach.parts)) for reach in reaches if reach is not None))
    inner, outer, whole = (_members(group, world) for group in (first, second, joined))
    if inner is None or outer is None or whole is None:
        return None
    index = {rank: k for ranks in whole.values() for k, rank in enumerate(ranks)}
    orders = {tuple(index[source] for mate in outer[rank] for source in inner[mate]) for rank in range(world)}
    return (joined, next(iter(orders))) if len(orders) == 1 else None


@functools.cache
def _keep_their_place(first: Hashable, second: Hashable) -> bool:
    """Whether the ranks of each second group have the same index in their first groups."""
    spans = [sum(map(len, reach.parts)) for group in (first, second) if (reach := _reach_of(group))]
    world = math.lcm(*spans)
    inner, outer = _members(first, world), _members(second, world)
    if len(spans) != 2 or inner is None or outer is None:
        return False
    place = {rank: inner[rank].index(rank) for rank in range(world)}
    return all(place[mate] == place[rank] for rank in range(world) for mate in outer[rank])


def _merged_parts(
    terms: Terms, segment: Segment, first: Hashable, second: Hashable
) -> tuple[Segment, Reach, tuple[int, ...]] | None:
    """The parts that exchanges or scatters over two groups in turn send, by the ranks that get them; None if unknown.

    The segment has the results of the first for the ranks of the second. A rank with index k in the second group and i
    in the first gets element i of those that element k of the segment was made from.
    """
    merged = _merged(first, second) if _keep_their_place(first, second) else None
    if merged is None:
        return None
    atoms, starts, length = segment
    reach, order = merged
    num_parts = range(len(order) // len(atoms))
    found = [_part_behind(terms, a, s, k) for a, s in zip(atoms, starts, strict=True) for k in num_parts]
    sent = [found[order.index(k)] for k in range(len(order))]
    return (tuple(atom for atom, _ in sent), tuple(start for _, start in sent), length), reach, order


def _part_behind(terms: Terms, atom: int, start: Size, k: int) -> tuple[int, Size]:
    """The element that reaches rank k, of an element that is named by one for each rank (`_by_rank`)."""
    label, operands = _label(terms, atom), terms.operands[atom]
    source, shift = operands[0] if len(label) == EVEN else operands[k]
    return source, settle(start + (k * label[-1] if len(label) == EVEN else shift))


def scattered_and_gathered(call: Call) -> list[Value] | None:
    """A gather of reduce-scattered parts as the all-reduce of the whole; None for other gathers.

    The parts may have been reduced over other axes of the mesh in between. This holds in real arithmetic only, since
    the two may add the ranks in different orders.
    """
    terms, dtype = call.terms, _sent(call).dtype
    runs: list[Run] = []
    for k, group, _, part, start, length in _pieces(call):
        if _is_zero(terms, part):
            runs.append((part, start, length))
            continue
        atom, between = part, list[tuple[Any, ...]]()
        while (label := _label(terms, atom))[0] == ALL_REDUCE:
            between.append(label)
            atom = terms.operands[atom][0][0]
        if label[0] != REDUCE_SCATTER or _named(label[2]) != group or not is_real(label[1], dtype):
            return None
        if not all(_commute(op, label[1], dtype) and _reach_the_same(axis, group) for _, op, axis in between):
            return None
        source, position = _part_behind(terms, atom, start, k)
        for _, reduce_op, axis in reversed(between):
            source = _reduced(terms, reduce_op, axis, source, dtype)
        runs.append((_reduced(terms, label[1], group, source, dtype), position, length))
    return [Value(call.results[0][0], dtype, join(runs))]


def is_real(reduce_op: Hashable, dtype: torch.dtype | None) -> bool:
    """Whether a reduction is exact in real arithmetic; an average of integers rounds at an unspecified point."""
    return _commute(reduce_op, reduce_op, dtype)


def _label(terms: Terms, atom: int) -> tuple[Any, ...]:
    found: Any = terms.labels[atom]
    return found if isinstance(found, tuple) else (found,)  # pyright: ignore[reportUnknownVariableType]


def scattered(call: Call) -> list[Value]:
    """Element p of the result on rank r is the reduction of element p of part r on every rank.

    The rank is not known here, so an element is named by all the parts it may come from.
    """
    label, dtype = (REDUCE_SCATTER, call.arguments["reduce_op"], call.arguments["group"]), _sent(call).dtype
    return [_scattered(call, lambda segment: _by_rank(call.terms, label, segment, dtype))]


def scattered_in_real(call: Call) -> list[Value]:
    """Like `scattered`, where a scatter of a sum over another axis is a sum of scatters, and two scatters are one."""
    terms, dtype = call.terms, _sent(call).dtype
    label = (REDUCE_SCATTER, call.arguments["reduce_op"], _named(call.arguments["group"]))

    def part(segment: Segment) -> Run:
        return _reduced_later(terms, label, segment, dtype) or _scattered_once(terms, label, segment, dtype)

    return [_scattered(call, part)]


def _scattered(call: Call, part: Callable[[Segment], Run]) -> Value:
    value = _sent(call)
    return Value(call.results[0][0], value.dtype, join(map(part, align(_parts(value, _num_ranks(call))))))


def _scattered_once(terms: Terms, label: tuple[Any, ...], segment: Segment, dtype: torch.dtype | None) -> Run:
    """A scatter; of elements that were scattered over another axis before, as one scatter over both axes."""
    _, reduce_op, group = label
    inner = {_label(terms, atom)[:3] for atom in segment[0]}
    first = next(iter(inner))
    if len(inner) == 1 and first[:2] == (REDUCE_SCATTER, reduce_op) and is_real(reduce_op, dtype):
        merged = _merged_parts(terms, segment, first[2], group)
        if merged is not None:
            return _by_rank(terms, (REDUCE_SCATTER, reduce_op, merged[1]), merged[0], dtype)
    return _by_rank(terms, label, segment, dtype)


def _reduced_later(terms: Terms, label: tuple[Any, ...], segment: Segment, dtype: torch.dtype | None) -> Run | None:
    """A scatter of elements that were all-reduced over another axis, as the all-reduce of scattered elements.

    This holds in real arithmetic, and only for reductions that commute: `sum` and `avg` of floats with each other, all
    others with themselves. Zero is the reduction of zeros. None if the segment has another form.
    """
    atoms, starts, length = segment
    if all(_is_zero(terms, atom) for atom in atoms):
        return atoms[0], starts[0], length
    inner = {_label(terms, atom)[:3] for atom in atoms if not _is_zero(terms, atom)}
    sum_label = next(iter(inner))
    if len(inner) > 1 or sum_label[0] != ALL_REDUCE:
        return None
    _, reduce_op, group = sum_label
    if not _commute(reduce_op, label[1], dtype) or not _reach_the_same(group, label[2]):
        return None
    sources = tuple(atom if _is_zero(terms, atom) else terms.operands[atom][0][0] for atom in atoms)
    inside = sources, starts, length
    atom, start, length = _reduced_later(terms, label, inside, dtype) or _scattered_once(terms, label, inside, dtype)
    return _reduced(terms, reduce_op, group, atom, dtype), start, length


def _is_zero(terms: Terms, atom: int) -> bool:
    return number_of(terms.labels[atom]) == 0


@functools.cache
def _reach_the_same(reduced: Hashable, scattered_over: Hashable) -> bool:
    """Whether each rank gets the same part from the same ranks, whichever of the two groups communicates first."""
    spans = [sum(map(len, reach.parts)) for group in (reduced, scattered_over) if (reach := _reach_of(group))]
    if len(spans) != 2:
        return False
    world = math.lcm(*spans)
    first, second = _members(reduced, world), _members(scattered_over, world)
    if first is None or second is None:
        return False
    for rank in range(world):
        part = second[rank].index(rank)
        before = sorted((sender, part) for mate in second[rank] for sender in first[mate])
        after = sorted((sender, second[mate].index(mate)) for mate in first[rank] for sender in second[mate])
        if before != after:
            return False
    return True


def exchanged(call: Call) -> list[Value]:
    """Element p of part k of the result on rank r is element p of part r on rank k."""
    value, into, out = _sent(call), call.arguments["input_split_sizes"], call.arguments["output_split_sizes"]
    if not into or into != out or any(n != into[0] for n in into):
        raise Undecided
    segments, group = list(align(_parts(value, len(into)))), _named(call.arguments["group"])
    runs: Iterable[Run] = (
        _exchanged_once(call.terms, k, group, segment, value.dtype) for k in range(len(into)) for segment in segments
    )
    return [Value(call.results[0][0], value.dtype, join(runs))]


def _exchanged_once(terms: Terms, k: int, group: Hashable, segment: Segment, dtype: torch.dtype | None) -> Run:
    """Part k of an exchange; of elements that were exchanged over another axis before, as one exchange over both."""
    inner = {_label(terms, atom)[:3] for atom in segment[0]}
    first = next(iter(inner))
    merged = _merged_parts(terms, segment, first[2], group) if len(inner) == 1 and first[0] == ALL_TO_ALL else None
    if merged is None:
        return _from_rank(terms, (ALL_TO_ALL, k, group), segment, dtype)
    parts, reach, order = merged
    num_inner = len(order) // len(segment[0])
    return _from_rank(terms, (ALL_TO_ALL, order[k * num_inner + first[1]], reach), parts, dtype)


def _parts(value: Value, num_ranks: int) -> list[list[Run]]:
    if num_ranks < 1:
        raise Undecided
    return cut(value.runs, [divide(product(value.shape), num_ranks)] * num_ranks)


def _by_rank(terms: Terms, label: tuple[Hashable, ...], segment: Segment, dtype: torch.dtype | None) -> Run:
    """A run named by one element per rank; if these are evenly spaced in one atom, by the atom and the step."""
    atoms, starts, length = segment
    step = _even_step(atoms, starts)
    if step is None:
        return terms.combined(label, segment, dtype)
    operands = ((atoms[0], 0),)
    return terms.atom((*label, len(atoms), step), terms.sizes[atoms[0]], dtype, operands), starts[0], length


def _even_step(atoms: Sequence[int], starts: Sequence[Size]) -> Size | None:
    if len(atoms) < 2 or any(atom != atoms[0] for atom in atoms):
        return None
    step = settle(starts[1] - starts[0])
    even = all(settle(after - before) == step for before, after in itertools.pairwise(starts))
    return step if even else None


def _moved(terms: Terms, label: Hashable, atom: int, times: int) -> int:
    """The atom that a move delivers. Moving commutes with reading the bytes of an atom."""
    kind = terms.labels[atom]
    if kind == "bytes":
        return bytes_of(terms, _moved(terms, label, terms.operands[atom][0][0], times))
    dtype, size = terms.dtypes[atom], terms.sizes[atom]
    if kind == "of bytes" and dtype is not None:
        source = terms.operands[atom][0][0]
        if terms.sizes[source] == settle(size * dtype.itemsize):
            return as_dtype(terms, _moved(terms, label, source, times), dtype)
    return terms.atom(label, settle(size * times), dtype, ((atom, 0),))


def _from_rank(terms: Terms, label: tuple[Hashable, ...], segment: Segment, dtype: torch.dtype | None) -> Run:
    """Like `_by_rank`, for a move: the moved bytes of whole elements are the bytes of the moved elements."""
    atoms, starts, length = segment
    sources = [terms.operands[a][0][0] for a in atoms if terms.labels[a] == "bytes"]
    dtypes = {terms.dtypes[source] for source in sources}
    if len(sources) < len(atoms) or len(dtypes) != 1:
        return _by_rank(terms, label, segment, dtype)
    (inner,) = dtypes
    if inner is None:
        return _by_rank(terms, label, segment, dtype)
    size = inner.itemsize
    try:
        steps = [divide(settle(start - starts[0]), size) for start in starts]
    except Undecided:
        return _by_rank(terms, label, segment, dtype)
    atom, _, _ = _by_rank(terms, label, (tuple(sources), tuple(steps), 1), inner)
    return bytes_of(terms, atom), starts[0], length
