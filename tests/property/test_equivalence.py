"""The symbolic witness on random programs: it proves what passes and legal reorderings do, and never what is wrong.

`WEFT_FUZZ=full` multiplies the seeds.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from random import Random

import pytest
from torch import Tensor
from torch.fx import GraphModule, Node

import weft
from tests.property.strategies.listings import random_listing
from weft.graph import ops
from weft.graph.edit import Edit, copy_module
from weft.graph.listings.text import parse, render
from weft.passes.base import Numerics, all_passes
from weft.passes.pipeline import Pipeline
from weft.verification.symbolic.equivalence import prove

FULL = os.environ.get("WEFT_FUZZ") == "full"
NUM_SEEDS = 4000 if FULL else 200
CHUNK = 20
CHUNKS = [range(start, start + CHUNK) for start in range(0, NUM_SEEDS, CHUNK)]
NUM_RANKS = 4
TIDY = "remove-dead-code,dedupe-collectives,hoist-launches,sink-waits"
MUTATIONS_PER_SEED = 12 if FULL else 4

chunks = pytest.mark.parametrize("seeds", CHUNKS, ids=lambda seeds: f"seeds {seeds.start}-{seeds.stop - 1}")


def program(seed: int) -> GraphModule:
    return parse(random_listing(Random(seed)))


PASSES = [name for name in all_passes() if not name.startswith("test-")]
CASES = [*((TIDY, seeds) for seeds in CHUNKS), *((n, s) for n in PASSES for s in (CHUNKS if FULL else CHUNKS[:1]))]


@pytest.mark.parametrize(
    ("spec", "seeds"), CASES, ids=lambda case: case if isinstance(case, str) else f"from {case.start}"
)
def test_what_passes_do_is_proved(spec: str, seeds: range) -> None:
    pipeline = Pipeline.parse(spec)
    exact = all(p.numerics is Numerics.EXACT for p in pipeline.passes)
    for seed in seeds:
        before = program(seed)
        after = pipeline.run(before, effort="fast").module
        found = prove(before, after, reassociates=not exact)
        assert found.proved, f"seed {seed}: {found.difference}\n{render(before)}\n{render(after)}"


@chunks
def test_any_order_that_the_dag_allows_is_proved(seeds: range) -> None:
    for seed in seeds:
        before = program(seed)
        after = copy_module(before)
        nodes = [node for node in after.graph.nodes if node.op == "call_function"]
        Random(seed).shuffle(nodes)
        with Edit(after.graph) as edit:
            edit.move_before(nodes, list(after.graph.nodes)[-1])
        found = prove(before, after)
        assert found.proved, f"seed {seed}: {found.difference}\n{render(before)}\n{render(after)}"


@chunks
def test_what_changes_values_is_never_proved(seeds: range) -> None:
    for seed in seeds:
        before = program(seed)
        rng = Random(seed)
        for _ in range(MUTATIONS_PER_SEED):
            after = mutated(before, rng)
            if after is None or not prove(before, after).proved:
                continue
            verdict = weft.verify(before, after, ranks=NUM_RANKS, seed=seed)
            assert verdict.bitwise, f"seed {seed}: {verdict}\n{render(before)}\n{render(after)}"


@pytest.mark.slow
def test_the_changes_do_change_values_and_are_noticed() -> None:
    """Most of the changes above are real ones; else the test above would say nothing."""
    changed = equal = noticed = 0
    for seed in range(40):
        before, rng = program(seed), Random(seed)
        for _ in range(4):
            after = mutated(before, rng)
            if after is None:
                continue
            try:
                same = weft.verify(before, after, ranks=NUM_RANKS, seed=seed).bitwise
            except weft.WeftError:
                continue  # a change may break a rule of communication
            changed, equal = changed + (not same), equal + same
            noticed += not same and not prove(before, after).proved
    assert changed >= 40
    assert noticed == changed
    assert equal < changed * 3


# Changes.


def mutated(before: GraphModule, rng: Random) -> GraphModule | None:
    """A copy with one node changed or moved; None where the change that was drawn finds no node."""
    after = copy_module(before)
    sites = list(rng.choice(CHANGES)(after, rng))
    if not sites:
        return None
    rng.choice(sites)()
    return parse(render(after))  # with metadata of its own: another argument may share another storage


Change = Callable[[], None]


def _nodes(module: GraphModule) -> list[Node]:
    return [node for node in module.graph.nodes if node.op == "call_function"]


def _set(node: Node, position: int, value: object) -> None:
    node.args = (*node.args[:position], value, *node.args[position + 1 :])  # type: ignore[assignment]


def change_a_scalar(module: GraphModule, rng: Random) -> Iterator[Change]:
    for node in _nodes(module):
        for position, value in enumerate(node.args):
            if isinstance(value, float):
                yield lambda n=node, p=position, v=value: _set(n, p, v + 0.25)


def swap_two_arguments(module: GraphModule, rng: Random) -> Iterator[Change]:
    for node in _nodes(module):
        sources = node.all_input_nodes
        if len(node.args) == len(sources) == 2 and _type(sources[0]) == _type(sources[1]):
            yield lambda n=node: setattr(n, "args", n.args[::-1])


def drop_an_operator(module: GraphModule, rng: Random) -> Iterator[Change]:
    for node in _nodes(module):
        if ops.name_of(node.target) in ("relu", "neg", "sigmoid", "mul", "add"):
            yield lambda n=node: n.replace_all_uses_with(n.args[0])  # type: ignore[arg-type]


def exchange_an_input(module: GraphModule, rng: Random) -> Iterator[Change]:
    seen: dict[object, list[Node]] = {}
    for node in module.graph.nodes:
        for source in node.all_input_nodes:
            others = [other for other in seen.get(_type(source), []) if other is not source]
            if others and not ops.is_wait(node.target):
                other = rng.choice(others)
                yield lambda n=node, s=source, o=other: n.replace_input_with(s, o)
        if isinstance(ops.value_of(node), Tensor) and ops.kind_of(node.target) is None:
            seen.setdefault(_type(node), []).append(node)


def _type(node: Node) -> object:
    value = ops.value_of(node)
    return (value.dtype, tuple(value.shape), value.stride()) if isinstance(value, Tensor) else None


def swap_members(module: GraphModule, rng: Random) -> Iterator[Change]:
    for node in _nodes(module):
        members = list(node.args[0]) if node.args and isinstance(node.args[0], list | tuple) else []
        if not all(isinstance(member, Node) for member in members):
            continue
        pairs = [(i, j) for j in range(len(members)) for i in range(j) if _type(members[i]) == _type(members[j])]
        if pairs:
            i, j = rng.choice(pairs)
            members[i], members[j] = members[j], members[i]
            yield lambda n=node, m=tuple(members): _set(n, 0, list(m))


def change_a_collective(module: GraphModule, rng: Random) -> Iterator[Change]:
    names = ["dp", "tp", "all"]
    for node in _nodes(module):
        for position, value in enumerate(node.args):
            if value in ("sum", "avg", "max", "min"):
                other = rng.choice([op for op in ("sum", "avg", "max") if op != value])
                yield lambda n=node, p=position, v=other: _set(n, p, v)
            elif isinstance(value, str) and value in names and "tp" in _groups(module):
                yield lambda n=node, p=position, v=value: _set(n, p, "tp" if v == "dp" else "dp")


def _groups(module: GraphModule) -> set[str]:
    return {value for node in _nodes(module) for value in node.args if isinstance(value, str)}


def take_another_part(module: GraphModule, rng: Random) -> Iterator[Change]:
    for node in _nodes(module):
        name = ops.name_of(node.target)
        if name == "slice":
            dim, start, end = node.args[1:4]
            shift = end - start if start == 0 else -start  # type: ignore[operator]
            yield lambda n=node, d=dim, a=start + shift, b=end + shift: setattr(n, "args", (n.args[0], d, a, b))  # type: ignore[operator]
        elif name == "operator.getitem":
            parts = ops.value_of(node.args[0])  # type: ignore[arg-type]
            same = [k for k, part in enumerate(parts) if part.shape == ops.value_of(node).shape and k != node.args[1]]
            if same and ops.kind_of(node.args[0].target) is None:  # type: ignore[union-attr]
                yield lambda n=node, k=same[0]: _set(n, 1, k)


def drop_a_write(module: GraphModule, rng: Random) -> Iterator[Change]:
    for node in _nodes(module):
        if ops.name_of(node.target) in ("copy_", "zero_", "mul_.Tensor", "mul_", "add_"):
            yield lambda n=node: (n.replace_all_uses_with(n.args[0]), module.graph.erase_node(n))  # type: ignore[func-returns-value,arg-type]


def move_a_node(module: GraphModule, rng: Random) -> Iterator[Change]:
    """As late as its users allow, whatever its effects: past writes, draws and waits."""
    nodes = list(module.graph.nodes)
    index = {node: i for i, node in enumerate(nodes)}
    for node in _nodes(module):
        last = min((index[user] for user in node.users), default=len(nodes) - 1)
        if last > index[node] + 1:
            later = nodes[rng.randint(index[node] + 2, last)]
            yield lambda n=node, place=later: place.prepend(n)


def draw_once_more(module: GraphModule, rng: Random) -> Iterator[Change]:
    for node in _nodes(module):
        if ops.name_of(node.target) == "rand_like":
            yield lambda n=node: _draw_before(module, n)


def _draw_before(module: GraphModule, node: Node) -> None:
    with module.graph.inserting_before(node):
        twin = module.graph.create_node("call_function", node.target, node.args, node.kwargs)
    twin.meta = dict(node.meta)


CHANGES = (
    change_a_scalar,
    swap_two_arguments,
    drop_an_operator,
    exchange_an_input,
    exchange_an_input,
    change_a_collective,
    take_another_part,
    swap_members,
    drop_a_write,
    move_a_node,
    draw_once_more,
)
