"""Mutants in which one argument, dtype or operator differs: no value that changes is ever proved the same.

Programs of one rank over operators with many arguments; each mutant draws the arguments of one line anew, takes a
sibling of its operator, exchanges its tensors, or puts a call before it that may or may not change anything. Where the
proof says equal, both run on special values: outputs, inputs after the step and the state of the generator must be
equal in every bit, but for the payload of a NaN. `WEFT_FUZZ=full` multiplies the seeds.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable
from random import Random

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule

import weft
from tests.unit.verification.denotation import same
from weft.verification.symbolic.equivalence import prove

FULL = os.environ.get("WEFT_FUZZ") == "full"
NUM_SEEDS = 6000 if FULL else 60
MUTANTS_PER_SEED = 12
CHUNK = 20
DTYPES = ("f32", "f64", "f16", "bf16", "i64", "i32", "i8", "u8", "b8", "c64", "u16", "u32")
SPECIAL = (0.0, -0.0, 1.0, -1.0, 0.5, -1.5, 2.5, 3.0, float("inf"), -float("inf"), float("nan"), 1e-40, 65504.0, 3e38)

# `{x}` and `{y}` are tensors; the other names are drawn anew in a mutant.
TEMPLATES = (
    "add({x}, {y}, alpha={n})",
    "sub({x}, {y}, alpha={n})",
    "rsub({x}, {y}, alpha={n})",
    "add.Scalar({x}, {n}, {n})",
    "mul({x}, {y})",
    "mul({x}, {n})",
    "div({x}, {n})",
    "div.Tensor_mode({x}, {y}, rounding_mode={rounding})",
    "round.decimals({x}, decimals={k})",
    "round(round.decimals({x}, decimals={k}))",
    "floor({x})",
    "neg({x})",
    "logical_not({x})",
    "bitwise_not({x})",
    "relu({x})",
    "maximum({x}, {y})",
    "clamp({x}, {m}, {m})",
    "clamp_min({x}, {n})",
    "where.self(gt.Scalar({x}, {n}), {x}, {y})",
    "masked_fill.Scalar({x}, gt.Scalar({y}, {n}), {n})",
    "pow.Tensor_Scalar({x}, {n})",
    "eq.Scalar({x}, {n})",
    "nan_to_num({x}, {m}, {m}, {m})",
    "leaky_relu({x}, {f})",
    "elu({x}, {f}, {f}, {f})",
    "gelu({x}, approximate={gelu})",
    "threshold_backward({x}, {y}, {n})",
    "sum.dim_IntList({x}, [{d}], {b})",
    "sum.dim_IntList({x}, [{d}], {b}, dtype={dtype})",
    "mean.dim({x}, [{d}], {b})",
    "amax({x}, [{d}], {b})",
    "var.correction({x}, [{d}], correction={k}, keepdim={b})",
    "cumsum({x}, {d})",
    "argmax({x}, {d}, {b})",
    "_softmax({x}, {d}, False)",
    "logsumexp({x}, [{d}], {b})",
    "flip({x}, [{d}])",
    "roll({x}, [{k}], [{d}])",
    "tril({x}, {k})",
    "triu({x}, {k})",
    "_to_copy({x}, dtype={dtype})",
    "_to_copy(_to_copy({x}, dtype={dtype}), dtype={dtype})",
    "view.dtype({x}, {dtype})",
    "transpose.int({x}, {d}, {d})",
    "permute({x}, {order})",
    "slice({x}, {d}, {k}, {k}, {step})",
    "select.int({x}, {d}, {k})",
    "narrow({x}, {d}, {k}, {k})",
    "cat([{x}, {y}], {d})",
    "stack([{x}, {y}], {d})",
    "view({x}, {size})",
    "expand(unsqueeze({x}, {d}), {size3})",
    "repeat({x}, [{k}, {k}])",
    "constant_pad_nd({x}, [{k}, {k}], {n})",
    "as_strided({x}, [2, 3], [{k}, {k}], {k})",
    "_reshape_alias({x}, [3, 2], {strides})",
    "slice_scatter({x}, {y}, {d}, {k}, {k})",
    "full_like({x}, {n}, dtype={dtype})",
    "mul(full_like({x}, {n}), {y})",
    "add(full_like({x}, {n}), {y})",
    "rand([2, 3], dtype={float})",
    "randint({big}, [2, 3])",
    "randint.low({k}, {big}, [2, 3])",
    "bernoulli.p({x}, {f})",
    "rand_like({x}, dtype={float})",
    "uniform_(clone({x}), 0.0, {f})",
    "normal_(clone({x}), {f}, {f})",
    "mul_({x}, {n})",
    "add_({x}, {y}, alpha={n})",
    "copy_({x}, {y})",
    "fill_.Scalar({x}, {n})",
    "logical_not_({x})",
    "round_.decimals({x}, decimals={k})",
    "addmm({x}, {x}, t({y}), beta={n}, alpha={n})",
    "mm({x}, t({y}))",
    "fmod.Scalar({x}, {n})",
    "remainder.Scalar({x}, {n})",
    "__lshift__.Scalar({x}, {k})",
    "bitwise_and.Scalar({x}, {k})",
    "bitwise_xor.Scalar({x}, {k})",
    "squeeze.dim({x}, {d})",
    "flatten.using_ints({x}, {d}, {d})",
    "index_select({x}, {d}, argmax({y}, {d}))",
)
BESIDE = (
    *("mul({x}, 1)", "div({x}, 1)", "add({x}, 0)", "add({x}, -0.0)", "sub({x}, 0)", "neg(neg({x}))", "abs({x})"),
    *("logical_not(logical_not({x}))", "bitwise_not(bitwise_not({x}))", "pow.Tensor_Scalar({x}, 1)", "round({x})"),
    *("maximum({x}, {x})", "relu(relu({x}))", "floor({x})", "clone({x})", "contiguous({x})", "clamp({x})", "t(t({x}))"),
    *(
        "_to_copy(_to_copy({x}, dtype={dtype}), dtype={same})",
        "view.dtype(view.dtype({x}, u8), {same})",
        "where.self(isnan({x}), {x}, {x})",
    ),
    *(
        "slice(cat([{x}, {x}]), 0, 2, 4)",
        "mul(ones_like({x}), {x})",
        "add(zeros_like({x}), {x})",
        "copy(neg({x}), {x})",
    ),
    *(
        "bitwise_xor.Scalar({x}, 0)",
        "repeat({x}, [1, 1])",
        "constant_pad_nd({x}, [0, 0])",
        "_to_copy({x}, dtype={same})",
    ),
)
SIBLINGS = (
    ("floor", "ceil", "trunc", "round"),
    ("maximum", "minimum"),
    ("tril", "triu"),
    ("fmod", "remainder"),
    ("amax", "amin"),
    ("rand_like", "randn_like"),
    ("add", "sub", "rsub"),
    ("cumsum", "cumprod"),
)
DRAWS: dict[str, Callable[[Random], object]] = {
    "n": lambda rng: rng.choice((0, 1, 2, -1, 0.0, -0.0, 1.0, 0.5, 3)),
    "m": lambda rng: rng.choice((None, 0, 1.0, -1, 0.5)),
    "f": lambda rng: rng.choice((0.25, 0.5, 1.0, 0.0)),
    "k": lambda rng: rng.choice((0, 1, 2, -1, 3)),
    "d": lambda rng: rng.choice((0, 1, -1)),
    "b": lambda rng: rng.choice((True, False)),
    "step": lambda rng: rng.choice((1, 2)),
    "big": lambda rng: rng.choice((7, 10, 1 << 33, 1 << 40)),
    "rounding": lambda rng: rng.choice(("'floor'", "'trunc'", None)),
    "gelu": lambda rng: rng.choice(("'none'", "'tanh'")),
    "dtype": lambda rng: rng.choice(DTYPES),
    "float": lambda rng: rng.choice(("f32", "f64")),
    "order": lambda rng: rng.choice(("[0, 1]", "[1, 0]")),
    "strides": lambda rng: rng.choice(("[2, 1]", "[1, 3]", "[1, 1]", "[0, 1]")),
    "size": lambda rng: rng.choice(("[2, 3]", "[3, 2]", "[6]", "[1, 6]", "[-1]")),
    "size3": lambda rng: rng.choice(("[2, 2, 3]", "[2, 1, 3]", "[1, 2, 3]", "[2, 3, 4]")),
}
HOLE = re.compile(r"\{(\w+)\}")


class Line:
    """One line of a program: a template, the tensors that it takes, and how it is drawn."""

    def __init__(self, template: str, x: str, y: str, seed: int) -> None:
        self.template, self.x, self.y, self.seed = template, x, y, seed

    def calls(self, name: str, same_as: str) -> list[str]:
        """The calls of the line, one on each line of a listing."""
        rng = Random(self.seed)
        given = {"x": self.x, "y": self.y, "same": same_as}
        text = HOLE.sub(lambda hole: str(given[hole[1]] if hole[1] in given else DRAWS[hole[1]](rng)), self.template)
        lines: list[str] = []
        while (inner := re.search(r"(?<=[(\[ ])([\w.]+)\(([^()]*)\)", text)) is not None:
            lines.append(f"{name}_{len(lines)} = {inner[0]}")
            text = f"{text[: inner.start()]}{name}_{len(lines) - 1}{text[inner.end() :]}"
        return [*lines, f"{name} = {text}"]


def listing(dtype: str, lines: dict[str, Line], outputs: list[str]) -> str:
    body = [call for name, line in lines.items() for call in line.calls(name, dtype)]
    return (
        "\n    ".join([f"def graph(a: {dtype}[2, 3], b: {dtype}[2, 3]):", *body, f"return [{', '.join(outputs)}]"])
        + "\n"
    )


def parsed(text: str) -> GraphModule | None:
    try:
        return weft.parse(text)
    except (weft.WeftError, RuntimeError, TypeError, IndexError, ValueError):
        return None


def program(rng: Random) -> tuple[str, dict[str, Line], list[str]]:
    dtype, names, lines = rng.choice(DTYPES), ["a", "b"], dict[str, Line]()
    for _ in range(12):
        name = f"v{len(lines)}"
        line = Line(rng.choice(TEMPLATES), rng.choice(names), rng.choice(names), rng.getrandbits(32))
        if parsed(listing(dtype, {**lines, name: line}, [name])) is not None:
            lines[name] = line
            names.append(name)
        if len(lines) == 4:
            break
    return dtype, lines, [*lines]


def mutant(rng: Random, lines: dict[str, Line]) -> dict[str, Line]:
    name, line = rng.choice(list(lines.items()))
    changed = dict(lines)
    how = rng.randrange(4)
    if how == 0:  # a call beside it
        spare = f"{name}n"
        rest = list(lines.items())
        place = rest.index((name, line))
        beside = Line(rng.choice(BESIDE), line.x, line.x, rng.getrandbits(32))
        moved = Line(line.template, spare, line.y, line.seed)
        return dict([*rest[:place], (spare, beside), (name, moved), *rest[place + 1 :]])
    if how == 1:
        operator = re.match(r"\w+", line.template)
        siblings = next((family for family in SIBLINGS if operator and operator[0] in family), ())
        if siblings:
            other = rng.choice(siblings) + line.template[len(operator[0]) :] if operator else line.template
            changed[name] = Line(other, line.x, line.y, line.seed)
            return changed
    if how == 2:
        changed[name] = Line(line.template, line.y, line.x, line.seed)
        return changed
    changed[name] = Line(line.template, line.x, line.y, rng.getrandbits(32))
    return changed


def run(module: GraphModule, inputs: list[Tensor]) -> list[Tensor] | None:
    """Outputs, inputs after the step, and the state of the generator; None where torch refuses."""
    given = [tensor.clone() for tensor in inputs]
    torch.manual_seed(3)
    try:
        return [*(tensor.clone() for tensor in module(*given)), *given, torch.get_rng_state()]
    except (RuntimeError, IndexError):
        return None


def special_inputs(module: GraphModule, rng: Random) -> list[Tensor]:
    found: list[Tensor] = []
    for node in module.graph.nodes:
        if node.op != "placeholder":
            continue
        dtype, shape = node.meta["val"].dtype, tuple(node.meta["val"].shape)
        if dtype.is_floating_point:
            flat = torch.tensor([rng.choice(SPECIAL) for _ in range(6)]).to(dtype)
        elif dtype.is_complex:
            flat = torch.tensor([complex(rng.choice(SPECIAL), rng.choice(SPECIAL)) for _ in range(6)], dtype=dtype)
        elif dtype is torch.bool:
            flat = torch.tensor([rng.random() < 0.5 for _ in range(6)])
        else:
            limits = torch.iinfo(dtype)
            flat = torch.tensor([rng.choice((0, 1, 2, 3, limits.max, limits.min, 100)) for _ in range(6)], dtype=dtype)
        found.append(flat.reshape(shape))
    return found


@pytest.mark.parametrize(
    "seeds", [range(k, k + CHUNK) for k in range(0, NUM_SEEDS, CHUNK)], ids=lambda s: f"from {s.start}"
)
def test_no_mutant_that_changes_a_bit_is_proved(seeds: range) -> None:
    warnings.simplefilter("ignore")
    for seed in seeds:
        for before, after, _ in pairs(seed):
            if not prove(before, after).proved:
                continue
            rng = Random(seed)
            for _ in range(4):
                inputs = special_inputs(before, rng)
                old, new = run(before, inputs), run(after, inputs)
                if old is None or new is None:
                    continue
                equal = all(same(a.resolve_conj(), b.resolve_conj()) for a, b in zip(old, new, strict=True))
                assert equal, f"seed {seed}\n{weft.listing(before)}\n{weft.listing(after)}\n{inputs}\n{old}\n{new}"


def test_the_mutants_are_many_and_some_are_proved() -> None:
    """Else the test above would say nothing: a share is equal and proved, the larger part is not."""
    counts = {"mutants": 0, "proved": 0}
    for seed in range(25):
        for before, after, _ in pairs(seed):
            counts["mutants"] += 1
            counts["proved"] += prove(before, after).proved
    assert counts["mutants"] > 100
    assert 0.05 < counts["proved"] / counts["mutants"] < 0.7, counts


def pairs(seed: int) -> list[tuple[GraphModule, GraphModule, str]]:
    rng = Random(seed)
    dtype, lines, outputs = program(rng)
    before = parsed(listing(dtype, lines, outputs)) if lines else None
    if before is None:
        return []
    found: list[tuple[GraphModule, GraphModule, str]] = []
    for _ in range(MUTANTS_PER_SEED):
        text = listing(dtype, mutant(rng, lines), outputs)
        after = parsed(text)
        if after is not None:
            found.append((before, after, text))
    return found
