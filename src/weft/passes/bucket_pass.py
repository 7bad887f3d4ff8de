"""What the passes that merge collectives share: their options and how these become a policy.

max-bytes=1048576/26214400   caps of the first, second, ... bucket; the last one holds for all further ones
pinned=ag0+ag1/ag5+ag6       launches that make a bucket
forbidden=ag3/ag4            launches that stay as they are
modules=layers.*             patterns of modules
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from torch.fx import Graph, Node

from weft.bucketing.eligibility import Strategy
from weft.bucketing.engine import Bucketing
from weft.bucketing.policy import Policy, cap_from
from weft.errors import PipelineError, compose, nearest
from weft.graph import ops
from weft.graph.dag import Dag
from weft.graph.edit import MEMBERS_KEY
from weft.graph.ops import Kind
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
    """The cap of the first bucket where the cluster gives the others."""

    max_bytes: tuple[int, ...] = ()
    """Close a bucket before its larger side, what is sent or what is received, would exceed this. Several numbers are
    the caps of the first, second, ... bucket. Empty: the bytes at which the cluster, or nodes of eight H100 if none is
    given, reaches nine tenths of its bandwidth."""
    strategy: Strategy = "concat"
    """`concat`: plain operators. `coalesced`: one operator that takes lists, no copies. `pack`: one operator that
    converts and copies; dtypes may mix in what only moves data."""
    alias_outputs: bool = False
    """Let tensors that the graph returns be views of one buffer: saves copies, but who keeps one of them keeps all."""
    modules: tuple[str, ...] = ()
    """Patterns of module names: what belongs to one module that matches has buckets of its own."""
    pinned: tuple[str, ...] = ()
    """Launches, joined by +, that make a bucket whatever their size."""
    forbidden: tuple[str, ...] = ()
    """Launches that stay as they are."""

    def plan(self, graph: Graph, context: Context) -> Step:
        dag = Dag(graph)
        self._check_names(dag.nodes)
        engine = Bucketing(self.name(), dag, context.groups, self.policy(context), self.strategy, self.alias_outputs)
        return self.step(*engine.plan(self.kinds))

    def policy(self, context: Context) -> Policy:
        """The options as a policy; a pass with more of them replaces what differs."""
        return Policy(
            cap_from(self.max_bytes, context.target_cluster, context.groups, self.first_bytes),
            self.may_overshoot,
            modules=self.modules,
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
        faults += [f"{names} pins one launch, a bucket has two" for names in self.pinned if "+" not in names]
        faults += [
            f"{name} is {n}, expected {low} or more" for name, (ns, low) in numbers.items() for n in ns if n < low
        ]
        if faults:
            raise PipelineError(compose(self.name(), "its options do not fit", where=faults))

    def _check_names(self, nodes: Iterable[Node]) -> None:
        launches = [node for node in nodes if node.op == "call_function" and ops.launch_form(node.target) is not None]
        known = {name for node in launches for name in (node.name, *node.meta.get(MEMBERS_KEY, ()))}
        for name in (*self.forbidden, *(name for names in self.pinned for name in names.split("+"))):
            if name not in known:
                do = nearest(name, known) or "name launches as the listing does"
                raise PipelineError(compose(self.name(), f"the graph has no launch {name!r}", do=do))
