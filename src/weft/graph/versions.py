"""The analyses of a graph, kept as long as the graph stays as it is.

Contract: inside `analyses_kept`, `dag_of` builds the Dag of a graph once, and returns the same one until an edit
changes the graph. `Edit` is the only writer of graphs, so it alone says when a version ends: `begin_edit` sets the kept
Dag aside, and `end_edit` keeps the one that holds from then on. After a pass from another package, the pipeline calls
`forget`. While an edit is open, and outside of `analyses_kept`, every call builds a new Dag. With `CHECKS_EVERY_USE`,
which the tests set, a kept Dag is built again at each use and compared.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from contextvars import ContextVar

from torch.fx import Graph

from weft.errors import GraphError, compose
from weft.graph.dag import Dag

MOST_GRAPHS = 4
"""Number of graphs whose Dags are kept at once: the given one, its copy, and trials. The oldest is forgotten first."""
CHECKS_EVERY_USE = False


class _Versions:
    """The Dags of the graphs of one run."""

    def __init__(self) -> None:
        self.dags: dict[Graph, Dag] = {}
        self.being_edited: set[Graph] = set()

    def keep(self, graph: Graph, dag: Dag) -> None:
        self.dags[graph] = dag
        if len(self.dags) > MOST_GRAPHS:
            del self.dags[next(iter(self.dags))]


_VERSIONS: ContextVar[_Versions | None] = ContextVar("_VERSIONS", default=None)


@contextlib.contextmanager
def analyses_kept() -> Generator[None]:
    """Keep the Dags of graphs until the end of the outermost such context."""
    if _VERSIONS.get() is not None:
        yield
        return
    token = _VERSIONS.set(_Versions())
    try:
        yield
    finally:
        _VERSIONS.reset(token)


def dag_of(graph: Graph) -> Dag:
    """The Dag of a graph as it is now; treat it as read-only, because others use it too."""
    versions = _VERSIONS.get()
    if versions is None or graph in versions.being_edited:
        return Dag(graph)
    known = versions.dags.get(graph)
    if known is None:
        known = Dag(graph)
        versions.keep(graph, known)
    elif CHECKS_EVERY_USE:
        _check(graph, known)
    return known


def keep_dag(graph: Graph, dag: Dag) -> None:
    """Keep a Dag that the caller knows to be that of the graph as it is now."""
    versions = _VERSIONS.get()
    if versions is not None:
        versions.keep(graph, dag)


def begin_edit(graph: Graph) -> Dag | None:
    """The kept Dag of a graph that is about to change; None is kept until `end_edit`."""
    versions = _VERSIONS.get()
    if versions is None:
        return None
    versions.being_edited.add(graph)
    return versions.dags.pop(graph, None)


def end_edit(graph: Graph, dag: Dag | None) -> None:
    """From now on the graph has this Dag; None if it is not known."""
    versions = _VERSIONS.get()
    if versions is not None:
        versions.being_edited.discard(graph)
        if dag is not None:
            versions.keep(graph, dag)


def forget(graph: Graph) -> None:
    """Build the Dag of a graph anew at its next use: code that is not ours may have changed it without an `Edit`."""
    versions = _VERSIONS.get()
    if versions is not None:
        versions.dags.pop(graph, None)


def _check(graph: Graph, known: Dag) -> None:
    now = Dag(graph)
    if _facts(now) != _facts(known):
        what = "the graph changed, but its kept Dag did not"
        raise GraphError(compose("analyses", what, do="change graphs through an Edit"))


def _facts(dag: Dag) -> tuple[object, ...]:
    effects = dag.effects
    return dag.nodes, dag.preds, dag.succs, dag.bits, effects.storages, effects.accesses, effects.flights, dag.queue
