"""Each law of the proof is tried over its domain: every operator and overload, dtype and sample of every argument.

A call is made by torch on numbers and by the law on symbols; what the symbols mean (`denotation`) must be what torch
computed, in every bit. Small dtypes are exhausted; others hold the values at which arithmetic is not what it seems.
"""

from __future__ import annotations

import functools
import itertools
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

import weft.bucketing.pack as _pack  # noqa: F401  # defines weft::pack
from tests.tiers import quick_first
from tests.unit.verification.denotation import Denotation, reduced, same
from weft.compat import OpOverload
from weft.graph import ops
from weft.graph.groups import Group
from weft.verification.symbolic import laws
from weft.verification.symbolic.arguments import base_of
from weft.verification.symbolic.casts import ANY, BOOL, COMPLEX, FLOATS, NARROW, WHOLE, is_seen_through
from weft.verification.symbolic.collectives import Reach
from weft.verification.symbolic.index_maps import Call
from weft.verification.symbolic.laws import LAWS, Domain, Law
from weft.verification.symbolic.tensors import Terms, Undecided, Value, join

INF, NAN = float("inf"), float("nan")
SPECIAL = (0.0, -0.0, 1.0, -INF, NAN, -1.5, 3e38, 1e-40, 0.5, -1.0, 2.5, 3.0, INF, -6e-8, 65504.0, 0.1)
MAX_DRAWS, MAX_CALLS = 300, 3
NUM_SPECIAL, MAX_IN_A_LIST = 6, 12
"""Combinations of samples for one overload and dtype that are drawn, and those that a law applies to."""


def everything(dtype: torch.dtype) -> Tensor:
    """Every number of a dtype of one or two bytes."""
    if dtype is torch.bool:
        return torch.tensor([False, True])
    size = dtype.itemsize * 8
    return torch.arange(1 << size, dtype=torch.int32).to(torch.uint8 if size == 8 else torch.uint16).view(dtype)


def special(dtype: torch.dtype) -> Tensor:
    """Numbers of a dtype at which arithmetic is not what it seems."""
    if dtype is torch.bool:
        return torch.tensor([False, True])
    if dtype.is_complex:
        return torch.tensor([complex(a, b) for a in SPECIAL[::3] for b in SPECIAL[::3]], dtype=dtype)
    if dtype.is_floating_point:
        return torch.tensor(SPECIAL).to(dtype)
    limits = torch.iinfo(dtype)
    wanted = (0, 1, 2, 7, 100, limits.max, limits.max - 1, limits.min, limits.min + 1, -1, -2)
    return torch.tensor(sorted({n for n in wanted if limits.min <= n <= limits.max}), dtype=dtype)


def values_of(dtype: torch.dtype) -> Tensor:
    return everything(dtype) if dtype.itemsize <= 2 and dtype in FLOATS | NARROW | WHOLE | BOOL else special(dtype)


# Calls, on numbers and on symbols.


@dataclass(frozen=True, eq=False)
class Both:
    """A tensor, and the value that stands for it."""

    tensor: Tensor
    value: Value


