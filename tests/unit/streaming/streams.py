"""Listings of gathers before products and of products before scatters: every dim, every kind of product."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Literal

Form = Literal["plain", "bias", "linear", "bmm", "fp8", "fp8-rows"]
FORMS: tuple[Form, ...] = ("plain", "bias", "linear", "bmm", "fp8", "fp8-rows")
WIDTH = 16
"""Of rows and columns: what fp8 products take."""


@dataclass(frozen=True)
class Case:
    """One site."""

    num_ranks: int
    shape: tuple[int, ...]
    """Of the shard, before a gather or behind a scatter."""
    dim: int
    form: Form
    used: bool
    """Whether somebody else takes what was gathered, or the result of the product."""

    def __str__(self) -> str:
        used = ", used" if self.used else ""
        return f"{self.num_ranks} ranks, {len(self.shape)} dims, dim {self.dim}, {self.form}{used}"

    @property
    def whole(self) -> tuple[int, ...]:
        return tuple(n * self.num_ranks if d == self.dim else n for d, n in enumerate(self.shape))


def cases(num_ranks: int, forms: tuple[Form, ...] = FORMS) -> list[Case]:
    """Shards of two and of three dims, every dim, every form, used elsewhere or not."""
    found = [
        Case(num_ranks, (*outer, 16 if form == "fp8-rows" else 4, WIDTH), dim, form, used)
        for outer in ((), (2,))
        for dim, form, used in product(range(len(outer) + 2), forms, (False, True))
    ]
    return [case for case in found if case.form != "bmm" or len(case.shape) == 3]


def quick_cases(found: list[Case]) -> list[Case]:
    """For the quick loop: every dim and kind of product of three dims, on two ranks and with another user."""
    return [case for case in found if case.num_ranks == 2 and len(case.shape) == 3 and case.used]


def gather(case: Case) -> str:
    """A gather along a dim, and a product of its rows."""
    fp8 = case.form.startswith("fp8")
    inputs, lines = [f"x: {'u8' if fp8 else 'f32'}{list(case.shape)}"], list[str]()
    if fp8:
        inputs[0], sent = f"y: f32{list(case.shape)}", "x"
        lines += ["h = _to_copy(y, dtype=f8e4m3fn)", "x = view.dtype(h, u8)"]
    sent = "x"
    lines += [f"ag = all_gather({sent}, {case.num_ranks}, 'tp')", "w = wait(ag)", *_gathered(case, "w", "g")]
    if fp8:
        lines += ["v = view.dtype(g, f8e4m3fn)"]
    operand = "v" if fp8 else "g"
    more, made = _multiplied(case, operand, case.whole)
    lines += made
    results = ["r", *(["e"] if case.used else [])]
    if case.used:
        lines.append(f"e = {'clone' if fp8 else 'relu'}(g)")
    return _listing(case, inputs + more, lines, results)


def scatter(case: Case) -> str:
    """A product, and a scatter of its result along a dim."""
    shape = (*case.whole[:-1], WIDTH)
    lines = ["h = _to_copy(y, dtype=f8e4m3fn)"] if case.form.startswith("fp8") else []
    columns = case.whole[-1]
    more, made = _multiplied(case, "h" if lines else "y", shape, columns)
    lines += made
    if case.dim == 0:
        lines.append("c = clone(r)" if case.used else "c = view(r, [" + ", ".join(map(str, case.whole)) + "])")
    else:
        lines.append(f"s = split(r, {case.shape[case.dim]}, {case.dim})")
        lines += [f"p{k} = s[{k}]" for k in range(case.num_ranks)]
        lines.append(f"c = cat([{', '.join(f'p{k}' for k in range(case.num_ranks))}])")
    lines += [f"rs = reduce_scatter(c, 'sum', {case.num_ranks}, 'tp')", "w = wait(rs)"]
    if case.used:
        lines.append("e = relu(r)")
    return _listing(case, [f"y: f32{list(shape)}", *more], lines, ["w", *(["e"] if case.used else [])])


def reduce(case: Case) -> str:
    """A product of which every rank needs the sum, and a product of that."""
    lines = ["h = _to_copy(y, dtype=f8e4m3fn)"] if case.form.startswith("fp8") else []
    more, made = _multiplied(case, "h" if lines else "y", case.shape)
    lines += [*made, "ar = all_reduce(r, 'sum', 'tp')", "w = wait(ar)", "z = matmul(w, d)"]
    if case.used:
        lines.append("e = relu(r)")
    inputs = [f"y: f32{list(case.shape)}", *more, f"d: f32[{WIDTH}, {WIDTH}]"]
    return _listing(case, inputs, lines, ["z", *(["e"] if case.used else [])])


def _gathered(case: Case, source: str, name: str) -> list[str]:
    if case.dim == 0:
        return [f"{name} = view({source}, {list(case.whole)})"]
    parts = [f"q{k}" for k in range(case.num_ranks)]
    return [
        f"z = split({source}, {case.shape[0]})",
        *(f"{part} = z[{k}]" for k, part in enumerate(parts)),
        f"{name} = cat([{', '.join(parts)}], {case.dim})",
    ]


def _multiplied(case: Case, operand: str, shape: tuple[int, ...], columns: int = WIDTH) -> tuple[list[str], list[str]]:
    """Inputs and lines of a product of `operand` that makes `r`, in as many dims as it has."""
    inner, rows = shape[-1], 1
    for n in shape[:-1]:
        rows *= n
    if case.form == "bmm":
        return [f"b: f32[{shape[0]}, {inner}, {columns}]"], [f"r = bmm({operand}, b)"]
    if case.form == "linear":
        return [f"b: f32[{columns}, {inner}]", f"o: f32[{columns}]"], [f"r = linear({operand}, b, o)"]
    flat = [f"f = reshape({operand}, [{rows}, {inner}])"]
    back = [f"r = view(m, {[*shape[:-1], columns]})"]
    if case.form == "plain":
        return [f"b: f32[{inner}, {columns}]"], [*flat, "m = mm(f, b)", *back]
    if case.form == "bias":
        return [f"b: f32[{inner}, {columns}]", f"o: f32[{columns}]"], [*flat, "m = addmm(o, f, b)", *back]
    scales = ["sa: f32[()]", "sb: f32[()]"] if case.form == "fp8" else [f"sa: f32[{rows}, 1]", f"sb: f32[1, {columns}]"]
    lines = ["k = _to_copy(b, dtype=f8e4m3fn)", "t0 = t(k)", "m = _scaled_mm(f, t0, sa, sb, out_dtype=f32)"]
    return [f"b: f32[{columns}, {inner}]", *scales], [*flat, *lines, *back]


def _listing(case: Case, inputs: list[str], lines: list[str], results: list[str]) -> str:
    head = f"group('tp', size={case.num_ranks})\n\ndef graph({', '.join(inputs)}):\n"
    return head + "".join(f"    {line}\n" for line in [*lines, f"return [{', '.join(results)}]"])
