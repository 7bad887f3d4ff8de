"""The laws of the symbolic proof, all in one table.

Contract: a call is either followed by a law of this table or opaque, that is, known by its operator, all its arguments,
and the strides of its tensors. A law states the operators, dtypes, arguments and values for which it holds; a law
without a domain cannot be constructed. Its rule gets only the arguments that the law reads, and the law applies only if
every other argument has its default. `tests/unit/verification/test_laws.py` tries each law against torch over its whole
domain.

    times one     mul(x, 1) is x      bool, integers, floats     reads self, other
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from weft.compat import FUNCTIONAL, OpOverload
from weft.graph import ops
from weft.verification.symbolic import collectives, elementwise, identities, index_maps, rowwise
from weft.verification.symbolic.arguments import base_of
from weft.verification.symbolic.casts import ANY, BOOL, COMPLEX, FILLABLE, FLOATS, REAL, WHOLE
from weft.verification.symbolic.index_maps import Call, LawRule
from weft.verification.symbolic.tensors import Value

TENSOR: tuple[Any, ...] = (torch.Tensor,)
"""Marks an argument that is a tensor; the test makes samples in the dtypes of the domain."""
TENSORS: tuple[Any, ...] = (list,)
"""Marks an argument that is a list of tensors."""
ALL = "all arguments"
"""Stands for every argument that differs from its default; each becomes part of the label."""
METADATA: tuple[Any, ...] = (None,)
"""Marks an argument that affects only the type of the result."""
EVERY_VALUE = "every value in every bit, except the payload of a NaN"
REAL_NUMBERS = "real numbers: finite values, without rounding"


@dataclass(frozen=True)
class Domain:
    """Where a law holds."""

    dtypes: frozenset[torch.dtype]
    """The dtypes of all tensors that the call takes and returns."""
    reads: Mapping[str, Sequence[Any]]
    """The arguments that the law reads, each with sample values. Every other argument must have its default."""
    values: str = EVERY_VALUE

    def __post_init__(self) -> None:
        if not self.dtypes or not self.reads or not self.values or not all(self.reads.values()):
            raise ValueError("a domain needs dtypes, values, and samples of each argument that is read")


@dataclass(frozen=True)
class Law:
    """One fact about operators of torch, and the domain in which it holds."""

    name: str
    operators: tuple[str, ...]
    """Full names with the overload; `aten::mul.*` stands for all overloads, including those in place."""
    domain: Domain
    rule: LawRule
    is_real: bool = False
    """Whether the law holds in real arithmetic only."""

    def __post_init__(self) -> None:
        if not isinstance(self.domain, Domain) or not self.name or not self.operators:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError("a law needs a name, operators and a domain")

    def follow(self, call: Call, target: OpOverload) -> list[Value] | None:
        """The results of a call by this law; None if the law does not apply to the call."""
        values = [*_values(call.arguments.values()), *(Value(shape, dtype, ()) for shape, dtype in call.results)]
        if any(value.dtype not in self.domain.dtypes for value in values):
            return None
        plain = {name: default for name, _, has_default, default in ops.parameters(target) if has_default}
        said = {
            name for name, given in call.arguments.items() if given is not None and not _is_same(given, plain.get(name))
        }
        if ALL in self.domain.reads:
            return self.rule(replace(call, arguments={k: v for k, v in call.arguments.items() if k in said}))
        if said - self.domain.reads.keys():
            return None
        read = {name: value for name, value in call.arguments.items() if name in self.domain.reads}
        return self.rule(replace(call, arguments=read))


def laws_of(target: OpOverload, *, real: bool) -> tuple[Law, ...]:
    """The laws of an operator, in the order in which they are tried."""
    return tuple(law for law in _laws_of(target) if real or not law.is_real)


@functools.cache
def _laws_of(target: OpOverload) -> tuple[Law, ...]:
    base = base_of(target)
    names = {target.name(), f"{base}.*"}
    if target.namespace == "aten" and torch.Tag.pointwise in target.tags:
        names.add(POINTWISE)
    if base.startswith(f"aten::{elementwise.FOREACH}"):
        names.add(EACH)
    return tuple(law for law in LAWS if names.intersection(law.operators))


def _values(arguments: Any) -> Iterator[Value]:
    for argument in arguments:
        if isinstance(argument, Value):
            yield argument
        elif isinstance(argument, list | tuple):
            yield from _values(argument)


def _is_same(given: Any, default: Any) -> bool:
    return type(given) in (bool, int, float, str, list, tuple) and _listed(given) == _listed(default)


def _listed(argument: Any) -> Any:
    return [_listed(item) for item in argument] if isinstance(argument, list | tuple) else argument


# The table.

POINTWISE = "pointwise"
"""Stands for all operators of aten that torch tags as pointwise."""
EACH = "foreach"
"""Stands for all `_foreach` operators of aten."""
NUMBERS = (0, 1, 2, 0.0, -0.0, 1.0, 0.5, True, False, torch.Tensor)
"""Samples of an argument that may be a number or a tensor."""
DIMS = (0, 1, -1)
SIZES = ([], [0, 3], [1], [2, 3], [3, 2], [6], [1, 6], [2, 1, 3], [24], [2, 3, 4], [4, 6], [-1])
INDICES = (None, 0, 1, 2, -1, -2, 9)
LENGTHS = ([1, 1], [2, 1], [1, 2], [3], [2, 2], [1, 3], [6])
OPTIONS: Mapping[str, Sequence[Any]] = dict.fromkeys(
    ("dtype", "layout", "device", "pin_memory", "memory_format"), METADATA
)
ONE: Mapping[str, Sequence[Any]] = {"self": TENSOR}
TWO: Mapping[str, Sequence[Any]] = {"self": TENSOR, "other": NUMBERS}


def _every(names: str) -> tuple[str, ...]:
    return tuple(f"aten::{name}.*" for name in names.split())


def _aten(names: str) -> tuple[str, ...]:
    return tuple(f"aten::{name}" for name in names.split())


MOVES = (
    Law(
        "same elements in another shape",
        _aten("view reshape _unsafe_view view_copy"),
        Domain(ANY, {**ONE, "size": SIZES, "shape": SIZES}),
        index_maps.relabel,
    ),
    Law(
        "dims flattened",
        _aten("flatten.using_ints ravel"),
        Domain(ANY, {**ONE, "start_dim": DIMS, "end_dim": DIMS}),
        index_maps.relabel,
    ),
    Law(
        "a dim unflattened",
        _aten("unflatten.int"),
        Domain(ANY, {**ONE, "dim": DIMS, "sizes": SIZES}),
        index_maps.relabel,
    ),
    Law(
        "shape of another tensor",
        _aten("view_as reshape_as"),
        Domain(ANY, {**ONE, "other": TENSOR}),
        index_maps.relabel,
    ),
    Law(
        "a copy or another name",
        (
            *_aten("contiguous clone alias detach alias_copy lift_fresh lift_fresh_copy"),
            f"{FUNCTIONAL}::_wrap_tensor_autograd",
        ),
        Domain(ANY, {**ONE, "input": TENSOR, "memory_format": METADATA}),
        index_maps.relabel,
    ),
    Law(
        "dims of size one",
        _aten("squeeze squeeze.dim squeeze.dims unsqueeze"),
        Domain(ANY, {**ONE, "dim": (*DIMS, [0], [0, 1])}),
        index_maps.relabel,
    ),
    Law(
        "a range of a dim",
        _aten("slice.Tensor slice_copy.Tensor"),
        Domain(ANY, {**ONE, "dim": DIMS, "start": INDICES, "end": INDICES, "step": (1, 2)}),
        index_maps.sliced,
    ),
    Law(
        "a range of a dim by its length",
        _aten("narrow narrow_copy"),
        Domain(ANY, {**ONE, "dim": DIMS, "start": (0, 1, -1), "length": (0, 1, 2)}),
        index_maps.narrowed,
    ),
    Law(
        "one index of a dim",
        _aten("select.int select_copy.int"),
        Domain(ANY, {**ONE, "dim": DIMS, "index": (0, 1, -1)}),
        index_maps.selected,
    ),
    Law(
        "consecutive ranges of a dim",
        _aten(
            "split.Tensor split.sizes split_with_sizes split_with_sizes_copy chunk "
            "unsafe_chunk unsafe_split.Tensor unsafe_split_with_sizes"
        ),
        Domain(
            ANY, {**ONE, "split_size": (1, 2, 4, *LENGTHS), "split_sizes": LENGTHS, "chunks": (1, 2, 3), "dim": DIMS}
        ),
        index_maps.parted,
    ),
    Law("every index of a dim", _aten("unbind.int"), Domain(ANY, {**ONE, "dim": DIMS}), index_maps.unbound),
    Law(
        "concatenated along a dim",
        _aten("cat concat"),
        Domain(ANY, {"tensors": TENSORS, "dim": DIMS}),
        index_maps.concatenated,
    ),
    Law(
        "stacked along a new dim",
        _aten("stack"),
        Domain(ANY, {"tensors": TENSORS, "dim": DIMS}),
        index_maps.stacked,
    ),
    Law(
        "padded with a number",
        _aten("constant_pad_nd"),
        Domain(ANY, {**ONE, "pad": ([], [0, 0], [0, 1], [2, 0], [1, 1, 0, 2], [-1, 0]), "value": (0, 2.5, -0.0, True)}),
        index_maps.padded,
    ),
    Law(
        "dims in another order",
        _aten("permute permute_copy t t_copy transpose.int"),
        Domain(
            ANY,
            {
                **ONE,
                "dims": ([0], [1, 0], [0, 1], [2, 0, 1], [1, 2, 0], [0, 2, 1], [-1, 0]),
                "dim0": DIMS,
                "dim1": DIMS,
            },
        ),
        index_maps.permuted,
    ),
    Law(
        "repeats along dims of size one",
        _aten("expand expand_copy"),
        Domain(ANY, {**ONE, "size": (*SIZES, [2, 2, 3], [3, -1], [4, 6, 1]), "implicit": (False,)}),
        index_maps.expanded,
    ),
    Law(
        "the same bytes as another dtype",
        _aten("view.dtype"),
        Domain(ANY, {**ONE, "dtype": (torch.uint8, torch.int16, torch.float32, torch.float64, torch.complex64)}),
        index_maps.reinterpreted,
    ),
    Law(
        "rows of several tensors packed by bytes",
        ("weft::pack",),
        Domain(ANY, {"tensors": TENSORS, "dtypes": TENSORS, "num_rows": (1, 2), "alignment": (1, 8)}),
        index_maps.packed,
    ),
    Law(
        "elements of several tensors, in host memory",
        ("weft::copy_to_host",),
        Domain(ANY, {"tensors": TENSORS}),
        index_maps.on_host,
    ),
)
CASTS = (
    Law(
        "a copy in another dtype",
        (*_aten("_to_copy to.dtype"), "prims::convert_element_type", "prims::device_put"),
        Domain(
            ANY,
            {
                **ONE,
                "a": TENSOR,
                **OPTIONS,
                "dtype": sorted(ANY, key=str),
                "non_blocking": (False, True),
                "copy": (False, True),
            },
        ),
        index_maps.copied,
    ),
    Law(
        "copied over the whole target",
        _every("copy"),
        Domain(ANY, {**ONE, "src": TENSOR, "non_blocking": (False, True)}),
        index_maps.copied_over,
    ),
)
IDENTITIES = (
    Law(
        "tensor filled with one number",
        _every(" ".join(identities.FILLED)),
        Domain(FILLABLE, {**ONE, "size": SIZES, "fill_value": (0, 1, -0.0, 2.5, True), **OPTIONS}),
        identities.filled,
    ),
    Law("times one", _every("mul"), Domain(REAL, TWO), identities.neutral(1, either_way=True)),
    Law("times zero", _every("mul"), Domain(WHOLE | BOOL, TWO), identities.times_zero),
    Law("divided by one", _every("div"), Domain(FLOATS, TWO), identities.neutral(1, either_way=False)),
    Law("plus zero", _every("add"), Domain(REAL, TWO), identities.neutral(0, either_way=True, negative_zero=True)),
    Law("minus zero", _every("sub"), Domain(REAL, TWO), identities.neutral(0, either_way=False)),
    Law(
        "bitwise or, xor with zero",
        _every("bitwise_xor bitwise_or"),
        Domain(WHOLE | BOOL, TWO),
        identities.neutral(0, either_way=False),
    ),
    Law(
        "shifted by zero bits",
        _every("__lshift__ __rshift__"),
        Domain(WHOLE, TWO),
        identities.neutral(0, either_way=False),
    ),
    Law("maximum or minimum of equal values", _every("maximum minimum"), Domain(REAL, TWO), identities.both_alike),
    Law(
        "bitwise and, or of equal values",
        _every("bitwise_and bitwise_or"),
        Domain(WHOLE | BOOL, TWO),
        identities.both_alike,
    ),
    Law(
        "choice between equal values",
        _aten("where.self where.ScalarSelf where.ScalarOther where.Scalar"),
        Domain(ANY, {"condition": TENSOR, **TWO}),
        identities.both_alike,
    ),
    Law("double negation", _every("neg"), Domain(WHOLE | FLOATS, ONE), identities.twice_is_none),
    Law("double bitwise negation", _every("bitwise_not"), Domain(WHOLE | BOOL, ONE), identities.twice_is_none),
    Law("double logical negation", _every("logical_not"), Domain(BOOL, ONE), identities.twice_is_none),
    Law(
        "idempotent operators",
        _every("ceil floor round trunc abs relu"),
        Domain(WHOLE | FLOATS, ONE),
        identities.twice_is_once,
    ),
    Law(
        "rounded integers",
        _every("ceil floor round trunc"),
        Domain(WHOLE, ONE),
        identities.first_if(lambda given: True),
    ),
    Law(
        "to the power of one",
        _every("pow"),
        Domain(WHOLE | FLOATS, {**ONE, "exponent": (1, 1.0, 2, 0.5)}),
        identities.first_if(lambda given: identities.is_one(given.get("exponent"))),
    ),
    Law(
        "repeated once",
        _every("repeat"),
        Domain(ANY, {**ONE, "repeats": ([], [1], [1, 1], [2, 1], [1, 1, 1])}),
        identities.first_if(lambda given: all(n == 1 for n in given["repeats"])),
    ),
    Law(
        "scattered over the whole target",
        _every("slice_scatter"),
        Domain(ANY, {**ONE, "src": TENSOR, "dim": DIMS, "start": INDICES, "end": INDICES, "step": (1, 2)}),
        identities.first_if(identities.covers_all, "src"),
    ),
)
COMPARED: Mapping[str, Sequence[Any]] = {**ONE, "min": (None, *NUMBERS), "max": (None, *NUMBERS)}
ELEMENTWISE = (
    Law(
        "correctly rounded unary operators",
        _every("neg abs relu sign floor ceil trunc round sqrt isnan isinf"),
        Domain(REAL, ONE),
        elementwise.applied,
    ),
    Law("correctly rounded sums", _every("add sub rsub"), Domain(REAL | COMPLEX, TWO), elementwise.applied),
    Law("correctly rounded products and quotients", _every("mul div"), Domain(REAL, TWO), elementwise.applied),
    Law(
        "maximum or minimum of integers",
        _every("maximum minimum clamp clamp_min clamp_max"),
        Domain(WHOLE | BOOL, {**COMPARED, "other": TENSOR}),
        elementwise.applied,
    ),
    Law("equality", _every("eq ne"), Domain(REAL | COMPLEX, TWO), elementwise.applied),
    Law("comparison", _every("lt le gt ge"), Domain(REAL, TWO), elementwise.applied),
    Law(
        "choice by a mask",
        _aten("where.self where.ScalarSelf where.ScalarOther where.Scalar"),
        Domain(REAL | COMPLEX, {"condition": TENSOR, "self": NUMBERS, "other": NUMBERS}),
        elementwise.applied,
    ),
    Law(
        "filled by a mask",
        _every("masked_fill"),
        Domain(REAL | COMPLEX, {**ONE, "mask": TENSOR, "value": NUMBERS}),
        elementwise.applied,
    ),
    Law(
        "gradient of a threshold",
        _every("threshold_backward"),
        Domain(WHOLE | FLOATS, {"grad_output": TENSOR, **ONE, "threshold": (0, 0.5, 0.0)}),
        elementwise.applied,
    ),
    Law(
        "logical operators",
        _every("logical_and logical_or logical_xor logical_not"),
        Domain(REAL | COMPLEX, TWO),
        elementwise.applied,
    ),
    Law(
        "bitwise operators",
        _every("bitwise_and bitwise_or bitwise_xor bitwise_not"),
        Domain(WHOLE | BOOL, TWO),
        elementwise.applied,
    ),
    Law(
        "operators on lists of tensors",
        _every(
            "_foreach_neg _foreach_abs _foreach_sign _foreach_floor _foreach_ceil _foreach_trunc _foreach_round "
            "_foreach_sqrt _foreach_add _foreach_sub _foreach_mul"
        ),
        Domain(
            REAL,
            {"self": TENSORS, "other": (*TENSORS, torch.Tensor), "scalar": (2, 0.5), "scalars": ([2, 3], [0.5, 2.0])},
        ),
        elementwise.applied_to_each,
    ),
    Law(
        "quotients of two lists",
        _every("_foreach_div"),
        Domain(REAL, {"self": TENSORS, "other": TENSORS}),
        elementwise.applied_to_each,
    ),
)
IN_REAL_ARITHMETIC = (
    Law(
        "rows of a matrix product",
        _every(" ".join(rowwise.LEFT_AND_RIGHT)),
        Domain(ANY, {ALL: TENSOR}, REAL_NUMBERS),
        rowwise.multiplied,
        is_real=True,
    ),
    Law(
        "rows of a sum",
        _every(" ".join(rowwise.ALONG_A_ROW)),
        Domain(
            ANY,
            {**ONE, "dim": ([0], [1], [-1], [0, 1]), "keepdim": (False, True), "dtype": (None, torch.float64)},
            REAL_NUMBERS,
        ),
        rowwise.summed,
        is_real=True,
    ),
    Law(
        "any pointwise operator", (POINTWISE,), Domain(ANY, {ALL: NUMBERS}, REAL_NUMBERS), rowwise.applied, is_real=True
    ),
    Law(
        "any operator on lists of tensors",
        (EACH,),
        Domain(ANY, {ALL: TENSORS}, REAL_NUMBERS),
        rowwise.applied_to_each,
        is_real=True,
    ),
)
SENT: Mapping[str, Sequence[Any]] = {
    "input": TENSOR,
    "inputs": TENSORS,
    "out": TENSOR,
    collectives.SENT: TENSOR,
    "group": ("dp",),
    "group_name": ("dp",),
}
EVERY_RANK = (
    "every value in every bit, if the order in which a reduction adds does not depend on the position in the buffer"
)


def _sent(names: str) -> tuple[str, ...]:
    return tuple(f"{FUNCTIONAL}::{name}" for name in names.split())


ALL_REDUCES = _sent("all_reduce all_reduce_ all_reduce_coalesced all_reduce_coalesced_")
GATHERS = _sent("all_gather_into_tensor all_gather_into_tensor_out all_gather_into_tensor_coalesced")
SCATTERS = _sent("reduce_scatter_tensor reduce_scatter_tensor_out reduce_scatter_tensor_coalesced")
REDUCED: Mapping[str, Sequence[Any]] = {**SENT, "reduce_op": ("sum", "avg", "max", "min", "product")}
SIZED: Mapping[str, Sequence[Any]] = {**SENT, "group_size": (1, 2, 4)}
COLLECTIVES = (
    Law(
        "a group of one rank",
        (*ALL_REDUCES, *GATHERS, *SCATTERS, *_sent("all_to_all_single broadcast broadcast_")),
        Domain(ANY, {**REDUCED, **SIZED, "src": (0,), "input_split_sizes": ([4],), "output_split_sizes": ([4],)}),
        collectives.alone,
    ),
    Law(
        "reductions over several axes, or of zeros",
        ALL_REDUCES,
        Domain(ANY, REDUCED, REAL_NUMBERS),
        collectives.all_reduced_in_real,
        is_real=True,
    ),
    Law("each element reduced over the ranks", ALL_REDUCES, Domain(ANY, REDUCED, EVERY_RANK), collectives.all_reduced),
    Law(
        "the elements of one rank",
        _sent("broadcast broadcast_"),
        Domain(ANY, {**SENT, "src": (0, 1, 3)}),
        collectives.broadcast,
    ),
    Law(
        "scattered parts gathered again",
        GATHERS,
        Domain(ANY, SIZED, REAL_NUMBERS),
        collectives.scattered_and_gathered,
        is_real=True,
    ),
    Law("the elements of each rank in turn", GATHERS, Domain(ANY, SIZED), collectives.gathered),
    Law(
        "a scatter of a sum over another axis",
        SCATTERS,
        Domain(ANY, {**REDUCED, **SIZED}, REAL_NUMBERS),
        collectives.scattered_in_real,
        is_real=True,
    ),
    Law(
        "each element of one part reduced over the ranks",
        SCATTERS,
        Domain(ANY, {**REDUCED, **SIZED}, EVERY_RANK),
        collectives.scattered,
    ),
    Law(
        "equal parts exchanged",
        _sent("all_to_all_single"),
        Domain(ANY, {**SENT, "input_split_sizes": ([1, 1, 1, 1],), "output_split_sizes": ([1, 1, 1, 1],)}),
        collectives.exchanged,
    ),
)
LAWS = (*MOVES, *CASTS, *IDENTITIES, *IN_REAL_ARITHMETIC, *ELEMENTWISE, *COLLECTIVES)
"""All laws; the laws of one operator are tried in this order."""