class Bench:
    """Makes calls, and compares what a law says with what torch does."""

    def __init__(self) -> None:
        self.terms = Terms()
        self.meaning = Denotation(self.terms)
        self.applied: Counter[str] = Counter()

    def input(self, tensor: Tensor) -> Both:
        atom = self.terms.atom(("given", len(self.terms.labels)), tensor.numel(), tensor.dtype)
        self.meaning.given[atom, 0] = tensor.reshape(-1).clone()
        return Both(tensor, Value(tuple(tensor.shape), tensor.dtype, join([(atom, 0, tensor.numel())])))

    def call(self, target: OpOverload, arguments: dict[str, Any], only: Law | None = None) -> list[Both] | None:
        """The results, with the values that the laws give them; None where torch refuses the call or no law applies."""
        writes = {a.name for a in target._schema.arguments if a.alias_info is not None and a.alias_info.is_write}

        def numbers(name: str, argument: Any) -> Any:
            if isinstance(argument, Both):
                return argument.tensor.clone() if name in writes else argument.tensor
            return [numbers(name, item) for item in argument] if isinstance(argument, list) else argument

        def symbols(argument: Any) -> Any:
            if isinstance(argument, Both):
                return argument.value
            return [symbols(item) for item in argument] if isinstance(argument, list) else argument

        try:
            given = {name: numbers(name, argument) for name, argument in arguments.items()}
            found = target(**given)
        except (RuntimeError, TypeError, IndexError, ValueError, NotImplementedError):
            return None
        found = given["self"] if found is None else found
        results = list(found) if isinstance(found, list | tuple) else [found]
        if not all(isinstance(result, Tensor) for result in results):
            return None
        bound = ops.bind_arguments(target, (), arguments)
        types = [(tuple(result.shape), result.dtype) for result in results]
        name = base_of(target).partition("::")[2]
        call = Call(self.terms, {k: symbols(v) for k, v in bound.items()}, types, True, "cpu", name)
        for law in laws.laws_of(target, real=False) if only is None else (only,):
            try:
                values = law.follow(call, target)
            except Undecided:
                continue
            if values is not None:
                self.compare(law, target, arguments, results, values)
                return [Both(t, v) for t, v in zip(results, values, strict=True)]
        return None

    def compare(self, law: Law, target: OpOverload, arguments: Any, results: Sequence[Tensor], values: Any) -> None:
        assert len(results) == len(values)
        for result, value in zip(results, values, strict=True):
            assert (value.shape, value.dtype) == (tuple(result.shape), result.dtype), (law.name, target.name())
            meant = self.meaning.value(value)
            assert same(result.resolve_conj(), meant), (law.name, target.name(), shown(arguments), result, meant)
        self.applied[law.name] += 1


def shown(argument: Any) -> Any:
    if isinstance(argument, dict):
        return {key: shown(item) for key, item in argument.items()}
    if isinstance(argument, list):
        return [shown(item) for item in argument]
    if isinstance(argument, Both):
        return argument.tensor.dtype, tuple(argument.tensor.shape), argument.tensor.stride(), argument.tensor
    return argument


def overloads(law: Law) -> Iterator[OpOverload]:
    """The operators of a law, with all overloads, less those that write into a given tensor."""
    for operator in law.operators:
        namespace, _, full = operator.partition("::")
        if not full:
            continue
        name, _, overload = full.partition(".")
        for each in (name, f"{name}_") if overload == "*" else (name,):
            packet = getattr(getattr(torch.ops, namespace), each, None)
            for key in [] if packet is None else packet.overloads() if overload == "*" else [overload or "default"]:
                found = getattr(packet, key)
                if all(argument.name != "out" for argument in found._schema.arguments):
                    yield found


def samples(law: Law, target: OpOverload, tensors: Sequence[Both], rng: Random) -> Iterator[dict[str, Any]]:
    """Arguments for a call: all combinations of the samples, or a draw from them."""
    columns: list[list[Any]] = []
    names: list[str] = []
    for argument in target._schema.arguments:
        wanted = law.domain.reads.get(argument.name)
        kind = str(argument.type)
        if wanted is None:
            if argument.has_default_value():
                continue
            wanted = (None,)
        names.append(argument.name)
        if kind in ("Tensor", "Optional[Tensor]"):
            columns.append(list(tensors) if torch.Tensor in wanted else [None])
        elif kind == "List[Tensor]":
            few = [each for each in tensors if each.tensor.numel() <= MAX_IN_A_LIST]
            columns.append([list(pair) for pair in itertools.product(few, repeat=2)] + [[each] for each in few])
        elif argument.name == "dtypes":
            columns.append([0])
        else:
            columns.append([sample for sample in wanted if sample is not torch.Tensor and sample is not list])
    total = 1
    for column in columns:
        total *= len(column)
    if total <= MAX_DRAWS:
        drawn: Any = itertools.product(*columns)
    else:
        drawn = (tuple(rng.choice(column) for column in columns) for _ in range(MAX_DRAWS))
    for row in drawn:
        found = {name: v for name, v in zip(names, row, strict=True) if v is not None}
        if "dtypes" in found:
            found["dtypes"] = [each.tensor.dtype for each in found["tensors"]]
        yield found


