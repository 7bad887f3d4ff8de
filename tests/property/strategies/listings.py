"""Random SPMD programs as listings: tables of steps with their weights, and the generator."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from hypothesis import strategies as st

from tests.property.strategies.builder import DTYPES
from tests.property.strategies.collectives import Collectives
from tests.property.strategies.compute import Compute
from tests.property.strategies.rewrites import Rewrites

MESHES = (
    {"dp": (2, 1)},
    {"dp": (4, 1)},
    {"dp": (2, 2), "tp": (2, 1)},
    {"dp": (2, 2), "tp": (2, 1), "all": (4, 1)},
)
ONE_RANK_MESHES = ({"dp": (1, 1)}, {"dp": (2, 1), "tp": (1, 1)}, {"dp": (1, 1), "tp": (4, 1)})
"""With groups of one rank."""


class Steps(Compute, Collectives, Rewrites):
    """All steps; the tables below name them."""


STEPS = (
    *(("pointwise", 6), ("binary", 5), ("matmul", 4), ("cast", 3), ("draw", 3), ("concatenate", 2)),
    *(("view", 4), ("transpose", 2), ("copy", 2), ("slice", 3), ("split", 2), ("write", 10)),
    *(("all_gather", 4), ("reduce_scatter", 3), ("all_reduce", 4), ("broadcast", 1), ("all_to_all", 1)),
    *(("coalesced", 1), ("wait", 7), ("wait_again", 1), ("gather_again", 2)),
)
REWRITE_STEPS = (
    *(("arithmetic", 8), ("cast_back", 5), ("view_back", 5), ("turn_back", 4), ("biased", 6), ("join_again", 5)),
    *(
        ("cut_again", 4),
        ("reduce_twice", 2),
        ("count_up", 1),
        ("copy", 6),
        ("pointwise", 3),
        ("matmul", 2),
        ("slice", 2),
    ),
    *(("summed", 4), ("write", 4), ("draw", 1), ("all_gather", 1), ("all_reduce", 1), ("wait", 4)),
)
"""Programs with much that can be rewritten, and writes and collectives in between."""
ALGEBRA_STEPS = (
    *(("scatter_and_gather", 6), ("gram", 6), ("all_reduce", 6), ("all_gather", 2), ("reduce_scatter", 2)),
    *(("coalesced", 2), ("broadcast", 1), ("all_to_all", 1), ("wait", 12), ("wait_again", 1), ("slice", 2)),
    *(("pointwise", 3), ("binary", 2), ("matmul", 2), ("write", 3), ("draw", 1), ("view", 2), ("copy", 1)),
)
"""Programs with collectives that others can stand for."""
SCATTER_STEPS = (("reduce_and_scatter", 12), *ALGEBRA_STEPS)
"""The same, with sums over one group that are scattered over another."""
AXES_STEPS = (("reduce_in_turn", 20), *ALGEBRA_STEPS)
"""The same, with sums over several groups in turn."""
MUTATION_STEPS = (
    *(("put", 8), ("pointwise", 6), ("binary", 3), ("view", 3), ("transpose", 1), ("slice", 2), ("split", 1)),
    *(("copy", 2), ("write", 3), ("draw", 1), ("matmul", 2), ("cast", 1)),
    *(("all_gather", 2), ("all_reduce", 2), ("reduce_scatter", 1), ("coalesced", 1), ("wait", 5), ("wait_again", 1)),
)
"""Programs with much that can be written in place, and much that must not."""
BATCH_STEPS = (
    *(("towers", 6), ("pointwise", 10), ("binary", 6), ("view", 2), ("transpose", 1), ("slice", 2), ("write", 3)),
    *(("viewed_cat", 4), ("add_rows", 4), ("draw", 1), ("all_gather", 1), ("all_reduce", 1), ("wait", 2)),
)
"""Programs with much that is alike."""
WRAPPED_STEPS = (
    *(
        ("functionalized", 10),
        ("pointwise", 4),
        ("binary", 3),
        ("view", 3),
        ("slice", 2),
        ("transpose", 1),
        ("write", 2),
    ),
    *(("copy", 1), ("draw", 1), ("all_gather", 1), ("all_reduce", 1), ("coalesced", 1), ("wait", 4)),
)
"""Programs with operators that write, in wrappers that copy."""
SCAN_STEPS = (
    *(("scanned", 8), ("pointwise", 3), ("binary", 3), ("view", 3), ("slice", 2), ("transpose", 1), ("write", 2)),
    *(("draw", 2), ("all_gather", 1), ("all_reduce", 1), ("wait", 3)),
)
"""Programs with rounds."""
BUCKET_STEPS = (
    *(("pointwise", 5), ("binary", 3), ("matmul", 2), ("cast", 3), ("draw", 1), ("concatenate", 1)),
    *(("view", 2), ("transpose", 1), ("slice", 1), ("write", 3)),
    *(("all_gather", 8), ("reduce_scatter", 8), ("all_reduce", 8), ("broadcast", 5), ("all_to_all", 4)),
    *(("coalesced", 3), ("wait", 20), ("wait_again", 1), ("gather_again", 2)),
)
"""Programs with many collectives of few kinds, for passes that merge them."""


def random_listing(
    rng: Random,
    num_steps: int | None = None,
    steps: tuple[tuple[str, int], ...] = STEPS,
    dtypes: Sequence[str] = DTYPES,
    meshes: Sequence[dict[str, tuple[int, int]]] = MESHES,
) -> str:
    """A random valid program. Its types are left out: reading it computes them."""
    builder = Steps(rng, rng.choice(meshes))
    for _ in range(rng.randint(2, 5)):
        shape = rng.choice([(4, 4), (8, 4), (4, 8), (8,), (8, 8)])
        builder.values.append(builder.new(shape, rng.choice(dtypes)))
    inputs = ", ".join(f"{v.name}: {v.dtype}[{', '.join(map(str, v.shape))}]" for v in builder.values)
    names, weights = zip(*steps, strict=True)
    for step in rng.choices(names, weights, k=num_steps or rng.randint(10, 60)):
        getattr(builder, step)()
    for flight in list(builder.flights):
        if rng.random() < 0.2:
            builder.returned += flight.pending
        else:
            builder.flights = [flight, *(f for f in builder.flights if f is not flight)]
            while flight in builder.flights:
                builder.wait()
    ready = [v for v in builder.values if not v.storages & builder.unreadable]
    builder.returned += rng.sample(ready, min(len(ready), rng.choice([1, 4, len(ready)])))
    header = [f"group({n!r}, size={size}, stride={stride})" for n, (size, stride) in builder.groups.items()]
    result = ", ".join(v.name for v in builder.returned)
    return "\n".join([*header, "", f"def graph({inputs}):", *builder.lines, f"    return [{result}]"]) + "\n"


listings = st.randoms(use_true_random=False).map(random_listing)
"""Random programs for hypothesis, which shrinks them."""
