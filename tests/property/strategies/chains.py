"""Long chains and wide fans of a given size."""

from __future__ import annotations

from collections.abc import Callable


def _chain(step: Callable[[str, int], str], inputs: str = "x: f32[4, 6]") -> Callable[[int], str]:
    def listing(size: int) -> str:
        lines = [f"def graph({inputs}):", "    h = relu(x)", f"    a0 = {step('h', 0)}"]
        lines += [f"    a{k} = {step(f'a{k - 1}', k)}" for k in range(1, size)]
        return "\n".join([*lines, f"    r = neg(a{size - 1})", "    return [r]"]) + "\n"

    return listing


def _fan(*steps: str, whole: str = "", first: str = "") -> Callable[[int], str]:
    """Each step is made once for each member; `{k}` is its number, `{all}` the results of the last step."""

    def listing(size: int) -> str:
        lines = [f"def graph(x: f32[{4 * size}]):", "    h = relu(x)"]
        lines += [f"    {first.format(size=size)}"] if first else []
        lines += [f"    {step.format(k=k, a=4 * k, b=4 * k + 4)}" for k in range(size) for step in steps]
        every = ", ".join(f"{steps[-1].split('{')[0]}{k}" for k in range(size))
        last = [f"    r = {whole.format(all=every)}", "    return [r]"] if whole else [f"    return [{every}]"]
        return "\n".join([*lines, *last]) + "\n"

    return listing


CHAINS: dict[str, Callable[[int], str]] = {
    "slices": lambda size: _chain(lambda x, k: f"slice({x}, 0, 1, {2 * size - k})", f"x: f32[{2 * size}]")(size),
    "nested concatenations": _chain(lambda x, k: f"cat([{x}, x])"),
    "views": _chain(lambda x, k: f"view({x}, {[24] if k % 2 else [6, 4]})"),
    "reshapes": _chain(lambda x, k: f"reshape({x}, {[[24], [3, 8], [8, 3]][k % 3]})"),
    "permutations": _chain(lambda x, k: f"permute({x}, [1, 2, 0])", "x: f32[2, 3, 4]"),
    "transposes": _chain(lambda x, k: f"transpose.int({x}, 0, 1)"),
    "dims put in and taken out": _chain(lambda x, k: f"select.int({x}, 0, 0)" if k % 2 else f"unsqueeze({x}, 0)"),
    "expansions": _chain(lambda x, k: f"expand({x}, [4, 6])"),
    "copies": _chain(lambda x, k: f"clone({x})"),
    "casts": _chain(lambda x, k: f"_to_copy({x}, dtype={'f32' if k % 2 else 'f64'})"),
    "casts that round": _chain(lambda x, k: f"_to_copy({x}, dtype={'f32' if k % 2 else 'bf16'})"),
    "zeros that are added": _chain(lambda x, k: f"add({x}, 0.0)"),
    "zeros that are subtracted": _chain(lambda x, k: f"sub({x}, 0.0)"),
    "slices of concatenations": _chain(lambda x, k: f"cat([{x}, x])" if k % 2 else f"slice({x}, 0, 0, 4)"),
    "one node of many users": _fan("a{k} = neg(c)", first="c = clone(h)"),
    "views of one node": _fan("v{k} = view(h, [-1, 2])", "w{k} = view(v{k}, [-1])", "a{k} = neg(w{k})"),
    "one concatenation": _fan("v{k} = neg(h)", whole="cat([{all}])"),
    "a concatenation of copies": _fan("v{k} = neg(h)", "w{k} = clone(v{k})", whole="cat([{all}])"),
    "a concatenation of concatenations": _fan("v{k} = neg(h)", "w{k} = cat([v{k}, h])", whole="cat([{all}])"),
    "pieces put together": _fan("s{k} = slice(h, 0, {a}, {b})", whole="cat([{all}])"),
    "parts put together": _fan("s{k} = p[{k}]", whole="cat([{all}])", first="p = split(h, 4)"),
    "parts one by one": _fan("s{k} = p[{k}]", "t{k} = neg(s{k})", first="p = split(h, 4)"),
    "copies that are returned": _fan("v{k} = neg(h)", "w{k} = clone(v{k})"),
}
"""Programs of a given size by what they hold much of."""