def numbers_for(bench: Bench, dtype: torch.dtype) -> list[Both]:
    """Tensors for operators on numbers: all pairs of special values, as memory may lie; tensors of one number; none."""
    found = special(dtype)[:NUM_SPECIAL]
    first, second = (t.reshape(-1) for t in torch.meshgrid(found, found, indexing="ij"))
    spread = torch.stack([first, second], 1)[:, 1]
    tensors = [bench.input(t) for t in (first, second, spread, found[1], found[:0])]
    if dtype not in COMPLEX:
        for number in (0, 1, -0.0):
            like = torch.ops.aten.full_like.default
            tensors += bench.call(like, {"self": tensors[0], "fill_value": number}) or []
    return tensors


def shapes_for(bench: Bench, dtype: torch.dtype) -> list[Both]:
    """Tensors of several shapes and layouts, some made of pieces of others."""
    data = torch.arange(24 * dtype.itemsize, dtype=torch.int32).to(torch.uint8)
    whole = data.ne(0) if dtype is torch.bool else data.view(dtype)
    plain = [
        whole[:n].reshape(shape)
        for n, shape in ((1, ()), (0, (0, 3)), (6, (6,)), (6, (2, 3)), (24, (2, 3, 4)), (6, (1, 6)), (3, (3, 1)))
    ]
    tensors = [bench.input(t) for t in (*plain, whole.reshape(4, 6).t(), whole.reshape(4, 6)[:, ::2])]
    halves = bench.call(torch.ops.aten.split.Tensor, {"self": tensors[2], "split_size": 4}) or []
    tensors += bench.call(torch.ops.aten.cat.default, {"tensors": halves[::-1]}) or []
    return tensors


DTYPES = sorted(ANY, key=str)
IN_BITS = [law for law in LAWS if not law.is_real and law not in laws.COLLECTIVES]
IN_REAL = [law for law in LAWS if law.is_real and law not in laws.COLLECTIVES]


@pytest.mark.parametrize("num_calls", quick_first([1, MAX_CALLS]))
@pytest.mark.parametrize("law", IN_BITS, ids=lambda law: law.name)
def test_a_law_says_what_torch_does(law: Law, num_calls: int) -> None:
    try_law(law, num_calls)


@pytest.mark.long
@pytest.mark.parametrize("law", IN_BITS, ids=lambda law: law.name)
def test_a_law_says_what_torch_does_many_times_more(law: Law) -> None:
    try_law(law, 3 * MAX_CALLS)


