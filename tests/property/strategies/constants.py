"""Random listings of two devices."""

from __future__ import annotations

from random import Random


def random_constants(rng: Random) -> str:
    """A program of two devices: constants of the host, what is made of them there, and copies to the device."""
    host, there, lines = ["h"], ["x"], list[str]()

    def add(text: str, where: list[str]) -> None:
        lines.append(f"    n{len(lines)} = {text}")
        where.append(f"n{len(lines) - 1}")

    for _ in range(rng.randint(6, 24)):
        a, b, c, d = rng.choice(host), rng.choice(host), rng.choice(there), rng.choice(there)
        match rng.randrange(9):
            case 0 | 1 | 2:
                made = rng.choice(["full([4], 2.0, dtype=f32", "ones([4], dtype=f32", "arange(4, dtype=f32"])
                add(f"{made}, device=device('cpu'))", host)
            case 3:
                add(rng.choice([f"add({a}, {b})", f"neg({a})", f"mul({a}, 0.5)", f"view({a}, [4])"]), host)
            case 4 | 5:
                add(f"_to_copy({a}, device=device('cuda:0'))", there)
            case 6:
                add(rng.choice([f"add({c}, {d})", f"mul({c}, {d})", f"sigmoid({c})"]), there)
            case 7:
                add(f"_to_copy({rng.choice([a, c])}, device=device('cpu'))", host)
            case _:
                add(f"mul_({a}, 0.5)", host)
    returned = [*rng.sample(there, min(3, len(there))), *rng.sample(host, rng.choice([0, 0, 1]))]
    header = "device('cuda:0')\n\ndef graph(x: f32[4], h: f32[4](device='cpu')):\n"
    return header + "\n".join([*lines, f"    return [{', '.join(returned)}]"]) + "\n"
