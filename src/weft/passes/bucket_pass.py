"""Base of the passes that merge collectives: their common options, and the policy that these describe.

max-bytes=1048576/26214400   size limits of the first, second, ... bucket; the last applies to all later buckets
pinned=ag0+ag1/ag5+ag6       launches that form a bucket
forbidden=ag3/ag4            launches that must not be merged
modules=layers.*             patterns of module names
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch.fx import Graph, Node

from weft.bucketing.eligibility import Strategy
from weft.bucketing.engine import Bucketing
from weft.bucketing.policy import Policy, cap_from
from weft.errors import PipelineError, compose, nearest
from weft.graph import ops
from weft.graph.edit import MEMBERS_KEY
from weft.graph.ops import Kind
from weft.graph.versions import dag_of
from weft.passes.base import Pass
from weft.plan.context import Context
from weft.plan.plan import Step


@dataclass(frozen=True)
class BucketPass(Pass):
    """Base of the passes that merge collectives."""

    reorders_launches = True
    kinds: ClassVar[frozenset[Kind]]
    may_overshoot: ClassVar[bool] = False
    first_bytes: ClassVar[int | None] = None
    """Size limit of the first bucket if the limits of the others come from the cluster."""

    max_bytes: tuple[int, ...] = ()
    """Maximum size of a bucket in bytes, counted on its larger side, sent or received. Several numbers are the caps of
    the first, second, ... bucket. Empty: the size at which the cluster (nodes of eight H100 if none is given) reaches
    90 % of its bandwidth."""
    strategy: Strategy = "concat"
    """`concat`: plain operators. `coalesced`: one operator that takes lists, without copies. `pack`: one operator that
    casts and copies; collectives that only move data may mix dtypes in it."""
    alias_outputs: bool = False
    """Return views of one buffer instead of copies: saves the copies, but each view keeps the whole buffer alive."""
    modules: tuple[str, ...] = ()
    """Patterns of module names. Launches of each matching module get buckets of their own."""
    units: Literal["none", "one", "split"] = "none"
    """`split`, `one`: merge by unit as FSDP2 does, whatever the size. Each visit of a block (the outermost module whose
    name ends in a number) is a unit. The launches outside of blocks form a unit before and one after them, or a single
    one. In a graph without module names, `max-bytes` decides."""
    pinned: tuple[str, ...] = ()
    """Launches, joined by +, that form a bucket regardless of their size."""
    forbidden: tuple[str, ...] = ()
    """Launches that must not be merged."""

    def plan(self, graph: Graph, context: Context) -> Step:
        dag = dag_of(graph)
        self._check_names(dag.nodes)
        engine = Bucketing(self.name(), dag, context.groups, self.policy(context), self.strategy, self.alias_outputs)
        return self.step(*engine.plan(self.kinds))

    def policy(self, context: Context) -> Policy:
        """The policy that the options describe; a pass with more options overrides this."""
        return Policy(
            cap_from(self.max_bytes, context.target_cluster, context.groups, self.first_bytes),
            self.may_overshoot,
            modules=self.modules,
            units=self.units,
            pinned=tuple(tuple(names.split("+")) for names in self.pinned),
            forbidden=frozenset(self.forbidden),
            withheld=context.withheld,
        )

    def __post_init__(self) -> None:
        pins = [name for names in self.pinned for name in names.split("+")]
        twice = next((name for name in (*pins, *self.forbidden) if (*pins, *self.forbidden).count(name) > 1), None)
        numbers = {"max-bytes": (self.max_bytes, 1)}
        numbers |= {name: ((getattr(self, name),), 0) for name in ("prefetch", "defer") if hasattr(self, name)}
        faults = [f"{twice} is pinned or forbidden twice"] if twice is not None else []
        faults += [f"{names} pins a single launch, expected two or more" for names in self.pinned if "+" not in names]
        faults += [
            f"{name} is {n}, expected {low} or more" for name, (ns, low) in numbers.items() for n in ns if n < low
        ]
        if faults:
            raise PipelineError(compose(self.name(), "invalid options", where=faults))

    def _check_names(self, nodes: Iterable[Node]) -> None:
        launches = [node for node in nodes if node.op == "call_function" and ops.launch_form(node.target) is not None]
        known = {name for node in launches for name in (node.name, *node.meta.get(MEMBERS_KEY, ()))}
        for name in (*self.forbidden, *(name for names in self.pinned for name in names.split("+"))):
            if name not in known:
                do = nearest(name, known) or "name launches as the listing does"
                raise PipelineError(compose(self.name(), f"the graph has no launch {name!r}", do=do))