def try_law(law: Law, num_calls: int) -> None:
    bench, rng = Bench(), Random(f"{law.name} {num_calls}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for dtype in sorted(law.domain.dtypes, key=str):
            is_move = law in laws.MOVES or law in laws.CASTS
            tensors = (
                shapes_for(bench, dtype) if is_move else [*numbers_for(bench, dtype), *shapes_for(bench, dtype)[2:5]]
            )
            others = numbers_for(bench, rng.choice(DTYPES))[:4] if not is_move else []
            if law in laws.IDENTITIES or law in laws.ELEMENTWISE:
                tensors += [bench.input(t) for t in (torch.tensor([True, False]), torch.tensor(True))]
            for target in overloads(law):
                enough = bench.applied[law.name] + num_calls
                for arguments in samples(law, target, [*tensors, *others], rng):
                    results = bench.call(target, arguments, law)
                    if len(target._schema.arguments) == 1:  # it may undo or repeat itself
                        results = results or bench.call(target, arguments) or []
                        bench.call(target, {"self": results[0] if results else None}, law)
                    if bench.applied[law.name] >= enough:
                        break
    assert bench.applied[law.name] >= len(law.domain.dtypes) / 2, f"tried only {bench.applied[law.name]} times"


# Small dtypes, exhausted.


def layouts(tensor: Tensor) -> Iterator[Tensor]:
    """The same elements as memory may hold them: vectors in a row, out of step with the registers, and apart."""
    yield tensor
    yield torch.cat([tensor[:1], tensor])[1:]
    yield torch.stack([tensor, tensor], 1)[:, 1]


UNARY = [
    (law, o)
    for law in laws.ELEMENTWISE
    for o in overloads(law)
    if str(o).endswith(".default")
    and len(o._schema.arguments) == 1
    and not o._schema.is_mutable
    and "foreach" not in str(o)
]
BINARY = [
    (law, o)
    for law in laws.ELEMENTWISE
    for o in overloads(law)
    if [a.name for a in o._schema.arguments if a.name != "alpha"] == ["self", "other"]
    and str(o._schema.arguments[1].type) == "Tensor"
    and not o._schema.is_mutable
    and "foreach" not in str(o)
]


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.int8, torch.uint8, torch.int16, torch.uint16, torch.float16, torch.bfloat16], ids=str
)
def test_operators_on_one_number_do_not_depend_on_memory_for_any_number_of_a_small_dtype(dtype: torch.dtype) -> None:
    values = everything(dtype)
    tried = 0
    for law, target in UNARY:
        results = [
            result for t in layouts(values) if dtype in law.domain.dtypes and (result := _try(target, t)) is not None
        ]
        for result in results[1:]:
            assert same(results[0], result), (target.name(), dtype)
            tried += 1
    assert tried > 0


@pytest.mark.parametrize("dtype", sorted(FLOATS | WHOLE | BOOL | COMPLEX, key=str), ids=str)
def test_operators_on_two_numbers_do_not_depend_on_memory_for_pairs_of_numbers(dtype: torch.dtype) -> None:
    """All pairs of bytes; of wider dtypes all pairs of special values and as many pairs at random."""
    values = everything(dtype) if dtype.itemsize == 1 else special(dtype)
    first, second = (t.reshape(-1) for t in torch.meshgrid(values, values, indexing="ij"))
    if dtype.itemsize > 1:
        noise = torch.randint(
            0, 256, (2, 50_000 * dtype.itemsize), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)
        )
        first, second = (torch.cat([t, row.view(dtype)]) for t, row in zip((first, second), noise, strict=True))
    tried = 0
    for law, target in BINARY:
        if dtype not in law.domain.dtypes:
            continue
        whole = _try(target, first, second)
        for a, b in zip(layouts(first), list(layouts(second))[::-1], strict=True) if whole is not None else ():
            result = _try(target, a, b)
            assert result is not None
            assert same(whole, result), (target.name(), dtype)
            tried += 1
    assert tried > 0


def _try(target: OpOverload, *arguments: Tensor) -> Tensor | None:
    try:
        return target(*arguments)
    except (RuntimeError, NotImplementedError):
        return None


def test_casts_that_are_taken_for_one_are_one_for_every_number_of_a_small_dtype() -> None:
    tried = 0
    for before, between, after in itertools.product(DTYPES, repeat=3):
        if before is between or not is_seen_through(before, between, after):
            continue
        for values in layouts(values_of(before)):
            assert same(values.to(between).to(after), values.to(after)), (before, between, after)
        tried += 1
    assert tried > 500


# Real arithmetic: small whole numbers in f64, of which no sum rounds.


