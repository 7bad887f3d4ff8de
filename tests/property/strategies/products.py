"""Random listings of matrix products: biases and factors of every kind, and quantised weights."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random


def random_products(rng: Random) -> str:
    """A program of products with biases of every shape, factors of zero, one and more, and sizes down to none."""
    dtype = rng.choice(["f32", "f64", "f16", "bf16", "c64", "i64"])
    rows, terms, columns = (rng.choice([0, 1, 3, 8]) for _ in range(3))
    biases = [[], [columns], [1], [1, columns], [rows, 1], [rows, columns]]
    inputs, lines, results = list[str](), list[str](), list[str]()

    def given(shape: Sequence[int]) -> str:
        inputs.append(f"a{len(inputs)}: {dtype}[{', '.join(map(str, shape)) or '()'}]")
        return f"a{len(inputs) - 1}"

    def emit(text: str) -> str:
        lines.append(f"    n{len(lines)} = {text}")
        return f"n{len(lines) - 1}"

    left, right = [given([rows, terms]) for _ in range(3)], [given([terms, columns]) for _ in range(3)]
    for _ in range(rng.randint(2, 6)):
        x, y, w, v = rng.choice(left), rng.choice(left), rng.choice(right), rng.choice(right)
        match rng.randrange(4):
            case 0:
                bias = given(rng.choice(biases))
                factors = [rng.choice([0, 1, 1, 2]) for _ in range(2)]
                result = emit(f"addmm({bias}, {x}, {w}, beta={factors[0]}, alpha={factors[1]})")
            case 1:
                result = emit(f"add({emit(f'mm({x}, {w})')}, {given(rng.choice(biases))})")
            case 2:
                result = emit(f"add({emit(f'mm({x}, {w})')}, {emit(f'mm({y}, {v})')})")
            case _:
                result = emit(f"mm({x}, {w})")
        results.append(emit(f"neg({result})"))
    return "\n".join([f"def graph({', '.join(inputs)}):", *lines, f"    return [{', '.join(results)}]"]) + "\n"


def random_quantised(rng: Random) -> str:
    """A program of products with int8 weights that are cast, in ways that fit or not, and with packed int4 weights."""
    inputs = ["x: bf16[8, 64]", "y: bf16[2, 4, 64]", "z: bf16[4, 128]"]
    lines: list[str] = []
    results: list[str] = []

    def line(text: str) -> str:
        lines.append(f"    n{len(lines)} = {text}")
        return f"n{len(lines) - 1}"

    for k in range(rng.randint(2, 5)):
        rows = rng.choice([32, 64, 128])
        if rng.random() < 0.5:
            rows = rng.choice([64, 64, 32, 128])
            inputs += [f"w{k}: u8[{rows}, 64]", f"s{k}: bf16[4, {rows}, 2]"]
            results.append(line(f"_weight_int4pack_mm_for_cpu(z, w{k}, 32, s{k})"))
            if rng.random() < 0.3:
                results[-1] = line(f"relu({results[-1]})")
            continue
        inputs += [f"w{k}: i8[{rows}, 64]", f"s{k}: bf16[{rng.choice([rows, rows, rows, 1])}]"]
        cast = "_to_copy({}, dtype=bf16)" if rng.random() < 0.5 else "prims.convert_element_type.default({}, bf16)"
        turn = rng.choice(["t({})", "permute({}, [1, 0])"])
        first, second = (cast, turn) if rng.random() < 0.5 else (turn, cast)
        weight = line(second.format(line(first.format(f"w{k}"))))
        if rng.random() < 0.15:
            line(f"neg_(w{k})")
        is_deep = rng.random() < 0.4
        product = line(f"mm({line('view(y, [8, 64])') if is_deep else 'x'}, {weight})")
        if rng.random() < 0.15:
            results.append(product)
        product = line(f"view({product}, [2, 4, {rows}])") if is_deep else product
        pair = [product, f"s{k}"] if rng.random() < 0.5 else [f"s{k}", product]
        results.append(line(f"mul({', '.join(pair)})"))
    return f"def graph({', '.join(inputs)}):\n" + "\n".join([*lines, f"    return [{', '.join(results)}]"]) + "\n"
