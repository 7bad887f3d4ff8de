"""PredictedStep: when each collective of a simulated step runs, as data that plans keep and traces are compared with.

Contract: times in whole nanoseconds from the start of the step. Groups have their canonical names and their ranks, so
that the groups of a trace can be recognised.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch.fx import GraphModule

from weft.cost.device import DTYPES
from weft.cost.flops import product_dtype, shape_of
from weft.cost.kernels import ProductShape
from weft.cost.prices import full_bytes
from weft.graph.collective import collectives
from weft.graph.dag import Dag
from weft.graph.groups import Group, GroupTable
from weft.simulation.timeline import Timeline


@dataclass(frozen=True)
class Launch:
    """One launch of a graph."""

    name: str
    kind: str
    """As in listings: `all_gather`."""
    group: str
    num_bytes: int | None
    """Size of the full tensor, gathered or not yet scattered; None if unknown."""


@dataclass(frozen=True)
class PredictedCollective(Launch):
    """A launch, and when its collective runs."""

    launched_ns: int = 0
    """When the compute stream reaches the launch."""
    start_ns: int = 0
    end_ns: int = 0
    waited_ns: int | None = None
    """When the compute stream reaches the first wait for it; None without a wait."""
    exposed_ns: int = 0
    """How long the compute stream is blocked by it."""


@dataclass(frozen=True, order=True)
class Product:
    """A shape of matrix product, and how often it runs."""

    dtype: str
    """`bf16`, as in cluster files."""
    batch: int
    rows: int
    columns: int
    terms: int
    count: int = 1


@dataclass(frozen=True)
class PredictedStep:
    """A simulated step."""

    step_ns: int
    compute_ns: int
    """How long the compute stream is busy."""
    collectives: tuple[PredictedCollective, ...] = ()
    """In launch order."""
    groups: tuple[Group, ...] = ()
    products: tuple[Product, ...] | None = None
    """The matrix products of the graphs, by shape, without grouped ones; None if unknown."""


def products_of(dags: Iterable[Dag]) -> tuple[Product, ...]:
    """The matrix products of graphs, by shape; those of unknown size, and grouped ones, are left out."""
    found: Counter[Product] = Counter()
    for node in (node for dag in dags for node in dag.nodes if node.op == "call_function"):
        shape, dtype = shape_of(node), product_dtype(node)
        if isinstance(shape, ProductShape) and not shape.groups and dtype in DTYPES:
            found[Product(DTYPES[dtype], shape.batch, shape.rows, shape.columns, shape.terms)] += 1
    return counted(found)


def counted(found: Mapping[Product, int]) -> tuple[Product, ...]:
    """Products with their counts, in order."""
    return tuple(replace(product, count=count) for product, count in sorted(found.items()))


def launches_of(module: GraphModule, groups: GroupTable) -> tuple[Launch, ...]:
    """The launches of a graph in order."""
    return tuple(
        Launch(found.launch.name, found.kind.value, groups.canonical(found.group_argument), full_bytes(found))
        for found in collectives(module.graph)
    )


def predict(
    timeline: Timeline, launches: Iterable[Launch], groups: Iterable[Group], dags: Iterable[Dag]
) -> PredictedStep:
    """The prediction of a timeline. `launches` belong to its graphs, in the order in which they ran."""
    return PredictedStep(
        timeline.step_ns,
        sum(span.end_ns - span.start_ns for span in timeline.compute),
        tuple(
            PredictedCollective(
                launch.name,
                launch.kind,
                launch.group,
                launch.num_bytes,
                span.launched_ns,
                span.start_ns,
                span.end_ns,
                span.waited_ns,
                span.exposed_ns,
            )
            for span, launch in zip(timeline.collectives, launches, strict=True)
        ),
        tuple(groups),
        products_of(dags),
    )


def one_after_the_other(predictions: Sequence[PredictedStep]) -> PredictedStep:
    """The prediction of several graphs, such as forward and backward, where each starts when the one before it ends."""
    step_ns, found = 0, list[PredictedCollective]()
    for prediction in predictions:
        found += [_later(each, step_ns) for each in prediction.collectives]
        step_ns += prediction.step_ns
    groups = {group.name: group for prediction in predictions for group in prediction.groups}
    compute_ns = sum(prediction.compute_ns for prediction in predictions)
    products: Counter[Product] | None = Counter()
    for prediction in predictions:
        if prediction.products is None or products is None:
            products = None
            continue
        products.update({replace(each, count=1): each.count for each in prediction.products})
    known = None if products is None else counted(products)
    return PredictedStep(step_ns, compute_ns, tuple(found), tuple(groups.values()), known)


def _later(found: PredictedCollective, by_ns: int) -> PredictedCollective:
    waited_ns = None if found.waited_ns is None else found.waited_ns + by_ns
    times = {"launched_ns": found.launched_ns + by_ns, "start_ns": found.start_ns + by_ns}
    return replace(found, **times, end_ns=found.end_ns + by_ns, waited_ns=waited_ns)