REAL_CALLS: list[tuple[Any, list[tuple[int, ...]], dict[str, Any]]] = [
    (torch.ops.aten.mm.default, [(6, 4), (4, 3)], {}),
    (torch.ops.aten.matmul.default, [(2, 3, 4), (4, 3)], {}),
    (torch.ops.aten.matmul.default, [(6, 4), (4,)], {}),
    (torch.ops.aten.bmm.default, [(2, 3, 4), (2, 4, 5)], {}),
    (torch.ops.aten.addmm.default, [(3,), (6, 4), (4, 3)], {}),
    (torch.ops.aten.addmm.default, [(6, 3), (6, 4), (4, 3)], {"alpha": 2, "beta": 3}),
    (torch.ops.aten.baddbmm.default, [(2, 3, 5), (2, 3, 4), (2, 4, 5)], {}),
    (torch.ops.aten.linear.default, [(6, 4), (3, 4), (3,)], {}),
    (torch.ops.aten.linear.default, [(2, 3, 4), (3, 4)], {}),
    (torch.ops.aten.sum.dim_IntList, [(6, 4)], {"dim": [1]}),
    (torch.ops.aten.sum.dim_IntList, [(2, 3, 4)], {"dim": [-1, 1], "keepdim": True}),
    (torch.ops.aten.sum.dim_IntList, [(6, 4)], {"dim": [0]}),
    (torch.ops.aten.sum.dim_IntList, [()], {"dim": [0]}),
    (torch.ops.aten.mean.dim, [(6, 4)], {"dim": [-1]}),
    (torch.ops.aten.amax.default, [(6, 4)], {"dim": [1]}),
    (torch.ops.aten.amin.default, [(2, 3, 4)], {"dim": [2]}),
    (torch.ops.aten.add.Tensor, [(6, 4), (6, 4)], {}),
    (torch.ops.aten.add.Tensor, [(6, 4), (4,)], {}),
    (torch.ops.aten.add.Tensor, [(6, 4), (6, 1)], {"alpha": 3}),
    (torch.ops.aten.mul.Tensor, [(1, 4), (6, 4)], {}),
    (torch.ops.aten.sub.Tensor, [(6, 1), (6, 4)], {}),
    (torch.ops.aten.maximum.default, [(6, 4), (6, 4)], {}),
    (torch.ops.aten.clamp.default, [(6, 4)], {"min": -1, "max": 2}),
    (torch.ops.aten.addcmul.default, [(6, 4), (4,), (6, 1)], {"value": 2}),
    (torch.ops.aten.where.self, [(6, 4), (6, 4), (4,)], {}),
    (torch.ops.aten._foreach_mul.List, [], {}),
]


