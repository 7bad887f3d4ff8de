"""CollectiveRecord: one collective, where it comes from, and every decision about it.

    ag0: all-gather of layers.7.feed_forward.up (112 MiB) over dp (8 ranks)
      + hoist-launches: ...
      = sink-waits: ... (already-done: r)
      - dedupe-collectives: ... (mutated: add_)

with `+` for an applied rewrite, `-` for one that the graph prevents, and `=` for nothing to do. If the collective is
exposed, the cause comes first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from weft.graph.origins import CollectiveOrigin, tell_origins
from weft.plan.decision import Reason
from weft.quantities import size_text
from weft.report.plain_text import plain_line, with_modules

CAUSES = {
    Reason.EXPOSED_BY_DEPENDENCY: "inputs come too late, or the result is needed too soon",
    Reason.EXPOSED_BY_QUEUE: "other collectives go first in the queue",
    Reason.EXPOSED_BY_LINK: "other collectives share the link",
    Reason.EXPOSED_BY_MEMORY: "an earlier launch does not fit into memory",
    Reason.EXPOSED_BY_ORDER: "the planner found no better order",
}
"""Why a collective stays exposed, in a few words."""


@dataclass(frozen=True)
class CollectiveDecision:
    """One decision about a collective."""

    pass_name: str
    reason: Reason
    sentence: str
    nodes: tuple[str, ...]
    blocking: str | None
    """The node that prevents the rewrite, or the node after which the collective was placed."""
    exposed_us: float = 0.0
    """Time for which the collective is still exposed, if the decision says so; of a bucket as a whole."""
    gain_us: float = 0.0
    """Upper limit on the time that removing the obstacle could save."""

    @property
    def applied(self) -> bool:
        return self.reason is Reason.APPLIED

    def __str__(self) -> str:
        sign = "+" if self.applied else "-" if self.reason.is_refusal else "="
        told = f"{sign} {self.pass_name}: {self.sentence}"
        if self.applied:
            return told
        return f"{told} ({self.reason.value}{f': {self.blocking}' if self.blocking else ''})"


@dataclass(frozen=True)
class CollectiveRecord:
    """One collective of the original graph, and every decision about it."""

    name: str
    kind: str
    group: str
    num_ranks: int
    """Of the group; 0 if unknown."""
    num_bytes: int | None
    """Of the full tensor: after the gather, or before the scatter; None if unknown."""
    outcomes: tuple[CollectiveDecision, ...]
    """The causes of exposure first, then in the order of the passes."""
    origins: tuple[CollectiveOrigin, ...] = ()
    """Of a merged launch: those of all its members."""

    @property
    def label(self) -> str:
        """`all-gather of layers.7.feed_forward.up (112 MiB)`; without an origin, `all_gather of 112 MiB`."""
        size = "of unknown size" if self.num_bytes is None else f"of {size_text(self.num_bytes)}"
        return tell_origins(self.kind, self.num_bytes, self.origins) or f"{self.kind} {size}"

    def is_of(self, module: str) -> bool:
        """Whether it carries something of a module, or of a module inside it."""
        return any(f"{origin.subject}.".startswith(f"{module}.") for origin in self.origins)

    @property
    def cause(self) -> Reason | None:
        """Why it stays exposed, if a pass said so."""
        return next((outcome.reason for outcome in self.outcomes if outcome.exposed_us > 0), None)

    def lines(self, modules: Mapping[str, str] | None = None) -> list[str]:
        """The collective on the first line, then one line for each decision, with the `modules` of the nodes in it."""
        ranks = f"{self.num_ranks} ranks" if self.num_ranks else "unknown ranks"
        outcomes = [f"  {with_modules(str(outcome), modules or {}, self.name)}" for outcome in self.outcomes]
        lines = [f"{self.name}: {self.label} over {self.group} ({ranks})", *outcomes]
        lines += [f"  source: {self.origins[0].source}"] if len(self.origins) == 1 and self.origins[0].source else []
        lines += [] if outcomes else ["  no pass has considered it"]
        return [plain_line(line) for line in lines]
