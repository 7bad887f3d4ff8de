"""Random listings of arithmetic in many dtypes."""

from __future__ import annotations

from random import Random

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