def _pieces(bench: Bench, tensor: Tensor) -> Both:
    """A tensor made of pieces of two others, cut where no row ends."""
    flat = tensor.reshape(-1)
    cut_at = max(len(flat) // 2 - 1, 0)
    parts = [bench.input(torch.cat([piece, piece])) for piece in (flat[:cut_at], flat[cut_at:])]
    runs = [(part.value.runs[0][0], len(part.tensor) // 2, len(part.tensor) // 2) for part in parts if len(part.tensor)]
    return Both(tensor, Value(tuple(tensor.shape), tensor.dtype, join(runs)))


@pytest.mark.parametrize("in_pieces", [False, True], ids=["whole", "in pieces"])
@pytest.mark.parametrize("case", range(len(REAL_CALLS)), ids=lambda k: f"{REAL_CALLS[k][0]} {REAL_CALLS[k][1]}")
def test_a_law_of_real_arithmetic_says_what_torch_does(case: int, in_pieces: bool) -> None:
    target, shapes, constants = REAL_CALLS[case]
    bench = Bench()
    rng = torch.Generator().manual_seed(case)
    names = [argument.name for argument in target._schema.arguments]
    make = functools.partial(_pieces, bench) if in_pieces else bench.input
    tensors = [make(torch.randint(-3, 4, shape, generator=rng).to(torch.float64)) for shape in shapes]
    if target is torch.ops.aten.where.self:
        tensors[0] = make(tensors[0].tensor > 0)
    arguments: dict[str, Any] = dict(zip(names, tensors, strict=False)) | constants
    if not shapes:
        lists = [[make(torch.arange(6.0)), make(torch.arange(3.0) - 1)] for _ in range(2)]
        arguments = {"self": lists[0], "other": lists[1]}
    applied = 0
    for law in laws.laws_of(target, real=True):
        if law.is_real:
            applied += bench.call(target, arguments, law) is not None
    assert applied == (0 if shapes == [()] or constants.get("dim") == [0] else 1)


# Collectives: four ranks, alone, in pairs and all together.


GROUPS = [Group("one", 1), Group("dp", 2), Group("tp", 2, 2), Group("all", 4)]
NUM_RANKS = 4


@pytest.mark.parametrize("law", laws.COLLECTIVES, ids=lambda law: law.name)
@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.name)
def test_a_collective_delivers_what_its_law_says(law: Law, group: Group) -> None:
    tried = 0
    for reduce_op, source, seed in itertools.product(
        ("sum", "avg", "max", "min", "product"), range(group.size), range(3)
    ):
        terms = Terms()
        meaning = Denotation(terms, NUM_RANKS)
        value = _sent(terms, meaning, Random(seed))
        for operator in law.operators:
            tried += _deliver(law, operator, group, terms, meaning, value, reduce_op, source)
    needs_more = law.name in ("scattered parts gathered again",)  # a value that was scattered: see below
    assert tried or needs_more or (law.name == "a group of one rank") != (group.size == 1)


def _sent(terms: Terms, meaning: Denotation, rng: Random) -> Value:
    """Sixteen numbers on each rank: runs of atoms, some of which are zeros."""
    atoms = [terms.atom(("given", k), 16, torch.float64) for k in range(2)]
    for atom, rank in itertools.product(atoms, range(NUM_RANKS)):
        numbers = [float(rng.randint(1, 4)) for _ in range(16)]
        meaning.given[atom, rank] = torch.tensor(numbers, dtype=torch.float64)
    zeros = terms.atom(("fill", "0.0", "cpu"), 16, torch.float64)
    runs, left = [], 16
    while left:
        length = min(rng.choice((1, 2, 4, 8, 16)), left)
        runs.append((rng.choice([*atoms, zeros]), rng.randrange(17 - length), length))
        left -= length
    return Value((16,), torch.float64, join(runs))


def _deliver(
    law: Law, operator: str, group: Group, terms: Terms, meaning: Denotation, value: Value, reduce_op: str, source: int
) -> bool:
    target = next(o for o in overloads(replace(law, operators=(operator,)))) if not operator.endswith("_out") else None
    if target is None:
        return False
    size = group.size
    arguments: dict[str, Any] = {"sent": value, "group": (group, "")}
    known = {
        "reduce_op": reduce_op,
        "group_size": size,
        "src": source,
        "input_split_sizes": [16 // size] * size,
        "output_split_sizes": [16 // size] * size,
    }
    arguments |= {a.name: known[a.name] for a in target._schema.arguments if a.name in known}
    kind = operator.partition("::")[2]
    length = 16 * size if "gather" in kind else 16 // size if "scatter" in kind else 16
    try:
        found = law.follow(Call(terms, arguments, [((length,), torch.float64)], True), target)
    except Undecided:
        return False
    if found is None:
        return False
    for rank in range(NUM_RANKS):
        members = next(ranks for ranks in group.partition(NUM_RANKS) if rank in ranks)
        sent = [meaning.value(value, k) for k in members]
        place = members.index(rank)
        if "gather" in kind:
            expected = torch.cat(sent)
        elif "all_reduce" in kind:
            expected = reduced(sent, reduce_op)
        elif "scatter" in kind:
            expected = reduced(sent, reduce_op).reshape(size, -1)[place]
        elif "broadcast" in kind:
            expected = sent[source]
        else:
            expected = torch.cat([t.reshape(size, -1)[place] for t in sent])
        assert torch.equal(meaning.value(found[0], rank), expected), (law.name, operator, group, reduce_op)
    return True


@pytest.mark.parametrize("reduce_op", ["sum", "avg", "max"])
@pytest.mark.parametrize("law", ["scattered parts gathered again", "a scatter of a sum over another axis"])
def test_collectives_of_collectives_deliver_what_the_laws_of_real_arithmetic_say(law: str, reduce_op: str) -> None:
    found = next(each for each in laws.COLLECTIVES if each.name == law)
    outer, inner = GROUPS[1], GROUPS[1] if "gathered" in law else GROUPS[2]
    rules = {each.name: each for each in laws.COLLECTIVES}
    first = rules[
        "each element of one part reduced over the ranks"
        if "gathered" in law
        else "each element reduced over the ranks"
    ]
    tried = 0
    for seed in range(20):
        terms = Terms()
        meaning = Denotation(terms, NUM_RANKS)
        value = _sent(terms, meaning, Random(seed))
        target = next(overloads(replace(first, operators=first.operators[:1])))
        arguments = {"sent": value, "group": (inner, ""), "reduce_op": reduce_op, "group_size": 2}
        arguments = {
            k: v
            for k, v in arguments.items()
            if k in ("sent", "group") or k in {a.name for a in target._schema.arguments}
        }
        shape = (8,) if "gathered" in law else (16,)
        (middle,) = first.follow(Call(terms, arguments, [(shape, torch.float64)], True), target) or [None]
        assert middle is not None
        target = next(overloads(replace(found, operators=found.operators[:1])))
        arguments = {"sent": middle, "group": (outer, ""), "reduce_op": reduce_op, "group_size": 2}
        arguments = {
            k: v
            for k, v in arguments.items()
            if k in ("sent", "group") or k in {a.name for a in target._schema.arguments}
        }
        shape = (16,) if "gathered" in law else (8,)
        result = found.follow(Call(terms, arguments, [(shape, torch.float64)], True), target)
        for rank in range(NUM_RANKS) if result is not None else ():
            members = next(ranks for ranks in outer.partition(NUM_RANKS) if rank in ranks)
            sent = [meaning.value(middle, k) for k in members]
            expected = (
                torch.cat(sent) if "gathered" in law else reduced(sent, reduce_op).reshape(2, -1)[members.index(rank)]
            )
            assert torch.equal(meaning.value(result[0], rank), expected)
            tried += 1
    assert tried > 20


AXES = (
    *(Group("tp", 2), Group("cp", 2, 2), Group("dp", 2, 4), Group("tp_cp", 4), Group("dp_cp", 4, 2), Group("all", 8)),
    Group("same as tp", 2, ranks=((0, 1), (2, 3), (4, 5), (6, 7))),
    Group("dp_tp", 4, ranks=((0, 1, 4, 5), (2, 3, 6, 7))),
    Group("tp and dp backwards", 4, ranks=((5, 4, 1, 0), (7, 6, 3, 2))),
    Group("crosswise", 2, ranks=((0, 3), (1, 2), (4, 7), (5, 6))),
    Group("unequal", 2, ranks=((0, 1), (2, 3, 4, 5), (6,), (7,))),
)
"""Axes of a mesh of 2 x 2 x 2, their products, and groups that are neither."""


@pytest.mark.parametrize("seed", range(8))
def test_chains_of_collectives_over_any_groups_deliver_what_the_laws_of_real_arithmetic_say(seed: int) -> None:
    rng, joined = Random(seed), 0
    for _ in range(60):
        terms = Terms()
        meaning = Denotation(terms, 8)
        atom = terms.atom("given", 64, torch.float64)
        for rank in range(8):
            meaning.given[atom, rank] = torch.tensor([float(rng.randint(1, 3)) for _ in range(64)], dtype=torch.float64)
        value = Value((64,), torch.float64, ((atom, 0, 64),))
        sent = [meaning.value(value, rank) for rank in range(8)]
        open_scatters: list[Group] = []
        for _ in range(rng.randint(2, 6)):
            kind = rng.choice(["all_reduce", "all_reduce", "scatter", "gather"])
            group = rng.choice([*AXES[:3] * 5, *AXES])
            if kind == "gather" and open_scatters and rng.random() < 0.8:
                group = open_scatters.pop()
            if kind != "all_reduce" and group.name == "unequal":
                continue
            if kind == "scatter" and len(sent[0]) % group.size == 0:
                open_scatters.append(group)
            elif kind == "scatter" or len(sent[0]) > 512:
                continue
            value, sent = _communicate(terms, value, sent, kind, group, rng.choice(["sum", "sum", "avg", "max"]))
        reaches = [part for label in terms.labels if isinstance(label, tuple) for part in label if type(part) is Reach]
        joined += any(reach.name not in {group.name for group in AXES} for reach in reaches)
        for rank in range(8):
            assert torch.equal(meaning.value(value, rank), sent[rank])
    assert joined > 2  # the laws took several reductions for one


def _communicate(
    terms: Terms, value: Value, sent: list[Tensor], kind: str, group: Group, reduce_op: str
) -> tuple[Value, list[Tensor]]:
    """The value that the laws give to the result of a collective, and the result on each rank."""
    members = [next(ranks for ranks in group.partition(8) if rank in ranks) for rank in range(8)]
    if kind == "gather":
        target, found = ops.op_names()["all_gather"], [torch.cat([sent[k] for k in ranks]) for ranks in members]
    else:
        target = ops.op_names()["all_reduce" if kind == "all_reduce" else "reduce_scatter"]
        found = [reduced([sent[k] for k in ranks], reduce_op) for ranks in members]
    if kind == "scatter":
        parts = zip(found, members, range(8), strict=True)
        found = [whole.reshape(group.size, -1)[ranks.index(rank)] for whole, ranks, rank in parts]
    known = {"reduce_op": reduce_op, "group_size": group.size}
    arguments: dict[str, Any] = {"sent": value, "group": (group, group.name)}
    arguments |= {a.name: known[a.name] for a in target._schema.arguments if a.name in known}
    call = Call(terms, arguments, [(tuple(found[0].shape), torch.float64)], True)
    results = (law.follow(call, target) for law in laws.laws_of(target, real=True) if law.name != "a group of one rank")
    (after,) = next(result for result in results if result is not None)
    return after, found


# The table.


def test_every_law_is_tried_by_one_of_these_tests() -> None:
    called = {law.name for target, _, _ in REAL_CALLS for law in laws.laws_of(target, real=True) if law.is_real}
    assert {*called, *(law.name for law in (*IN_BITS, *laws.COLLECTIVES))} == {law.name for law in LAWS}
    assert len({law.name for law in LAWS}) == len(LAWS)


def test_a_law_without_a_domain_cannot_be_made() -> None:
    law = LAWS[0]
    for broken in ({"domain": None}, {"name": ""}, {"operators": ()}):
        with pytest.raises(ValueError, match="a law needs a name, operators and a domain"):
            replace(law, **broken)
    for dtypes, reads, values in (
        (frozenset(), {"self": laws.TENSOR}, "all"),
        (ANY, {}, "all"),
        (ANY, {"self": ()}, "all"),
        (ANY, {"self": laws.TENSOR}, ""),
    ):
        with pytest.raises(ValueError, match="a domain needs dtypes, values, and samples of each argument"):
            Domain(dtypes, reads, values)


def test_an_argument_that_no_law_reads_leaves_the_call_to_itself() -> None:
    bench = Bench()
    tensor = bench.input(torch.tensor([1.25, -2.5]))
    rounded = bench.call(torch.ops.aten.round.default, {"self": tensor})
    assert rounded is not None
    assert bench.call(torch.ops.aten.round.decimals, {"self": rounded[0], "decimals": -1}) is None
    assert bench.call(torch.ops.aten.add.Tensor, {"self": tensor, "other": tensor, "alpha": 2}) is None
    assert (
        bench.call(torch.ops.aten.div.Tensor_mode, {"self": tensor, "other": tensor, "rounding_mode": "floor"}) is None
    )
